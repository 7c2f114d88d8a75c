"""dS in global memory, where a kernel of its own multiplies it by K: one layout for who writes, sizes and reads it.

[batch * heads_q][strip of 64 query rows][16 keys][16 query rows of the strip][32 lanes][4 registers], 16-bit values: the
A fragments (m16n8k16) of dS^T as the main kernel holds them, so that a lane's 16 bytes and a warp's 512 are consecutive
on both sides. A strip holds its keys from an origin on: all of them, or, under a window, those that its rows may keep.
The same Python runs on plain integers and in a kernel.
"""

from __future__ import annotations

from typing import Any

from ..config.padding import KEY_PADDING, QUERY_PADDING, padded_keys, padded_queries
from .mask import Mask, MaskKinds
from .select import maximum, minimum

STRIP = QUERY_PADDING
"""Query rows of a strip; whole query tiles of the main kernel."""
FRAGMENT = 128
"""32-bit words of one 16x16 fragment."""
KEY_BLOCK = STRIP // 16 * FRAGMENT
"""Words of 16 keys of a strip: one fragment for each 16 query rows."""


def strip_keys(seqlen_k, kinds: MaskKinds, left_bound, right_bound) -> Any:
    """Keys that every strip has room for.

    Rows q0 .. q0 + 63 keep keys of [q0 + diag - L + 1, q0 + 63 + diag + R], L + R + 63 of them, which touch so many
    whole key tiles (KEY_PADDING is a multiple of every tile_n) wherever the diagonal lies.
    """
    if not (kinds.left and kinds.right):
        return padded_keys(seqlen_k)
    band = left_bound + right_bound + (STRIP - 1)
    return minimum(((band + (KEY_PADDING - 2)) // KEY_PADDING + 1) * KEY_PADDING, padded_keys(seqlen_k))


def place_of(query) -> tuple[Any, Any]:
    """(strip, 16-row block within it) of a query row."""
    return query >> (STRIP.bit_length() - 1), (query & (STRIP - 1)) >> 4


def strip_origin(strip, mask: Mask) -> Any:
    """First key of a strip, a multiple of KEY_PADDING."""
    if not (mask.kinds.left and mask.kinds.right):
        return 0
    return maximum(strip * STRIP - mask.left_reach + 1, 0) & ~(KEY_PADDING - 1)


def ds_bytes(batch: int, heads_q: int, seqlen_q: int, keys: int) -> int:
    """Bytes of all strips of `keys` keys."""
    return 4 * key_offset(batch * heads_q * strips(seqlen_q), keys, 0)


def strips(seqlen_q) -> Any:
    """Strips of a head."""
    return padded_queries(seqlen_q) // STRIP


def key_offset(strip, keys, key) -> Any:
    """Words before the `key`-th key (a multiple of 16) of a strip; in a kernel, `strip` is a 64-bit value: the strip's
    number among those of all batches and heads, each of which has room for `keys`."""
    return (strip * keys + key) * (KEY_BLOCK // 16)


def fragment_offset(query_block, key_block) -> Any:
    """Words from there to the fragment of the strip's `query_block`-th 16 rows, `key_block` blocks of 16 keys on."""
    return key_block * KEY_BLOCK + query_block * FRAGMENT

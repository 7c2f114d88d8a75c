"""dS in global memory, where a kernel of its own multiplies it by K: one layout for who writes, sizes and reads it.

[batch * heads_q][strip of 64 query rows][16 keys][16 query rows of the strip][32 lanes][4 registers] of 16-bit pairs:
the A fragments (m16n8k16) of dS^T as the main kernel holds them, so that a lane's 16 bytes and a warp's 512 are
consecutive on both sides. A strip holds its keys from an origin on: all of them, or, under a window, those that its
rows may keep. The same Python runs on plain integers and in a kernel.
"""

from __future__ import annotations

from typing import Any

from ..config.padding import KEY_PADDING, QUERY_PADDING, padded_keys, padded_queries
from .mask import Mask, MaskKinds
from .select import maximum, minimum, wide

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


def strip_origin(strip, mask: Mask) -> Any:
    """First key of a strip, a multiple of KEY_PADDING."""
    if not (mask.kinds.left and mask.kinds.right):
        return 0
    return maximum(strip * STRIP - mask.left_reach + 1, 0) & ~(KEY_PADDING - 1)


def strips(seqlen_q) -> Any:
    """Strips of a head."""
    return padded_queries(seqlen_q) // STRIP


def ds_bytes(heads: Any, seqlen_q, keys) -> Any:
    """Bytes of all strips of so many (batch, query head), each with room for `keys` keys; in 64 bits if `heads` is."""
    return heads * strips(seqlen_q) * keys * (STRIP * 2)


def tile_offset(head_strip, query, key, keys, mask: Mask) -> Any:
    """Words before the fragment of query rows and keys from (query, key) on, multiples of 16; in a kernel, in 64 bits.

    `head_strip`: number of the head's first strip among those of all batches and heads. 32 bits hold the number of a
    strip, as its 64 rows of Q alone take 1 KiB, so that the product is one of 32 bits by 32.
    """
    strip = query >> (STRIP.bit_length() - 1)
    row_block = (query & (STRIP - 1)) >> 4
    in_strip = key - strip_origin(strip, mask)
    return (wide(head_strip + strip) * keys + in_strip) * (KEY_BLOCK // 16) + fragment_offset(row_block, 0)


def fragment_offset(row_blocks: int, key_blocks: int) -> Any:
    """Words from a fragment to the one so many blocks of 16 query rows, within the strip, and of 16 keys on."""
    return key_blocks * KEY_BLOCK + row_blocks * FRAGMENT

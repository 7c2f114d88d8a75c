"""From raw scores, transposed (rows are keys), to probabilities: scale, subtract the LSE, add the bias; then mask.

The mask comes after the scale, which may be negative or zero, so that `-inf` never meets it; or last, on probabilities,
so that a tile which needs no masking has no branch between its GEMM and its exponentials.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .bias import Bias
from .mask import Mask


@cute.jit
def log2_probabilities(
    acc_s,
    lse,
    bias: Bias | None,
    batch,
    head,
    query,
    key,
    lane,
    scale_log2,
    key_blocks: cutlass.Constexpr[int],
    tile_m: cutlass.Constexpr[int],
):
    """x[key_blocks][tile_m / 8][4] for the transposed scores `acc_s` of a warp's tile at (query, key).

    `lse`: shared pointer to the tile's LSE rows in log2 units, at this lane's column pair; `scale_log2`: scale log2 e.
    """
    columns = tile_m // 8
    x = cutlass.Array(Float32, key_blocks * columns * 4, alignment=16)
    for j in cutlass.range_constexpr(columns):
        pair = (lse + 8 * j).load(count=2, alignment=8)
        for block in cutlass.range_constexpr(key_blocks):
            for e in cutlass.range_constexpr(4):
                x[(block * columns + j) * 4 + e] = acc_s[block][j][e] * scale_log2 - pair[e & 1]
    if cutlass.const_expr(bias is not None):
        add_bias(x, bias, batch, head, query + 2 * (lane & 3), key + (lane >> 2), key_blocks, columns)
    return x


def dropped(mask: Mask, own_query, own_key, block: int, half: int):
    """`(j, e) -> whether the mask drops` this lane's score in key row 16 block + 8 half; its first one is at
    (own_query, own_key)."""
    key = own_key + (16 * block + 8 * half)
    first, end = mask.first_query(key), mask.end_query(key)

    def drop(j: int, e: int):
        query = own_query + (8 * j + e)
        return query < first if end is None else (query < first) | (query >= end)

    return drop


@cute.jit
def mask_packed(p, mask: Mask, query, key, lane, key_blocks: cutlass.Constexpr[int], tile_m: cutlass.Constexpr[int]):
    """Zero the dropped ones of p[key_blocks][tile_m / 8][2], pairs of 16-bit probabilities of a warp's tile."""
    if mask.cuts_tile(query, tile_m, key, 16 * key_blocks):
        for block in cutlass.range_constexpr(key_blocks):
            for half in cutlass.range_constexpr(2):
                drop = dropped(mask, query + 2 * (lane & 3), key + (lane >> 2), block, half)
                for j in cutlass.range_constexpr(tile_m // 8):
                    at = (block * (tile_m // 8) + j) * 2 + half
                    low = cutlass.select_(drop(j, 0), Int32(0), Int32(0xFFFF))
                    high = cutlass.select_(drop(j, 1), Int32(0), Int32(-0x10000))
                    p[at] = p[at] & (low | high)


@cute.jit
def mask_log2(x, mask: Mask, query, key, lane, key_blocks: cutlass.Constexpr[int], tile_m: cutlass.Constexpr[int]):
    """Make the dropped ones of x[key_blocks][tile_m / 8][4], as `log2_probabilities` returns it, -inf."""
    if mask.cuts_tile(query, tile_m, key, 16 * key_blocks):
        for block in cutlass.range_constexpr(key_blocks):
            for half in cutlass.range_constexpr(2):
                drop = dropped(mask, query + 2 * (lane & 3), key + (lane >> 2), block, half)
                for j in cutlass.range_constexpr(tile_m // 8):
                    for e in cutlass.range_constexpr(2):
                        at = (block * (tile_m // 8) + j) * 4 + 2 * half + e
                        x[at] = cutlass.select_(drop(j, e), Float32(float("-inf")), x[at])


def add_bias(x, bias: Bias, batch, head, own_query, own_key, key_blocks: int, columns: int) -> None:
    """Add the bias to x; (own_query, own_key) is the score of this lane's first element."""
    origin = bias.tile(batch, head, own_query, own_key)
    for block in range(key_blocks):
        for half in range(2):
            key_offset = bias.key_offset(own_key, 16 * block + 8 * half)
            for j in range(columns):
                for e in range(2):
                    at = (block * columns + j) * 4 + 2 * half + e
                    x[at] = x[at] + bias.log2(origin + (bias.query_offset(own_query, 8 * j + e) + key_offset))

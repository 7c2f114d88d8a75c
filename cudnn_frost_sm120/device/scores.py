"""From raw scores to log2 of the probabilities: scale, subtract the LSE, add the bias, mask.

Scaled first, masked last: `-inf` never meets the scale, which may be negative or zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bias import Bias
from .mask import Mask


@cute.jit
def log2_probabilities(
    acc_s,
    lse,
    mask: Mask,
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
    if mask.cuts_tile(query, tile_m, key, 16 * key_blocks):
        for block in cutlass.range_constexpr(key_blocks):
            for half in cutlass.range_constexpr(2):
                own_key = key + 16 * block + 8 * half + (lane >> 2)
                first, end = mask.first_query(own_key), mask.end_query(own_key)
                for j in cutlass.range_constexpr(columns):
                    for e in cutlass.range_constexpr(2):
                        at = (block * columns + j) * 4 + 2 * half + e
                        own_query = query + 8 * j + 2 * (lane & 3) + e
                        drop = own_query < first
                        if cutlass.const_expr(end is not None):
                            drop = drop | (own_query >= end)
                        x[at] = cutlass.select_(drop, Float32(float("-inf")), x[at])
    return x


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

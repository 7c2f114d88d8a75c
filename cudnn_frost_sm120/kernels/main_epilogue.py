"""Writing dK and dV of a CTA's key tile: final rows, or one part of a sum over the group's query heads."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.padding import padded_keys
from ..device import accumulator
from ..device.copy import gmem_ptr
from ..device.mma import columns_of, pack_pair
from .main_setup import Cta, MainConfig
from .operands import Extents, Strided


@cute.jit
def store_key_tile(
    config: MainConfig,
    cta: Cta,
    acc,
    out: Strided,
    partial,
    extents: Extents,
    scale,
    headdim_out,
    headdim: cutlass.Constexpr[int],
):
    """Write acc[key_blocks][headdim / 8][4] of a warp to its rows, or as a part where the group's heads are split."""
    if cutlass.const_expr(config.grouped):
        if extents.group_splits > 1:
            store_partial_rows(config, cta, acc, partial, extents, headdim)
        else:
            store_key_rows(config, cta, acc, out, extents.seqlen_k, headdim_out, scale, headdim)
    else:
        store_key_rows(config, cta, acc, out, extents.seqlen_k, headdim_out, scale, headdim)


@cute.jit
def store_key_rows(
    config: MainConfig, cta: Cta, acc, out: Strided, seqlen_k, headdim_out, scale, headdim: cutlass.Constexpr[int]
):
    """Scale acc[key_blocks][headdim / 8][4] of a warp and write it to its key rows."""
    row = cta.first_key + cta.warp_in_group * config.warp_keys
    target = (out, cta.batch, cta.head_k, row, 0, seqlen_k, headdim_out)
    store_rows(acc, *target, scale, config.dtype, cta.lane, config.tile.key_blocks, headdim)


@cute.jit
def store_rows(
    acc,
    out: Strided,
    batch,
    head,
    first_row,
    first_column,
    seqlen,
    headdim_out,
    scale,
    dtype: cutlass.Constexpr,
    lane,
    blocks: cutlass.Constexpr[int],
    headdim: cutlass.Constexpr[int],
    column_warps: cutlass.Constexpr[int] = 1,
):
    """Scale acc[blocks][columns / 8][4], its columns as `gemm_accumulate` has them, and write the rows and columns that
    exist; every one of them is written."""
    row = first_row + (lane >> 2)
    base = gmem_ptr(out.address, dtype) + out.row(batch, head, row) + (first_column + 2 * (lane & 3))
    columns = columns_of(headdim, column_warps)
    for block in cutlass.range_constexpr(blocks):
        for half in cutlass.range_constexpr(2):
            if row + (16 * block + 8 * half) < seqlen:
                target = base + (16 * block + 8 * half) * out.stride_s
                for j in cutlass.range_constexpr(len(columns)):
                    at = (block * len(columns) + j) * 4 + 2 * half
                    if first_column + columns[j] < headdim_out:
                        pair = pack_pair(acc[at] * scale, acc[at + 1] * scale, dtype)
                        cutlass.Pointer(target + columns[j], dtype=Int32).store(pair)


@cute.jit
def store_partial_rows(config: MainConfig, cta: Cta, acc, partial, extents: Extents, headdim: cutlass.Constexpr[int]):
    """Write acc[key_blocks][headdim / 8][4] as fp32 fragments into this part's slot (device/accumulator.py)."""
    slot = (cta.batch * extents.heads_k + cta.head_k) * extents.group_splits + cta.part
    first = cta.first_key + cta.warp_in_group * config.warp_keys
    offset = (Int64(slot) * padded_keys(extents.seqlen_k) + first) * headdim + 4 * cta.lane
    target = gmem_ptr(partial, Float32) + offset
    for block in cutlass.range_constexpr(config.tile.key_blocks):
        for j in cutlass.range_constexpr(headdim // 8):
            at = (block * (headdim // 8) + j) * 4
            value = cutlass.Vector.from_elements(tuple(acc[at + i] for i in range(4)), Float32)
            (target + accumulator.fragment_offset(block, j, headdim)).store(value, alignment=16)

"""Writing dK and dV of a CTA's key tile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.copy import gmem_ptr
from ..device.mma import pack_pair
from .main_setup import Cta, MainConfig
from .operands import Strided


@cute.jit
def store_key_rows(
    config: MainConfig, cta: Cta, acc, out: Strided, seqlen_k, headdim_out, scale, headdim: cutlass.Constexpr[int]
):
    """Scale acc[key_blocks][headdim / 8][4] and write the rows and columns that exist; every one of them is written."""
    lane = cta.lane
    row = cta.first_key + cta.warp_in_group * config.warp_keys + (lane >> 2)
    base = gmem_ptr(out.address, config.dtype) + out.row(cta.batch, cta.head_k, row) + 2 * (lane & 3)
    for block in cutlass.range_constexpr(config.tile.key_blocks):
        for half in cutlass.range_constexpr(2):
            if row + (16 * block + 8 * half) < seqlen_k:
                target = base + (16 * block + 8 * half) * out.stride_s
                for j in cutlass.range_constexpr(headdim // 8):
                    at = (block * (headdim // 8) + j) * 4 + 2 * half
                    if 8 * j < headdim_out:
                        pair = pack_pair(acc[at] * scale, acc[at + 1] * scale, config.dtype)
                        cutlass.Pointer(target + 8 * j, dtype=Int32).store(pair)

"""After the main kernel: scale an fp32 accumulator, round it to the io dtype and write it row by row.

Serves dQ (one slot per head) and, where the query heads of a group are split over CTAs, dK and dV (the parts of a head
are summed in fp32, in order: deterministic).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device import accumulator
from ..device.copy import gmem_ptr, scale_of
from ..device.mma import pack_pair
from .operands import Strided

ROWS = 64
THREADS = 256


class AccumulatorConvertKernel:
    """One CTA per `ROWS` rows of a head; a thread writes 16 bytes (8 columns) of a row at a time."""

    def __init__(self, dtype, headdim: int):
        self.dtype, self.headdim = dtype, headdim

    @cute.kernel
    def kernel(
        self,
        out: Strided,
        source: Int64,
        heads: Int32,
        seqlen: Int32,
        padded_rows: Int32,
        headdim_out: Int32,
        parts: Int32,
        scale: Float32,
        scale_address: Int64 | None,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tiles = (seqlen + (ROWS - 1)) // ROWS
        batch_head = block // tiles
        first = (block - batch_head * tiles) * ROWS
        batch = batch_head // heads
        head = batch_head - batch * heads
        slot_stride = Int64(padded_rows) * self.headdim
        slot = gmem_ptr(source, Float32) + Int64(batch_head) * parts * slot_stride + Int64(first) * self.headdim
        granules = self.headdim // accumulator.COLUMNS
        scale = scale_of(scale, scale_address)
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range_constexpr(ROWS * granules // THREADS):
            # Lanes: 16 rows of a fragment, then the next fragment, so that a warp reads 1 KB and writes whole sectors.
            item = i * THREADS + tid
            row_in_block = item & 15
            column_block = (item >> 4) % granules
            row_block = (item >> 4) // granules
            row = first + row_block * accumulator.ROWS + row_in_block
            if (row < seqlen) & (column_block * accumulator.COLUMNS < headdim_out):
                values = [Float32(0.0) for _ in range(8)]
                fragment = slot + accumulator.fragment_offset(row_block, column_block, self.headdim)
                for _ in cutlass.range(0, parts, unroll=1):
                    for pair in cutlass.range_constexpr(4):
                        value = (fragment + accumulator.pair_offset(row_in_block, pair)).load(count=2, alignment=8)
                        values[2 * pair] = values[2 * pair] + value[0]
                        values[2 * pair + 1] = values[2 * pair + 1] + value[1]
                    fragment = fragment + slot_stride
                regs = [pack_pair(values[2 * p] * scale, values[2 * p + 1] * scale, self.dtype) for p in range(4)]
                target = (
                    gmem_ptr(out.address, self.dtype) + out.row(batch, head, row) + column_block * accumulator.COLUMNS
                )
                cutlass.Pointer(target, dtype=Int32).store(
                    cutlass.Vector.from_elements(tuple(regs), Int32), alignment=16
                )

    @cute.jit
    def launch(
        self, out: Strided, source, batch, heads, seqlen, padded_rows, headdim_out, parts, scale, scale_address, stream
    ):
        grid = (seqlen + (ROWS - 1)) // ROWS * heads * batch
        self.kernel(out, source, heads, seqlen, padded_rows, headdim_out, parts, scale, scale_address).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

"""After the main kernel: dQ = scale * accumulator, rounded to the io dtype and written row by row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.query_padding import QUERY_PADDING, padded_queries
from ..device import dq_accum
from ..device.copy import gmem_ptr
from ..device.mma import pack_pair
from .operands import Extents, Scratch, Strided

ROWS = QUERY_PADDING
THREADS = 256


class DqConvertKernel:
    """One CTA per `ROWS` query rows of a head; a thread writes 16 bytes (8 columns) of a row at a time."""

    def __init__(self, dtype, headdim: int):
        self.dtype, self.headdim = dtype, headdim

    @cute.kernel
    def kernel(self, dq: Strided, scratch: Scratch, extents: Extents, scale: Float32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        padded_q = padded_queries(extents.seqlen_q)
        tiles = padded_q // ROWS
        batch_head = block // tiles
        first = (block - batch_head * tiles) * ROWS
        batch = batch_head // extents.heads_q
        head = batch_head - batch * extents.heads_q
        accum = gmem_ptr(scratch.dq_accum, Float32) + (Int64(batch_head) * padded_q + first) * self.headdim
        granules = self.headdim // dq_accum.COLUMNS
        for i in cutlass.range_constexpr(ROWS * granules // THREADS):
            # Lanes: 16 rows of a fragment, then the next fragment, so that a warp reads 1 KB and writes whole sectors.
            item = i * THREADS + tid
            row_in_block = item & 15
            column_block = (item >> 4) % granules
            row_block = (item >> 4) // granules
            row = first + row_block * dq_accum.ROWS + row_in_block
            fragment = accum + dq_accum.fragment_offset(row_block, column_block, self.headdim)
            if (row < extents.seqlen_q) & (column_block * dq_accum.COLUMNS < extents.headdim_qk):
                regs = []
                for pair in cutlass.range_constexpr(4):
                    value = (fragment + dq_accum.pair_offset(row_in_block, pair)).load(count=2, alignment=8)
                    regs.append(pack_pair(value[0] * scale, value[1] * scale, self.dtype))
                target = gmem_ptr(dq.address, self.dtype) + dq.row(batch, head, row) + column_block * dq_accum.COLUMNS
                packed = cutlass.Vector.from_elements(tuple(regs), Int32)
                cutlass.Pointer(target, dtype=Int32).store(packed, alignment=16)

    @cute.jit
    def launch(self, dq: Strided, scratch: Scratch, extents: Extents, scale: Float32, stream):
        grid = padded_queries(extents.seqlen_q) // ROWS * extents.heads_q * extents.batch
        self.kernel(dq, scratch, extents, scale).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream)

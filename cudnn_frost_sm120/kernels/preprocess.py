"""Before the main kernel: the statistics of every query row, and the dQ accumulator and the relay zeroed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.padding import padded_queries
from ..config.roles import WARPS_PER_GROUP
from ..device.copy import gmem_ptr
from .main_setup import MainConfig
from .operands import Extents, Lengths, Scratch, Strided
from .row_statistics import ROWS, RowStatistics

THREADS = 256


class PreprocessKernel:
    """One CTA per `ROWS` query rows of a head."""

    def __init__(self, config: MainConfig):
        self.headdim_qk, self.zeroes_dq = config.tile.headdim_qk, config.dq_in_main
        self.statistics = RowStatistics(config, THREADS)
        self.turns = ROWS // config.tile.tile_m * WARPS_PER_GROUP if config.relay else 0  # of a CTA's rows

    @cute.kernel
    def kernel(
        self, o: Strided, do: Strided, lse: Strided, scratch: Scratch, extents: Extents, lengths: Lengths | None
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        padded_q = padded_queries(extents.seqlen_q)
        tiles = padded_q // ROWS
        batch_head = block // tiles
        first = (block - batch_head * tiles) * ROWS
        batch = batch_head // extents.heads_q
        head = batch_head - batch * extents.heads_q
        out_row = Int64(batch_head) * padded_q + first

        if cutlass.const_expr(self.zeroes_dq):
            zero = cutlass.Vector.from_elements((Float32(0.0),) * 4, Float32)
            accum = gmem_ptr(scratch.dq_accum, Float32) + out_row * self.headdim_qk + 4 * tid
            for i in cutlass.range_constexpr(ROWS * self.headdim_qk // (4 * THREADS)):
                (accum + 4 * THREADS * i).store(zero, alignment=16)

        if cutlass.const_expr(self.turns > 0):
            if tid < self.turns:
                (gmem_ptr(scratch.turns, Int32) + out_row // ROWS * self.turns + tid).store(Int32(0))
            if (block == 0) & (tid == 0):
                gmem_ptr(scratch.ticket, Int32).store(Int32(0))

        self.statistics.write(tid, batch, head, first, o, do, lse, scratch, extents, lengths)

    @cute.jit
    def launch(
        self, o: Strided, do: Strided, lse: Strided, scratch: Scratch, extents: Extents, lengths: Lengths | None, stream
    ):
        grid = padded_queries(extents.seqlen_q) // ROWS * extents.heads_q * extents.batch
        self.kernel(o, do, lse, scratch, extents, lengths).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

"""Before the main kernel: delta = rowsum(dO * O), LSE in log2 units and cleaned, dQ accumulator and relay zeroed.

Rows that are no query (past the length, or padding up to a tile) get LSE = +inf and delta = 0, so that their P is 0
without a branch in the main loop, whatever the tensors hold there. An LSE of -inf (an empty row) becomes +inf too. A
finite one is kept above `LOWEST`, as the bias is: a row of finfo.min must not overflow to -inf.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.padding import QUERY_PADDING, padded_queries
from ..config.roles import WARPS_PER_GROUP
from ..device.bias import LOG2_E, LOWEST
from ..device.copy import gmem_ptr
from ..device.mma import unpack_pair
from ..device.seqlen import SeqlenInfo
from .main_setup import MainConfig
from .operands import Extents, Lengths, Scratch, Strided

ROWS = QUERY_PADDING
THREADS = 256


class PreprocessKernel:
    """One CTA per `ROWS` query rows of a head."""

    def __init__(self, config: MainConfig):
        headdim_v = config.tile.headdim_v
        self.dtype, self.headdim_qk, self.padded = config.dtype, config.tile.headdim_qk, config.padded
        self.turns = ROWS // config.tile.tile_m * WARPS_PER_GROUP if config.relay else 0  # of a CTA's rows
        self.lanes_per_row = 1 << (headdim_v // 8 - 1).bit_length()  # one 16-byte load a lane
        self.rows_per_pass = THREADS // self.lanes_per_row

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
        len_q = None
        if cutlass.const_expr(self.padded):
            len_q = gmem_ptr(lengths.seqlens_q, Int32)[batch]
        rows = SeqlenInfo.create(extents.seqlen_q, extents.seqlen_k, len_q).len_q
        out_row = Int64(batch_head) * padded_q + first

        zero = cutlass.Vector.from_elements((Float32(0.0),) * 4, Float32)
        accum = gmem_ptr(scratch.dq_accum, Float32) + out_row * self.headdim_qk + 4 * tid
        for i in cutlass.range_constexpr(ROWS * self.headdim_qk // (4 * THREADS)):
            (accum + 4 * THREADS * i).store(zero, alignment=16)

        if cutlass.const_expr(self.turns > 0):
            if tid < self.turns:
                (gmem_ptr(scratch.turns, Int32) + out_row // ROWS * self.turns + tid).store(Int32(0))
            if (block == 0) & (tid == 0):
                gmem_ptr(scratch.ticket, Int32).store(Int32(0))

        if tid < ROWS:
            value = Float32(float("inf"))
            if first + tid < rows:
                raw = (gmem_ptr(lse.address, Float32) + lse.row(batch, head, first + tid)).load()
                value = cutlass.select_(
                    raw == Float32(float("-inf")), value, cute.arch.fmax(raw * LOG2_E, Float32(LOWEST))
                )
            (gmem_ptr(scratch.lse, Float32) + out_row + tid).store(value)

        column = (tid % self.lanes_per_row) * 8
        for i in cutlass.range_constexpr(ROWS // self.rows_per_pass):
            row = i * self.rows_per_pass + tid // self.lanes_per_row
            partial = Float32(0.0)
            if (first + row < rows) & (column < extents.headdim_v):
                a = self.load8(o, batch, head, first + row, column)
                b = self.load8(do, batch, head, first + row, column)
                for e in cutlass.range_constexpr(4):
                    (a0, a1), (b0, b1) = unpack_pair(a[e], self.dtype), unpack_pair(b[e], self.dtype)
                    partial = partial + a0 * b0
                    partial = partial + a1 * b1
            for step in cutlass.range_constexpr(self.lanes_per_row.bit_length() - 1):
                partial = partial + cute.arch.shuffle_sync_bfly(partial, offset=1 << step)
            if column == 0:
                (gmem_ptr(scratch.delta, Float32) + out_row + row).store(partial)

    def load8(self, t: Strided, batch, head, row, column):
        """Eight consecutive elements as four registers."""
        ptr = gmem_ptr(t.address, self.dtype) + t.row(batch, head, row) + column
        return cutlass.Pointer(ptr, dtype=Int32).load(count=4, alignment=16)

    @cute.jit
    def launch(
        self, o: Strided, do: Strided, lse: Strided, scratch: Scratch, extents: Extents, lengths: Lengths | None, stream
    ):
        grid = padded_queries(extents.seqlen_q) // ROWS * extents.heads_q * extents.batch
        self.kernel(o, do, lse, scratch, extents, lengths).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

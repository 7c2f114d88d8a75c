"""What every later kernel needs of a query row: LSE in log2 units, cleaned, and delta = rowsum(dO * O).

Rows that are no query (past the length, or padding up to a tile) get LSE = +inf and delta = 0, so that their P is 0
without a branch in any loop, whatever the tensors hold there. An LSE of -inf (an empty row) becomes +inf too. A
finite one is kept above `LOWEST`, as the bias is: a row of finfo.min must not overflow to -inf.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.padding import QUERY_PADDING, padded_queries
from ..device.bias import LOG2_E, LOWEST
from ..device.copy import gmem_ptr, smem_ptr
from ..device.mma import unpack_pair
from ..device.select import minimum
from ..device.seqlen import SeqlenInfo
from .main_setup import MainConfig
from .operands import Extents, Lengths, Scratch, Strided

ROWS = QUERY_PADDING


class RowStatistics:
    """Writes them for `ROWS` rows of a head, with all threads of a CTA."""

    def __init__(self, config: MainConfig, threads: int):
        self.dtype, self.padded = config.dtype, config.padded
        self.lanes_per_row = 1 << (config.tile.headdim_v // 8 - 1).bit_length()  # one 16-byte load a lane
        self.rows_per_pass = threads // self.lanes_per_row

    @cute.jit
    def write(
        self,
        tid,
        batch,
        head,
        first,
        o: Strided,
        do: Strided,
        lse: Strided,
        scratch: Scratch,
        extents: Extents,
        lengths: Lengths | None,
        shared: Int32 | None = None,
    ):
        """`first`: the first row, a multiple of `ROWS`. `shared`: shared address for a copy: ROWS LSE, ROWS delta."""
        len_q = None
        if cutlass.const_expr(self.padded):
            len_q = gmem_ptr(lengths.seqlens_q, Int32)[batch]
        rows = SeqlenInfo.create(extents.seqlen_q, extents.seqlen_k, len_q).len_q
        out_row = Int64(batch * extents.heads_q + head) * padded_queries(extents.seqlen_q) + first

        # All loads are issued before the first one is used. What is no row of O, or column, reads one that is.
        column = (tid % self.lanes_per_row) * 8
        own_column = minimum(column, extents.headdim_v - 8)
        loaded = []
        for i in cutlass.range_constexpr(ROWS // self.rows_per_pass):
            row = minimum(first + i * self.rows_per_pass + tid // self.lanes_per_row, extents.seqlen_q - 1)
            loaded.append([self.load8(t, batch, head, row, own_column) for t in (o, do)])

        if tid < ROWS:
            value = Float32(float("inf"))
            if first + tid < rows:
                raw = (gmem_ptr(lse.address, Float32) + lse.row(batch, head, first + tid)).load()
                value = cutlass.select_(
                    raw == Float32(float("-inf")), value, cute.arch.fmax(raw * LOG2_E, Float32(LOWEST))
                )
            (gmem_ptr(scratch.lse, Float32) + out_row + tid).store(value)
            if cutlass.const_expr(shared is not None):
                (smem_ptr(shared, Float32) + tid).store(value)

        for i in cutlass.range_constexpr(ROWS // self.rows_per_pass):
            row = i * self.rows_per_pass + tid // self.lanes_per_row
            a, b = loaded[i]
            partial = Float32(0.0)
            for e in cutlass.range_constexpr(4):
                (a0, a1), (b0, b1) = unpack_pair(a[e], self.dtype), unpack_pair(b[e], self.dtype)
                partial = partial + a0 * b0
                partial = partial + a1 * b1
            counts = (first + row < rows) & (column < extents.headdim_v)
            partial = cutlass.select_(counts, partial, Float32(0.0))
            for step in cutlass.range_constexpr(self.lanes_per_row.bit_length() - 1):
                partial = partial + cute.arch.shuffle_sync_bfly(partial, offset=1 << step)
            if column == 0:
                (gmem_ptr(scratch.delta, Float32) + out_row + row).store(partial)
                if cutlass.const_expr(shared is not None):
                    (smem_ptr(shared, Float32) + (ROWS + row)).store(partial)

    def load8(self, t: Strided, batch, head, row, column):
        """Eight consecutive elements as four registers."""
        ptr = gmem_ptr(t.address, self.dtype) + t.row(batch, head, row) + column
        return cutlass.Pointer(ptr, dtype=Int32).load(count=4, alignment=16)

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
from ..device.mma import pack_pair, zeros
from ..device.select import minimum
from .operands import Strided

ROWS = 64
THREADS = 256
WARPS = THREADS // 32
FRAGMENTS = 4
"""A warp's item: this many fragments side by side, 16 rows of 32 columns."""


class AccumulatorConvertKernel:
    """One CTA per `ROWS` rows of a head. Loads are 512 consecutive bytes of a warp; each quad of lanes then exchanges
    what it holds, so that a lane stores 16 bytes and a quad 64 of a row."""

    def __init__(self, dtype, headdim: int):
        self.dtype, self.headdim = dtype, headdim
        self.items = ROWS // accumulator.ROWS * headdim // (FRAGMENTS * accumulator.COLUMNS)

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
        lane, warp = tid & 31, tid >> 5
        tiles = (seqlen + (ROWS - 1)) // ROWS
        batch_head = block // tiles
        first = (block - batch_head * tiles) * ROWS
        batch = batch_head // heads
        head = batch_head - batch * heads
        slot_stride = Int64(padded_rows) * self.headdim
        slot = gmem_ptr(source, Float32) + Int64(batch_head) * parts * slot_stride + Int64(first) * self.headdim
        scale = scale_of(scale, scale_address)
        cute.arch.griddepcontrol_wait()
        # The rows of a tile exist up to its end, here and in the other parts; so every item's loads go out at once.
        rounds = (self.items + WARPS - 1) // WARPS
        values = zeros(rounds * FRAGMENTS * 4)
        for part in cutlass.range(0, parts, unroll=1):
            for i in cutlass.range_constexpr(rounds):
                fragment = slot + part * slot_stride + self.item_offset(self.item_of(i, warp)) + 4 * lane
                for f in cutlass.range_constexpr(FRAGMENTS):
                    loaded = (fragment + f * accumulator.FRAGMENT).load(count=4, alignment=16)
                    for e in cutlass.range_constexpr(4):
                        at = (i * FRAGMENTS + f) * 4 + e
                        values[at] = values[at] + loaded[e]
        for i in cutlass.range_constexpr(rounds):
            item = self.item_of(i, warp)
            row_block, column = self.place(item)
            for half in cutlass.range_constexpr(2):
                pairs = []
                for f in cutlass.range_constexpr(FRAGMENTS):
                    at = (i * FRAGMENTS + f) * 4 + 2 * half
                    pairs.append(pack_pair(values[at] * scale, values[at + 1] * scale, self.dtype))
                granule = transposed_in_quad(pairs, lane)
                row = first + row_block * accumulator.ROWS + 8 * half + (lane >> 2)
                own_column = column + (lane & 3) * accumulator.COLUMNS
                if (i * WARPS + warp < self.items) & (row < seqlen) & (own_column < headdim_out):
                    target = gmem_ptr(out.address, self.dtype) + out.row(batch, head, row) + own_column
                    cutlass.Pointer(target, dtype=Int32).store(
                        cutlass.Vector.from_elements(tuple(granule), Int32), alignment=16
                    )

    def item_of(self, i: int, warp):
        """The i-th item of a warp; one that is not there repeats the last (and is not stored)."""
        return minimum(i * WARPS + warp, self.items - 1)

    def place(self, item):
        """(block of 16 rows, first column) of an item."""
        per_row = self.headdim // (FRAGMENTS * accumulator.COLUMNS)
        return item // per_row, item % per_row * (FRAGMENTS * accumulator.COLUMNS)

    def item_offset(self, item):
        row_block, column = self.place(item)
        return accumulator.fragment_offset(row_block, column // accumulator.COLUMNS, self.headdim)

    @cute.jit
    def launch(
        self, out: Strided, source, batch, heads, seqlen, padded_rows, headdim_out, parts, scale, scale_address, stream
    ):
        grid = (seqlen + (ROWS - 1)) // ROWS * heads * batch
        self.kernel(out, source, heads, seqlen, padded_rows, headdim_out, parts, scale, scale_address).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )


def transposed_in_quad(values: list, lane) -> list:
    """Lane c of a quad gets value c of its four lanes, in their order, for its own four values."""
    values = list(values)
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for low in (index for index in range(4) if not index & bit):
            sent = cutlass.select_(upper, values[low], values[low + bit])
            received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            values[low] = cutlass.select_(upper, received, values[low])
            values[low + bit] = cutlass.select_(upper, values[low + bit], received)
    return values

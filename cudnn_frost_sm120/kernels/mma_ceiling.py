"""Not of the chain: mma.sync out of registers alone, as fast as the tensor pipe takes it. The benchmark's ceiling."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ..device.copy import gmem_ptr
from ..device.mma import mma, zeros

THREADS = 256  # as in the main kernel: two warps on each sub-partition
ROW_BLOCKS, COLUMN_BLOCKS, UNROLLED = 2, 8, 4
OPERANDS = 4 * ROW_BLOCKS + 2 * COLUMN_BLOCKS
"""Registers of a thread that hold A and B."""
FLOPS_PER_ITERATION = 4096 * ROW_BLOCKS * COLUMN_BLOCKS * UNROLLED * (THREADS // 32)
"""Of a CTA."""


class MmaCeiling:
    """`iterations` rounds of independent m16n8k16 products in each warp, bf16, fp32 sums."""

    @cute.kernel
    def kernel(self, operands: Int64, sums: Int64, clocks: Int64, iterations: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        source = gmem_ptr(operands, Int32) + tid * OPERANDS
        loaded = [(source + i).load() for i in range(OPERANDS)]
        a = [loaded[4 * i : 4 * i + 4] for i in range(ROW_BLOCKS)]
        b = [loaded[4 * ROW_BLOCKS + 2 * j : 4 * ROW_BLOCKS + 2 * j + 2] for j in range(COLUMN_BLOCKS)]
        tiles = ROW_BLOCKS * COLUMN_BLOCKS
        acc = zeros(4 * tiles)
        cycles, nanoseconds = cute.arch.clock64(), cute.arch.globaltimer()
        for _ in cutlass.range(0, iterations, unroll=1):
            for t in cutlass.range_constexpr(UNROLLED * tiles):
                at = 4 * (t % tiles)
                j, i = t % COLUMN_BLOCKS, t // COLUMN_BLOCKS % ROW_BLOCKS
                product = mma([acc[at + e] for e in range(4)], a[i], *b[j], BFloat16)
                for e in cutlass.range_constexpr(4):
                    acc[at + e] = product[e]
        cycles, nanoseconds = cute.arch.clock64() - cycles, cute.arch.globaltimer() - nanoseconds
        if tid == 0:
            (gmem_ptr(clocks, Int64) + 2 * block).store(cycles)
            (gmem_ptr(clocks, Int64) + 2 * block + 1).store(nanoseconds)
        total = Float32(0.0)
        for x in cutlass.range_constexpr(4 * tiles):
            total = total + acc[x]
        (gmem_ptr(sums, Float32) + block * THREADS + tid).store(total)

    @cute.jit
    def __call__(self, operands: Int64, sums: Int64, clocks: Int64, iterations: Int32, ctas: Int32, stream):
        """`operands`: OPERANDS registers of bf16 pairs for each of THREADS threads; `sums`: an fp32 for each thread;
        `clocks`: the loop's time in cycles and in nanoseconds, two int64 for each CTA."""
        self.kernel(operands, sums, clocks, iterations).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

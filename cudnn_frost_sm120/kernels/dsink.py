"""dSink[h] = -sum over batch and real query rows of exp(sink[h] - LSE) * delta, after the preprocess kernel.

Rows that do not count have LSE = +inf in the workspace, so that their term is 0. One CTA per head, one fixed order of
summation: deterministic.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from ..config.padding import padded_queries
from ..device.bias import LOG2_E
from ..device.copy import gmem_ptr
from .operands import Extents, Scratch

THREADS = 256


class DsinkKernel:
    """`sink` and `dsink`: fp32, one value per query head, contiguous."""

    @cute.kernel
    def kernel(self, sink: Int64, dsink: Int64, scratch: Scratch, extents: Extents):
        tid, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        rows = padded_queries(extents.seqlen_q)
        sink_log2 = (gmem_ptr(sink, Float32) + head).load() * LOG2_E
        total = Float32(0.0)
        cute.arch.griddepcontrol_wait()
        for batch in cutlass.range(0, extents.batch, unroll=1):
            first = Int64(batch * extents.heads_q + head) * rows
            lse, delta = gmem_ptr(scratch.lse, Float32) + first, gmem_ptr(scratch.delta, Float32) + first
            for row in cutlass.range(tid, rows, THREADS, unroll=1):
                weight = cute.math.exp2(sink_log2 - (lse + row).load(), fastmath=True)
                total = total - weight * (delta + row).load()
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        partial = cutlass.Array(Float32, THREADS // 32, space=cutlass.AddressSpace.smem, alignment=16)
        if tid % 32 == 0:
            partial[tid // 32] = total
        cute.arch.barrier()
        if tid == 0:
            result = Float32(0.0)
            for warp in cutlass.range_constexpr(THREADS // 32):
                result = result + partial[warp]
            (gmem_ptr(dsink, Float32) + head).store(result)

    @cute.jit
    def launch(self, sink, dsink, scratch: Scratch, extents: Extents, stream):
        self.kernel(sink, dsink, scratch, extents).launch(
            grid=(extents.heads_q, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

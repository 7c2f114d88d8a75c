"""The rate that mma.sync reaches on this GPU when nothing else is in its way; measured, once a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import target as targets
from ..compile import compile_options
from ..target import Target

ROUNDS = 7
ITERATIONS = 20_000
"""Some ten milliseconds: long enough for the clock to settle as in a main kernel."""


def compile_ceiling(target: Target) -> Any:
    """The compiled kernel of (operands, sums, clocks, iterations, ctas, stream)."""
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    from ..kernels.mma_ceiling import MmaCeiling

    arguments = (*[Int64(1)] * 3, Int32(1), Int32(1), cute.runtime.make_fake_stream())
    return cute.compile(MmaCeiling(), *arguments, options=compile_options(target))


@dataclass(frozen=True)
class Ceiling:
    tflops: float
    clock_ghz: float  # of the SMs, meanwhile

    def with_idle_products(self) -> Ceiling:
        """Of the products that count, where an idle one comes with each (device/mma.py) and takes the pipe as long.

        Not measured: an idle product and the one behind it share an accumulator, and a loop of products alone waits for
        it. It came to 252 of 640 TFLOP/s on an H200, less than 1 % above whole chains in their throttled build.
        """
        return replace(self, tflops=self.tflops / 2)


def measure() -> Ceiling:
    """On the current device: bf16 operands, random, fp32 sums; medians."""
    from cudnn.frost.compiled_cache import positional_entry

    from ..kernels.mma_ceiling import FLOPS_PER_ITERATION, OPERANDS, THREADS

    target = targets.for_device(torch.cuda.current_device())
    compiled = compile_ceiling(target)
    kernel = positional_entry(compiled) or compiled  # takes plain integers
    operands = torch.randn(THREADS * OPERANDS * 2, device="cuda").bfloat16()
    sums = torch.empty(target.sm_count * THREADS, device="cuda")
    clocks = torch.empty(target.sm_count, 2, device="cuda", dtype=torch.int64)
    addresses = (operands.data_ptr(), sums.data_ptr(), clocks.data_ptr())
    times, rates = [], []
    for _ in range(ROUNDS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel(*addresses, ITERATIONS, target.sm_count, torch.cuda.current_stream().cuda_stream)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
        rates.append((clocks[:, 0].double() / clocks[:, 1]).median().item())
    flops = FLOPS_PER_ITERATION * ITERATIONS * target.sm_count
    return Ceiling(flops / statistics.median(times[1:]) / 1e9, statistics.median(rates[1:]))

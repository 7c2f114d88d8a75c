"""The rate that mma.sync reaches on this GPU when nothing else is in its way; measured, once a run."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from .. import target as targets
from ..compile import compile_options
from ..target import Target

ROUNDS = 7
ITERATIONS = 20_000
"""Some ten milliseconds: long enough for the clock to settle as in a main kernel."""


def compile_ceiling(target: Target, throttle: bool) -> Any:
    """The compiled kernel of (operands, sums, iterations, ctas, stream)."""
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    from ..device.mma import throttled
    from ..kernels.mma_ceiling import MmaCeiling

    arguments = (Int64(1), Int64(1), Int32(1), Int32(1), cute.runtime.make_fake_stream())
    with throttled(throttle):
        return cute.compile(MmaCeiling(), *arguments, options=compile_options(target))


def measure(throttle: bool = False) -> float:
    """TFLOP/s on the current device: bf16 operands, random, fp32 sums. Throttled, of the products that count."""
    from cudnn.frost.compiled_cache import positional_entry

    from ..kernels.mma_ceiling import FLOPS_PER_ITERATION, OPERANDS, THREADS

    target = targets.for_device(torch.cuda.current_device())
    compiled = compile_ceiling(target, throttle)
    kernel = positional_entry(compiled) or compiled  # takes plain integers
    operands = torch.randn(THREADS * OPERANDS * 2, device="cuda").bfloat16()
    sums = torch.empty(target.sm_count * THREADS, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(ROUNDS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel(operands.data_ptr(), sums.data_ptr(), ITERATIONS, target.sm_count, stream)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return FLOPS_PER_ITERATION * ITERATIONS * target.sm_count / statistics.median(times[1:]) / 1e9

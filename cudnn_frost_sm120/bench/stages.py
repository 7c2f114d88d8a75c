"""Time of each kernel of a chain, by the profiler's record of what the GPU ran.

Kernels overlap by programmatic dependent launch: one that was started early waits for its predecessor. So a kernel is
charged from where the one before it ended, and the sum is the time in which any of them ran.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

CALLS = 5


def kernel_microseconds(run: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each kernel in one call of the chain, in order of time. Empty where nothing was recorded."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, kernel_name(event.name))
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    spent = charged(spans)
    return {name: spent[name] / CALLS for name in sorted(spent, key=lambda name: -spent[name])}


def charged(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Time by name of (start, end, name), each from its start or from the latest end before it."""
    spent: defaultdict[str, float] = defaultdict(float)
    latest = 0.0
    for start, end, name in sorted(spans):
        spent[name] += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return spent


_OURS = re.compile(r"cudnn_frost_sm120kernels([a-z_0-9]+?)[A-Z]")
_BASELINE = {
    "dot_do_o": "dot",
    "convert_dq": "convert_dq",
    "dkv_reduce": "reduce",
    "dsink": "dsink",
    "DetDqGemm": "dq_gemm",
}


def kernel_name(symbol: str) -> str:
    """A short name for a kernel's symbol: ours by their file, the baseline's by what they do, else the first words."""
    ours = _OURS.search(symbol)
    if ours:
        return ours.group(1)
    if "FusedMultiHeadAttention" in symbol:
        return "main"
    known = next((name for part, name in _BASELINE.items() if part in symbol), None)
    return known or re.sub(r"[<(].*", "", symbol)[:60]

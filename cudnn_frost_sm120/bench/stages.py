"""Time of each kernel of a chain, by the profiler's record of what the GPU ran.

Kernels of our chain overlap by programmatic dependent launch, and one that was started early is charged for its wait:
the sum of the kernels may exceed the time of the chain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

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
    spent: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Activity Buffer"):
            spent[kernel_name(event.name)] += event.time_range.elapsed_us() / CALLS
    return dict(spent.most_common())


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

"""Whether anything listens on an operator's way through torch's dispatcher: if not, its kernel can be called directly.

Host time is why: a trip through the dispatcher takes 10 µs or more for an operator that is written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_include_set,
)
from torch.compiler import is_compiling
from torch.overrides import has_torch_function


def _where_no_mode_is_active(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a thread of its own: modes belong to a thread, and this module may be imported, or first used, under one."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(function, *arguments).result()


_AT_REST = _where_no_mode_is_active(_dispatch_tls_local_include_set)


def only_passes_on(*tensors: torch.Tensor | None) -> bool:
    """Whether the dispatcher would call autograd and the device's kernel and nothing else, for these arguments.

    False under tracing, dispatch and function modes, torch.func's transforms, inference mode, a profiler, or below
    autograd, and for tensors that are more than a plain one of their device: subclasses, fake, batched or lazy ones.
    """
    if is_compiling() or torch._C._autograd._profiler_enabled() or has_torch_function(tensors):
        return False
    if _dispatch_tls_local_include_set() != _AT_REST:
        return False
    if _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality):
        return False
    plain = _plain_keys(next(t for t in tensors if t is not None).device)
    for tensor in tensors:  # a loop takes half the time of a generator
        if tensor is not None and _dispatch_keys(tensor).raw_repr() != plain:
            return False
    return True


@cache
def _plain_keys(device: torch.device) -> int:
    return int(_where_no_mode_is_active(lambda: _dispatch_keys(torch.empty(0, device=device)).raw_repr()))

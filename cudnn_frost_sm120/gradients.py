"""The gradients of torch tensors by the plan that ranks first: what the wrapper and the torch operators have in common.

A problem is stated as the same facts that a graph would give, so it is served or declined by the same rules. Planning
looks at signatures alone and is remembered for each set of them; a call that comes again looks up and launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from .facts import BwdFacts, MaskFacts, TensorFacts
from .target import Target

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
_PLANS_KEPT = 4096  # per process; one is a few kilobytes, and kernels are shared between them

# Admission rules that no problem can break, only arguments that do not fit each other.
_CONTRADICTIONS = frozenset(
    {"rank", "shapes", "uniform_dtype", "stats_dtype", "mask_bounds", "lengths", "bias_shape", "sink_shape"}
)

Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Of one tensor, all that planning looks at: (shape, stride, dtype, device)."""


def gradients(
    operands: Mapping[str, torch.Tensor], mask: MaskFacts, scale: float, deterministic: bool, want_dbias: bool
) -> dict[str, torch.Tensor]:
    """dq, dk, dv, and dbias and dsink where there is a bias (and it is wanted) and a sink, by these names.

    ``operands``: q, k, v, o, do, stats and what there is of seq_len_q, seq_len_kv, bias and sink, on one CUDA device,
    with the shapes that a graph has. Gradients are allocated here, in the layouts of what they belong to, without gaps;
    dbias in fp32. Work is enqueued on the device's current stream. Raises as ``refuse`` does, before anything runs.
    """
    device = operands["q"].device
    signatures = tuple([signature(tensor) for tensor in operands.values()])
    likes = {"dq": operands["q"], "dk": operands["k"], "dv": operands["v"]}
    if want_dbias and "bias" in operands:
        likes["dbias"] = operands["bias"]
    if "sink" in operands:
        likes["dsink"] = operands["sink"]
    with current(device):
        launcher, workspace_bytes = _launcher(tuple(operands), signatures, tuple(likes), mask, scale, deterministic)
        results = {
            name: torch.empty_like(like, dtype=_gradient_dtype(name, like.dtype)) for name, like in likes.items()
        }
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        addresses = {name: tensor.data_ptr() for name, tensor in {**operands, **results}.items()}
        launcher.run(addresses, workspace.data_ptr(), workspace_bytes, stream_of(device))
    return results


def signature(tensor: torch.Tensor) -> Signature:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one; where it is, entering this costs nothing."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """torch's current stream of a CUDA device, as ``torch.cuda.current_stream(device).cuda_stream`` in less time."""
    return torch._C._cuda_getCurrentRawStream(device.index)


@lru_cache(maxsize=_PLANS_KEPT)
def _launcher(
    names: tuple[str, ...],
    signatures: tuple[Signature, ...],
    results: tuple[str, ...],
    mask: MaskFacts,
    scale: float,
    deterministic: bool,
) -> tuple[Any, int]:
    """The launcher of the first plan, and its workspace in bytes. What raises is not remembered."""
    from . import target
    from .compile import compile_chain
    from .launch import Launcher
    from .plan import make_plan
    from .ranking import plans_for

    given = dict(zip(names, signatures, strict=True))
    device = given["q"][3]
    for name, (_, _, _, where) in given.items():
        if where != device:
            raise ValueError(f"q is on {device} and {name} on {where}; all tensors belong on one device")
    given |= {name: gradient_signature(name, given[name.removeprefix("d")]) for name in results}
    facts = facts_from_signatures(given, mask, scale, deterministic)
    resolved = target.for_device(device.index)
    refuse(facts, resolved)
    plan = make_plan(facts, plans_for(facts, resolved)[0], resolved)
    return Launcher(plan, compile_chain(plan.key, resolved)), plan.workspace_bytes


def gradient_signature(name: str, like: Signature) -> Signature:
    """Of the gradient that ``gradients`` allocates for a tensor."""
    shape, stride, dtype, device = like
    without_gaps = torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
    return shape, without_gaps, _gradient_dtype(name, dtype), device


def _gradient_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name == "dbias" else dtype


def facts_from_signatures(
    given: Mapping[str, Signature], mask: MaskFacts, scale: float, deterministic: bool
) -> BwdFacts:
    """The facts that a graph over such tensors would give; nothing is judged here."""
    batch = given["q"][0][0] if len(given["q"][0]) else 0
    records = {name: _record(name, described, batch) for name, described in given.items()}
    return BwdFacts(**records, mask=mask, scale=scale, deterministic=deterministic)  # type: ignore[arg-type]


def refuse(facts: BwdFacts, resolved: Target) -> None:
    """Raise the first admission rule that hits: ValueError where arguments contradict each other, else a decline."""
    from .admission import declining_rule

    rule = declining_rule(facts, resolved)
    if rule is not None:
        kind = ValueError if rule.name in _CONTRADICTIONS else NotImplementedError
        raise kind(rule.says(facts, resolved))


def _record(name: str, described: Signature, batch: int) -> TensorFacts:
    shape, stride, dtype, _ = described
    dtype_name = _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    dense = all(size == 1 or step == 1 for size, step in zip(shape, stride, strict=True))
    if name in ("seq_len_q", "seq_len_kv") and shape.numel() == batch and dense:
        return TensorFacts(name, (batch, 1, 1, 1), (1, 1, 1, 1), dtype_name)  # the one spelling that a graph has
    return TensorFacts(name, tuple(shape), tuple(stride), dtype_name)

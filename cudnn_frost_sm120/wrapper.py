"""torch tensors in, gradients out: ``sdpa_bwd_wrapper_dsl_sm120``.

Call-compatible with cudnn-frontend's function of that name. It states the problem as the same facts that a graph would
give, so it is served or declined by the same rules, and it runs the plan that ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from .facts import BwdFacts, MaskFacts, TensorFacts
from .target import Target

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
_REQUIRED = ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")
_OPTIONAL = ("seq_len_q", "seq_len_kv", "bias", "dbias", "sink", "dsink")
_PLANS_KEPT = 4096  # per process; one is a few kilobytes, and kernels are shared between them

# Admission rules that no problem can break, only arguments that do not fit each other.
_CONTRADICTIONS = frozenset(
    {"rank", "shapes", "uniform_dtype", "stats_dtype", "mask_bounds", "lengths", "bias_shape", "sink_shape"}
)

Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Of one tensor, all that planning looks at: (shape, stride, dtype, device)."""


class NamedResults(dict[str, torch.Tensor]):
    """A dict whose values also unpack and index in order: ``dq, dk, dv = results``; ``results["dq_tensor"]``."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> torch.Tensor:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def sdpa_bwd_wrapper_dsl_sm120(
    q_tensor: torch.Tensor,
    k_tensor: torch.Tensor,
    v_tensor: torch.Tensor,
    o_tensor: torch.Tensor,
    do_tensor: torch.Tensor,
    stats_tensor: torch.Tensor,
    is_causal: bool = False,
    causal_bottom_right: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    deterministic: bool = False,
    scale_softmax: float | None = None,
    seq_q_lens: torch.Tensor | None = None,
    seq_kv_lens: torch.Tensor | None = None,
    sink_token: torch.Tensor | None = None,
    bias_tensor: torch.Tensor | None = None,
    *,
    want_dbias: bool = True,
) -> NamedResults:
    """The gradients of attention: ``dq_tensor, dk_tensor, dv_tensor`` [, ``dbias_tensor``] [, ``dsink_tensor``].

    All tensors are on one CUDA device. Work is enqueued on that device's current stream; nothing synchronises.

    q_tensor (B, Hq, Sq, D), k_tensor (B, Hk, Sk, D), v_tensor (B, Hk, Sk, Dv), fp16 or bf16, in any layout whose head
    dim is contiguous; o_tensor and do_tensor (B, Hq, Sq, Dv); stats_tensor (B, Hq, Sq, 1), fp32, the natural-log
    log-sum-exp of the scores. is_causal keeps keys up to the diagonal, which starts in the top left corner, or ends in
    the bottom right one with causal_bottom_right. window_size_left=W keeps that many keys before the diagonal as well
    as the one on it; window_size_right=R that many after it, and widens a causal mask. scale_softmax defaults to
    1/sqrt(D). seq_kv_lens and seq_q_lens are B int32 lengths; seq_q_lens may be left out. sink_token (1, Hq, 1, 1),
    fp32, gives dsink_tensor; bias_tensor (B, Hq, Sq, Sk), any of them 1, gives dbias_tensor, in fp32, but for
    want_dbias=False. Gradients have the layouts of what they belong to, without gaps.

    Raises NotImplementedError where no plan serves the problem, and ValueError for arguments that make no sense, each
    in one sentence, before anything runs.
    """
    if not q_tensor.is_cuda:
        raise ValueError(
            f"q_tensor is on {q_tensor.device}, and the kernels need a CUDA device; "
            "cudnn_frost_sm120.reference.sdpa_backward computes the same on the CPU"
        )
    mask = _mask(is_causal, causal_bottom_right, window_size_left, window_size_right, seq_kv_lens is not None)
    if seq_q_lens is not None and seq_kv_lens is None:
        raise ValueError("seq_q_lens was given without seq_kv_lens; query lengths are part of the padding mask")
    if seq_kv_lens is not None and seq_q_lens is None:
        seq_q_lens = torch.full_like(seq_kv_lens, q_tensor.shape[2])
    scale = 1.0 / math.sqrt(q_tensor.shape[-1]) if scale_softmax is None else float(scale_softmax)
    if not math.isfinite(scale):
        raise ValueError(f"scale_softmax must be finite, got {scale_softmax}")

    tensors = {
        "q": q_tensor,
        "k": k_tensor,
        "v": v_tensor,
        "o": o_tensor,
        "do": do_tensor,
        "stats": stats_tensor,
        "dq": torch.empty_like(q_tensor),
        "dk": torch.empty_like(k_tensor),
        "dv": torch.empty_like(v_tensor),
        "seq_len_q": seq_q_lens,
        "seq_len_kv": seq_kv_lens,
        "bias": bias_tensor,
        "dbias": torch.empty_like(bias_tensor, dtype=torch.float32) if bias_tensor is not None and want_dbias else None,
        "sink": sink_token,
        "dsink": None if sink_token is None else torch.empty_like(sink_token),
    }
    signatures = tuple(None if t is None else signature(t) for t in tensors.values())
    device = q_tensor.device
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        launcher, workspace_bytes = _launcher(signatures, mask, scale, bool(deterministic))
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        launcher.run(
            {name: t.data_ptr() for name, t in tensors.items() if t is not None},
            workspace.data_ptr(),
            workspace_bytes,
            torch.cuda.current_stream(device).cuda_stream,
        )
    results = ((name, tensors[name]) for name in ("dq", "dk", "dv", "dbias", "dsink"))
    return NamedResults({f"{name}_tensor": t for name, t in results if t is not None})


def signature(tensor: torch.Tensor) -> Signature:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _mask(causal: bool, bottom_right: bool, left: int | None, right: int | None, padding: bool) -> MaskFacts:
    for name, size in (("window_size_left", left), ("window_size_right", right)):
        if size is not None and size < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}; None is no bound on that side")
    if bottom_right and not causal:
        raise ValueError("causal_bottom_right says where a causal diagonal ends, and needs is_causal=True")
    if right is not None and not causal:
        raise ValueError("window_size_right widens a causal mask, and needs is_causal=True")
    return MaskFacts(
        bottom_right=bool(bottom_right),
        left_bound=None if left is None else int(left) + 1,  # the graph's bound leaves out the key at distance L
        right_bound=(int(right) if right is not None else 0) if causal else None,
        padding=padding,
    )


@lru_cache(maxsize=_PLANS_KEPT)
def _launcher(
    signatures: tuple[Signature | None, ...], mask: MaskFacts, scale: float, deterministic: bool
) -> tuple[Any, int]:
    """The launcher of the first plan, and its workspace in bytes. What raises is not remembered."""
    from . import target
    from .compile import compile_chain
    from .launch import Launcher
    from .plan import make_plan
    from .ranking import plans_for

    given = {n: s for n, s in zip((*_REQUIRED, *_OPTIONAL), signatures, strict=True) if s is not None}
    device = given["q"][3]
    for name, (_, _, _, where) in given.items():
        if where != device:
            raise ValueError(f"q is on {device} and {name} on {where}; all tensors belong on one device")
    facts = facts_from_signatures(given, mask, scale, deterministic)
    resolved = target.for_device(device.index)
    refuse(facts, resolved)
    plan = make_plan(facts, plans_for(facts, resolved)[0], resolved)
    return Launcher(plan, compile_chain(plan.key, resolved)), plan.workspace_bytes


def facts_from_signatures(given: dict[str, Signature], mask: MaskFacts, scale: float, deterministic: bool) -> BwdFacts:
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

"""The operators ``torch.ops.cudnn_frost_sm120.sdpa_forward`` and ``sdpa_backward``, as the dispatcher sees them.

Both are functional, and opaque to ``torch.compile``: the first gives out and the log-sum-exp, the second gradients from
those. ``mask`` arguments are those of ``facts.MaskFacts``; lengths, where given, are two, B int32 each; sinks are Hq
fp32 logits. out is (B, Hq, Sq, Dv) in (B, S, H, D) storage, lse (B, Hq, Sq, 1) fp32, natural log. Gradients have the
layouts of what they belong to; those of an absent or unwanted bias and of absent sinks are empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import reference
from ..facts import MaskFacts
from . import cuda
from .dispatch import only_passes_on
from .plain import Lengths

NAMESPACE = "cudnn_frost_sm120"

_OPTIONS = "float scale, bool bottom_right, int? left_bound, int? right_bound, bool deterministic, bool strict"
_OPTIONAL = "Tensor? bias, Tensor? sinks, Tensor? seq_len_q, Tensor? seq_len_kv"
_FORWARD = f"(Tensor query, Tensor key, Tensor value, {_OPTIONAL}, {_OPTIONS}) -> (Tensor out, Tensor lse)"
_BACKWARD = (
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_OPTIONAL}, {_OPTIONS}, bool want_dbias) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_OPERANDS = 7  # leading arguments of the forward that are tensors; the rest are options

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"sdpa_forward{_FORWARD}")
_library.define(f"sdpa_backward{_BACKWARD}")
sdpa_forward = torch.ops.cudnn_frost_sm120.sdpa_forward.default
sdpa_backward = torch.ops.cudnn_frost_sm120.sdpa_backward.default

Optional = torch.Tensor | None


class Problem(NamedTuple):
    """The arguments of the forward, in the order of its schema."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: Optional
    sinks: Optional
    seq_len_q: Optional
    seq_len_kv: Optional
    scale: float
    bottom_right: bool
    left_bound: int | None
    right_bound: int | None
    deterministic: bool
    strict: bool

    @property
    def lengths(self) -> Lengths:
        return None if self.seq_len_q is None or self.seq_len_kv is None else (self.seq_len_q, self.seq_len_kv)

    @property
    def mask(self) -> MaskFacts:
        return MaskFacts(self.bottom_right, self.left_bound, self.right_bound, self.lengths is not None)

    def reference_options(self) -> dict[str, Any]:
        lengths = {"seq_len_q": self.seq_len_q, "seq_len_kv": self.seq_len_kv}
        return {"scale": self.scale, "mask": self.mask, "bias": self.bias, "sink": self.sinks, **lengths}


def _backward_arguments(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Problem, bool]:
    """(grad_out, out, lse, the problem, want_dbias), from the arguments of the backward."""
    return grad_out, out, lse, Problem(query, key, value, *rest[:-1]), rest[-1]


def empty_results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, not yet written."""
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, rows, 1, dtype=torch.float32)


def empty_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Optional, sinks: Optional, want_dbias: bool
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, dbias, dsinks, not yet written."""
    dbias = torch.empty_like(bias) if bias is not None and want_dbias else query.new_empty(0)
    dsinks = torch.empty_like(sinks) if sinks is not None else query.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), dbias, dsinks


@torch.library.register_fake(f"{NAMESPACE}::sdpa_forward", lib=_library)
def _forward_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return empty_results(query, value)


@torch.library.register_fake(f"{NAMESPACE}::sdpa_backward", lib=_library)
def _backward_fake(grad_out: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, _, _, bias, sinks = arguments[:7]
    return empty_gradients(query, key, value, bias, sinks, arguments[-1])


def _forward_cpu(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    p = Problem(*arguments)
    exact = reference.sdpa_forward(p.query, p.key, p.value, **p.reference_options())
    results = empty_results(p.query, p.value)
    return results[0].copy_(exact[0]), results[1].copy_(exact[1])


def _backward_cpu(*arguments: Any) -> tuple[torch.Tensor, ...]:
    grad_out, out, lse, p, want_dbias = _backward_arguments(*arguments)
    exact = reference.sdpa_backward(p.query, p.key, p.value, out, grad_out, lse, **p.reference_options())
    results = empty_gradients(p.query, p.key, p.value, p.bias, p.sinks, want_dbias)
    for result, gradient in zip(results, (exact.dq, exact.dk, exact.dv, exact.dbias, exact.dsink), strict=True):
        if gradient is not None and result.numel():
            result.copy_(gradient)
    return results


def _forward_cuda(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    p = Problem(*arguments)
    results = empty_results(p.query, p.value)
    return cuda.forward(p.query, p.key, p.value, p.bias, p.sinks, p.lengths, p.mask, p.scale, results)


def _backward_cuda(*arguments: Any) -> tuple[torch.Tensor, ...]:
    grad_out, out, lse, p, want_dbias = _backward_arguments(*arguments)
    tensors = (p.query, p.key, p.value, out, lse, grad_out)
    options = (p.mask, p.scale, p.deterministic, p.strict, want_dbias)
    return cuda.backward(*tensors, p.bias, p.sinks, p.lengths, *options)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cpu": (_forward_cpu, _backward_cpu),
    "cuda": (_forward_cuda, _backward_cuda),
}
for _device, _kernels in _KERNELS.items():
    for _name, _kernel in zip(("sdpa_forward", "sdpa_backward"), _kernels, strict=True):
        torch.library.impl(f"{NAMESPACE}::{_name}", _device.upper(), _kernel, lib=_library)


def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``sdpa_forward``, by the short way where there is one."""
    if not only_passes_on(*inputs[:_OPERANDS]):
        return sdpa_forward(*inputs)
    return _Forward.apply(_KERNELS[inputs[0].device.type][0], *inputs)


def _below_autograd(operator: Callable[..., Any], *inputs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(*inputs)
        ctx.save_for_backward(*inputs[:_OPERANDS], out, lse)
        ctx.options = inputs[_OPERANDS:]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or lse's, which is not used, is filled with zeros
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        query, key, value, bias, sinks, seq_len_q, seq_len_kv, out, lse = ctx.saved_tensors
        optional = (bias, sinks, seq_len_q, seq_len_kv)
        want_dbias = bias is not None and ctx.needs_input_grad[4]
        tensors = (grad_out, query, key, value, out, lse, *optional)
        direct = not torch.is_grad_enabled() and only_passes_on(*tensors)
        run = _KERNELS[query.device.type][1] if direct else sdpa_backward
        dq, dk, dv, dbias, dsinks = run(*tensors, *ctx.options, want_dbias)
        rest = (dbias if want_dbias else None, None if sinks is None else dsinks, None, None)
        return None, dq, dk, dv, *rest, *(None for _ in ctx.options)


class _Backward(torch.autograd.Function):
    """In a graph that is to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return _below_autograd(sdpa_backward, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError("attention has no second derivative here; torch's math backend has one")


# Not by torch.library.register_autograd, which goes through the schema on every call: on one CPU 75 µs for the forward
# where this takes 30. Also where nothing requires a gradient: a tangent of forward mode must raise, not be dropped.
_forward_autograd = partial(_Forward.apply, partial(_below_autograd, sdpa_forward))
torch.library.impl(f"{NAMESPACE}::sdpa_forward", "Autograd", _forward_autograd, lib=_library)
torch.library.impl(f"{NAMESPACE}::sdpa_backward", "Autograd", _Backward.apply, lib=_library)

"""``scaled_dot_product_attention``: arguments in, one of our operators or torch's own function out."""

from __future__ import annotations

import math
from operator import index

import torch
from torch.compiler import is_compiling

from ..facts import MaskFacts
from . import admits, ops, plain
from .notices import say_once


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_bottom_right: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    seq_lens: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    deterministic: bool | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Attention whose backward runs on our kernels; returns (B, Hq, Sq, Dv), in (B, S, H, D) storage.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), on one device, of one floating dtype; under
    autocast they are cast to its dtype. Hk other than Hq needs ``enable_gqa``. Differentiable in query, key, value,
    attn_bias and sinks.

    attn_bias: added to the scaled scores; broadcasts to (B, Hq, Sq, Sk); the query's dtype or fp32. A bool tensor says
        which pairs take part, and becomes a bias of 0 and -inf first.
    is_causal: keep keys up to the diagonal, which starts in the top left corner, as torch's does; with
        ``causal_bottom_right`` it ends in the bottom right corner instead.
    window: (left, right), the number of keys kept before and after the one on the diagonal; None is no bound.
    sinks: Hq logits, one more term of each row's softmax that has no value.
    seq_lens: B int32 lengths of queries and keys alike, or a pair (of queries, of keys). What lies past a length takes
        no part, whatever it holds; the output is zero there.
    scale: of the scores; default 1/sqrt(D).
    deterministic: bitwise the same gradients in every run; default ``torch.are_deterministic_algorithms_enabled()``.

    The forward is cuDNN's, else torch's flash kernel; on CPU tensors the fp64 reference computes both directions. Where
    our engine declines, torch's own forward and backward run, and the logger ``cudnn_frost_sm120`` says why, once;
    with ``strict`` that is a NotImplementedError instead. Where no gradient is wanted, torch's own forward runs.
    Raises ValueError for arguments that contradict each other, before anything runs.
    """
    query, key, value = _autocast(query, key, value)
    _check_shapes(query, key, value, enable_gqa)
    left, right = _bounds(is_causal, causal_bottom_right, window)
    bias = None if attn_bias is None else _bias(attn_bias, query.dtype)
    logits = None if sinks is None else _sinks(sinks, query.shape[1])
    lengths = None if seq_lens is None else _lengths(seq_lens, query.shape[0])
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[3])
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()

    mask = MaskFacts(causal_bottom_right, left, right, lengths is not None)
    operands = (query, key, value, bias, logits, lengths, mask, scale, deterministic)
    if not _wants_gradient(query, key, value, bias, logits):
        if plain.torch_expresses(query, key, bias, logits, lengths, mask):
            return plain.attention(*operands)
    else:
        reason = _static_reason(query, value) if is_compiling() else _reason(operands)
        if reason is not None:
            if strict:
                raise NotImplementedError(reason)
            say_once(f"attention runs on torch's own kernels, forward and backward: {reason}")
            return plain.attention(*operands)
    len_q, len_k = (None, None) if lengths is None else lengths
    options = (float(scale), causal_bottom_right, left, right, deterministic, strict)
    out, _ = ops.forward(query, key, value, bias, logits, len_q, len_k, *options)
    return out


def _reason(operands: tuple) -> str | None:
    query, key, value, bias, logits, *rest = operands
    if query.is_cuda:
        sinks = None if logits is None else logits.view(1, -1, 1, 1)
        return admits.decline_reason(query, key, value, bias, sinks, *rest)
    return _static_reason(query, value)


def _static_reason(query: torch.Tensor, value: torch.Tensor) -> str | None:
    headdims = (index(query.shape[3]), index(value.shape[3]))  # under torch.compile: numbers, even if all is dynamic
    dtype = str(query.dtype).removeprefix("torch.")
    return admits.static_decline_reason(query.device.type, query.device.index, dtype, *headdims)


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"query, key and value must be (B, H, S, D), and have {query.dim()}, {key.dim()}, {value.dim()} dims"
        )
    if key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit each other"
        )
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(
            f"query, key and value must have one floating dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if query.shape[1] != key.shape[1] and not (enable_gqa and query.shape[1] % key.shape[1] == 0):
        raise ValueError(
            f"{query.shape[1]} query heads on {key.shape[1]} key heads need enable_gqa=True, and a multiple of them"
        )


def _bounds(
    is_causal: bool, bottom_right: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    """The left and right bounds of ``facts.MaskFacts``; its left one leaves out the key at that distance."""
    left, right = window or (None, None)
    for side, size in (("left", left), ("right", right)):
        if size is not None and size < 0:
            raise ValueError(f"the {side} side of a window is 0 or more keys, or None, not {size}")
    if bottom_right and not is_causal:
        raise ValueError("causal_bottom_right says where a causal diagonal ends, and needs is_causal=True")
    if is_causal and right:
        raise ValueError(f"a window with {right} keys after the diagonal contradicts is_causal=True")
    return None if left is None else left + 1, 0 if is_causal else right


def _bias(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With 4 dims, additive."""
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, -math.inf)
    return bias[(None,) * (4 - bias.dim())]


def _sinks(sinks: torch.Tensor, heads: int) -> torch.Tensor:
    if sinks.numel() != heads:
        raise ValueError(f"sinks has {sinks.numel()} logits, and there are {heads} query heads")
    return sinks.reshape(heads).float()


def _lengths(
    seq_lens: torch.Tensor | tuple[torch.Tensor, torch.Tensor], batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    len_q, len_k = (seq_lens, seq_lens) if isinstance(seq_lens, torch.Tensor) else seq_lens
    for name, length in (("queries", len_q), ("keys", len_k)):
        if length.numel() != batch or length.dtype != torch.int32:
            raise ValueError(f"seq_lens of {name} must be {batch} int32 values, not {length.numel()} of {length.dtype}")
    return len_q.reshape(batch), len_k.reshape(batch)

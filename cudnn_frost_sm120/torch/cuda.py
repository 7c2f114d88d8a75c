"""What the two operators do on CUDA tensors. Nothing here waits for the GPU."""

from __future__ import annotations

import torch

from ..facts import MaskFacts
from ..gradients import gradients
from .cudnn_forward import cudnn_forward
from .notices import say_once
from .plain import Lengths, written_out

_HALF = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEADDIM = 256
_FLASH_HEADDIM_MULTIPLE = 8


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: Lengths,
    mask: MaskFacts,
    scale: float,
    results: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): by cuDNN's graph, else by torch's flash kernel, else written out in torch operations.

    ``results`` are the tensors to fill where a kernel takes them. Rows past a length, and rows that keep nothing, are
    zeros in out.
    """
    # Fused kernels find a row's maximum before they scale; with a scale of 0 or less that is another row's maximum.
    if query.dtype in _HALF and scale > 0:
        tensors = {"q": query, "k": key, "v": value, "out": results[0], "lse": results[1]}
        if bias is not None:
            tensors["bias"] = bias
        if sinks is not None:
            tensors["sink"] = sinks.view(1, -1, 1, 1)
        if lengths is not None:
            tensors["seq_len_q"], tensors["seq_len_kv"] = (length.view(-1, 1, 1, 1) for length in lengths)
            results[0].zero_()  # a kernel need not write rows past a length
        if cudnn_forward(tensors, mask, scale):
            return results
        if bias is None and sinks is None and lengths is None and _flash_serves(query, key, value, mask):
            return _flash(query, key, value, mask, scale)
    say_once(
        "no fused attention forward serves one of the problems: it runs in torch operations, with S_q x S_k memory"
    )
    return written_out(query, key, value, bias, sinks, lengths, mask, scale)


def _flash_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: MaskFacts) -> bool:
    headdim = query.shape[3]
    bounded = mask.left_bound is not None or mask.right_bound is not None
    return (
        headdim == value.shape[3]
        and headdim <= _FLASH_MAX_HEADDIM
        and headdim % _FLASH_HEADDIM_MULTIPLE == 0
        and all(t.stride(3) == 1 for t in (query, key, value))
        # Its diagonal ends in the bottom right corner, always.
        and (not bounded or mask.bottom_right or query.shape[2] == key.shape[2])
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: MaskFacts, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        mask.right_bound == 0,
        False,
        scale=scale,
        window_size_left=None if mask.left_bound is None else mask.left_bound - 1,
        window_size_right=mask.right_bound,
    )
    return out.transpose(1, 2), lse.unsqueeze(-1)


def backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: Lengths,
    mask: MaskFacts,
    scale: float,
    deterministic: bool,
    strict: bool,
    want_dbias: bool,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, dbias, dsinks by our engine.

    Layouts that the kernels do not take (an expanded gradient, say) are copied first, which is said once; with
    ``strict`` they raise NotImplementedError, as does what no layout would change.
    """
    operands = {"q": query, "k": key, "v": value, "o": out, "do": grad_out, "stats": lse}
    optional = {}
    if lengths is not None:
        optional["seq_len_q"], optional["seq_len_kv"] = lengths
    if bias is not None:
        optional["bias"] = bias
    if sinks is not None:
        optional["sink"] = sinks.view(1, -1, 1, 1)
    options = (mask, scale, deterministic, want_dbias)
    try:
        results = gradients(operands | optional, *options)
    except NotImplementedError as declined:
        if strict or all(_is_dense(tensor) for tensor in operands.values()):
            raise
        say_once(f"attention backward copies an operand into another layout: {declined}")
        operands = {name: tensor if _is_dense(tensor) else tensor.contiguous() for name, tensor in operands.items()}
        results = gradients(operands | optional, *options)
    dbias = results["dbias"].to(bias.dtype) if bias is not None and want_dbias else query.new_empty(0)
    dsinks = results["dsink"].view(-1) if sinks is not None else query.new_empty(0)
    return results["dq"], results["dk"], results["dv"], dbias, dsinks


def _is_dense(tensor: torch.Tensor) -> bool:
    """In (B, H, S, D) or (B, S, H, D) storage without gaps."""
    return tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()

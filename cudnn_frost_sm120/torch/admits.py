"""Whether our engine would serve the backward of an attention call, asked before its forward runs.

The answer comes from the rules that a graph meets (admission.py), by way of the facts that the wrapper would state.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import assume_constant_result

from .. import target
from ..config.arch import TMA_ALIGNMENT
from ..facts import MaskFacts
from ..gradients import Signature, facts_from_signatures, gradient_signature, refuse, signature

_ANSWERS_KEPT = 4096


def decline_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: tuple[torch.Tensor, torch.Tensor] | None,
    mask: MaskFacts,
    scale: float,
    deterministic: bool,
) -> str | None:
    """Why the backward of this call is declined, in one sentence, or None where it is served.

    CUDA tensors as in ``scaled_dot_product_attention``, sinks of shape (1, Hq, 1, 1). Raises ValueError for tensors
    that contradict each other. Nothing runs on the GPU.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.data_ptr() % TMA_ALIGNMENT:
            return f"the first element of {name} is not at a multiple of {TMA_ALIGNMENT} bytes"
    optional = {"bias": bias, "sink": sinks}
    given = {name: signature(tensor) for name, tensor in optional.items() if tensor is not None}
    if lengths is not None:
        given["seq_len_q"], given["seq_len_kv"] = map(signature, lengths)
    return _reason(signature(query), signature(key), signature(value), tuple(given.items()), mask, scale, deterministic)


@assume_constant_result
def static_decline_reason(device: str, index: int | None, dtype: str, headdim: int, headdim_v: int) -> str | None:
    """The same from what no batch changes; ``torch.compile`` asks it while it traces."""
    if device == "cpu":
        return None  # the reference serves
    if device != "cuda":
        return f"tensors are on {device}, and the kernels need a CUDA device"
    where, kind = torch.device(device, index or 0), getattr(torch, dtype)

    def contiguous(size: int) -> Signature:
        return torch.Size((1, 1, 64, size)), (64 * size, 64 * size, size, 1), kind, where

    return _reason(contiguous(headdim), contiguous(headdim), contiguous(headdim_v), (), MaskFacts(), 1.0, False)


@lru_cache(maxsize=_ANSWERS_KEPT)
def _reason(
    query: Signature,
    key: Signature,
    value: Signature,
    optional: tuple[tuple[str, Signature], ...],
    mask: MaskFacts,
    scale: float,
    deterministic: bool,
) -> str | None:
    shape, _, dtype, device = query
    if len(shape) != 4 or len(value[0]) != 4:
        raise ValueError(f"query and value must be (B, H, S, D), and have shapes {tuple(shape)} and {tuple(value[0])}")
    batch, heads, rows, _ = shape
    width = value[0][3]
    out = (torch.Size((batch, heads, rows, width)), (rows * heads * width, width, heads * width, 1), dtype, device)
    stats = (torch.Size((batch, heads, rows, 1)), (heads * rows, rows, 1, 1), torch.float32, device)
    given = {"q": query, "k": key, "v": value, "o": out, "do": out, "stats": stats}
    given |= {f"d{name}": gradient_signature(f"d{name}", given[name]) for name in ("q", "k", "v")}
    try:
        refuse(
            facts_from_signatures(given | dict(optional), mask, scale, deterministic), target.for_device(device.index)
        )
    except NotImplementedError as declined:
        return str(declined)
    return None

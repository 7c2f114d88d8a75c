"""Our attention under a name that Hugging Face models take as ``attn_implementation``."""

from __future__ import annotations

from typing import Any

import torch

from .attention import scaled_dot_product_attention
from .notices import say_once

NAME = "cudnn_frost_sm120"


def register_with_transformers(name: str = NAME, *, strict: bool = False) -> str:
    """Register our attention, and return its name: ``model.set_attn_implementation(register_with_transformers())``.

    ``from_pretrained(..., attn_implementation=name)`` takes it as well. Causal masks and sliding windows are given to
    the kernels as such, attention sinks with their gradient; every other mask (padding, packed sequences, chunks) as
    an additive bias, which is as large as the mask. What needs dropout, attention weights, or a position bias goes to
    transformers' own ``sdpa``, said once; with ``strict`` that, and whatever our engine declines, raises
    NotImplementedError. Raises ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return _attention(*arguments, strict=strict, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
    return name


def _mask(
    *, q_length: int, kv_length: int, q_offset: int = 0, local_size: int | None = None, config: Any = None, **rest: Any
) -> torch.Tensor | None:
    """What transformers hands to ``_attention``: None, a bool mask, or a window written as an empty mask.

    A mask of shape (1, 1, 0, W) stands for a causal window of W keys. The width travels with the mask, and not beside
    it, so that a model that does not pass its window on cannot lose it.
    """
    from transformers.masking_utils import sdpa_mask

    window = getattr(config, "sliding_window", None)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    plainly_causal = rest.get("allow_is_causal_skip", True) and rest.get("attention_mask") is None
    # transformers gives the width of windows and of chunks in one argument.
    if plainly_causal and local_size is not None and local_size == window and not chunked:
        if q_length == kv_length > local_size and isinstance(q_offset, int) and q_offset == 0:
            return torch.empty(1, 1, 0, local_size, dtype=torch.bool, device=rest.get("device", "cpu"))
    sizes: dict[str, Any] = {
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "local_size": local_size,
    }
    return sdpa_mask(**sizes, config=config, **rest)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    strict: bool,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, Hq, Sq, D) and so on; the result is (B, Sq, Hq, Dv), and no weights."""
    wide = query.shape[2] > 1
    window = None
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[2] == 0:
        window, attention_mask = (attention_mask.shape[3] - 1, 0), None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)

    beyond = _beyond_ours(dropout, options)
    if beyond is not None:
        if strict or s_aux is not None or window is not None:
            raise NotImplementedError(f"the attention of {type(module).__name__} asks for {beyond}, which is not there")
        say_once(f"transformers' own sdpa attention runs: {beyond} is not there")
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_bias=attention_mask,
        is_causal=window is None and attention_mask is None and wide and is_causal,
        window=window,
        sinks=s_aux,
        scale=scaling,
        enable_gqa=True,
        strict=strict,
    )
    return out.transpose(1, 2), None


def _beyond_ours(dropout: float, options: dict[str, Any]) -> str | None:
    if dropout:
        return "dropout"
    for name in ("softcap", "position_bias", "head_mask"):
        if options.get(name) is not None:
            return name
    return "output_attentions" if options.get("output_attentions") else None

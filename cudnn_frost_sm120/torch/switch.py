"""Switches ``torch.nn.functional.scaled_dot_product_attention`` over to ours, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional

from .attention import scaled_dot_product_attention
from .notices import say_once
from .plain import torch_sdpa


@contextmanager
def replace_torch_sdpa(*, strict: bool = False) -> Iterator[None]:
    """While it is entered, every module that calls ``F.scaled_dot_product_attention`` calls ours; a decorator too.

    It replaces the name in ``torch.nn.functional``, for all threads, and leaves alone what was imported by name from
    there before, and what torch.compile has traced before. Calls that ours has no arguments for (dropout, tensors that
    are not (B, H, S, D) or need broadcasting) go to torch, which is said once; with ``strict``, they raise
    NotImplementedError, as does whatever our engine declines.
    """

    def replacement(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        reason = _beyond_ours(query, key, value, attn_mask, dropout_p, is_causal)
        if reason is None:
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return scaled_dot_product_attention(query, key, value, attn_bias=attn_mask, strict=strict, **options)
        if strict:
            raise NotImplementedError(reason)
        say_once(f"attention runs on torch's own kernels: {reason}")
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    before = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = before


def _beyond_ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str | None:
    """What torch's function takes and ours does not, in words; torch also words the errors of what neither takes."""
    if dropout_p:
        return "there is no dropout"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "query, key and value are not (B, H, S, D)"
    if key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3]:
        return "query, key and value have other batches or heads, and nothing is broadcast"
    if attn_mask is not None and is_causal:
        return "an attn_mask beside is_causal is an error of torch's"
    return None

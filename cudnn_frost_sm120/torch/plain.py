"""Attention by torch alone: what runs where our engine declines, and the last resort of the forward."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # bound before `switch` replaces it

from ..facts import MaskFacts
from ..reference import keep_mask

Lengths = tuple[torch.Tensor, torch.Tensor] | None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: Lengths,
    mask: MaskFacts,
    scale: float,
    deterministic: bool,
) -> torch.Tensor:
    """Differentiable, from torch's own function where that can express the problem, else written out.

    Arguments as in ``written_out``. ``deterministic`` beyond torch's global setting takes torch's math backend.
    """
    if not torch_expresses(query, key, bias, sinks, lengths, mask):
        return written_out(query, key, value, bias, sinks, lengths, mask, scale)[0]
    more = deterministic and not torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(SDPBackend.MATH) if more else nullcontext():
        return torch_sdpa(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=mask.right_bound is not None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def torch_expresses(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: Lengths,
    mask: MaskFacts,
) -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` has arguments for it."""
    if sinks is not None or lengths is not None or mask.left_bound is not None or mask.right_bound not in (None, 0):
        return False
    if bias is not None:
        return mask.right_bound is None and bias.dtype == query.dtype
    return not mask.bottom_right or query.shape[2] == key.shape[2]


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: Lengths,
    mask: MaskFacts,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) in fp32 operations (fp64 for fp64 tensors), differentiable, with all scores held at once.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); bias broadcasts to the scores; sinks are Hq fp32
    logits in any shape; lengths are (queries, keys) of each batch entry. Returns out (B, Hq, Sq, Dv) in (B, S, H, D)
    storage, of the query's dtype, and LSE (B, Hq, Sq, 1), fp32. Rows that keep nothing are zeros, with LSE -inf.
    """
    working = torch.promote_types(query.dtype, torch.float32)
    batch, heads, rows, _ = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    full = torch.full((batch,), rows, device=query.device), torch.full((batch,), keys, device=query.device)
    len_q, len_k = (length.reshape(batch, 1, 1).clamp(min=0) for length in (lengths or full))
    len_q, len_k = len_q.clamp(max=rows), len_k.clamp(max=keys)
    row = torch.arange(rows, device=query.device)[None, :, None]
    col = torch.arange(keys, device=query.device)[None, None, :]
    keep = keep_mask(mask, row, col, len_q, len_k)[:, None]
    q, k, v = (t.to(working) for t in (query, key, value))
    if lengths is not None:  # storage past a length may hold anything
        q = torch.where((row < len_q)[:, None], q, 0)
        k, v = (torch.where((col.mT < len_k)[:, None], t, 0) for t in (k, v))
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))

    scores = (q @ k.mT) * scale
    if bias is not None:
        scores = scores + bias.to(working)
    scores = torch.where(keep, scores, -math.inf)
    logit = (
        None
        if sinks is None
        else torch.where((row < len_q)[:, None], sinks.to(working).reshape(heads, 1, 1), -math.inf)
    )
    top = scores.detach().amax(-1, keepdim=True)
    if logit is not None:
        top = torch.maximum(top, logit.detach())
    top = torch.where(top == -math.inf, 0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if logit is not None:
        total = total + torch.exp(logit - top)
    out = (weights @ v) / torch.where(total == 0, 1, total)
    lse = (top + torch.log(total)).detach()
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()

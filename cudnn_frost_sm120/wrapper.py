"""torch tensors in, gradients out: ``sdpa_bwd_wrapper_dsl_sm120``.

Call-compatible with cudnn-frontend's function of that name. It states the problem as the same facts that a graph would
give, so it is served or declined by the same rules, and it runs the plan that ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .facts import MaskFacts
from .gradients import gradients


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

    operands = {"q": q_tensor, "k": k_tensor, "v": v_tensor, "o": o_tensor, "do": do_tensor, "stats": stats_tensor}
    optional = {"seq_len_q": seq_q_lens, "seq_len_kv": seq_kv_lens, "bias": bias_tensor, "sink": sink_token}
    operands |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    results = gradients(operands, mask, scale, bool(deterministic), want_dbias)
    return NamedResults({f"{name}_tensor": tensor for name, tensor in results.items()})


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

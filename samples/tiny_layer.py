"""One attention layer of a small byte-level language model, run on real text: where the samples' operands come from.

Weights are random with a fixed seed; everything else is genuine. Text becomes bytes, bytes become embeddings, one
causal attention layer runs, the next byte is predicted, and the gradient of that loss is dO.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

TEXT = Path(__file__).with_name("alice.txt")


@dataclass(frozen=True)
class AttentionLayer:
    """Operands as a training step has them, bf16 except lse; (B, H, S, D) views of (B, S, H, D) storage."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor  # (B, H, S, 1) fp32, natural log
    do: torch.Tensor
    scale: float
    loss: float
    autograd: dict[str, torch.Tensor]  # dq, dk, dv in fp32, by torch, from this very dO


def attention_layer(
    batch: int = 2, seqlen: int = 1024, heads: int = 8, headdim: int = 64, device: torch.device | str = "cpu"
) -> AttentionLayer:
    """Run the layer forward and backward on ``batch`` pieces of the text, ``seqlen`` bytes each."""
    width = heads * headdim
    seed = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=seed) * rows**-0.5).to(device)

    tokens = _pieces(batch, seqlen + 1).to(device)
    x = weight(256, width)[tokens[:, :-1]] * 16 + _positions(seqlen, width).to(device)
    x = torch.nn.functional.rms_norm(x, (width,))
    q, k, v = (_as_stored((x @ weight(width, width)).unflatten(-1, (heads, headdim)).transpose(1, 2)) for _ in range(3))

    scale = headdim**-0.5
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(future, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = torch.exp(scores - lse) @ leaves[2]

    after = o.transpose(1, 2).reshape(batch, seqlen, width) @ weight(width, width)
    logits = (x + after) @ weight(width, 256)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (exact_do,) = torch.autograd.grad(loss, o, retain_graph=True)
    do = _as_stored(exact_do)
    gradients = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do.float()), strict=True))
    return AttentionLayer(q, k, v, _as_stored(o), lse.detach(), do, scale, loss.item(), gradients)


def _pieces(count: int, length: int) -> torch.Tensor:
    """(count, length) bytes, evenly spread over the text."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    if length > len(text):
        raise ValueError(f"the text has {len(text)} bytes, and pieces of {length} were asked for")
    starts = torch.linspace(0, len(text) - length, count).long()
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def _positions(seqlen: int, width: int) -> torch.Tensor:
    rate = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(seqlen)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)


def _as_stored(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) rounded to bf16, in (B, S, H, D) storage."""
    return x.detach().transpose(1, 2).bfloat16().contiguous().transpose(1, 2)

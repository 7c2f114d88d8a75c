"""Tensors of a cell on the GPU: random inputs, O and LSE from an fp32 forward, and the check of gradients."""

from __future__ import annotations

from functools import cached_property

import torch

from ..reference import keep_mask, relative_error, sdpa_backward
from .cells import Cell

TOLERANCE = 6e-3
"""Largest relative error of a bf16 gradient, against the fp64 oracle."""
SCORES_AT_A_TIME = 1 << 26
"""Elements of an fp32 score matrix that the forward holds at a time: 256 MiB."""


class Problem:
    """(B, H, S, D) views on (B, S, H, D) storage, bf16; `tensors` by port name, as in a launch."""

    def __init__(self, cell: Cell, device: str = "cuda"):
        self.cell, self.device = cell, device
        torch.manual_seed(0)

        def io(heads: int, headdim: int) -> torch.Tensor:
            return torch.randn(cell.batch, cell.seqlen, heads, headdim, device=device).bfloat16().transpose(1, 2)

        q, do = io(cell.heads_q, cell.headdim_qk), io(cell.heads_q, cell.headdim_v)
        k, v = io(cell.heads_k, cell.headdim_qk), io(cell.heads_k, cell.headdim_v)
        o, stats = torch.empty_like(do), torch.empty(cell.batch, cell.heads_q, cell.seqlen, 1, device=device)
        self.tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "stats": stats}
        if cell.sink:
            self.tensors["sink"] = torch.randn(1, cell.heads_q, 1, 1, device=device)
        self._forward()
        outputs = {"dq": q, "dk": k, "dv": v} | ({"dsink": self.tensors["sink"]} if cell.sink else {})
        self.tensors |= {name: torch.empty_like(like) for name, like in outputs.items()}
        self.outputs = tuple(outputs)

    def _forward(self) -> None:
        """O and LSE, a head and a block of query rows at a time, with the keys alone that the block can see."""
        cell, tensors = self.cell, self.tensors
        rows = max(1, SCORES_AT_A_TIME // cell.seqlen)
        position, full = torch.arange(cell.seqlen, device=self.device), torch.tensor(cell.seqlen, device=self.device)
        for begin in range(0, cell.seqlen, rows):
            end = min(begin + rows, cell.seqlen)
            keys = slice(max(0, begin - cell.window) if cell.window else 0, end if cell.causal else cell.seqlen)
            dropped = ~keep_mask(cell.mask, position[begin:end, None], position[None, keys], full, full)
            for b in range(cell.batch):
                for h in range(cell.heads_q):
                    head_k = h // (cell.heads_q // cell.heads_k)
                    key, value = (tensors[name][b, head_k, keys].float() for name in ("k", "v"))
                    scores = (tensors["q"][b, h, begin:end].float() @ key.T) * cell.scale
                    scores.masked_fill_(dropped, float("-inf"))
                    lse = scores.logsumexp(-1, keepdim=True)
                    if cell.sink:
                        lse = torch.logaddexp(lse, tensors["sink"][0, h])
                    tensors["stats"][b, h, begin:end] = lse
                    tensors["o"][b, h, begin:end] = ((scores - lse).exp() @ value).bfloat16()

    def wipe(self) -> None:
        """NaN in every output."""
        for name in self.outputs:
            self.tensors[name].fill_(float("nan"))

    def errors(self) -> dict[str, float]:
        """Errors of the first key head and its query heads, in the first batch entry, and of dSink."""
        heads = {"dq": self.cell.heads_q // self.cell.heads_k, "dk": 1, "dv": 1}
        got = {name: self.tensors[name] for name in self.outputs}
        got |= {name: got[name][:1, :count] for name, count in heads.items()}
        return {name: relative_error(tensor, self._expected[name]) for name, tensor in got.items()}

    @cached_property
    def _expected(self) -> dict[str, torch.Tensor]:
        cell, tensors = self.cell, self.tensors
        heads = cell.heads_q // cell.heads_k
        q, o, do, stats = (tensors[name][:1, :heads] for name in ("q", "o", "do", "stats"))
        k, v = (tensors[name][:1, :1] for name in ("k", "v"))
        gradients = sdpa_backward(q, k, v, o, do, stats, scale=cell.scale, mask=cell.mask)
        expected = {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        if cell.sink:
            delta = (tensors["o"].double() * tensors["do"].double()).sum(-1, keepdim=True)
            weight = (tensors["sink"].double() - tensors["stats"].double()).exp()
            expected["dsink"] = -(weight * delta).sum((0, 2), keepdim=True)
        return expected

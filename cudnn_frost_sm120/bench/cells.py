"""What the benchmark measures: cells, named grids of them, and the floating-point operations of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..facts import BwdFacts, MaskFacts, TensorFacts


@dataclass(frozen=True)
class Cell:
    """One sdpa_backward problem, bf16, S_q = S_k, tensors stored as (B, S, H, D), which is how training has them.

    `window`: how many keys a query sees, its own the last (the graph's left bound, with a causal right bound). `sink`:
    one logit for each query head, and its gradient.
    """

    headdim_qk: int
    headdim_v: int
    batch: int
    heads_q: int
    heads_k: int
    seqlen: int
    causal: bool = True
    window: int | None = None
    deterministic: bool = False
    sink: bool = False

    @property
    def name(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        dims = str(self.headdim_qk) if self.headdim_qk == self.headdim_v else f"{self.headdim_qk}/{self.headdim_v}"
        mode = (", sink" if self.sink else "") + (", deterministic" if self.deterministic else "")
        return f"D{dims} B{self.batch} H{self.heads_q}/{self.heads_k} S{self.seqlen} {mask}{mode}"

    @property
    def flops(self) -> float:
        """(3 d_qk + 2 d_v) * 2 for every pair of a batch entry and head; a causal mask keeps half of the pairs."""
        pairs = self.seqlen * self.seqlen / (2 if self.causal else 1)
        if self.window:
            ramp = min(self.window, self.seqlen)
            pairs = ramp * (ramp + 1) / 2 + (self.seqlen - ramp) * ramp
        return (3 * self.headdim_qk + 2 * self.headdim_v) * 2 * self.batch * self.heads_q * pairs

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.headdim_qk)

    @property
    def mask(self) -> MaskFacts:
        return MaskFacts(left_bound=self.window, right_bound=0 if self.causal else None)

    def facts(self) -> BwdFacts:
        """What a graph of this problem asks for."""

        def io(name: str, heads: int, headdim: int) -> TensorFacts:
            dim = (self.batch, heads, self.seqlen, headdim)
            return TensorFacts(name, dim, (self.seqlen * heads * headdim, headdim, heads * headdim, 1), "bf16")

        def logits(name: str) -> TensorFacts | None:
            return TensorFacts(name, (1, self.heads_q, 1, 1), (self.heads_q, 1, 1, 1), "fp32") if self.sink else None

        rows = (self.batch, self.heads_q, self.seqlen, 1)
        return BwdFacts(
            q=io("q", self.heads_q, self.headdim_qk),
            k=io("k", self.heads_k, self.headdim_qk),
            v=io("v", self.heads_k, self.headdim_v),
            o=io("o", self.heads_q, self.headdim_v),
            do=io("do", self.heads_q, self.headdim_v),
            stats=TensorFacts("stats", rows, (self.heads_q * self.seqlen, self.seqlen, 1, 1), "fp32"),
            dq=io("dq", self.heads_q, self.headdim_qk),
            dk=io("dk", self.heads_k, self.headdim_qk),
            dv=io("dv", self.heads_k, self.headdim_v),
            sink=logits("sink"),
            dsink=logits("dsink"),
            mask=self.mask,
            scale=self.scale,
            deterministic=self.deterministic,
        )


Shape = tuple[int, int, int, int, int]  # d_qk, d_v, batch, query heads, key heads
D64, D64_GROUPED = (64, 64, 2, 32, 32), (64, 64, 1, 64, 8)
D128, D128_GROUPED = (128, 128, 2, 16, 16), (128, 128, 1, 64, 8)
D192_128, D192 = (192, 128, 2, 16, 16), (192, 192, 2, 16, 16)
D256, D256_GROUPED = (256, 256, 2, 8, 8), (256, 256, 1, 16, 2)
SHAPES: tuple[Shape, ...] = (D64, D64_GROUPED, D128, D128_GROUPED, D192_128, D192, D256, D256_GROUPED)


def _squares(shapes: Iterable[Shape], seqlens: Iterable[int]) -> list[Cell]:
    return [Cell(*shape, seqlen, causal) for shape in shapes for seqlen in seqlens for causal in (False, True)]


def _windows(sinks: Iterable[bool]) -> list[Cell]:
    return [
        Cell(d, d, 2, 64, 8, 4096, True, window, sink=sink)
        for d in (64, 128)
        for window in (128, 1024)
        for sink in sinks
    ]


def _deterministic(cells: Iterable[Cell]) -> list[Cell]:
    return [replace(cell, deterministic=True) for cell in cells]


_MAIN = _squares(SHAPES, (2048, 4096, 8192, 16384))
_WINDOWS = _windows((False, True))
_SHORT = [
    Cell(d, d, batch, heads_q, heads_k, seqlen, causal)
    for d, batch, heads_q, heads_k in (
        (64, 8, 16, 16),
        (128, 8, 16, 16),
        (128, 4, 32, 8),
        (256, 4, 8, 8),
        (64, 1, 2, 2),
    )
    for seqlen in (256, 512, 1024)
    for causal in (False, True)
]
_HEADLINE = [
    *(Cell(*D64, 4096, causal) for causal in (False, True)),
    *(Cell(*D128, 4096, causal) for causal in (False, True)),
    Cell(192, 128, 2, 8, 8, 4096),
    Cell(*D256, 4096),
    Cell(*D128_GROUPED, 8192),
    Cell(64, 64, 2, 64, 8, 4096, True, 128),
    *(Cell(*D128, 4096, causal, deterministic=True) for causal in (False, True)),
]
_TARGETS = [
    Cell(*D128, 8192, False),
    Cell(*D128, 2048),
    Cell(*D128_GROUPED, 4096),
    Cell(*D64, 4096, False),
    Cell(*D64_GROUPED, 2048),
    *(Cell(*D192_128, 4096, causal) for causal in (False, True)),
    Cell(*D192, 4096, False),
    Cell(*D256, 4096, False),
    Cell(*D256_GROUPED, 4096),
    *_windows((True,)),
    *_deterministic([Cell(*D128, 4096), Cell(*D128_GROUPED, 2048), Cell(*D64, 4096, False), Cell(*D192_128, 4096)]),
    *_deterministic([Cell(*D256, 4096), Cell(64, 64, 2, 64, 8, 4096, True, 128)]),
    Cell(128, 128, 8, 16, 16, 512),
]

GRIDS: dict[str, list[Cell]] = {
    "smoke": [Cell(64, 64, 1, 4, 4, 1024), Cell(128, 128, 1, 8, 2, 1024, False)],
    "targets": _TARGETS,
    "headline": _HEADLINE,
    "main": _MAIN,
    "windows": _WINDOWS,
    "short": _SHORT,
    "deterministic": _deterministic([*_squares(SHAPES, (2048, 8192)), *_WINDOWS]),
    "long-deterministic": _deterministic(_squares(SHAPES, (4096, 16384, 32768))),
}
GRIDS["all"] = [*_MAIN, *_WINDOWS, *_SHORT, *GRIDS["deterministic"], *GRIDS["long-deterministic"]]

"""What the benchmark measures: cells, named grids of them, and the floating-point operations of each."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cell:
    """One sdpa_backward problem, bf16, S_q = S_k. `window`: the graph's left bound, with a causal right bound."""

    headdim_qk: int
    headdim_v: int
    batch: int
    heads_q: int
    heads_k: int
    seqlen: int
    causal: bool = True
    window: int | None = None
    deterministic: bool = False

    @property
    def name(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        dims = str(self.headdim_qk) if self.headdim_qk == self.headdim_v else f"{self.headdim_qk}/{self.headdim_v}"
        mode = ", deterministic" if self.deterministic else ""
        return f"D{dims} B{self.batch} H{self.heads_q}/{self.heads_k} S{self.seqlen} {mask}{mode}"

    @property
    def flops(self) -> float:
        """(3 d_qk + 2 d_v) * 2 for every pair of a batch entry and head; a causal mask keeps half of the pairs."""
        pairs = self.seqlen * self.seqlen / (2 if self.causal else 1)
        if self.window:
            ramp = min(self.window, self.seqlen)
            pairs = ramp * (ramp + 1) / 2 + (self.seqlen - ramp) * ramp
        return (3 * self.headdim_qk + 2 * self.headdim_v) * 2 * self.batch * self.heads_q * pairs


def _squares(seqlens: tuple[int, ...]) -> list[Cell]:
    shapes = [
        (64, 64, 2, 32, 32),
        (64, 64, 1, 64, 8),
        (128, 128, 2, 16, 16),
        (128, 128, 1, 64, 8),
        (192, 128, 2, 16, 16),
        (192, 192, 2, 16, 16),
        (256, 256, 1, 16, 2),
    ]
    return [Cell(*shape, seqlen, causal) for shape in shapes for seqlen in seqlens for causal in (False, True)]


_WINDOWS = [Cell(d, d, 2, 64, 8, 4096, True, window) for d in (64, 128) for window in (128, 1024)]

_HEADLINE = [
    *(Cell(64, 64, 2, 32, 32, 4096, causal) for causal in (False, True)),
    *(Cell(128, 128, 2, 16, 16, 4096, causal) for causal in (False, True)),
    Cell(192, 128, 2, 8, 8, 4096),
    Cell(256, 256, 2, 8, 8, 4096),
    Cell(128, 128, 1, 64, 8, 8192),
    Cell(64, 64, 2, 64, 8, 4096, True, 128),
    *(Cell(128, 128, 2, 16, 16, 4096, causal, deterministic=True) for causal in (False, True)),
]

GRIDS: dict[str, list[Cell]] = {
    "smoke": [Cell(64, 64, 1, 4, 4, 1024), Cell(128, 128, 1, 8, 2, 1024, False)],
    "headline": _HEADLINE,
    "main": [*_squares((2048, 8192)), *_WINDOWS],
    "deterministic": [replace(cell, deterministic=True) for cell in [*_squares((2048,)), *_WINDOWS]],
}

"""What was measured in a cell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..knobs import BwdKnobs
from .cells import Cell

OURS = "ours"
THROTTLED = "ours, throttled"
ATOMIC = "ours, atomic adds"
"""Names of candidates: our first plan; its build with every HMMA followed by an idle one; and, beside a deterministic
plan, the one that sums dQ by atomic adds."""


@dataclass
class Timing:
    """Of one candidate, in milliseconds; `spread` is (max - min) / median, `host_us` what a call takes to submit."""

    median: float
    spread: float
    host_us: float


@dataclass
class Result:
    cell: Cell
    timings: dict[str, Timing] = field(default_factory=dict)  # by candidate
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by candidate and gradient, to the fp64 oracle
    build_seconds: dict[str, float] = field(default_factory=dict)  # by candidate; little where the kernel was there
    knobs: dict[str, BwdKnobs] = field(default_factory=dict)  # of our candidates
    missing: dict[str, str] = field(default_factory=dict)  # why, by candidate
    outside_bytes: int = 0  # what our first plan moves outside the main kernel (traffic.py)
    ceilings: dict[str, float] = field(default_factory=dict)  # TFLOP/s, by the candidate that it holds for
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # microseconds by candidate and kernel

    def tflops(self, who: str) -> float:
        return self.cell.flops / self.timings[who].median / 1e9

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as a peer our first plan is."""
        if OURS not in self.timings or peer not in self.timings:
            return None
        return self.timings[peer].median / self.timings[OURS].median

    def over_atomic(self) -> float | None:
        """Time of our deterministic plan over that of the plan with atomic adds."""
        if OURS not in self.timings or ATOMIC not in self.timings:
            return None
        return self.timings[OURS].median / self.timings[ATOMIC].median

    def share(self, who: str) -> float | None:
        """Of the ceiling of mma.sync, over the whole chain."""
        return self.tflops(who) / self.ceilings[who] if who in self.timings and who in self.ceilings else None

    def as_json(self) -> dict[str, Any]:
        rates = {who: round(self.tflops(who), 1) for who in self.timings}
        return {"name": self.cell.name, **asdict(self), "tflops": rates}

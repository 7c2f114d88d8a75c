"""What the project has set itself, and whether a run met it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .cells import Cell
from .result import OURS, THROTTLED, Result


@dataclass(frozen=True)
class Target:
    """`measure` of a result is to be at least `goal` in every cell of the regime; None where it says nothing."""

    regime: str
    what: str
    goal: float
    covers: Callable[[Cell], bool]
    measure: Callable[[Result], float | None]


@dataclass(frozen=True)
class Verdict:
    target: Target
    lowest: float
    cell: str  # where it was lowest
    missed: int
    cells: int

    @property
    def met(self) -> bool:
        return self.missed == 0


def _against(peer: str) -> Callable[[Result], float | None]:
    return lambda result: result.ratio(peer)


def _share(who: str) -> Callable[[Result], float | None]:
    return lambda result: result.share(who)


def _kept_of_atomic(result: Result) -> float | None:
    over = result.over_atomic()
    return None if over is None else 1 / over


def _deterministic(headdim: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.headdim_qk == headdim and cell.deterministic and cell.seqlen >= 2048


def _plain(headdim: int) -> Callable[[Cell], bool]:
    """Full and causal cells of a head dim, as long as the targets are set for."""

    def covers(cell: Cell) -> bool:
        return cell.headdim_qk == headdim and not cell.window and not cell.deterministic and cell.seqlen >= 2048

    return covers


def _full(headdim_qk: int, headdim_v: int, seqlen: int) -> Callable[[Cell], bool]:
    def covers(cell: Cell) -> bool:
        dims = (cell.headdim_qk, cell.headdim_v) == (headdim_qk, headdim_v)
        return dims and not cell.causal and not cell.deterministic and cell.seqlen >= seqlen

    return covers


BASELINE = "ours / baseline"
TARGETS: tuple[Target, ...] = (
    Target("D128, full and causal", BASELINE, 1.6, _plain(128), _against("baseline")),
    Target("D64, full and causal", BASELINE, 1.35, _plain(64), _against("baseline")),
    Target("192/128 and D192", BASELINE, 1.4, _plain(192), _against("baseline")),
    Target("D256", BASELINE, 1.45, _plain(256), _against("baseline")),
    Target("windows", BASELINE, 1.6, lambda c: bool(c.window) and not c.deterministic, _against("baseline")),
    Target("deterministic", BASELINE, 1.4, lambda c: c.deterministic and c.seqlen >= 2048, _against("baseline")),
    Target("D128, deterministic", "rate of atomic adds kept", 0.91, _deterministic(128), _kept_of_atomic),
    Target("every cell", BASELINE, 1.1, lambda c: True, _against("baseline")),
    Target("every cell that it serves", "ours / fa2", 1.25, lambda c: True, _against("fa2")),
    Target("D128 full, S >= 8192", "share of the ceiling", 0.6, _full(128, 128, 8192), _share(OURS)),
    Target("D128 full, throttled", "share of the throttled ceiling", 0.8, _full(128, 128, 4096), _share(THROTTLED)),
    Target("D64 full, throttled", "share of the throttled ceiling", 0.76, _full(64, 64, 4096), _share(THROTTLED)),
    Target("192/128 full, throttled", "share of the throttled ceiling", 0.75, _full(192, 128, 4096), _share(THROTTLED)),
    Target("D256 full, throttled", "share of the throttled ceiling", 0.7, _full(256, 256, 4096), _share(THROTTLED)),
)


def verdicts(results: Iterable[Result]) -> list[Verdict]:
    """One for every target that some result of the run says something about."""
    found = []
    for target in TARGETS:
        measured = [(target.measure(r), r.cell.name) for r in results if target.covers(r.cell)]
        values = [(value, name) for value, name in measured if value is not None]
        if values:
            lowest, cell = min(values)
            found.append(Verdict(target, lowest, cell, sum(v < target.goal for v, _ in values), len(values)))
    return found

"""What a run on the stand-in says about the model: stalls fitted to it, and how well it then predicts the rest.

Two numbers are fitted for an engine and a pair of head dims, to main-kernel times of `bench --stages`: the exposed
share in the longest cell without a mask, and the cycles of a CTA in the narrowest window. All other cells are
predictions, and so is everything throttled: there the tensor pipe has half its rate and nothing else changes, which is
the step that the model has to take from Hopper to SM120.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bench.cells import Cell
from ..bench.result import OURS, THROTTLED
from ..target import Target
from .chains import NONE, Stalls, main_seconds
from .engines import Baseline, Engine, Ours
from .gpus import Gpu, stand_in

ENGINES: dict[str, Engine] = {OURS: Ours(), "baseline": Baseline(), THROTTLED: Ours(throttled=True)}
Headdims = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    who: str  # of ENGINES
    cell: Cell
    main_seconds: float


@dataclass(frozen=True)
class Check:
    measured: Measured
    predicted: float  # seconds
    fitted: bool  # to this very cell


@dataclass(frozen=True)
class Calibration:
    environment: str
    gpu: Gpu
    stalls: dict[tuple[str, Headdims], Stalls]  # by engine: "ours" or "baseline"
    checks: tuple[Check, ...]

    def of(self, who: str, headdims: Headdims) -> Stalls:
        """Of an engine and head dims; those of its nearest head dims where these were not measured."""
        found = {dims: stalls for (name, dims), stalls in self.stalls.items() if name == who}
        if not found:
            return NONE
        return found[min(found, key=lambda dims: abs(sum(dims) - sum(headdims)))]


def read(path: Path, target: Target) -> Calibration:
    """From the JSON of a `bench --stages` run. Raises ValueError where it has no main-kernel time to fit to."""
    run = json.loads(path.read_text(encoding="utf-8"))
    ceiling = run["ceilings"][OURS]
    gpu = stand_in(ceiling["tflops"], ceiling["clock_ghz"] * 1e9, target.sm_count)
    return calibrate(run["environment"], gpu, list(_measurements(run["results"])), target)


def calibrate(environment: str, gpu: Gpu, measured: list[Measured], target: Target) -> Calibration:
    stalls: dict[tuple[str, Headdims], Stalls] = {}
    fitted: set[Measured] = set()
    for who in (OURS, "baseline"):
        mine = [m for m in measured if m.who == who]
        for headdims in sorted({_headdims(m.cell) for m in mine}):
            same = [m for m in mine if _headdims(m.cell) == headdims]
            full = max((m for m in same if not m.cell.causal), key=lambda m: m.cell.seqlen, default=None)
            if full is None:
                continue
            found = Stalls(exposed=_exposed(full, gpu, target))
            narrow = min((m for m in same if m.cell.window), key=lambda m: m.cell.window or 0, default=None)
            if narrow is not None:
                found = replace(found, cta_cycles=_cta_cycles(narrow, found, gpu, target))
            stalls[who, headdims] = found
            fitted |= {m for m in (full, narrow) if m is not None}
    if not stalls:
        raise ValueError("no cell without a mask has the time of its main kernel: run bench --stages on such a grid")
    calibration = Calibration(environment, gpu, stalls, ())
    checks = (
        Check(
            m,
            main_seconds(ENGINES[m.who], m.cell, gpu, target, calibration.of(_engine(m.who), _headdims(m.cell))),
            m in fitted,
        )
        for m in measured
    )
    return replace(calibration, checks=tuple(checks))


def _exposed(m: Measured, gpu: Gpu, target: Target) -> float:
    """Times grow linearly with it."""
    none, all_of_it = (main_seconds(ENGINES[m.who], m.cell, gpu, target, Stalls(exposed=e)) for e in (0.0, 1.0))
    return max(0.0, (m.main_seconds - none) / (all_of_it - none))


def _cta_cycles(m: Measured, stalls: Stalls, gpu: Gpu, target: Target) -> float:
    without = main_seconds(ENGINES[m.who], m.cell, gpu, target, stalls)
    one = main_seconds(ENGINES[m.who], m.cell, gpu, target, replace(stalls, cta_cycles=1.0)) - without
    return max(0.0, (m.main_seconds - without) / one)


def _measurements(results: Iterable[dict[str, Any]]) -> Iterator[Measured]:
    for result in results:
        cell = Cell(**result["cell"])
        if cell.deterministic:  # other loops, other waits
            continue
        for who, kernels in result["stages"].items():
            if who in ENGINES and "main" in kernels:
                yield Measured(who, cell, kernels["main"] * 1e-6)


def _engine(who: str) -> str:
    return OURS if who == THROTTLED else who


def _headdims(cell: Cell) -> Headdims:
    return cell.headdim_qk, cell.headdim_v

"""What a run on the stand-in says about the model: stalls fitted to it, and how well it then predicts the rest.

Two numbers are fitted for a kernel of an engine and a pair of head dims, to the times of `bench --stages`: the exposed
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
from ..knobs import BwdKnobs, ReductionMode
from ..target import Target
from .chains import NONE, Stalls, StallsOf, kernel_seconds
from .engines import MODELLED, Baseline, Engine, Ours, TiledKernel
from .gpus import Gpu, stand_in

Headdims = tuple[int, int]
Fits = dict[tuple[str, str, Headdims], Stalls]  # by engine, kernel and head dims


@dataclass(frozen=True)
class Measured:
    who: str  # the candidate of the run
    engine: Engine
    kernel: TiledKernel
    cell: Cell
    seconds: float

    @property
    def headdims(self) -> Headdims:
        return self.cell.headdim_qk, self.cell.headdim_v


@dataclass(frozen=True)
class Check:
    measured: Measured
    predicted: float  # seconds
    fitted: bool  # to this very cell


@dataclass(frozen=True)
class Calibration:
    environment: str
    gpu: Gpu
    fits: Fits
    checks: tuple[Check, ...] = ()

    def stalls(self, engine: Engine, headdims: Headdims) -> StallsOf:
        """Of an engine's kernels; those of the nearest head dims where these were not measured, and of `main` where
        that kernel was not."""

        def find(kernel: TiledKernel) -> Stalls:
            for name in (kernel.name, "main"):
                found = {dims: fit for (who, k, dims), fit in self.fits.items() if (who, k) == (engine.name, name)}
                if found:
                    return found[min(found, key=lambda dims: abs(sum(dims) - sum(headdims)))]
            return NONE

        return find


def read(path: Path, target: Target) -> Calibration:
    """From the JSON of a `bench --stages` run. Raises ValueError where it has nothing to fit to."""
    run = json.loads(path.read_text(encoding="utf-8"))
    ceiling = run["ceilings"][OURS]
    gpu = stand_in(ceiling["tflops"], ceiling["clock_ghz"] * 1e9, target.sm_count)
    return calibrate(run["environment"], gpu, list(_measurements(run["results"], target)))


def calibrate(environment: str, gpu: Gpu, measured: list[Measured]) -> Calibration:
    fits: Fits = {}
    fitted: set[tuple[str, str, Cell]] = set()
    named: dict[tuple[str, str, Headdims], list[Measured]] = {}
    for m in measured:
        if m.who != THROTTLED:
            named.setdefault((m.engine.name, m.kernel.name, m.headdims), []).append(m)
    for name, same in named.items():
        full = max((m for m in same if not m.cell.causal), key=lambda m: m.cell.seqlen, default=None)
        narrow = min((m for m in same if m.cell.window), key=lambda m: m.cell.window or 0, default=None)
        if full is None:
            continue
        fits[name] = Stalls(exposed=_exposed(full, gpu))
        fitted.add((full.who, full.kernel.name, full.cell))
        if narrow is not None:
            fits[name] = replace(fits[name], cta_cycles=_cta_cycles(narrow, fits[name], gpu))
            fitted.add((narrow.who, narrow.kernel.name, narrow.cell))
    if not fits:
        raise ValueError("no cell without a mask has kernel times: run bench --stages on a grid that has such cells")
    found = Calibration(environment, gpu, fits)
    checks = []
    for m in measured:
        predicted = kernel_seconds(m.kernel, m.cell.facts(), gpu, found.stalls(m.engine, m.headdims)(m.kernel))
        checks.append(Check(m, predicted, (m.who, m.kernel.name, m.cell) in fitted))
    return replace(found, checks=tuple(checks))


def _exposed(m: Measured, gpu: Gpu) -> float:
    """Times grow linearly with it."""
    none, all_of_it = (kernel_seconds(m.kernel, m.cell.facts(), gpu, Stalls(exposed=e)) for e in (0.0, 1.0))
    return max(0.0, (m.seconds - none) / (all_of_it - none))


def _cta_cycles(m: Measured, stalls: Stalls, gpu: Gpu) -> float:
    facts = m.cell.facts()
    without = kernel_seconds(m.kernel, facts, gpu, stalls)
    one = kernel_seconds(m.kernel, facts, gpu, replace(stalls, cta_cycles=1.0)) - without
    return max(0.0, (m.seconds - without) / one)


def _measurements(results: Iterable[dict[str, Any]], target: Target) -> Iterator[Measured]:
    """Of our plans that the model knows, and of the baseline where it is not deterministic."""
    for result in results:
        cell = Cell(**result["cell"])
        for who, stages in result["stages"].items():
            engine = _engine(who, result, cell)
            if engine is not None and stages:
                for kernel in engine.tiled_kernels(cell.facts(), target):
                    yield Measured(who, engine, kernel, cell, stages[kernel.measured_as] * 1e-6)


def _engine(who: str, result: dict[str, Any], cell: Cell) -> Engine | None:
    """None where the model does not know what ran."""
    if who == "baseline":
        return None if cell.deterministic else Baseline()
    if not who.startswith(OURS):
        return None
    fields = result["knobs"][who]
    knobs = BwdKnobs(**fields | {"reduction_mode": ReductionMode(fields["reduction_mode"])})
    return Ours(knobs, who == THROTTLED) if knobs.reduction_mode in MODELLED else None

"""The model's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.cells import D64, D64_GROUPED, D128, D128_GROUPED, D192, D192_128, D256, Cell
from ..config.tiles import TABLE
from ..knobs import ReductionMode
from ..plan import knobs_of
from ..target import Target
from .calibration import Calibration, Headdims
from .chains import NONE, ChainTime, Stalls, StallsOf, chain_time, no_stalls, on_board
from .engines import MODELLED, Baseline, Engine, Ours, TiledKernel
from .gpus import GPUS, Gpu
from .loops import TileWork

PAIRS = 64 * 64
"""Cycles are shown for so many query-key pairs, as tiles differ."""

CELLS = (
    *(Cell(*shape, 8192, causal) for shape in (D64, D128) for causal in (False, True)),
    *(Cell(*shape, 2048) for shape in (D64_GROUPED, D128_GROUPED)),
    *(Cell(*shape, 4096, causal) for shape in (D192_128, D192, D256) for causal in (False, True)),
    *(Cell(d, d, 2, 64, 8, 4096, True, window) for d in (64, 128) for window in (128, 1024)),
)
LEAD = 1.3
"""What the chain is to be ahead of the baseline's at head dim 256 and in windows."""


@dataclass(frozen=True)
class Row:
    """A kernel that works on tiles."""

    headdims: Headdims
    engine: Engine
    kernel: TiledKernel
    stalls: Stalls

    def rate(self, gpu: Gpu) -> float:
        return rate(self.kernel.whole, gpu, self.stalls)


@dataclass(frozen=True)
class Chain:
    """A cell on one GPU: our first plan and the baseline."""

    cell: Cell
    gpu: Gpu
    mode: ReductionMode
    ours: ChainTime
    baseline: ChainTime

    @property
    def lead(self) -> float:
        return self.baseline.total / self.ours.total


def rate(work: TileWork, gpu: Gpu, stalls: Stalls = NONE) -> float:
    """TFLOP/s of a kernel that all SMs are busy with, by the products that it does."""
    return work.tile.flops * gpu.sms * gpu.clock_hz / work.pipes(gpu).cycles(stalls.exposed) / 1e12


def report(target: Target, calibration: Calibration | None = None) -> list[str]:
    """Everything there is to say; with a calibration, predictions beside bounds."""
    rows = list(_rows(target, calibration))
    chains = list(_chains(target, calibration))
    parts = [_loop_table(rows, calibration is not None), _chain_table(chains), _verdicts(rows, chains)]
    parts += [_calibration_table(calibration)] if calibration else []
    return [line for part in parts for line in (*part, "")][:-1]


def _stalls(calibration: Calibration | None, engine: Engine, headdims: Headdims) -> StallsOf:
    return calibration.stalls(engine, headdims) if calibration else no_stalls


def _rows(target: Target, calibration: Calibration | None) -> Iterator[Row]:
    """Of each configuration and way to sum dQ, and of the baseline at the same head dims; each kernel once."""
    seen: set[tuple[Any, ...]] = set()
    for tile in TABLE:
        headdims = (tile.headdim_qk, tile.headdim_v)
        engines: list[Engine] = [*(Ours(knobs_of(tile, 1, mode)) for mode in MODELLED), Baseline()]
        for engine in engines:
            stalls = _stalls(calibration, engine, headdims)
            for kernel in engine.tiled_kernels(Cell(*headdims, 1, 1, 1, 1024, False).facts(), target):
                this = (headdims, engine.name, kernel.name, kernel.whole.tile)
                if this not in seen:
                    seen.add(this)
                    yield Row(headdims, engine, kernel, stalls(kernel))


def _loop_table(rows: Iterable[Row], calibrated: bool) -> Iterator[str]:
    columns = ["head dims", "who", "kernel", "tile", "tensor (16 / 32)", "shared", "MUFU", "FP32", "issue"]
    columns += [f"bound, {gpu.name}" for gpu in GPUS] + [f"at most, TFLOP/s, {gpu.name}" for gpu in GPUS]
    columns += [f"predicted, TFLOP/s, {gpu.name}" for gpu in GPUS] if calibrated else []
    yield from _heading(columns)
    for row in rows:
        work = row.kernel.whole
        pipes = [work.pipes(gpu).scaled(PAIRS / (work.tile.rows * work.tile.keys)) for gpu in GPUS]
        some = pipes[0]
        line = [_dims(row.headdims), row.engine.name, row.kernel.name, f"{work.tile.rows}x{work.tile.keys}"]
        line += [" / ".join(f"{p.tensor:.0f}" for p in pipes)]
        line += [f"{cycles:.0f}" for cycles in (some.shared, some.mufu, some.fp32, some.issue)]
        line += ["{} {:.0f}".format(*p.bound) for p in pipes] + [f"{rate(work, gpu):.0f}" for gpu in GPUS]
        line += [f"{row.rate(gpu):.0f}" for gpu in GPUS] if calibrated else []
        yield _line(line)


def _chains(target: Target, calibration: Calibration | None) -> Iterator[Chain]:
    ours, baseline = Ours(), Baseline()
    for cell in CELLS:
        headdims = (cell.headdim_qk, cell.headdim_v)
        for gpu in GPUS:
            here = on_board(target, gpu)
            yield Chain(
                cell,
                gpu,
                ours.plan(cell.facts(), here).key.reduction,
                chain_time(ours, cell, gpu, here, _stalls(calibration, ours, headdims)),
                chain_time(baseline, cell, gpu, here, _stalls(calibration, baseline, headdims)),
            )


def _chain_table(chains: Iterable[Chain]) -> Iterator[str]:
    parts = "tiled + around + launches, ms"
    columns = ["cell", "GPU", "ours sums dQ by", f"ours: {parts}", f"baseline: {parts}"]
    yield from _heading([*columns, "ours, TFLOP/s", "baseline, TFLOP/s", "ours / baseline"])
    for chain in chains:
        times = (chain.ours, chain.baseline)
        row = [chain.cell.name, chain.gpu.name, chain.mode.name.lower()]
        row += [" + ".join(f"{1e3 * s:.3f}" for s in (t.tiled, t.around, t.launches)) for t in times]
        row += [f"{chain.cell.flops / t.total / 1e12:.0f}" for t in times]
        yield _line([*row, f"{chain.lead:.2f}"])


def _verdicts(rows: Sequence[Row], chains: Sequence[Chain]) -> Iterator[str]:
    """Of bounds, whatever the calibration; of chains as they stand in the table."""
    yield from _heading(["target on the model", "lowest", "in", ""])
    theirs = {row.headdims: row.kernel.whole for row in rows if row.engine.name == "baseline"}
    bounds = [
        (rate(row.kernel.whole, gpu) / rate(theirs[row.headdims], gpu), f"{_dims(row.headdims)} {row.kernel.name}")
        for row in rows
        for gpu in GPUS
        if row.engine.name != "baseline"
    ]
    yield _verdict("rate at the bound, any kernel of ours / the baseline's", 1.0, bounds)
    for what, members in (
        ("head dim 256: chain, ours / baseline", [c for c in chains if c.cell.headdim_qk == 256]),
        ("windows: chain, ours / baseline", [c for c in chains if c.cell.window]),
    ):
        yield _verdict(what, LEAD, [(c.lead, f"{c.cell.name} on {c.gpu.name}") for c in members])


def _verdict(what: str, goal: float, values: Sequence[tuple[float, str]]) -> str:
    lowest, where = min(values)
    met = lowest >= goal - 1e-9  # equal bounds are quotients of the same numbers
    return _line([f"{what} >= {goal}", f"{lowest:.2f}", where, "met" if met else "missed"])


def _calibration_table(calibration: Calibration) -> Iterator[str]:
    cycles = calibration.gpu.hmma_cycles
    yield f"Calibrated on: {calibration.environment}. An HMMA takes {cycles:.2f} cycles of a sub-partition there."
    yield ""
    yield from _heading(["who", "kernel", "head dims", "exposed share", "cycles of a CTA"])
    for (who, kernel, headdims), stalls in calibration.fits.items():
        yield _line([who, kernel, _dims(headdims), f"{stalls.exposed:.2f}", f"{stalls.cta_cycles:.0f}"])
    yield ""
    yield from _heading(["who", "kernel", "cell", "measured, µs", "model, µs", "model / measured", ""])
    for check in calibration.checks:
        m = check.measured
        numbers = [f"{1e6 * m.seconds:.1f}", f"{1e6 * check.predicted:.1f}", f"{check.predicted / m.seconds:.2f}"]
        yield _line([m.who, m.kernel.name, m.cell.name, *numbers, "fitted" if check.fitted else "predicted"])


def _dims(headdims: Headdims) -> str:
    return "{}/{}".format(*headdims)


def _heading(columns: Sequence[str]) -> Iterator[str]:
    yield _line(columns)
    yield "|" + " --- |" * len(columns)


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"

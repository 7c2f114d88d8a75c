"""The model's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..bench.cells import D64, D64_GROUPED, D128, D128_GROUPED, D192, D192_128, D256, Cell
from ..config.tiles import TABLE, TileConfig
from ..target import Target
from .calibration import Calibration
from .chains import NONE, Stalls, chain_time
from .engines import Baseline, Engine, Ours
from .gpus import GPUS, Gpu
from .loops import TileWork, tile_flops

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


def report(target: Target, calibration: Calibration | None = None) -> list[str]:
    """Everything there is to say; with a calibration, predictions beside bounds."""
    rows = list(_loops(target))
    chains = [_Chain(cell, target, calibration) for cell in CELLS]
    parts = [list(_loop_table(rows, calibration)), list(_chain_table(chains))]
    parts += [list(_verdicts(rows, chains))] + ([list(_calibration_table(calibration))] if calibration else [])
    return [line for part in parts for line in (*part, "")][:-1]


def _loops(target: Target) -> Iterator[tuple[Engine, TileWork]]:
    """Of each configuration, and of the baseline at its head dims."""
    ours, baseline = Ours(), Baseline()
    seen = set()
    for tile in TABLE:
        yield ours, ours.work(tile, (False, False), target)
        dims = (tile.headdim_qk, tile.headdim_v)
        if dims not in seen:
            seen.add(dims)
            theirs = baseline.tile(Cell(*dims, 1, 1, 1, 1024).facts(), target)
            yield baseline, baseline.work(theirs, (False, False), target)


def _loop_table(rows: Sequence[tuple[Engine, TileWork]], calibration: Calibration | None) -> Iterator[str]:
    columns = ["head dims", "who", "tile", "tensor (16 / 32)", "shared", "MUFU", "FP32", "issue"]
    columns += [f"bound, {gpu.name}" for gpu in GPUS] + [f"at most, TFLOP/s, {gpu.name}" for gpu in GPUS]
    columns += [f"predicted, TFLOP/s, {gpu.name}" for gpu in GPUS] if calibration else []
    yield from _heading(columns)
    for engine, work in rows:
        tile = work.tile
        pipes = [work.pipes(gpu).scaled(PAIRS / (tile.tile_m * tile.tile_n)) for gpu in GPUS]
        row = [f"{tile.headdim_qk}/{tile.headdim_v}", engine.name, f"{tile.tile_m}x{tile.tile_n}"]
        row += [" / ".join(f"{p.tensor:.0f}" for p in pipes)]
        row += [f"{cycles:.0f}" for cycles in (pipes[0].shared, pipes[0].mufu, pipes[0].fp32, pipes[0].issue)]
        row += ["{} {:.0f}".format(*p.bound) for p in pipes]
        row += [f"{rate(work, gpu):.0f}" for gpu in GPUS]
        if calibration:
            stalls = calibration.of(engine.name, (tile.headdim_qk, tile.headdim_v))
            row += [f"{rate(work, gpu, stalls):.0f}" for gpu in GPUS]
        yield _line(row)


def rate(work: TileWork, gpu: Gpu, stalls: Stalls = NONE) -> float:
    """TFLOP/s of a main loop that all SMs are busy with."""
    return tile_flops(work.tile) * gpu.sms * gpu.clock_hz / work.pipes(gpu).cycles(stalls.exposed) / 1e12


class _Chain:
    """One cell on every GPU, by either engine."""

    def __init__(self, cell: Cell, target: Target, calibration: Calibration | None):
        self.cell = cell
        dims = (cell.headdim_qk, cell.headdim_v)
        self.times = {
            (engine.name, gpu.name): chain_time(
                engine, cell, gpu, target, calibration.of(engine.name, dims) if calibration else NONE
            )
            for engine in (Ours(), Baseline())
            for gpu in GPUS
        }

    def lead(self, gpu: Gpu) -> float:
        return self.times["baseline", gpu.name].total / self.times["ours", gpu.name].total


def _chain_table(chains: Iterable[_Chain]) -> Iterator[str]:
    columns = ["cell", "who"]
    columns += [f"{gpu.name}: main + around + launches = chain, ms" for gpu in GPUS]
    yield from _heading([*columns, *(f"TFLOP/s, {gpu.name}" for gpu in GPUS), *(f"ratio, {gpu.name}" for gpu in GPUS)])
    for chain in chains:
        for who in ("ours", "baseline"):
            times = [chain.times[who, gpu.name] for gpu in GPUS]
            row = [chain.cell.name, who]
            row += [
                " + ".join(f"{1e3 * s:.3f}" for s in (t.main, t.around, t.launches)) + f" = {1e3 * t.total:.3f}"
                for t in times
            ]
            row += [f"{chain.cell.flops / t.total / 1e12:.0f}" for t in times]
            yield _line([*row, *(f"{chain.lead(gpu):.2f}" if who == "ours" else "" for gpu in GPUS)])


def _verdicts(rows: Sequence[tuple[Engine, TileWork]], chains: Sequence[_Chain]) -> Iterator[str]:
    yield from _heading(["target on the model", "lowest", "in", ""])
    theirs = {_dims(work.tile): work for engine, work in rows if engine.name == "baseline"}
    bounds = [
        (rate(work, gpu) / rate(theirs[_dims(work.tile)], gpu), f"{_dims(work.tile)} on {gpu.name}")
        for engine, work in rows
        for gpu in GPUS
        if engine.name == "ours"
    ]
    regimes = {
        "head dim 256: chain, ours / baseline": [c for c in chains if c.cell.headdim_qk == 256],
        "windows: chain, ours / baseline": [c for c in chains if c.cell.window],
    }
    yield _verdict("no configuration's bound below the baseline's (rates)", 1.0, bounds)
    for name, members in regimes.items():
        leads = [(chain.lead(gpu), f"{chain.cell.name} on {gpu.name}") for chain in members for gpu in GPUS]
        yield _verdict(name, LEAD, leads)


def _verdict(what: str, goal: float, values: Sequence[tuple[float, str]]) -> str:
    lowest, where = min(values)
    return _line([f"{what} >= {goal}", f"{lowest:.2f}", where, "met" if lowest >= goal - 1e-9 else "missed"])


def _calibration_table(calibration: Calibration) -> Iterator[str]:
    gpu = calibration.gpu
    yield f"Calibrated on: {calibration.environment}. An HMMA takes {gpu.hmma_cycles:.2f} cycles there."
    yield ""
    yield from _heading(["who", "head dims", "exposed share", "cycles of a CTA"])
    for (who, (headdim_qk, headdim_v)), stalls in calibration.stalls.items():
        yield _line([who, f"{headdim_qk}/{headdim_v}", f"{stalls.exposed:.2f}", f"{stalls.cta_cycles:.0f}"])
    yield ""
    yield from _heading(["main kernel of", "cell", "measured, µs", "model, µs", "model / measured", ""])
    for check in calibration.checks:
        m = check.measured
        numbers = [f"{1e6 * m.main_seconds:.1f}", f"{1e6 * check.predicted:.1f}"]
        quotient = f"{check.predicted / m.main_seconds:.2f}"
        yield _line([m.who, m.cell.name, *numbers, quotient, "fitted" if check.fitted else "predicted"])


def _dims(tile: TileConfig) -> str:
    return f"{tile.headdim_qk}/{tile.headdim_v}"


def _heading(columns: Sequence[str]) -> Iterator[str]:
    yield _line(columns)
    yield "|" + " --- |" * len(columns)


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"

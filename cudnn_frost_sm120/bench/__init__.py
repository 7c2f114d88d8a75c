"""The benchmark: our plans against peers on the same graph, interleaved in one process.

    python -m cudnn_frost_sm120 bench --grid targets --against baseline,fa2,cudnn
    python -m cudnn_frost_sm120 bench --model

The gradients of our plans are checked against the fp64 oracle, on one key head, before their times count. Times are
medians of CUDA-event intervals over whole chains, the candidates taken in turn, on random inputs. A peer that does not
serve a cell, or is not there, is left out of it, with a line that says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cells import GRIDS, Cell

PEERS = ("baseline", "fa2", "cudnn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", choices=GRIDS, default="targets")
    parser.add_argument(
        "--cells", metavar="REGEX", default="", help="of the grid, only cells whose name this is found in"
    )
    parser.add_argument("--against", default="baseline,fa2", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every candidate")
    parser.add_argument("--plans", choices=("first", "all"), default="first", help="of ours")
    parser.add_argument(
        "--throttled",
        action="store_true",
        help="our first plan with every HMMA doubled by an idle one too; peers have no such build",
    )
    parser.add_argument("--stages", action="store_true", help="the time of each kernel too")
    parser.add_argument("--model", action="store_true", help="the static model of SM120 instead; needs no GPU")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="for --model: the JSON of a bench --stages run on the stand-in"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write GRID.json, GRID.md and GRID.png there")


def run(options: argparse.Namespace) -> int:
    """0 if every cell was right and timed, 1 if one was not, 2 if nothing could be measured."""
    if options.model:
        return _model(options.calibration)
    peers = [peer for peer in options.against.split(",") if peer]
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        return _nothing(f"--against knows {', '.join(PEERS)}, not {', '.join(unknown)}")
    cells = [cell for cell in GRIDS[options.grid] if re.search(options.cells, cell.name)]
    if not cells:
        return _nothing(f"grid {options.grid} has no cell that {options.cells!r} is found in")
    import torch

    if not torch.cuda.is_available():
        return _nothing("bench needs a CUDA device")
    from . import ceiling, report
    from .candidates import baseline_on_stand_in
    from .measure import Wishes, measure
    from .result import OURS, THROTTLED

    ceilings = {OURS: ceiling.measure()}
    if options.throttled:
        ceilings[THROTTLED] = ceilings[OURS].with_idle_products()
    shown = ", ".join(f"{c.tflops:.0f} TFLOP/s at {c.clock_ghz:.2f} GHz ({who})" for who, c in ceilings.items())
    header = report.header(shown)
    print(header, flush=True)
    wishes = Wishes(peers, options.rounds, options.plans == "all", options.throttled, options.stages)
    results = []
    with baseline_on_stand_in():
        for cell in _progress(cells):
            result = measure(cell, wishes)
            result.ceilings = {who: found.tflops for who, found in ceilings.items()}
            results.append(result)
            print(report.line(result), flush=True)
            if options.out:  # after every cell: a long run may be cut short
                report.write(options.out, options.grid, results, header, ceilings)
    print(f"\n{report.markdown(results, header)}")
    if options.out:
        said = report.plot(results, options.out / f"{options.grid}.png")
        if said:
            print(said, file=sys.stderr)
    return 0 if all(OURS in result.timings for result in results) else 1


def _model(measured: Path | None) -> int:
    from ..sm120_model import calibration, report
    from ..target import named

    try:
        fitted = None if measured is None else calibration.read(measured, named("sm_90"))
    except (OSError, ValueError, KeyError) as error:
        return _nothing(f"--calibration takes the JSON of a bench --stages run on the stand-in: {error}")
    print("\n".join(report.report(named("sm_120"), fitted)))
    return 0


def _nothing(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


def _progress(cells: list[Cell]) -> Iterable[Cell]:
    try:
        from tqdm import tqdm
    except ImportError:
        print("no progress bar: tqdm is not installed", file=sys.stderr)
        return cells
    bar: Any = tqdm(cells, unit="cell", disable=not sys.stderr.isatty())
    return bar

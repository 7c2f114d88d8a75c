"""Which graphs a command works on: saved ones, and the cells of a named grid (bench/cells.py) in some dtypes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import graph_json
from .bench.cell_graph import DTYPES, graph_of
from .bench.cells import GRIDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "graphs", nargs="*", metavar="GRAPH.json", help="graphs as cudnn_frost_sm120.explain.save writes"
    )
    parser.add_argument("--grid", choices=GRIDS, help="the problems of this grid of the benchmark too")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="of the grid's problems")


def graphs_of(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, graph, not yet planned) of each. Raises OSError or ValueError for a file that holds no graph."""
    for file in options.graphs:
        yield Path(file).name, graph_json.load(file)
    for cell in GRIDS[options.grid] if options.grid else ():
        for dtype in options.dtype:
            yield f"{cell.name} {dtype}", graph_of(cell, dtype)

"""Which graphs a command works on: saved ones, and the cells of a named grid (bench/cells.py) in some dtypes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import graph_json
from .bench.cells import GRIDS, Cell

DTYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}


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
            yield f"{cell.name} {dtype}", graph_json.from_dict(describe(cell, dtype))


def describe(cell: Cell, dtype: str) -> dict[str, Any]:
    """The cell as graph_json describes a graph."""
    facts = cell.facts()
    kinds = {"bf16": DTYPES[dtype], "fp32": "FLOAT"}  # a cell is bf16
    ports = {"do": "dO", "dq": "dQ", "dk": "dK", "dv": "dV", "sink": "sink_token", "dsink": "dSink_token"}
    inputs, outputs = list(facts.inputs()), list(facts.outputs())
    attributes = {
        "attn_scale": cell.scale,
        "use_causal_mask": cell.causal,
        "use_deterministic_algorithm": cell.deterministic,
    }
    if cell.window is not None:
        attributes["sliding_window_length"] = cell.window
    return {
        "format": graph_json.FORMAT,
        "graph": {
            "io_data_type": DTYPES[dtype],
            "intermediate_data_type": "FLOAT",
            "compute_data_type": "FLOAT",
        },
        "tensors": {
            t.name: {"dim": list(t.dim), "stride": list(t.stride), "data_type": kinds[t.dtype]}
            for t in (*inputs, *outputs)
        },
        "node": {
            "op": "sdpa_backward",
            "inputs": {ports.get(t.name, t.name): t.name for t in inputs},
            "outputs": {ports.get(t.name, t.name): t.name for t in outputs},
            "attributes": attributes,
        },
    }

"""Which graphs a command works on: saved ones, and the cells of a named grid (bench_cells.py) in some dtypes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bench_cells import GRIDS, Cell

DTYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "graphs", nargs="*", metavar="GRAPH.json", help="graphs as cudnn_frost_sm120.explain.save writes"
    )
    parser.add_argument("--grid", choices=GRIDS, help="the problems of this grid of the benchmark too")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="of the grid's problems")


def graphs_of(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, graph, not yet planned) of each. Raises OSError or ValueError for a file that holds no graph."""
    from . import graph_json

    for file in options.graphs:
        yield Path(file).name, graph_json.load(file)
    for cell in GRIDS[options.grid] if options.grid else ():
        for dtype in options.dtype:
            yield f"{cell.name} {dtype}", graph_json.from_dict(describe(cell, dtype))


def describe(cell: Cell, dtype: str) -> dict[str, Any]:
    """The cell as graph_json describes a graph; tensors (B, H, S, D) lie as (B, S, H, D)."""

    def tensor(heads: int, headdim: int) -> dict[str, Any]:
        row = heads * headdim
        return {
            "dim": [cell.batch, heads, cell.seqlen, headdim],
            "stride": [cell.seqlen * row, headdim, row, 1],
        }

    q, k, v, o = (
        tensor(heads, headdim)
        for heads, headdim in (
            (cell.heads_q, cell.headdim_qk),
            (cell.heads_k, cell.headdim_qk),
            (cell.heads_k, cell.headdim_v),
            (cell.heads_q, cell.headdim_v),
        )
    )
    stats = {"dim": [cell.batch, cell.heads_q, cell.seqlen, 1], "data_type": "FLOAT"}
    attributes = {
        "attn_scale": 1 / math.sqrt(cell.headdim_qk),
        "use_causal_mask": cell.causal,
        "use_deterministic_algorithm": cell.deterministic,
    }
    if cell.window is not None:
        attributes["sliding_window_length"] = cell.window
    inputs, outputs = ("q", "k", "v", "o", "dO", "stats"), ("dQ", "dK", "dV")
    return {
        "format": 1,
        "graph": {
            "io_data_type": DTYPES[dtype],
            "intermediate_data_type": "FLOAT",
            "compute_data_type": "FLOAT",
        },
        "tensors": {"q": q, "k": k, "v": v, "o": o, "dO": o, "stats": stats, "dQ": q, "dK": k, "dV": v},
        "node": {
            "op": "sdpa_backward",
            "inputs": dict(zip(inputs, inputs, strict=True)),
            "outputs": dict(zip(outputs, outputs, strict=True)),
            "attributes": attributes,
        },
    }

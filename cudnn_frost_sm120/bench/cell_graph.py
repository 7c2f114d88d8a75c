"""A cell as a graph of one sdpa_backward node."""

from __future__ import annotations

from typing import Any

from .. import graph_json
from .cells import Cell

DTYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}


def graph_of(cell: Cell, dtype: str) -> Any:
    """The cell as a ``cudnn.pygraph``, not yet planned; its tensors are named as in the facts."""
    return graph_json.from_dict(describe(cell, dtype))


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

"""The graphs of a grid are those that its cells describe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudnn_frost_sm120.bench.cell_graph import describe, graph_of
from cudnn_frost_sm120.bench.cells import GRIDS, Cell
from cudnn_frost_sm120.facts import BwdFacts, facts_from_graph

CELLS = {
    "causal": Cell(64, 64, 2, 8, 2, 512),
    "full": Cell(192, 128, 1, 4, 4, 256, causal=False),
    "window": Cell(128, 128, 1, 8, 2, 512, window=128),
    "deterministic": Cell(64, 64, 1, 2, 2, 256, deterministic=True),
    "sink": Cell(64, 64, 1, 4, 2, 256, sink=True),
}


def without_uids(facts: BwdFacts) -> BwdFacts:
    tensors = {t.name: replace(t, uid=None) for t in (*facts.inputs(), *facts.outputs())}
    return replace(facts, **tensors, compute_dtype=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(CELLS))
def test_a_cell_as_a_graph(name: str) -> None:
    cell = CELLS[name]
    graph = graph_of(cell, "bf16")
    assert without_uids(facts_from_graph(graph)) == cell.facts()
    half = facts_from_graph(graph_of(cell, "fp16"))
    assert {tensor.dtype for tensor in half.io()} == {"fp16"}
    assert half.stats.dtype == "fp32"


def test_every_grid_is_described() -> None:
    for cells in GRIDS.values():
        for cell in cells:
            assert describe(cell, "bf16")["node"]["op"] == "sdpa_backward"

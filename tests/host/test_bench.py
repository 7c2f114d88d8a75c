"""The benchmark's arithmetic and its table; what it measures needs a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cudnn_frost_sm120 import bench
from cudnn_frost_sm120.__main__ import main
from cudnn_frost_sm120.bench_cells import GRIDS, Cell


@pytest.mark.parametrize(
    "cell", [Cell(64, 32, 2, 6, 3, 40, False), Cell(64, 32, 2, 6, 3, 40, True, 7), Cell(8, 8, 1, 1, 1, 5, True, 99)]
)
def test_flops_count_every_kept_pair(cell: Cell) -> None:
    pairs = sum(
        1
        for q in range(cell.seqlen)
        for k in range(cell.seqlen)
        if (k <= q or not cell.causal) and (cell.window is None or k > q - cell.window)
    )
    gemms = 3 * cell.headdim_qk + 2 * cell.headdim_v
    assert cell.flops == 2 * gemms * pairs * cell.batch * cell.heads_q


def test_a_causal_mask_counts_half() -> None:
    cell = Cell(128, 128, 1, 2, 2, 1000, False)
    assert replace(cell, causal=True).flops == cell.flops / 2


@pytest.mark.parametrize("grid", GRIDS)
def test_names_tell_the_cells_of_a_grid_apart(grid: str) -> None:
    names = [cell.name for cell in GRIDS[grid]]
    assert len(set(names)) == len(names)


def test_table_leaves_a_missing_peer_out() -> None:
    cell = Cell(64, 64, 1, 1, 1, 1000, False)
    result = bench.Result(cell, {"dq": 1e-3}, {"ours": 2.0, "baseline": 3.0}, {"ours": 0.01}, {"fa2": "not there"})
    *_, row = bench._table([result], ["baseline", "fa2"])
    assert row == "| D64 B1 H1/1 S1000 full | 2.000 | 0 | 1.0% | 0 | - | 1.50 | - | 1.0e-03 |"
    assert "no fa2: not there" in bench._line(result)
    assert json.dumps(bench.asdict(result))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--grid", "smoke"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert main(["bench", "--against", "nobody"]) == 2
    assert "not nobody" in capsys.readouterr().err

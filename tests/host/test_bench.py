"""The benchmark's arithmetic, problems and tables; what it measures needs a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from cudnn_frost_sm120 import bench, traffic
from cudnn_frost_sm120.__main__ import main
from cudnn_frost_sm120.admission import decline_reason
from cudnn_frost_sm120.bench import cells, report, stages
from cudnn_frost_sm120.bench.candidates import Lineup, baseline_on_stand_in, knob_changes
from cudnn_frost_sm120.bench.ceiling import Ceiling
from cudnn_frost_sm120.bench.cells import GRIDS, Cell
from cudnn_frost_sm120.bench.problem import TOLERANCE, Problem
from cudnn_frost_sm120.bench.result import OURS, THROTTLED, Result, Timing
from cudnn_frost_sm120.bench.targets import TARGETS, verdicts
from cudnn_frost_sm120.config.tiles import configs_for
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import BwdKnobs, ReductionMode
from cudnn_frost_sm120.plan import knobs_of, make_plan
from cudnn_frost_sm120.reference import sdpa_backward, sdpa_forward
from cudnn_frost_sm120.target import STAND_IN_ENV, TARGET_ENV, named

SM120 = named("sm_120")
SMALL = [
    Cell(64, 32, 2, 6, 3, 40, False),
    Cell(64, 32, 2, 6, 3, 40, True, 7, sink=True),
    Cell(8, 8, 1, 1, 1, 5, True, 99),
    Cell(64, 64, 1, 4, 2, 40, sink=True),
]


@pytest.mark.parametrize("cell", SMALL[:3])
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
def test_the_cells_of_a_grid_are_told_apart_and_served(grid: str) -> None:
    names = [cell.name for cell in GRIDS[grid]]
    assert len(set(names)) == len(names)
    for cell in GRIDS[grid]:
        assert decline_reason(cell.facts(), SM120) is None


@pytest.mark.parametrize("grid", ["targets", "all"])
def test_the_grids_cover_every_target(grid: str) -> None:
    for target in TARGETS:
        assert any(target.covers(cell) for cell in GRIDS[grid]), target.regime
    deterministic = {(c.headdim_qk, c.headdim_v, c.window) for c in GRIDS["all"] if c.deterministic}
    assert {(c.headdim_qk, c.headdim_v, c.window) for c in GRIDS["main"] + GRIDS["windows"]} <= deterministic


@pytest.mark.parametrize("cell", SMALL)
def test_the_forward_is_the_oracles(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_frost_sm120.bench.problem.SCORES_AT_A_TIME", 16 * cell.seqlen)  # several blocks of rows
    t = Problem(cell, "cpu").tensors
    o, lse = sdpa_forward(t["q"], t["k"], t["v"], scale=cell.scale, mask=cell.mask, sink=t.get("sink"))
    torch.testing.assert_close(t["stats"].double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(t["o"].double(), o, rtol=1e-2, atol=1e-3)
    facts = cell.facts()
    for record in (*facts.inputs(), *facts.outputs()):
        assert (tuple(t[record.name].shape), t[record.name].stride()) == (record.dim, record.stride), record.name


@pytest.mark.parametrize("cell", SMALL)
def test_a_wrong_gradient_is_seen(cell: Cell) -> None:
    problem = Problem(cell, "cpu")
    t = problem.tensors
    inputs = (t[name] for name in ("q", "k", "v", "o", "do", "stats"))
    right = sdpa_backward(*inputs, scale=cell.scale, mask=cell.mask, sink=t.get("sink"))
    for name in problem.outputs:
        t[name].copy_(getattr(right, name))
    assert max(problem.errors().values()) < 4e-3
    for name in problem.outputs:
        kept = t[name].clone()
        t[name][:, 0] *= 1.05
        assert problem.errors()[name] > TOLERANCE
        t[name].copy_(kept)
    problem.wipe()
    assert set(problem.errors().values()) == {float("inf")}


@pytest.mark.planning
def test_the_graph_lists_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET_ENV, "sm_120")
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")
    cell = Cell(64, 64, 2, 8, 2, 256, True, 40, sink=True)
    lineup = Lineup(Problem(cell, "cpu"))
    mine = [config.knobs for config in lineup.graph.plans if hasattr(config.knobs, "heads_per_cta")]
    assert mine == list(ranked_knobs(cell.facts(), SM120))


def test_the_baseline_is_let_onto_the_stand_in_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn.sdpa.bwd import engines
    from cudnn.sdpa.bwd.api_dsl import SdpaBwdDslSm120

    def seen() -> tuple[int, object]:
        (lowest,) = (spec.capabilities.sm_lo for spec in engines.ENGINE_SPECS if spec.name == "sdpa_bwd_sm120")
        return lowest, SdpaBwdDslSm120.check_support

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    before = seen()
    with baseline_on_stand_in():
        assert seen() == before  # the flag is not set
    monkeypatch.setenv(STAND_IN_ENV, "1")
    with baseline_on_stand_in():
        assert seen()[0] == 90
        assert seen()[1] is not before[1]
        assert torch.cuda.get_device_capability() == (9, 0)
    assert seen() == before


def test_a_plan_is_named_by_what_differs() -> None:
    first = BwdKnobs(64, 128, 2, heads_per_cta=8)
    other = replace(first, heads_per_cta=2, reduction_mode=ReductionMode.RELAY)
    assert knob_changes(first, other) == "PACK_GQA=2 REDUCTION_MODE=1"


def test_bytes_outside_the_main_kernel() -> None:
    cell = Cell(64, 64, 1, 8, 2, 4096, sink=True)
    facts = cell.facts()
    tile = configs_for(64, 64)[0]
    plan = make_plan(facts, knobs_of(tile, 2), SM120)
    found = traffic.outside_main(plan)
    rows, keys, parts = 8 * 4096, 2 * 4096, 2
    assert found["preprocess"] == traffic.Traffic(rows * (2 * 64 * 2 + 4), rows * (4 + 4 + 64 * 4))
    assert found["convert_dq"] == traffic.Traffic(rows * 64 * 4, rows * 64 * 2)
    assert found["sum_parts"] == traffic.Traffic(keys * parts * 2 * 64 * 4, keys * 2 * 64 * 2)
    assert found["dsink"] == traffic.Traffic(rows * 8 + 8 * 4, 8 * 4)
    assert traffic.outside_bytes(plan) == sum(stage.total for stage in found.values())
    whole = make_plan(facts, knobs_of(tile, 4, ReductionMode.RECOMPUTE), SM120)
    found = traffic.outside_main(whole)
    assert set(found) == {"dq_recompute", "dsink"}
    inputs = rows * 64 * 2 * 3 + keys * 64 * 2 * 2 + rows * 4  # Q, O, dO; K, V; LSE
    assert found["dq_recompute"] == traffic.Traffic(inputs, rows * (4 + 4 + 64 * 2))
    full = replace(facts, mask=replace(facts.mask, left_bound=None, right_bound=None))
    stored = make_plan(full, knobs_of(tile, 4, ReductionMode.DS_STORE), SM120)
    scores = rows * 4096
    found = traffic.outside_main(stored)
    assert set(found) == {"preprocess", "dq_gemm", "dsink"}
    assert found["dq_gemm"] == traffic.Traffic(2 * scores + keys * 64 * 2, rows * 64 * 2)
    recomputed = make_plan(full, knobs_of(tile, 4, ReductionMode.RECOMPUTE), SM120)
    assert traffic.main_kernel(stored).written == traffic.main_kernel(recomputed).written + 2 * scores


def _result(cell: Cell, **milliseconds: float) -> Result:
    times = {who.replace("_", ", "): Timing(ms, 0.01, 20.0) for who, ms in milliseconds.items()}
    result = Result(cell, times, errors={OURS: {"dq": 1e-3}}, knobs=dict.fromkeys(times, BwdKnobs(64, 128, 2)))
    result.ceilings = {OURS: 600.0, THROTTLED: 300.0}
    return result


@pytest.fixture
def results() -> list[Result]:
    full = Cell(*cells.D128, 8192, False)
    rate = full.flops / 1e9  # milliseconds at 1 TFLOP/s
    first = _result(full, ours=rate / 390, baseline=rate / 260, fa2=rate / 300, ours_throttled=rate / 250)
    first.missing["cudnn"] = "lists no plan"
    first.stages = {OURS: {"main": 900.0, "preprocess": 40.0}}
    second = _result(Cell(*cells.D128, 2048), ours=2.0, baseline=3.4)
    second.timings["ours, PACK_GQA=1"] = Timing(1.6, 0.0, 20.0)
    return [first, second]


def test_verdicts_name_the_lowest_cell(results: list[Result]) -> None:
    found = {(v.target.regime, v.target.what): v for v in verdicts(results)}
    d128 = found["D128, full and causal", "ours / baseline"]
    assert (d128.lowest, d128.met, d128.missed, d128.cells) == (pytest.approx(1.5), False, 1, 2)
    assert d128.cell == results[0].cell.name
    assert found["every cell", "ours / baseline"].met
    assert found["every cell that it serves", "ours / fa2"].lowest == pytest.approx(1.3)
    assert found["D128 full, S >= 8192", "share of the ceiling"].lowest == pytest.approx(0.65)
    assert found["D128 full, throttled", "share of the throttled ceiling"].lowest == pytest.approx(250 / 300)
    assert ("windows", "ours / baseline") not in found


def test_the_throttled_ceiling_is_half_of_the_ceiling():
    """An idle product takes the tensor pipe as long as any. Measured with products alone it came out at 0.39, as two
    that share an accumulator wait for each other, and shares of it at up to 99 %."""
    assert Ceiling(640.0, 1.8).with_idle_products() == Ceiling(320.0, 1.8)


def test_the_tables(results: list[Result]) -> None:
    text = report.markdown(results, "a GPU")
    rows = [line for line in text.splitlines() if line.startswith("| D128 B2 H16/16")]
    first, second, plans, kernels = rows
    assert first.split(" | ")[2:10] == ["390", "1.0%", "260", "300", "1.50", "1.30", "65%", "83%"]
    assert second.split(" | ")[4:9] == [f"{results[1].tflops('baseline'):.0f}", "-", "1.70", "-", "7%"]
    assert plans.split(" | ")[-3:] == ["PACK_GQA=1: 1.600", "ours, PACK_GQA=1", "25.0% |"]
    assert "main 900.0, preprocess 40.0 | 940.0" in kernels
    assert "- no cudnn in 1 cell (D128 B2 H16/16 S8192 full, ...): lists no plan" in text
    assert "no cudnn: lists no plan" in report.line(results[0])
    shown = json.loads(json.dumps([result.as_json() for result in results]))
    assert shown[0]["tflops"]["ours"] == 390.0


def test_a_run_is_written(results: list[Result], tmp_path) -> None:
    report.write(tmp_path / "made", "main", results, "a GPU", {OURS: Ceiling(600.0, 1.7)})
    assert report.plot(results, tmp_path / "made" / "main.png") is None
    assert sorted(path.suffix for path in (tmp_path / "made").iterdir()) == [".json", ".md", ".png"]


def test_what_is_not_installed_is_said(
    results: list[Result], tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "tqdm"):
        monkeypatch.setitem(sys.modules, package, None)
    assert report.plot(results, tmp_path / "main.png") == "no plot: matplotlib is not installed"
    assert list(bench._progress([results[0].cell])) == [results[0].cell]
    assert "tqdm is not installed" in capsys.readouterr().err


def test_kernels_have_short_names() -> None:
    ours = "kernel_cutlass_kernel_cudnn_frost_sm120kernelsaccumulator_convertAccumulatorConvertKernel_object_at__Str"
    assert stages.kernel_name(ours) == "accumulator_convert"
    assert stages.kernel_name("void flash_bwd_kernel<Traits<64>>(int)") == "void flash_bwd_kernel"


def test_a_kernel_is_charged_from_the_end_of_the_one_before() -> None:
    spans = [(0.0, 10.0, "preprocess"), (4.0, 90.0, "main"), (95.0, 99.0, "convert"), (96.0, 98.0, "inside")]
    assert stages.charged(spans) == {"preprocess": 10.0, "main": 80.0, "convert": 4.0, "inside": 0.0}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--grid", "smoke"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert main(["bench", "--against", "nobody"]) == 2
    assert "not nobody" in capsys.readouterr().err
    assert main(["bench", "--cells", "D7 "]) == 2
    assert "no cell" in capsys.readouterr().err

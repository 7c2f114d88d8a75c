"""The static model: loops found in SASS, cycles counted, chains put together, and stalls fitted to a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from cudnn_frost_sm120.__main__ import main
from cudnn_frost_sm120.bench import report
from cudnn_frost_sm120.bench.ceiling import Ceiling
from cudnn_frost_sm120.bench.cells import Cell
from cudnn_frost_sm120.bench.result import OURS, THROTTLED, Result, Timing
from cudnn_frost_sm120.config.recompute import recompute_tile
from cudnn_frost_sm120.config.tiles import configs_for
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.plan import ChainKey
from cudnn_frost_sm120.sass import main_loops
from cudnn_frost_sm120.sm120_model import calibration
from cudnn_frost_sm120.sm120_model.chains import NONE, Stalls, chain_time, cut_share, kernel_seconds
from cudnn_frost_sm120.sm120_model.engines import MAIN_KERNELS, MODELLED, Baseline, Ours
from cudnn_frost_sm120.sm120_model.gpus import GPUS, HMMA_FLOPS, SUB_PARTITIONS, Gpu, stand_in
from cudnn_frost_sm120.sm120_model.loops import Pipes, Tile, TileWork, count, key_tile, query_tile
from cudnn_frost_sm120.sm120_model.report import rate
from cudnn_frost_sm120.target import Target, named

SM120, SM90 = named("sm_120"), named("sm_90")
D64 = configs_for(64, 64)[0]
SASS = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, RZ ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   FSEL R3, R3, -INF , P1 ;
        /*0040*/                   ISETP.LT.AND P1, PT, R3, R4, PT ;
.L_x_2:
        /*0050*/                   MUFU.EX2 R3, R3 ;
        /*0060*/                   LDSM.16.M88.4 R8, [R1] ;
        /*0070*/                   STS.128 [R1], R8 ;
        /*0080*/                   LDS.64 R8, [R1] ;
        /*0090*/              @!P2 BRA `(.L_x_1) ;
        /*00a0*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*00b0*/                   EXIT ;
"""


def test_a_loop_is_found_with_its_masking_or_without() -> None:
    (body,) = main_loops(SASS)
    assert [opcode.split(".")[0] for opcode, _ in body] == ["HMMA", "BRA", "MUFU", "LDSM", "STS", "LDS", "BRA"]
    (whole,) = main_loops(SASS, rare_blocks=True)
    assert len(whole) == len(body) + 2


def test_cycles_by_pipe() -> None:
    tile = Tile(64, 128, flops=2 * HMMA_FLOPS * SUB_PARTITIONS, loaded_bytes=1024)
    work = count(main_loops(SASS), tile)  # two warps of a sub-partition pass through the loop
    assert work.shared_bytes == 2 * 4 * (512 + 512 + 256) + 1024
    pipes = work.pipes(GPUS[0])
    assert pipes == Pipes(tensor=32, shared=work.shared_bytes / 128, mufu=16, fp32=0, issue=14)
    assert pipes.bound == ("shared", pipes.shared)
    assert pipes.cycles(exposed=0) == pipes.shared
    assert pipes.cycles(exposed=1) == pipes.shared + 32 + 16 + 14
    with pytest.raises(ValueError, match="a sub-partition needs"):
        count([], tile)
    with pytest.raises(ValueError, match="3 HMMAs"):
        count([[("HMMA.16816", "")] * 3], tile)


def test_what_is_loaded_with_a_tile() -> None:
    assert query_tile(D64).loaded_bytes == 2 * 64 * 128 + 2 * 64 * 4  # Q, dO and their rows
    assert query_tile(D64).flops == 5 * query_tile(D64, 2).flops // 4
    assert key_tile(recompute_tile(64, 64)).loaded_bytes == 2 * 64 * 128


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_tensor_bound_loop_reaches_the_peak(gpu: Gpu) -> None:
    tile = query_tile(D64)
    hmmas = tile.flops // (HMMA_FLOPS * SUB_PARTITIONS)
    assert rate(TileWork(tile, hmmas, 1, 1, 1, 1), gpu) == pytest.approx(gpu.peak_tflops)
    assert 2e9 < gpu.clock_hz < 3e9


def test_the_stand_in_has_the_measured_ceiling() -> None:
    assert stand_in(635, 1.7e9).peak_tflops == pytest.approx(635)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, 128, 300])
def test_cut_tiles_are_counted(causal: bool, window: int | None) -> None:
    facts = Cell(64, 64, 1, 1, 1, 320, causal or window is not None, window).facts()
    visited = cut = 0
    for n in range(0, 320, D64.tile_n):
        for m in range(0, 320, D64.tile_m):
            kept = [
                (facts.mask.right_bound is None or k <= q) and (window is None or k > q - window)
                for q in range(m, m + D64.tile_m)
                for k in range(n, min(n + D64.tile_n, 320))
            ]
            visited += any(kept)
            cut += any(kept) and not all(kept)
    assert cut_share(facts, D64.tile_m, D64.tile_n) == pytest.approx(cut / visited)


@dataclass(frozen=True)
class _Loops(Ours):
    """Our plans with made-up loops, so that nothing is compiled."""

    def _work(self, key: ChainKey, kernel: str, target: Target, tile: Tile) -> tuple[TileWork, TileWork]:
        hmmas = tile.flops // (HMMA_FLOPS * SUB_PARTITIONS) * (2 if self.throttled else 1)
        return TileWork(tile, hmmas, 64, 192, 1000, 280_000), TileWork(tile, hmmas, 64, 192, 1100, 280_000)


def test_a_chain_is_its_parts() -> None:
    cell, gpu = Cell(64, 64, 2, 32, 32, 4096), GPUS[0]
    time = chain_time(_Loops(), cell, gpu, SM120)
    assert time.total == time.tiled + time.around + time.launches
    rows = 2 * 32 * 4096
    bytes_around = rows * (2 * 128 + 4 + 8 + 256) + rows * (256 + 128)
    assert time.around == pytest.approx(bytes_around / (0.85 * 1.79e12))
    assert cell.flops / time.tiled < gpu.peak_tflops * 1e12
    (main_kernel,) = _Loops().tiled_kernels(cell.facts(), SM120)
    assert kernel_seconds(main_kernel, cell.facts(), gpu) == time.tiled
    assert kernel_seconds(main_kernel, cell.facts(), gpu, Stalls(0.5)) > time.tiled
    per_cta = kernel_seconds(main_kernel, cell.facts(), gpu, Stalls(cta_cycles=1000)) - time.tiled
    assert per_cta == pytest.approx(1000 * (2 * 32 * 32 / 188) / gpu.clock_hz)


@pytest.mark.parametrize(
    ("mode", "kernel", "around"),
    [(ReductionMode.RECOMPUTE, "dq_recompute", []), (ReductionMode.DS_STORE, "dq_gemm", ["preprocess"])],
)
def test_a_plan_with_a_kernel_for_dq_has_two_tiled_kernels(mode: ReductionMode, kernel: str, around: list) -> None:
    facts = Cell(64, 64, 2, 64, 8, 4096, True, 128).facts()
    engine = _Loops(next(k for k in ranked_knobs(facts, SM120) if k.reduction_mode is mode))
    first, second = engine.tiled_kernels(facts, SM120)
    assert (first.name, first.by_query, second.name, second.by_query) == (MAIN_KERNELS[mode], False, kernel, True)
    assert list(engine.around(facts, SM120)) == around
    assert (first.traffic.written > 1e8) == (mode is ReductionMode.DS_STORE)


def test_the_loops_of_the_relay_are_not_known() -> None:
    facts = Cell(64, 64, 2, 64, 8, 4096, True, 128).facts()
    relay = next(k for k in ranked_knobs(replace(facts, deterministic=True), SM120) if k.reduction_mode == 1)
    with pytest.raises(NotImplementedError, match="RELAY"):
        _Loops(relay).tiled_kernels(facts, SM120)


def _run(tmp_path: Path, made: Stalls, cells: list[Cell]) -> Path:
    """The JSON of a run in which the model's own times were measured."""
    gpu, results = stand_in(635, 1.7e9), []
    for cell in cells:
        knobs = next(k for k in ranked_knobs(cell.facts(), SM90) if k.reduction_mode is ReductionMode.ATOMIC)
        stages = {}
        for who in (OURS, THROTTLED):
            kernels = _Loops(knobs, who == THROTTLED).tiled_kernels(cell.facts(), SM90)
            stages[who] = {k.measured_as: 1e6 * kernel_seconds(k, cell.facts(), gpu, made) for k in kernels}
        timings = {who: Timing(sum(kernels.values()) / 1e3, 0.0, 0.0) for who, kernels in stages.items()}
        results.append(Result(cell, timings, {OURS: {"dq": 0.0}}, knobs=dict.fromkeys(stages, knobs), stages=stages))
    report.write(tmp_path, "run", results, "made up", {OURS: Ceiling(635, 1.7)})
    return tmp_path / "run.json"


def test_stalls_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From times that the model itself made, the fit has to give back what they were made with."""
    monkeypatch.setattr(calibration, "Ours", _Loops)
    cells = [Cell(64, 64, 2, 32, 32, 4096, causal) for causal in (False, True)]
    cells.append(Cell(64, 64, 2, 64, 64, 4096, True, 1024))
    # The first fit does not know about CTAs: a cell long enough that they do not show.
    cells.append(Cell(64, 64, 2, 32, 32, 65536, False))
    found = calibration.read(_run(tmp_path, Stalls(exposed=0.4, cta_cycles=3000.0), cells), SM90)
    kernel = _Loops().tiled_kernels(cells[0].facts(), SM90)[0]
    stalls = found.stalls(Ours(), (64, 64))(kernel)
    assert stalls.exposed == pytest.approx(0.4, abs=0.01)
    assert stalls.cta_cycles == pytest.approx(3000, rel=0.05)
    assert found.stalls(Ours(), (256, 256))(kernel) == stalls
    assert found.stalls(Baseline(), (64, 64))(kernel) == NONE
    kinds = {(check.measured.who, check.fitted) for check in found.checks}
    assert kinds == {(OURS, True), (OURS, False), (THROTTLED, False)}
    for check in found.checks:
        assert check.predicted == pytest.approx(check.measured.seconds, rel=0.02)


def test_a_run_without_stages_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.json"
    cell = asdict(Cell(64, 64, 1, 4, 4, 1024, False))
    ceilings = {OURS: {"tflops": 635.0, "clock_ghz": 1.7}}
    run.write_text(json.dumps({"environment": "", "ceilings": ceilings, "results": [{"cell": cell, "stages": {}}]}))
    assert main(["bench", "--model", "--calibration", str(run)]) == 2
    assert "bench --stages" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize("headdims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_the_loops_of_both_engines_are_found(headdims: tuple[int, int]) -> None:
    """`count` refuses loops that are not exactly the products of a tile."""
    facts = Cell(*headdims, 1, 2, 2, 1024).facts()
    knobs = [k for k in ranked_knobs(facts, SM120) if k.reduction_mode in MODELLED]
    ours = {kernel.name: kernel for k in knobs for kernel in Ours(k).tiled_kernels(facts, SM120)}
    assert set(ours) == {*MAIN_KERNELS.values(), "dq_recompute", "dq_gemm"}
    (baseline,) = Baseline().tiled_kernels(facts, SM120)
    for kernel in (*ours.values(), baseline):
        assert rate(kernel.whole, GPUS[0]) == pytest.approx(GPUS[0].peak_tflops), kernel.name
        masks = kernel is not baseline and kernel.name != "dq_gemm"  # one masks every tile, the other none
        assert kernel.cut.issue >= kernel.whole.issue + masks, kernel.name
    tile, theirs = ours["main"].whole.tile, baseline.whole.tile
    pairs = theirs.rows * theirs.keys / (tile.rows * tile.keys)
    assert baseline.whole.shared_bytes > pairs * ours["main"].whole.shared_bytes

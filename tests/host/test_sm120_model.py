"""The static model: loops found in SASS, cycles counted, chains put together, and stalls fitted to a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cudnn_frost_sm120.__main__ import main
from cudnn_frost_sm120.bench.cells import Cell
from cudnn_frost_sm120.bench.result import OURS, THROTTLED
from cudnn_frost_sm120.config.tiles import TABLE, TileConfig
from cudnn_frost_sm120.sm120_model import calibration, chains
from cudnn_frost_sm120.sm120_model.chains import Stalls, chain_time, cut_share, main_seconds
from cudnn_frost_sm120.sm120_model.engines import Baseline, Masks, Ours
from cudnn_frost_sm120.sm120_model.gpus import GPUS, HMMA_FLOPS, SUB_PARTITIONS, Gpu, stand_in
from cudnn_frost_sm120.sm120_model.loops import Pipes, TileWork, count, passes_for_five_products
from cudnn_frost_sm120.sm120_model.report import rate
from cudnn_frost_sm120.sm120_model.sass import main_loops
from cudnn_frost_sm120.target import Target, named

SM120, SM90 = named("sm_120"), named("sm_90")
D64 = TABLE[1]
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
    work = count(main_loops(SASS), TileConfig(64, 64, 64, 2, 2, 2, 2, 1))
    loads = 2 * 64 * 128 + 2 * 64 * 4  # a Q and a dO tile with their rows
    assert work.shared_bytes == 4 * (512 + 512 + 256) + loads
    pipes = work.pipes(GPUS[0])
    assert pipes == Pipes(tensor=16, shared=work.shared_bytes / 128, mufu=8, fp32=0, issue=7)
    assert pipes.bound == ("shared", pipes.shared)
    assert pipes.cycles(exposed=0) == pipes.shared
    assert pipes.cycles(exposed=1) == pipes.shared + 16 + 8 + 7


def test_a_loop_that_is_not_the_five_products_is_refused() -> None:
    with pytest.raises(ValueError, match="five GEMMs"):
        passes_for_five_products([], D64)
    with pytest.raises(ValueError, match="five GEMMs"):
        passes_for_five_products([[("HMMA", "")] * 7], D64)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_tensor_bound_loop_reaches_the_peak(gpu: Gpu) -> None:
    hmmas = (2 * D64.tile_m * D64.tile_n * 5 * 64) // (HMMA_FLOPS * SUB_PARTITIONS)
    assert rate(TileWork(D64, hmmas, 1, 1, 1, 1), gpu) == pytest.approx(gpu.peak_tflops)
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
    assert cut_share(facts, D64) == pytest.approx(cut / visited)


class _Loops(Ours):
    """Our plans with made-up loops, so that nothing is compiled."""

    def work(self, tile: TileConfig, masks: Masks, target: Target, masked: bool = False) -> TileWork:
        hmmas = 320 * (2 if self._throttled else 1)
        return TileWork(tile, hmmas, 64, 192, 1100 if masked else 1000, 280_000)


def test_a_chain_is_its_parts() -> None:
    cell, gpu = Cell(64, 64, 2, 32, 32, 4096), GPUS[0]
    time = chain_time(_Loops(), cell, gpu, SM120)
    assert time.total == time.main + time.around + time.launches
    rows = 2 * 32 * 4096
    bytes_around = rows * (2 * 128 + 4 + 8 + 256) + rows * (256 + 128)
    assert time.around == pytest.approx(bytes_around / (0.85 * 1.79e12))
    assert cell.flops / time.main < gpu.peak_tflops * 1e12
    assert main_seconds(_Loops(), cell, gpu, SM120, Stalls(0.5)) > time.main
    per_cta = main_seconds(_Loops(), cell, gpu, SM120, Stalls(cta_cycles=1000)) - time.main
    assert per_cta == pytest.approx(1000 * (2 * 32 * 32 / 188) / gpu.clock_hz)


def test_stalls_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From times that the model itself made, the fit has to give back what they were made with."""
    engines = {OURS: _Loops(), THROTTLED: _Loops(throttled=True)}
    monkeypatch.setattr(calibration, "ENGINES", engines)
    gpu, made = stand_in(635, 1.7e9), Stalls(exposed=0.4, cta_cycles=3000.0)
    cells = [Cell(64, 64, 2, 32, 32, 4096, causal) for causal in (False, True)]
    cells.append(Cell(64, 64, 2, 64, 8, 4096, True, 128))
    # The first fit does not know about CTAs: a cell long enough that they do not show.
    cells.append(Cell(64, 64, 2, 32, 32, 65536, False))
    measured = [
        calibration.Measured(who, cell, main_seconds(engines[who], cell, gpu, SM90, made))
        for cell in cells
        for who in engines
    ]
    found = calibration.calibrate("made up", gpu, measured, SM90)
    stalls = found.of(OURS, (64, 64))
    assert stalls.exposed == pytest.approx(0.4, abs=0.01)
    assert stalls.cta_cycles == pytest.approx(3000, rel=0.05)
    assert found.of(OURS, (256, 256)) == stalls
    assert found.of("baseline", (64, 64)) == chains.NONE
    assert {(check.measured.who, check.fitted) for check in found.checks} == {
        (OURS, True),
        (OURS, False),
        (THROTTLED, False),
    }
    for check in found.checks:
        assert check.predicted == pytest.approx(check.measured.main_seconds, rel=0.02)


def test_a_run_without_stages_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.json"
    cell = asdict(Cell(64, 64, 1, 4, 4, 1024, False))
    ceilings = {OURS: {"tflops": 635.0, "clock_ghz": 1.7}}
    run.write_text(json.dumps({"environment": "", "ceilings": ceilings, "results": [{"cell": cell, "stages": {}}]}))
    assert main(["bench", "--model", "--calibration", str(run)]) == 2
    assert "bench --stages" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize("tile", [TABLE[1], TABLE[-1]], ids=lambda tile: str(tile.headdim_qk))
@pytest.mark.parametrize("masks", [(False, False), (True, True)], ids=["full", "window"])
def test_our_loops_hold_exactly_the_five_products(tile: TileConfig, masks: Masks) -> None:
    work = Ours().work(tile, masks, SM120)
    assert work.hmma * SUB_PARTITIONS * HMMA_FLOPS == 2 * tile.tile_m * tile.tile_n * (
        3 * tile.headdim_qk + 2 * tile.headdim_v
    )
    cut = Ours().work(tile, masks, SM120, masked=True)
    assert cut.issue > work.issue  # without a mask, the end of the keys is cut


@pytest.mark.compile
@pytest.mark.parametrize("headdims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_the_baselines_loop_is_found(headdims: tuple[int, int]) -> None:
    facts = Cell(*headdims, 1, 2, 2, 1024).facts()
    tile = Baseline().tile(facts, SM120)
    work = Baseline().work(tile, (True, False), SM120)
    assert work.pipes(GPUS[0]).bound[0] == "tensor"
    assert rate(work, GPUS[0]) == pytest.approx(GPUS[0].peak_tflops)
    ours = Ours().tile(facts, SM120)
    pairs = tile.tile_m * tile.tile_n / (ours.tile_m * ours.tile_n)
    assert work.shared_bytes > pairs * Ours().work(ours, (True, False), SM120).shared_bytes

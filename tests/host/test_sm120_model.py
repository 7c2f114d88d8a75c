"""The static model: loops found in SASS, cycles counted, and the tensor work checked against the arithmetic."""

from __future__ import annotations

import pytest

from cudnn_frost_sm120 import sm120_model as model
from cudnn_frost_sm120.config.tiles import TABLE, TileConfig
from cudnn_frost_sm120.cubin import compile_cubin
from cudnn_frost_sm120.target import Target

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


def test_a_loop_is_found_without_its_masking() -> None:
    (body,) = model.main_loops(SASS)
    assert [opcode.split(".")[0] for opcode, _ in body] == ["HMMA", "BRA", "MUFU", "LDSM", "STS", "LDS", "BRA"]


def test_cycles_by_pipe() -> None:
    tile = TileConfig(64, 64, 64, 2, 2, 2, 2, 1)
    pipes = model.count_pipes(model.main_loops(SASS), tile, hmma_cycles=16)
    loads = 2 * 64 * 128 + 2 * 64 * 4  # a Q and a dO tile with their rows
    assert pipes == model.Pipes(tensor=16, shared=4 * (4 + 4 + 2) + loads // 128, mufu=8, fp32=0, issue=7)
    assert pipes.bound == ("shared", pipes.shared)


@pytest.mark.parametrize("gpu", model.GPUS, ids=lambda gpu: gpu.name)
def test_a_tensor_bound_loop_reaches_the_peak(gpu: model.Gpu) -> None:
    flops_per_second = model.HMMA_FLOPS * model.SUB_PARTITIONS * gpu.sms * gpu.clock_hz / gpu.hmma_cycles
    assert flops_per_second == pytest.approx(gpu.peak_tflops * 1e12)
    assert 2e9 < gpu.clock_hz < 3e9


@pytest.mark.compile
@pytest.mark.parametrize("tile", [TABLE[1], TABLE[-1]], ids=lambda tile: str(tile.headdim_qk))
def test_the_loops_hold_exactly_the_five_gemms(tile: TileConfig) -> None:
    built = compile_cubin(model.plain_key(tile), Target("sm_120", "sm_120a", None, 188))
    loops = model.main_loops(built.main_sass())
    assert len(loops) == 2
    hmmas = sum(opcode.startswith("HMMA") for body in loops for opcode, _ in body)
    assert hmmas * model.SUB_PARTITIONS * model.HMMA_FLOPS == model.tile_flops(tile)

"""Every native configuration compiled for sm_120a and read back: few or no spills, nothing that SM120 lacks.

No GPU is needed; a compile takes one to three seconds.
"""

from __future__ import annotations

import re

import pytest

from cudnn_frost_sm120 import cubin
from cudnn_frost_sm120.config.arch import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, SMEM_CAPACITY
from cudnn_frost_sm120.config.roles import DqWarps
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.plan import ChainKey, make_plan
from cudnn_frost_sm120.sass import main_loops
from cudnn_frost_sm120.target import Target
from tests.gpu.cases import CAUSAL, FULL, Case, facts_of, unserved

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore:This static loop")]

TARGETS = {
    name: Target(name, f"{name}a", None, count) for name, count in (("sm_120", 188), ("sm_121", 48), ("sm_90", 132))
}
NATIVE = [(32, 32), (64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
GROUPED = {"heads_q": 8, "heads_k": 2}
WINDOW = MaskFacts(left_bound=100, right_bound=3, bottom_right=True)
LENGTHS = {"len_q": (3, 4), "len_k": (5, 6)}
FEATURES = {
    "full": {"mask": FULL},
    "window, groups, scale tensor": {"mask": WINDOW, "scale_tensor": True, **GROUPED},
    "causal, lengths": {"mask": CAUSAL, **LENGTHS},
    "causal, groups, lengths, sinks": {"mask": CAUSAL, "sink": True, **GROUPED, **LENGTHS},
    "bias and dbias": {"mask": WINDOW, "bias": (0, 1, 1, 1), "dbias": True, **GROUPED, **LENGTHS},
    "deterministic": {"mask": CAUSAL, "deterministic": True},
    "deterministic, lengths": {"mask": CAUSAL, "deterministic": True, **LENGTHS},
    "deterministic, window, groups": {"mask": WINDOW, "deterministic": True, **GROUPED},
}
"""What decides registers: masks, groups, lengths, bias, route. `python -m tests.cubins` compiles all combinations."""
TIGHT = [(128, 128), (256, 256)]
"""Where registers are scarce: the deterministic routes with more features are compiled there alone."""
CASES = [
    pytest.param(Case(*headdims, "bf16", **FEATURES[name]), id=f"{name}-{headdims}")
    for name in FEATURES
    for headdims in (TIGHT if name.startswith("deterministic, ") else NATIVE)
]
IN_FP16 = {"causal": {"mask": CAUSAL}, "bias": {"mask": CAUSAL, "bias": (0, 1, 1, 1)}}


def chains(case: Case, target: Target = TARGETS["sm_120"]) -> list[ChainKey]:
    """The chain of every plan that is offered for a case; where any order of sums will do, of those with atomics."""
    facts = facts_of(case)
    keys = dict.fromkeys(make_plan(facts, knobs, target).key for knobs in ranked_knobs(facts, target))
    return [key for key in keys if case.deterministic or key.reduction is ReductionMode.ATOMIC]


SPILL = re.compile(r"\b(LDL|STL)\b")
KERNELS_OF_ROUTE = {
    ReductionMode.ATOMIC: ("preprocess", "accumulator_convert"),
    ReductionMode.RELAY: ("preprocess", "accumulator_convert"),
    ReductionMode.DS_STORE: ("preprocess", "dq_gemm"),
    ReductionMode.RECOMPUTE: ("dq_recompute",),
}
STACK_ALLOWED = 40
"""Bytes a thread; lengths, bias, relay, recomputing, and grouped heads beside a dQ group need registers that the loops
lack: see docs/performance.md."""


def assert_within_budget(built: cubin.Cubin) -> None:
    tight = built.key.reduction in (ReductionMode.RELAY, ReductionMode.RECOMPUTE)
    tight |= built.key.grouped and built.key.tile.dq is DqWarps.DQ_GROUP
    may_spill = built.key.padded or built.key.bias is not None or tight
    allowed = STACK_ALLOWED if may_spill else 0
    for row in built.report():
        assert row.stack_bytes <= allowed, f"{row.kernel} of {built.key.name} has a stack of {row.stack_bytes} bytes"
        assert row.registers <= MAX_REGISTERS_PER_THREAD
        assert row.shared_bytes <= SMEM_CAPACITY
        if row.kernel == "main":
            assert row.registers * built.key.tile.threads <= REGISTERS_PER_SM
    forbidden = built.forbidden_instructions()
    if may_spill:
        forbidden = [line for line in forbidden if not SPILL.search(line)]
    assert forbidden == [], built.key.name
    assert built.early_frees() == [], built.key.name
    main = [text for name, text in cubin.functions(built.sass) if "MainKernel" in name]
    assert len(main) == 1
    assert main[0].count("HMMA.16816.F32") > 0
    assert "UTMALDG" in main[0]
    assert {"main", *KERNELS_OF_ROUTE[built.key.reduction]} <= {row.kernel for row in built.report()}


@pytest.mark.parametrize("case", CASES)
def test_bf16_on_sm_120(case):
    if unserved(case):
        pytest.skip(f"not served yet: {', '.join(unserved(case))}")
    for key in chains(case):
        assert_within_budget(cubin.compile_cubin(key, TARGETS["sm_120"]))


@pytest.mark.parametrize("headdims", NATIVE, ids=str)
@pytest.mark.parametrize("features", IN_FP16)
def test_fp16_on_sm_120(headdims, features):
    for key in chains(Case(*headdims, "fp16", **IN_FP16[features]))[:1]:
        assert_within_budget(cubin.compile_cubin(key, TARGETS["sm_120"]))


@pytest.mark.parametrize("name", ["sm_121", "sm_90"])
def test_other_targets(name):
    target = TARGETS[name]
    for key in chains(Case(64, mask=CAUSAL), target):
        built = cubin.compile_cubin(key, target)
        assert_within_budget(built)
        assert re.search(rf"\.target\s+{name}a\b", built.sass)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_tile_is_found_by_few_multiplications(headdim):
    """With grouped heads ptxas makes what leads to a tile anew for every tile: with 64-bit products of 64-bit values it
    was up to 26 multiplications on the way to dS, LSE and delta, and 7 % of the time."""
    case = Case(headdim, mask=CAUSAL, deterministic=True, **GROUPED)
    (key, *_) = [key for key in chains(case) if key.reduction is ReductionMode.DS_STORE]
    sass = cubin.compile_cubin(key, TARGETS["sm_120"]).kernel_sass("main")
    counts = [sum(opcode.startswith("UIMAD") for opcode, _ in loop) for loop in main_loops(sass, rare_blocks=True)]
    assert len(counts) == 2
    assert max(counts) <= 8


@pytest.mark.parametrize(
    "instruction",
    [
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
        "WARPGROUP.ARRIVE",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT",
        "UTCBAR [UR4], URZ",
        "LDTM.x32 R4, tmem[UR4]",
        "UTMALDG.4D.MULTICAST [UR8], [UR4], UR10",
        "UCGABAR_ARV",
        "@!UP0 UCGABAR_WAIT",
        "LDL.64 R2, [R1+0x8]",
        "@P3 STL [R1], R3",
        "CALL.REL.NOINC `(.L_x_1)",
    ],
)
def test_what_is_forbidden(instruction):
    assert cubin.is_forbidden(f"        /*2450*/                   {instruction} ;")


@pytest.mark.parametrize(
    "instruction",
    [
        "HMMA.16816.F32.BF16 R24, R4, R8, R24",
        "UTMALDG.4D [UR56], [UR4]",
        "UBLKCP.S.G [UR8], [UR4], UR10",
        "LDSM.16.MT88.4 R4, [R2]",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "STG.E desc[UR4][R2.64], R4",
        "REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4], R2",
        "LDS.128 R4, [R2]",
        "STS.128 [R2], R4",
        "USTL_OF_NO_MEANING",
    ],
)
def test_what_is_not_forbidden(instruction):
    assert not cubin.is_forbidden(f"        /*2450*/              @P0 {instruction} ;")


LOOP = """
.L_x_1:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*0110*/                   LDSM.16.MT88.4 R8, [R2] ;
        /*0120*/                   LDSM.16.MT88.4 R12, [R2+0x800] ;
        /*0130*/                   HMMA.16816.F32.BF16 R24, R4, R8, R24 ;
        {between}
        /*0150*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x10], RZ ;
        /*0160*/                   HMMA.16816.F32.BF16 R28, R4, R14, R28 ;
        /*0170*/              @P2 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("between", "count"),
    [
        ("", 1),
        ("/*0140*/                   HMMA.16816.F32.BF16 R32, R4, R10, R32 ;", 1),
        ("/*0140*/                   LDSM.16.M88.4 R16, [R3] ;", 1),
        ("/*0140*/                   HMMA.16816.F32.BF16 R28, R4, R12, R28 ;", 0),
        ("/*0140*/                   LOP3.LUT R3, R15, R40, RZ, 0xfc, !PT ;", 0),
        ("/*0140*/                   STS.128 [R40], R12 ;", 0),
    ],
)
def test_reads_under_way_at_an_arrival(between, count):
    """The second load's data is taken in ahead of the arrival, or it is not."""
    assert len(cubin.reads_under_way(LOOP.format(between=between))) == count


def test_what_is_read_ahead_of_a_loop_stays():
    ahead = "        /*0000*/                   LDSM.16.M88.4 R60, [R2] ;\n"
    taken = LOOP.format(between="/*0140*/                   HMMA.16816.F32.BF16 R28, R4, R12, R28 ;")
    assert cubin.reads_under_way(ahead + taken) == []
    arrival = "        /*0010*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ ;\n"
    assert len(cubin.reads_under_way(ahead + arrival + taken)) == 1

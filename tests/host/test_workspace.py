"""The workspace table: sizes in 64 bits, aligned, linear in the sequence length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import BwdKnobs, ReductionMode
from cudnn_frost_sm120.plan import BwdPlan, make_plan
from cudnn_frost_sm120.target import Target
from cudnn_frost_sm120.workspace import REGION_ALIGNMENT, WORKSPACE_ALIGNMENT, ds_region_bytes
from tests.gpu.cases import CAUSAL, Case, facts_of

SM120 = Target("sm_120", "sm_120a", None, 188)


def plans(**case) -> list[BwdPlan]:
    facts = facts_of(Case(**case))
    return [make_plan(facts, knobs, SM120) for knobs in ranked_knobs(facts, SM120)]


def atomic_plan(**case) -> BwdPlan:
    return next(plan for plan in plans(**case) if plan.key.reduction is ReductionMode.ATOMIC)


CASES = [
    {"headdim": 64, "seqlen_q": 1},
    {"headdim": 64, "seqlen_q": 1000, "heads_q": 8, "heads_k": 2},
    {"headdim": 192, "headdim_v": 128, "seqlen_q": 333, "seqlen_k": 77, "heads_q": 6, "heads_k": 2},
    {"headdim": 256, "seqlen_q": 65, "len_q": (3, 4), "len_k": (3, 4)},
    {"headdim": 40, "headdim_v": 72, "batch": 65_537, "seqlen_q": 3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_regions_follow_each_other(case):
    for plan in plans(**case):
        end = 0
        for region in plan.workspace.regions:
            assert region.offset % REGION_ALIGNMENT == 0
            assert 0 <= region.offset - end < REGION_ALIGNMENT
            assert region.nbytes > 0
            assert plan.workspace.offset(region.name) == region.offset
            end = region.offset + region.nbytes
        assert plan.workspace_bytes == end
        assert len({region.name for region in plan.workspace.regions}) == len(plan.workspace.regions)
    assert REGION_ALIGNMENT % WORKSPACE_ALIGNMENT == 0


def test_accumulators_hold_every_row():
    for plan in plans(headdim=128, batch=3, heads_q=8, heads_k=2, seqlen_q=130, seqlen_k=257):
        nbytes = {region.name: region.nbytes for region in plan.workspace.regions}
        rows = 3 * 8 * 192  # 130 rounded up to 64
        assert nbytes["lse"] == nbytes["delta"] == 4 * rows
        mode = plan.key.reduction
        assert nbytes.get("dq_accum") == (4 * rows * 128 if mode is ReductionMode.ATOMIC else None)
        assert nbytes.get("ds") == (2 * rows * 384 if mode is ReductionMode.DS_STORE else None)
        if plan.knobs.heads_per_cta < 4:
            parts = 3 * 8 // plan.knobs.heads_per_cta * 384  # 257 rounded up to 128
            assert nbytes["dk_partial"] == nbytes["dv_partial"] == 4 * parts * 128
        else:
            assert "dk_partial" not in nbytes


def test_a_window_stores_dS_of_its_band_only():
    """Linear in the sequence length, whatever the diagonal is."""
    window = MaskFacts(left_bound=1000, right_bound=24, bottom_right=True)
    sizes = [ds_region_bytes(facts_of(Case(128, seqlen_q=s, mask=window)), heads=3) for s in (4096, 8192)]
    assert sizes == [2 * 3 * s * (128 * 10) for s in (4096, 8192)]  # 1024 + 63 keys touch 10 tiles of 128 at most
    assert ds_region_bytes(facts_of(Case(128, seqlen_q=4096)), heads=3) == 2 * 3 * 4096 * 4096


HEAD = 2 * 4096 * 4096
"""Bytes of dS of one head at S 4096."""


@pytest.mark.parametrize("deterministic", [False, True])
def test_dS_is_stored_within_the_budget_only(deterministic):
    facts = facts_of(Case(128, batch=1, heads_q=32, heads_k=8, seqlen_q=4096, deterministic=deterministic))
    for budget, most_heads in ((32 * HEAD, 4), (4 * HEAD - 1, 2), (HEAD, 1), (HEAD - 1, 0), (0, 0)):
        target = replace(SM120, ds_budget=budget)
        storing = [k for k in ranked_knobs(facts, target) if k.reduction_mode is ReductionMode.DS_STORE]
        assert max((k.heads_per_cta for k in storing), default=0) == most_heads
        for knobs in storing:
            plan = make_plan(facts, knobs, target)
            (region,) = (r for r in plan.workspace.regions if r.name == "ds")
            assert region.nbytes == HEAD * plan.slots_per_launch * knobs.heads_per_cta <= budget


@pytest.mark.parametrize(
    ("batch", "seqlen", "slots"),
    [
        (16, 1024, 1024),  # 2 GiB: all at once
        (32, 1024, 1024),  # 2 GiB hold half, 43 waves of CTAs on 188 SMs
        (1, 8192, 22),  # 24 heads of 64 tiles are 8 waves: 64 heads in three equal parts
        (1, 32768, 6),  # 256 tiles: 6 heads are 8 waves
    ],
)
def test_a_part_takes_more_than_2_GiB_only_to_fill_the_gpu(batch, seqlen, slots):
    """However large the budget"""
    facts, target = facts_of(Case(128, batch=batch, heads_q=64, seqlen_q=seqlen)), replace(SM120, ds_budget=1 << 60)
    plan = make_plan(facts, BwdKnobs(32, 128, 3, 1, ReductionMode.DS_STORE), target)
    assert plan.slots_per_launch == slots


@pytest.mark.parametrize(
    ("case", "budget", "expected"),
    [
        (Case(128, batch=2, heads_q=16, seqlen_q=4096), 32 * HEAD, (32, 1)),
        (Case(128, batch=2, heads_q=16, seqlen_q=4096), 31 * HEAD, (16, 1)),  # two equal parts
        (Case(128, batch=2, heads_q=16, seqlen_q=4096), 10 * HEAD, (8, 1)),
        (Case(128, batch=2, heads_q=16, seqlen_q=4096, mask=CAUSAL), 31 * HEAD, (16, 8)),
        (Case(128, batch=2, heads_q=16, seqlen_q=4096, mask=CAUSAL), 23 * HEAD, (16, 8)),  # whole head groups
        (Case(128, batch=2, heads_q=16, seqlen_q=4096, mask=CAUSAL), 5 * HEAD, (5, 5)),
        (Case(128, batch=2, heads_q=16, seqlen_q=4096, mask=CAUSAL), 0, (1, 1)),  # a record from elsewhere
    ],
)
def test_dS_is_stored_in_equal_parts(case, budget, expected):
    facts, target = facts_of(case), replace(SM120, ds_budget=budget)
    plan = make_plan(facts, BwdKnobs(32, 128, 3, 1, ReductionMode.DS_STORE), target)
    assert (plan.slots_per_launch, plan.head_group) == expected
    assert plan.slots_per_launch % plan.head_group == 0


def test_the_parts_of_other_routes_are_all():
    for plan in plans(headdim=128, batch=2, heads_q=16, heads_k=4, seqlen_q=4096):
        if plan.key.reduction is not ReductionMode.DS_STORE:
            assert plan.slots_per_launch == 32 // plan.knobs.heads_per_cta


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("heads_k", [8, 2])
@pytest.mark.parametrize("mode", [m for m in ReductionMode if m is not ReductionMode.DS_STORE])
def test_linear_in_the_sequence_length(headdim, heads_k, mode):
    """One step in the length costs what the last one did, a few fp32 rows per query row."""
    sizes = {}
    for seqlen in (4096, 8192, 12_288, 32_768):
        facts = facts_of(Case(headdim, batch=1, heads_q=8, heads_k=heads_k, seqlen_q=seqlen))
        for heads in (1, facts.group):
            knobs = replace(ranked_knobs(facts, SM120)[0], heads_per_cta=heads, reduction_mode=mode)
            sizes[heads, seqlen] = make_plan(facts, knobs, SM120).workspace_bytes
    for heads in (1, 8 // heads_k):
        first, second, third, last = (sizes[heads, seqlen] for seqlen in (4096, 8192, 12_288, 32_768))
        assert abs(third - 2 * second + first) < 8 * REGION_ALIGNMENT
        assert last / (8 * 32_768) <= 4 * (3 * headdim + 2) + 1


def test_sizes_pass_2_to_31_and_2_to_32():
    plan = atomic_plan(headdim=256, batch=64, heads_q=64, seqlen_q=32_768)
    assert plan.workspace_bytes > 4 * 64 * 64 * 32_768 * 256
    offsets = [region.offset for region in plan.workspace.regions]
    assert offsets == sorted(offsets)
    plan = atomic_plan(headdim=8, batch=2**20, heads_q=2**10, seqlen_q=2**12)
    assert plan.workspace_bytes > 2**47

"""Which tile configuration serves which head dims."""

from __future__ import annotations

import pytest

from cudnn_frost_sm120.config.padding import KEY_PADDING, QUERY_PADDING, padded_keys, padded_queries
from cudnn_frost_sm120.config.roles import WARPS, WARPS_PER_GROUP, DqWarps
from cudnn_frost_sm120.config.tiles import HEADDIM_MULTIPLE, MAX_HEADDIM, TABLE, configs_for
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.target import Target
from tests.gpu.cases import Case, facts_of

SM120 = Target("sm_120", "sm_120a", None, 188)


def test_every_multiple_of_8_to_256_is_served_on_either_side():
    assert (HEADDIM_MULTIPLE, MAX_HEADDIM) == (8, 256)
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            rows = configs_for(d, dv)
            assert rows, (d, dv)
            for row in rows:
                assert row.headdim_qk >= d
                assert row.headdim_v >= dv


def test_the_smallest_native_pair_is_taken():
    assert [(d, configs_for(d, d)[0].headdim_qk) for d in (8, 32, 40, 64, 72, 128, 136, 192, 200, 256)] == [
        (8, 32),
        (32, 32),
        (40, 64),
        (64, 64),
        (72, 128),
        (128, 128),
        (136, 192),
        (192, 192),
        (200, 256),
        (256, 256),
    ]
    assert (configs_for(192, 128)[0].headdim_qk, configs_for(192, 128)[0].headdim_v) == (192, 128)
    assert configs_for(192, 136)[0].headdim_v == 192


@pytest.mark.parametrize("pair", [(0, 64), (64, 0), (-8, 64), (4, 4), (12, 64), (64, 100), (264, 264), (256, 512)])
def test_other_head_dims_are_not_served(pair):
    assert configs_for(*pair) == ()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.headdim_qk}x{row.headdim_v}")
def test_a_row_of_the_table_is_one_that_the_kernels_can_run(row):
    assert row.headdim_qk % 16 == row.headdim_v % 16 == 0
    assert row.tile_m in (32, 64)
    assert row.tile_n == 16 * row.key_blocks * WARPS_PER_GROUP
    assert QUERY_PADDING % row.tile_m == 0
    assert KEY_PADDING % row.tile_n == 0
    assert min(row.q_stages, row.do_stages, row.ds_stages, row.p_stages) >= 1
    assert row.evidence, "say where the configuration comes from"
    assert row.dq is not DqWarps.NONE
    assert row.dq_warps == (WARPS if row.dq is DqWarps.BOTH_GROUPS else WARPS_PER_GROUP)
    row_warps = row.tile_m // row.dq_rows_per_warp
    assert row.dq_warps % row_warps == 0
    assert row.headdim_qk % (16 * (row.dq_warps // row_warps)) == 0, "dQ columns are dealt in steps of 16"


def test_rows_are_unique_in_their_knobs():
    """Knobs name a row among those of one native pair, so that a recorded plan pins one kernel."""
    for d, dv in {(row.headdim_qk, row.headdim_v) for row in TABLE}:
        facts = facts_of(Case(d, dv, heads_q=6, heads_k=2))
        ranked = ranked_knobs(facts, SM120)
        assert len(set(ranked)) == len(ranked)
        plans = [make_plan(facts, knobs, SM120) for knobs in ranked]
        assert len({(plan.key, plan.knobs) for plan in plans}) == len(plans)


def test_padding_of_rows():
    for seqlen in (1, 63, 64, 65, 127, 128, 129, 2**31 - 1, 2**31, 2**33 + 1):
        for padded, unit in ((padded_queries, QUERY_PADDING), (padded_keys, KEY_PADDING)):
            assert padded(seqlen) % unit == 0
            assert 0 <= padded(seqlen) - seqlen < unit

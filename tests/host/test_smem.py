"""The shared-memory layout of the main kernel: what is alive together does not overlap, and it all fits."""

from __future__ import annotations

import itertools

import pytest

from cudnn_frost_sm120.config.arch import SMEM_CAPACITY
from cudnn_frost_sm120.config.roles import WARPS, WARPS_PER_GROUP
from cudnn_frost_sm120.config.smem import SmemLayout
from cudnn_frost_sm120.config.tiles import TABLE, TileConfig
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.plan import fitted, knobs_of
from tests.gpu.cases import Case, facts_of

RESERVED = 1024
"""Bytes that the driver keeps of every CTA's shared memory."""
PER_SM = 100 * 1024
SWIZZLE_ATOM = 1024


def every_configuration() -> dict[TileConfig, None]:
    """The rows of the table, and what plans make of them."""
    more = ({}, {"bias": (0, 1, 1, 1)}, {"len_q": (3, 4), "len_k": (3, 4)})
    found = dict.fromkeys(TABLE)
    for row, mode, features in itertools.product(TABLE, ReductionMode, more):
        facts = facts_of(Case(row.headdim_qk, row.headdim_v, **features))
        found[fitted(row, facts, knobs_of(row, 1, mode))] = None
    return found


tables = pytest.mark.parametrize("row", every_configuration(), ids=lambda row: f"{row.headdim_qk}x{row.headdim_v}")


def regions(layout: SmemLayout) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of everything in the main loop's life, computed from the tile shapes anew."""
    tile = layout.tile

    def operand(rows: int, headdim: int) -> int:
        return rows * -(-headdim // 64) * 64 * 2

    k = operand(tile.tile_n, tile.headdim_qk) if tile.keeps_k else 0
    return {
        "k": (layout.k, k),
        "q": (layout.q, tile.q_stages * operand(tile.tile_m, tile.headdim_qk)),
        "do": (layout.do, tile.do_stages * operand(tile.tile_m, tile.headdim_v)),
        "ds": (layout.ds, tile.ds_stages * tile.tile_m * tile.tile_n * 2),
        "p": (layout.p, tile.p_stages * tile.tile_m * tile.tile_n * 2),
        "lse": (layout.lse, tile.q_stages * tile.tile_m * 4),
        "delta": (layout.delta, tile.do_stages * tile.tile_m * 4),
        **{f"barriers at {first}": (first, 8 * count) for first, count, _ in layout.barriers()},
    }


@tables
def test_nothing_overlaps(row):
    found = sorted(regions(SmemLayout(row)).values())
    for (first, nbytes), (following, _) in itertools.pairwise(found):
        assert first + nbytes <= following


@tables
def test_everything_fits(row):
    layout = SmemLayout(row)
    assert max(first + nbytes for first, nbytes in regions(layout).values()) <= layout.total
    assert layout.total <= SMEM_CAPACITY
    assert layout.total + RESERVED <= PER_SM


@tables
def test_k_and_v_lie_over_the_pipelines_and_nothing_else(row):
    """V, and K where it does not stay, are in registers before the first query tile arrives; what does not wait for
    that must lie elsewhere."""
    layout = SmemLayout(row)
    v = range(layout.v, layout.v + row.tile_n * -(-row.headdim_v // 64) * 128)
    assert v.start >= layout.k + row.tile_n * -(-row.headdim_qk // 64) * 128
    assert layout.q >= (v.start if row.keeps_k else 0)
    for name, (first, _) in regions(layout).items():
        if name in ("lse", "delta") or name.startswith("barriers"):
            assert first >= v.stop, f"{name} lies in V's space"


@tables
def test_alignment(row):
    layout = SmemLayout(row)
    for name in ("k", "v", "q", "do"):
        assert getattr(layout, name) % SWIZZLE_ATOM == 0, name
    for stage_bytes in (layout.q_bytes, layout.do_bytes):
        assert stage_bytes % SWIZZLE_ATOM == 0
    for name in ("ds", "p"):
        assert getattr(layout, name) % 128 == 0, name
    for name in ("lse", "delta"):
        assert getattr(layout, name) % 16 == 0, name
    assert layout.row_bytes % 16 == 0
    assert layout.p_bytes % (WARPS_PER_GROUP * 16) == 0
    for first, count, warps in layout.barriers():
        assert first % 8 == 0
        assert count >= 0
        assert 0 <= warps <= row.warps
    arrivals = {first: warps for first, _, warps in layout.barriers()}
    assert arrivals[layout.q_empty] == arrivals[layout.do_empty] == WARPS
    assert arrivals[layout.kv_read] == (WARPS_PER_GROUP if row.keeps_k else row.warps)

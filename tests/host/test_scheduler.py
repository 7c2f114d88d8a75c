"""The CTA order and the accumulator layout are bijections."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_frost_sm120.device import accumulator
from cudnn_frost_sm120.device.scheduler import key_tile_of
from cudnn_frost_sm120.device.select import maximum, minimum, select

small = st.integers(1, 9)


@settings(max_examples=300, deadline=None)
@given(small, small, st.integers(1, 5), st.integers(1, 12))
def test_every_key_tile_is_worked_on_once(n_blocks, heads, batches, head_group):
    got = [key_tile_of(b, n_blocks, heads, batches, head_group) for b in range(n_blocks * heads * batches)]
    assert sorted(got) == [(n, h, b) for n in range(n_blocks) for h in range(heads) for b in range(batches)]


@given(small, small, st.integers(1, 12))
def test_heads_of_a_group_meet_each_key_tile_together(n_blocks, heads, head_group):
    """Within a group CTAs step along the heads first; a group of 1 walks one head's key tiles."""
    order = [key_tile_of(b, n_blocks, heads, 1, head_group)[:2] for b in range(n_blocks * heads)]
    groups = [range(first, min(first + head_group, heads)) for first in range(0, heads, head_group)]
    assert order == [(n, h) for group in groups for n in range(n_blocks) for h in group]


@pytest.mark.parametrize("headdim", [32, 64, 128, 192, 256])
def test_accumulator_offsets_are_a_bijection(headdim):
    rows = 48
    offsets = set()
    for row in range(rows):
        for column in range(0, headdim, 2):
            fragment = accumulator.fragment_offset(row // accumulator.ROWS, column // accumulator.COLUMNS, headdim)
            pair = accumulator.pair_offset(row % accumulator.ROWS, column % accumulator.COLUMNS // 2)
            offsets |= {fragment + pair, fragment + pair + 1}
    assert offsets == set(range(rows * headdim))


def test_a_lane_owns_sixteen_consecutive_bytes():
    """Lane 4 r + c: columns 2c, 2c + 1 of row r, then of row r + 8, as mma.sync leaves them."""
    for lane in range(32):
        row, pair = lane >> 2, lane & 3
        first, second = accumulator.pair_offset(row, pair), accumulator.pair_offset(row + 8, pair)
        assert (first, second) == (4 * lane, 4 * lane + 2)


@given(st.integers(-(2**31), 2**31), st.integers(-(2**31), 2**31), st.booleans())
def test_select_on_plain_integers(a, b, condition):
    assert (minimum(a, b), maximum(a, b)) == (min(a, b), max(a, b))
    assert select(condition, a, b) == (a if condition else b)

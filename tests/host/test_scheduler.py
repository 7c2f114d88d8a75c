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
def test_accumulator_fragments_are_a_bijection(headdim):
    """A lane's four values of a fragment are consecutive, and fragments fill a slot without gaps."""
    row_blocks = 3
    offsets = [
        accumulator.fragment_offset(row_block, column_block, headdim) + 4 * lane + e
        for row_block in range(row_blocks)
        for column_block in range(headdim // accumulator.COLUMNS)
        for lane in range(32)
        for e in range(4)
    ]
    assert offsets == list(range(row_blocks * accumulator.ROWS * headdim))


@given(st.integers(-(2**31), 2**31), st.integers(-(2**31), 2**31), st.booleans())
def test_select_on_plain_integers(a, b, condition):
    assert (minimum(a, b), maximum(a, b)) == (min(a, b), max(a, b))
    assert select(condition, a, b) == (a if condition else b)

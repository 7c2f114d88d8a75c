"""Lengths, masks and block ranges against brute force over every (query, key) pair, on plain integers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_frost_sm120.device.block_range import key_tiles, query_tiles
from cudnn_frost_sm120.device.mask import Mask, MaskKinds
from cudnn_frost_sm120.device.relay_order import key_turn, ordered_key_tile
from cudnn_frost_sm120.device.seqlen import SeqlenInfo

BIG = 2**30


@dataclass(frozen=True)
class Problem:
    seqlen_q: int
    seqlen_k: int
    len_q: int | None
    len_k: int | None
    bottom_right: bool
    left: int | None
    right: int | None
    rows: bool = False  # the mask itself tests the query length

    @property
    def seqlen(self) -> SeqlenInfo:
        return SeqlenInfo.create(self.seqlen_q, self.seqlen_k, self.len_q, self.len_k)

    @property
    def mask(self) -> Mask:
        kinds = MaskKinds(right=self.right is not None, left=self.left is not None, rows=self.rows)
        seqlen = self.seqlen
        diagonal = seqlen.diagonal(self.bottom_right)
        return Mask.create(kinds, seqlen.len_q, seqlen.len_k, diagonal, self.left or 0, self.right or 0)

    def keeps(self, q: int, k: int) -> bool:
        """The definition, in the words of the documentation."""
        clamp_q = self.seqlen_q if self.len_q is None else min(max(self.len_q, 0), self.seqlen_q)
        clamp_k = self.seqlen_k if self.len_k is None else min(max(self.len_k, 0), self.seqlen_k)
        diag = clamp_k - clamp_q if self.bottom_right else 0
        if q >= clamp_q or k >= clamp_k:
            return False
        if self.right is not None and k > q + diag + self.right:
            return False
        return self.left is None or k > q + diag - self.left


def problems(most: int = 90) -> st.SearchStrategy[Problem]:
    extent = st.integers(1, most)
    length = st.none() | st.integers(-5, most + 10) | st.sampled_from([0, -(2**31), 2**31 - 1])
    return st.builds(
        Problem,
        seqlen_q=extent,
        seqlen_k=extent,
        len_q=length,
        len_k=length,
        bottom_right=st.booleans(),
        left=st.none() | st.integers(1, 2 * most) | st.just(BIG),
        right=st.none() | st.just(0) | st.integers(0, 2 * most) | st.just(BIG),
        rows=st.booleans(),
    )


tiles = st.sampled_from([(16, 16), (32, 16), (16, 32), (32, 64), (64, 32)])


@settings(max_examples=400, deadline=None)
@given(problems(), tiles)
def test_a_range_holds_every_kept_pair_and_little_more(problem, tile):
    tile_m, tile_n = tile
    for n_block in range(-(-problem.seqlen_k // tile_n)):
        begin, end = query_tiles(n_block, tile_m, tile_n, problem.seqlen, problem.mask)
        assert begin <= end
        keys = range(n_block * tile_n, min((n_block + 1) * tile_n, problem.seqlen_k))
        kept = [q for q in range(problem.seqlen_q) if any(problem.keeps(q, k) for k in keys)]
        if not kept:
            # The bounds of one tile's first and last key may overlap although no row lies in both: one tile at most,
            # or a range that ends where it begins.
            assert end - begin <= -(-(tile_n + tile_m) // tile_m), (begin, end)
            continue
        assert begin == kept[0] // tile_m
        assert end == kept[-1] // tile_m + 1
        assert 0 <= begin
        assert end * tile_m < problem.seqlen_q + tile_m


@settings(max_examples=400, deadline=None)
@given(problems(), tiles)
def test_a_query_tile_visits_every_key_tile_that_it_keeps_a_pair_of(problem, tile):
    tile_m, tile_n = tile
    for m_block in range(-(-problem.seqlen_q // tile_m)):
        begin, end = key_tiles(m_block, tile_m, tile_n, problem.seqlen, problem.mask)
        assert begin <= end
        queries = range(m_block * tile_m, min((m_block + 1) * tile_m, problem.seqlen_q))
        kept = [k for k in range(problem.seqlen_k) if any(problem.keeps(q, k) for q in queries)]
        if not kept:
            assert end - begin <= -(-(tile_n + tile_m) // tile_n), (begin, end)
            continue
        assert (begin, end) == (kept[0] // tile_n, kept[-1] // tile_n + 1)


@settings(max_examples=400, deadline=None)
@given(problems(), tiles)
def test_a_dropped_tile_keeps_nothing_and_most_such_tiles_are_dropped(problem, tile):
    queries, keys = tile
    if problem.left is None and problem.right is None:
        return
    for query in range(0, problem.seqlen.len_q, queries):
        for key in range(0, problem.seqlen_k, keys):
            kept = [
                (q, k)
                for q in range(query, min(query + queries, problem.seqlen.len_q))
                for k in range(key, min(key + keys, problem.seqlen_k))
                if problem.keeps(q, k)
            ]
            drops = bool(problem.mask.drops_tile(query, queries, key, keys))
            assert not (drops and kept), (query, key)
            inside = key + keys <= problem.seqlen.len_k and query + queries <= problem.seqlen.len_q
            one_bound = (problem.left is None) != (problem.right is None)
            assert drops or kept or not inside or not one_bound, (query, key)


@settings(max_examples=300, deadline=None)
@given(problems(), tiles)
def test_nothing_is_visited_past_the_lengths(problem, tile):
    tile_m, tile_n = tile
    for n_block in range(-(-problem.seqlen_k // tile_n)):
        begin, end = query_tiles(n_block, tile_m, tile_n, problem.seqlen, problem.mask)
        if begin < end:
            assert n_block * tile_n < problem.seqlen.len_k
            assert (end - 1) * tile_m < problem.seqlen.len_q


@settings(max_examples=400, deadline=None)
@given(problems(), tiles, st.sampled_from([1, 2, 4, 8, 64]))
def test_turns_follow_the_order_without_gaps(problem, tile, group):
    """The visitors of a query tile hold turns 0, 1, 2, ... in the order that tickets are taken: a gap would wait for
    ever, and a turn behind a higher ticket could wait for a CTA that is not there."""
    tile_m, tile_n = tile
    blocks = -(-problem.seqlen_k // tile_n)
    order = [ordered_key_tile(position, blocks, group) for position in range(blocks)]
    assert sorted(order) == list(range(blocks))
    visits = [range(*query_tiles(n, tile_m, tile_n, problem.seqlen, problem.mask)) for n in range(blocks)]
    for m_block in range(-(-problem.seqlen_q // tile_m)):
        visitors = [n for n in order if m_block in visits[n]]
        turns = [key_turn(n, m_block, tile_m, tile_n, problem.mask, group) for n in visitors]
        assert turns == list(range(len(visitors))), (m_block, visitors)


@settings(max_examples=400, deadline=None)
@given(problems(), tiles)
def test_a_tile_is_cut_exactly_when_a_pair_of_it_is_masked(problem, tile):
    """Rows past the query length count only where the mask is to test them: else their LSE masks them."""
    queries, keys = tile
    diag, end_k = problem.seqlen.diagonal(problem.bottom_right), problem.seqlen.len_k
    end_q = problem.seqlen.len_q if problem.rows else BIG

    def keeps(q, k):
        right = problem.right is None or k <= q + diag + problem.right
        left = problem.left is None or k > q + diag - problem.left
        return k < end_k and q < end_q and right and left

    for query in range(0, problem.seqlen_q, queries):
        for key in range(0, problem.seqlen_k, keys):
            cut = problem.mask.cuts_tile(query, queries, key, keys)
            masked = not all(keeps(q, k) for q in range(query, query + queries) for k in range(key, key + keys))
            assert bool(cut) == masked, (query, key)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_first_and_end_query_of_a_key(problem):
    mask, len_q = problem.mask, problem.seqlen.len_q
    for key in range(problem.seqlen_k):
        first, end = mask.first_query(key), mask.end_query(key)
        for query in range(problem.seqlen_q if problem.rows else len_q):
            kept = query >= first and (end is None or query < end)
            assert kept == problem.keeps(query, key), (query, key)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_first_and_end_key_of_a_query(problem):
    mask = problem.mask
    for query in range(problem.seqlen_q if problem.rows else problem.seqlen.len_q):
        first, end = mask.first_key(query), mask.end_key(query)
        for key in range(problem.seqlen_k):
            kept = (first is None or key >= first) and key < end
            assert kept == problem.keeps(query, key), (query, key)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_lengths_clamp(seqlen_q, seqlen_k, len_q, len_k):
    seqlen = SeqlenInfo.create(seqlen_q, seqlen_k, len_q, len_k)
    assert seqlen.len_q == sorted((0, len_q, seqlen_q))[1]
    assert seqlen.len_k == sorted((0, len_k, seqlen_k))[1]
    assert seqlen.diagonal(False) == 0
    assert seqlen.diagonal(True) == seqlen.len_k - seqlen.len_q


@pytest.mark.parametrize("right", [0, BIG, 2 * BIG - 1])
@pytest.mark.parametrize("left", [1, BIG, 2 * BIG - 1])
def test_sums_stay_within_32_bits(left, right):
    """With extents below 2^30 no sum that a kernel forms wraps once the host has bounded the widths."""
    from cudnn_frost_sm120.facts import MaskFacts, effective_bounds
    from tests.gpu.cases import Case, facts_of

    facts = facts_of(Case(seqlen_q=2**20, seqlen_k=2**20, mask=MaskFacts(left_bound=left, right_bound=right)))
    for bound in effective_bounds(facts):
        assert bound is None or bound < facts.seqlen_q + facts.seqlen_k

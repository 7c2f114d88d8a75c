"""dS in workspace: the bytes that the main kernel stores are the ones that dq_gemm multiplies, in the right place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_range import Problem, problems

from cudnn_frost_sm120.config.gemm import TILE_M as GEMM_M
from cudnn_frost_sm120.config.gemm import TILE_N as GEMM_N
from cudnn_frost_sm120.config.padding import padded_keys
from cudnn_frost_sm120.config.tiles import TABLE
from cudnn_frost_sm120.device import ds_store
from cudnn_frost_sm120.device.block_range import key_tiles, query_tiles
from cudnn_frost_sm120.device.mask import MaskKinds

LANES = np.arange(32)
GEMM_ROWS = (16, 32)
"""Query rows of a warp of kernels/dq_gemm.py."""
SHAPES = sorted({(row.tile_m, row.tile_n, row.key_blocks) for row in TABLE})


def a_fragment(matrix: np.ndarray) -> list[np.ndarray]:
    """The four registers of a 16x16 A operand, each [32 lanes][2 values], by the table in the PTX manual."""
    rows, columns = LANES // 4, 2 * (LANES % 4)
    quarters = [(0, 0), (8, 0), (0, 8), (8, 8)]
    return [np.stack([matrix[rows + r, columns + c + e] for e in range(2)], axis=1) for r, c in quarters]


def movmatrix_trans(register: np.ndarray) -> np.ndarray:
    """movmatrix.trans: lane l holds elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4 of an 8x8 matrix."""
    return register.reshape(8, 8).T.reshape(32, 2)


def test_transposed_fragments(monkeypatch):
    """The fragments of dS^T become the A operands of dS."""
    from cudnn_frost_sm120.device import mma

    def inline_ptx(code, *, write_only_types, read_only_args):
        assert code.startswith("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0}")
        (register,) = read_only_args
        return movmatrix_trans(register)

    ds = np.arange(256).reshape(16, 16)  # rows are queries
    stored = a_fragment(ds.T)
    monkeypatch.setattr(mma.prims, "inline_ptx", inline_ptx)
    for got, wanted in zip(mma.transposed_a(stored), a_fragment(ds), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_round_trip_through_memory(shape):
    """Every fragment that the main kernel stores is read back by the warp of dq_gemm that owns its rows, as dS."""
    tile_m, tile_n, key_blocks = shape
    seqlen_q, seqlen_k, heads = 192, 256, 2
    mask = Problem(seqlen_q, seqlen_k, None, None, False, None, None).mask
    keys = ds_store.strip_keys(seqlen_k, mask.kinds, None, None)
    ds = np.random.default_rng(0).permutation(heads * seqlen_q * seqlen_k).reshape(heads, seqlen_q, seqlen_k)
    memory = np.full((ds_store.ds_bytes(heads, seqlen_q, keys) // 4, 2), -1)

    def head_strip(head):
        return head * ds_store.strips(seqlen_q)

    # As GradientGroup.keep_ds: 16-byte stores of a lane, at a base for the tile and constant offsets from it.
    for head, query, key in itertools.product(range(heads), range(0, seqlen_q, tile_m), range(0, seqlen_k, tile_n)):
        for warp_key in range(key, key + tile_n, 16 * key_blocks):
            base = ds_store.tile_offset(head_strip(head), query, warp_key, keys, mask)
            for block, k in itertools.product(range(key_blocks), range(tile_m // 16)):
                part = ds[head, query + 16 * k :, warp_key + 16 * block :][:16, :16]
                at = base + ds_store.fragment_offset(k, block) + 4 * LANES
                assert (at % 4 == 0).all()
                for e, register in enumerate(a_fragment(part.T)):
                    assert (memory[at + e] == -1).all()
                    memory[at + e] = register
    assert (memory >= 0).all()

    # As DqGemmKernel.load_ds: 16-byte loads, the base one key tile further with every tile.
    for rows in GEMM_ROWS:
        if rows > tile_m:
            continue
        for head, query in itertools.product(range(heads), range(0, seqlen_q, rows)):
            source = ds_store.tile_offset(head_strip(head), query, 0, keys, mask)
            for key in range(0, seqlen_k, GEMM_N):
                for m, k in itertools.product(range(rows // 16), range(GEMM_N // 16)):
                    at = source + ds_store.fragment_offset(m, k) + 4 * LANES
                    registers = [memory[at + e] for e in range(4)]
                    got = [movmatrix_trans(registers[i]) for i in (0, 2, 1, 3)]
                    wanted = a_fragment(ds[head, query + 16 * m :, key + 16 * k :][:16, :16])
                    np.testing.assert_array_equal(got, wanted)
                source += ds_store.fragment_offset(0, GEMM_N // 16)


def stored_tiles(problem: Problem, tile_m: int, tile_n: int, warp_keys: int) -> set[tuple[int, int]]:
    """(query, key) of every 16x16 fragment that the main kernel stores."""
    found = set()
    for n_block in range(-(-problem.seqlen_k // tile_n)):
        for m_block in range(*query_tiles(n_block, tile_m, tile_n, problem.seqlen, problem.mask)):
            for key in range(n_block * tile_n, (n_block + 1) * tile_n, warp_keys):
                query = m_block * tile_m
                if problem.mask.drops_tile(query, tile_m, key, warp_keys):
                    continue
                found |= set(itertools.product(range(query, query + tile_m, 16), range(key, key + warp_keys, 16)))
    return found


def read_tiles(problem: Problem, rows: int, tile_m: int, warp_keys: int) -> set[tuple[int, int]]:
    """(query, key) of every fragment that dq_gemm reads with warps of so many rows."""
    found = set()
    for cta in range(-(-problem.seqlen_q // GEMM_M)):
        begin, end = key_tiles(cta, GEMM_M, GEMM_N, problem.seqlen, problem.mask)
        for query in range(cta * GEMM_M, (cta + 1) * GEMM_M, rows):
            main_block = query // tile_m
            own_begin, own_end = key_tiles(main_block, tile_m, GEMM_N, problem.seqlen, problem.mask)
            assert own_begin >= own_end or (begin <= own_begin and own_end <= end)
            for key in range(own_begin * GEMM_N, own_end * GEMM_N, warp_keys):
                if problem.mask.drops_tile(main_block * tile_m, tile_m, key, warp_keys):
                    continue
                found |= set(itertools.product(range(query, query + rows, 16), range(key, key + warp_keys, 16)))
    return found


@settings(max_examples=300, deadline=None)
@given(problems(400), st.sampled_from(SHAPES), st.sampled_from(GEMM_ROWS))
def test_what_is_read_was_stored_and_holds_every_kept_pair(problem, shape, rows):
    """Workspace starts as NaN: reading one fragment too many is a wrong gradient, as is reading one too few."""
    tile_m, tile_n, key_blocks = shape
    stored = stored_tiles(problem, tile_m, tile_n, 16 * key_blocks)
    read = read_tiles(problem, min(rows, tile_m), tile_m, 16 * key_blocks)
    assert read <= stored
    fragments = itertools.product(range(0, problem.seqlen_q, 16), range(0, problem.seqlen_k, 16))
    for query, key in fragments:
        queries = range(query, min(query + 16, problem.seqlen_q))
        if any(problem.keeps(q, k) for q in queries for k in range(key, min(key + 16, problem.seqlen_k))):
            assert (query, key) in read


@settings(max_examples=300, deadline=None)
@given(problems(700), st.sampled_from(SHAPES))
def test_every_stored_fragment_has_a_place_of_its_own(problem, shape):
    """Within the region, also where a window's strips hold a band of keys only."""
    tile_m, tile_n, key_blocks = shape
    mask = problem.mask
    keys = ds_store.strip_keys(problem.seqlen_k, mask.kinds, problem.left, problem.right)
    words = ds_store.ds_bytes(3, problem.seqlen_q, keys) // 4
    head_strip = 2 * ds_store.strips(problem.seqlen_q)  # the last of three heads
    places = {}
    for query, key in stored_tiles(problem, tile_m, tile_n, 16 * key_blocks):
        origin = ds_store.strip_origin(query // ds_store.STRIP, mask)
        assert 0 <= key - origin < keys, (query, key)
        at = ds_store.tile_offset(head_strip, query, key, keys, mask)
        assert at % ds_store.FRAGMENT == 0
        assert 2 * words // 3 <= at <= words - ds_store.FRAGMENT
        assert places.setdefault(at, (query, key)) == (query, key)


def test_a_window_needs_a_band_only():
    both = MaskKinds(right=True, left=True)
    assert ds_store.strip_keys(100_000, both, 128, 0) == 384
    assert ds_store.strip_keys(100_000, both, 1, 0) == 128 * 2
    assert ds_store.strip_keys(200, both, 128, 0) == padded_keys(200) == 256
    for kinds in (MaskKinds(), MaskKinds(right=True), MaskKinds(left=True)):
        assert ds_store.strip_keys(1000, kinds, 128, 0) == padded_keys(1000) == 1024
    assert replace(both, rows=True) != both
    assert ds_store.strip_keys(100_000, replace(both, rows=True), 128, 0) == 384


def test_a_tile_of_the_gemm_lies_in_one_of_the_main_kernel():
    assert all(tile_n % GEMM_N == 0 for _, tile_n, _ in SHAPES)

"""Zeroing what lies past a length in a tile that straddles it: padded storage may hold NaN, and 0 * NaN is NaN.

Only compiled for graphs with per-batch lengths. At most one key tile of a head and the last query tile are affected.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ..config.roles import WARPS
from ..config.smem import chunks
from ..device.copy import zero_rows
from ..device.pipeline import arrive, wait
from .main_setup import Cta, MainConfig


@cute.jit
def clean_key_tile(config: MainConfig, cta: Cta, tid):
    """Zero the rows of K and V past the key length; every thread calls it, after the tile has arrived."""
    tile, smem = config.tile, config.smem
    valid = cta.mask.len_k - cta.first_key
    if valid < tile.tile_n:
        valid = cutlass.select_(valid < 0, cutlass.Int32(0), valid)
        zero_rows(cta.smem + smem.k, valid, tile.tile_n, chunks(tile.headdim_qk), tid, tile.threads)
        zero_rows(cta.smem + smem.v, valid, tile.tile_n, chunks(tile.headdim_v), tid, tile.threads)
        cute.arch.barrier()


@cute.jit
def clean_query_tile(config: MainConfig, cta: Cta, m_block, q_stage, q_phase, do_stage, do_phase, phase):
    """Zero the rows of Q and dO past the query length.

    The scores and the gradient group call it at the start of every tile, before they read either operand; they wait for
    each other in the tile that straddles the length. That cannot deadlock: each group reaches tile t having finished
    tile t - 1, which needs nothing of tile t from the other, and the loads of tile t were issued before. `phase`
    alternates with the query heads: each has one such tile, or none has.
    """
    tile, smem = config.tile, config.smem
    valid = cta.mask.len_q - m_block * tile.tile_m
    if valid < tile.tile_m:
        wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
        wait(cta.smem + smem.do_full + 8 * do_stage, do_phase)
        tid = cta.warp * 32 + cta.lane
        q, do = cta.smem + smem.q + q_stage * smem.q_bytes, cta.smem + smem.do + do_stage * smem.do_bytes
        zero_rows(q, valid, tile.tile_m, chunks(tile.headdim_qk), tid, 32 * WARPS)
        zero_rows(do, valid, tile.tile_m, chunks(tile.headdim_v), tid, 32 * WARPS)
        arrive(cta.lane, config.every_lane_arrives, cta.smem + smem.cleaned)
        wait(cta.smem + smem.cleaned, phase)

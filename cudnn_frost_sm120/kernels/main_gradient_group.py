"""Warps 4-7 of the main kernel: dP^T = V dO^T, dS = P (dP - delta), dK += dS^T Q; the first one issues the loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from ..config.roles import LOAD_WARP, WARPS_PER_GROUP, DqWarps
from ..config.smem import chunks
from ..device import ds_store
from ..device.copy import (
    a_lane_offset,
    b_lane_offset,
    bulk_load,
    ds_offset,
    smem_ptr,
    stmatrix_x4,
    tma_load_tile,
)
from ..device.mma import gemm_accumulate, gemm_scores, pack_pair, registers_of, unpack_pair, zeros
from ..device.pipeline import arrive, expect_bytes, next_stage, once_read, wait
from ..device.relay import fence, pass_turn, peek, wait_turn
from .main_cleaning import clean_query_tile
from .main_dq import DqTile
from .main_setup import (
    Cta,
    MainConfig,
    first_tile,
    head_in_group,
    key_fragments,
    key_turn_of,
    next_tile,
    p_slot,
    tile_after,
    turn_counter,
    wait_for_tile,
)


@dataclass(frozen=True)
class QuerySources:
    """Where query tiles come from. `lse` and `delta` point at the rows of the CTA's head; with groups, where every tile
    may be another head's, at the first row of all."""

    tma_q: Any
    tma_do: Any
    lse: Any
    delta: Any
    heads_before: Any  # query heads before those of the batch entry
    padded_q: Any


def load_q(config: MainConfig, cta: Cta, src: QuerySources, stage, m_block, head) -> None:
    """Q of a query tile with its LSE rows; called by one elected thread, as `load_do`."""
    smem, headdim = config.smem, config.tile.headdim_qk
    places = (smem.q + stage * smem.q_bytes, smem.lse + stage * smem.row_bytes, smem.q_full + 8 * stage)
    _load(config, cta, src.tma_q, src.lse, headdim, places, src, m_block, head)


def load_do(config: MainConfig, cta: Cta, src: QuerySources, stage, m_block, head) -> None:
    """dO of a query tile with its delta rows."""
    smem, headdim = config.smem, config.tile.headdim_v
    places = (smem.do + stage * smem.do_bytes, smem.delta + stage * smem.row_bytes, smem.do_full + 8 * stage)
    _load(config, cta, src.tma_do, src.delta, headdim, places, src, m_block, head)


def _load(config: MainConfig, cta: Cta, tma, rows, headdim: int, places, src: QuerySources, m_block, head) -> None:
    """`places`: offsets of the tile, of its fp32 rows and of the barrier that they complete on."""
    dst, rows_dst, bar = (cta.smem + place for place in places)
    tile_m, row_bytes = config.tile.tile_m, config.smem.row_bytes
    expect_bytes(bar, chunks(headdim) * tile_m * 128 + row_bytes)
    tma_load_tile(tma, dst, bar, m_block * tile_m, head, cta.batch, tile_m, chunks(headdim))
    first = m_block * tile_m
    if config.grouped:
        first += Int64(src.heads_before + head) * src.padded_q
    bulk_load(rows_dst, rows + first, row_bytes, bar)


class GradientGroup:
    def __init__(self, config: MainConfig):
        self.config = config
        self.dq = DqTile(config)
        self.relays = config.relay and config.tile.dq is not DqWarps.DQ_GROUP  # else the dQ group waits for its turns

    @cute.jit
    def run(self, cta: Cta, src: QuerySources):
        """Walk the query tiles; returns the dK accumulator (unscaled)."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        keys = cta.warp_in_group * config.warp_keys
        acc_dk = zeros(tile.key_blocks * (tile.headdim_qk // 8) * 4)
        v_frags = key_fragments(config, cta.smem + smem.v + keys * 128, lane, tile.headdim_v, in_registers=True)
        kv_read = once_read(cta.smem + smem.kv_read, registers_of(v_frags, tile.headdim_v))
        arrive(lane, config.every_lane_arrives, kv_read)

        # The dO tile to load next, do_stages ahead of the tile in work; the next Q tile is a fixed number of tiles on.
        assert tile.q_stages >= tile.do_stages
        load_block, load_head = first_tile(config, cta)
        if cta.warp == LOAD_WARP:
            wait(cta.smem + smem.kv_read, Int32(0))  # the pipelines lie where V was
        for stage in cutlass.range_constexpr(tile.q_stages):
            if cta.warp == LOAD_WARP and stage < cta.tiles:
                block_s, head_s = tile_after(config, cta, load_block, load_head, stage)
                if prims.elect_sync():
                    load_q(config, cta, src, stage, block_s, head_s)
                    if cutlass.const_expr(stage < tile.do_stages):
                        load_do(config, cta, src, stage, block_s, head_s)
                cute.arch.sync_warp()
        load_block, load_head = tile_after(config, cta, load_block, load_head, tile.do_stages)

        q_stage, p_stage, ds_stage, do_stage = Int32(0), Int32(0), Int32(0), Int32(0)
        q_phase, p_phase, ds_phase, do_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        m_block, head = first_tile(config, cta)
        added_block, added_head = first_tile(config, cta)  # relay: the tile whose dQ is added next
        seen = Int32(0)
        for t in cutlass.range(0, cta.tiles, unroll=1):
            if cutlass.const_expr(config.padded):
                place = (q_stage, q_phase, do_stage, do_phase)
                clean_query_tile(config, cta, m_block, *place, head_in_group(config, cta, head) & 1)
            if cutlass.const_expr(self.relays):
                seen = peek(turn_counter(config, cta, m_block, head))
            stages = (q_stage, q_phase, do_stage, do_phase)
            if cutlass.const_expr(config.warps_skip):
                if cta.mask.drops_tile(m_block * tile.tile_m, tile.tile_m, cta.first_key + keys, config.warp_keys):
                    wait_for_tile(config, cta, *stages)
                    arrive(lane, config.every_lane_arrives, cta.smem + smem.do_empty + 8 * do_stage)
                else:
                    ds_frags = self.score_gradients(cta, v_frags, do_stage, do_phase, p_stage, p_phase)
                    kept = self.place_of_ds(cta, m_block, head) if config.keeps_ds_ahead else None
                    self.add_dk(cta, acc_dk, ds_frags, q_stage, q_phase, kept)
                    if cutlass.const_expr(config.stores_ds and not config.keeps_ds_ahead):
                        self.keep_ds(ds_frags, self.place_of_ds(cta, m_block, head))
                    p_stage, p_phase = next_stage(p_stage, p_phase, tile.p_stages)
                arrive(lane, config.every_lane_arrives, cta.smem + smem.q_empty + 8 * q_stage)
            else:
                ds_frags = self.score_gradients(cta, v_frags, do_stage, do_phase, p_stage, p_phase)
                p_stage, p_phase = next_stage(p_stage, p_phase, tile.p_stages)
                if cutlass.const_expr(config.dq_in_main):
                    wait(cta.smem + smem.ds_empty + 8 * ds_stage, ds_phase ^ 1)
                    if cutlass.const_expr(self.relays):
                        fence()
                        if t >= tile.ds_stages:
                            pass_turn(turn_counter(config, cta, added_block, added_head), lane)
                            added_block, added_head = next_tile(config, cta, added_block, added_head)
                        turn = key_turn_of(config, cta, m_block)
                        wait_turn(turn_counter(config, cta, m_block, head), turn, seen, lane)
                    self.store_ds(cta, ds_frags, ds_stage)
                self.add_dk(cta, acc_dk, ds_frags, q_stage, q_phase)

            if cta.warp == LOAD_WARP:
                if t + tile.do_stages < cta.tiles:
                    wait(cta.smem + smem.do_empty + 8 * do_stage, do_phase)
                    if prims.elect_sync():
                        load_do(config, cta, src, do_stage, load_block, load_head)
                    cute.arch.sync_warp()
            if cutlass.const_expr(not config.warps_skip):
                arrive(lane, config.every_lane_arrives, cta.smem + smem.q_empty + 8 * q_stage)
            if cutlass.const_expr(tile.dq is DqWarps.BOTH_GROUPS):
                self.dq.add(cta, cta.warp_in_group + WARPS_PER_GROUP, m_block, head, ds_stage, ds_phase)
            if cta.warp == LOAD_WARP:
                if t + tile.q_stages < cta.tiles:
                    wait(cta.smem + smem.q_empty + 8 * q_stage, q_phase)
                    ahead = tile.q_stages - tile.do_stages
                    q_block, q_head = tile_after(config, cta, load_block, load_head, ahead)
                    if prims.elect_sync():
                        load_q(config, cta, src, q_stage, q_block, q_head)
                    cute.arch.sync_warp()
            load_block, load_head = next_tile(config, cta, load_block, load_head)
            m_block, head = next_tile(config, cta, m_block, head)
            if cutlass.const_expr(config.dq_in_main):
                ds_stage, ds_phase = next_stage(ds_stage, ds_phase, tile.ds_stages)
            q_stage, q_phase = next_stage(q_stage, q_phase, tile.q_stages)
            do_stage, do_phase = next_stage(do_stage, do_phase, tile.do_stages)
        if cutlass.const_expr(self.relays):
            for i in cutlass.range_constexpr(tile.ds_stages):  # the tiles whose turn is still held
                if cta.tiles >= tile.ds_stages - i:
                    wait(cta.smem + smem.ds_empty + 8 * ds_stage, ds_phase ^ 1)
                    fence()
                    pass_turn(turn_counter(config, cta, added_block, added_head), lane)
                    added_block, added_head = next_tile(config, cta, added_block, added_head)
                ds_stage, ds_phase = next_stage(ds_stage, ds_phase, tile.ds_stages)
        return acc_dk

    @cute.jit
    def score_gradients(self, cta: Cta, v_frags, do_stage, do_phase, p_stage, p_phase):
        """dS^T as A operands of dK: [key_blocks][tile_m / 16][4] registers; P comes from the partner warp."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        wait(cta.smem + smem.do_full + 8 * do_stage, do_phase)
        do_tile = cta.smem + smem.do + do_stage * smem.do_bytes + b_lane_offset(lane)
        acc_dp = gemm_scores(v_frags, do_tile, tile.headdim_v, tile.tile_m, config.dtype)
        wait(cta.smem + smem.p_full + 8 * (p_stage * 4 + cta.warp_in_group), p_phase)
        p = p_slot(config, cta, p_stage, cta.warp_in_group)
        delta = smem_ptr(cta.smem + smem.delta + do_stage * smem.row_bytes + 8 * (lane & 3), Float32)
        ds: list = [[[None] * 4 for _ in range(tile.tile_m // 16)] for _ in range(tile.key_blocks)]
        for k in cutlass.range_constexpr(tile.tile_m // 16):
            rows = [(delta + 16 * k + 8 * e).load(count=2, alignment=8) for e in range(2)]
            for block in cutlass.range_constexpr(tile.key_blocks):
                pairs = (p + (block * (tile.tile_m // 16) + k) * 128).load(count=4, alignment=16)
                for e in cutlass.range_constexpr(4):
                    row, dp = rows[e >> 1], acc_dp[block][2 * k + (e >> 1)]
                    lo, hi = unpack_pair(pairs[e], config.dtype)
                    lo, hi = lo * (dp[2 * (e & 1)] - row[0]), hi * (dp[2 * (e & 1) + 1] - row[1])
                    ds[block][k][e] = pack_pair(lo, hi, config.dtype)
        # dS took in dP and delta, so that dO and its delta rows have been read.
        registers = [register for block in ds for step in block for register in step]
        do_empty = once_read(cta.smem + smem.do_empty + 8 * do_stage, registers)
        p_empty = cta.smem + smem.p_empty + 8 * (p_stage * 4 + cta.warp_in_group)
        arrive(lane, config.every_lane_arrives, p_empty, do_empty)
        return ds

    @cute.jit
    def store_ds(self, cta: Cta, ds_frags, ds_stage):
        """dS^T of this warp's keys into a free stage, for the warps that compute dQ."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        keys = cta.warp_in_group * config.warp_keys
        ds_tile = cta.smem + smem.ds + ds_stage * smem.ds_bytes
        for block in cutlass.range_constexpr(tile.key_blocks):
            for k in cutlass.range_constexpr(tile.tile_m // 16):
                offset = ds_offset(keys + (lane & 7) + ((lane >> 3) & 1) * 8, 2 * k + (lane >> 4), tile.tile_m)
                stmatrix_x4(ds_tile + offset, 16 * block * tile.tile_m * 2, ds_frags[block][k])
        arrive(lane, config.every_lane_arrives, cta.smem + smem.ds_full + 8 * ds_stage)

    def place_of_ds(self, cta: Cta, m_block, head):
        """Where in workspace this lane leaves dS of a query tile."""
        config, tile, strips = self.config, self.config.tile, cta.ds
        query, key = m_block * tile.tile_m, cta.first_key + cta.warp_in_group * config.warp_keys
        head_strip = strips.before + head * strips.per_head
        return strips.base + ds_store.tile_offset(head_strip, query, key, strips.keys, cta.mask) + 4 * cta.lane

    @cute.jit
    def keep_ds(self, ds_frags, place):
        """dS^T of this warp's keys into workspace, straight from registers, for dq_gemm."""
        tile = self.config.tile
        for block in cutlass.range_constexpr(tile.key_blocks):
            for k in cutlass.range_constexpr(tile.tile_m // 16):
                value = cutlass.Vector.from_elements(tuple(ds_frags[block][k]), Int32)
                (place + ds_store.fragment_offset(k, block)).store(value, alignment=16)

    @cute.jit
    def add_dk(self, cta: Cta, acc_dk, ds_frags, q_stage, q_phase, kept=None):
        """acc_dk += dS^T Q; `kept`: where dS goes in workspace, if it is to go there ahead of the product."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
        if cutlass.const_expr(kept is not None):
            self.keep_ds(ds_frags, kept)
        q_tile = cta.smem + smem.q + q_stage * smem.q_bytes + a_lane_offset(lane)
        gemm_accumulate(acc_dk, ds_frags, q_tile, tile.headdim_qk, tile.tile_m, config.dtype)

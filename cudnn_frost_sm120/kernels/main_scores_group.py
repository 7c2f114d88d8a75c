"""Warps 0-3 of the main kernel: S^T = K Q^T, P = exp2(scale S - LSE), dV += P^T dO, and dQ."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config.roles import DqWarps
from ..device.copy import a_lane_offset, b_lane_offset, smem_ptr
from ..device.mma import gemm_accumulate, gemm_scores, pack_pair, registers_of, zeros
from ..device.pipeline import arrive, next_stage, once_read, wait
from ..device.scores import log2_probabilities, mask_log2, mask_packed
from .main_cleaning import clean_query_tile
from .main_dq import DqTile
from .main_setup import (
    Cta,
    MainConfig,
    first_tile,
    head_in_group,
    key_fragments,
    next_tile,
    p_slot,
    wait_for_tile,
)


class ScoresGroup:
    def __init__(self, config: MainConfig):
        self.config = config
        self.dq = DqTile(config)
        self.dq_lag = 1 if config.tile.dq is DqWarps.SCORES_GROUP else 0
        """Tiles by which dQ lags behind the scores, so that it does not wait for dS."""
        self.frees_do_late = config.tile.dq is DqWarps.DQ_GROUP
        """No branch comes between dV and the end of a tile: dO is freed behind the next tile's wait for Q."""
        assert not self.frees_do_late or config.tile.q_stages > 1  # else Q would wait for dO

    @cute.jit
    def run(self, cta: Cta, scale_log2):
        """Walk the query tiles; returns the dV accumulator."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        keys = cta.warp_in_group * config.warp_keys
        acc_dv = zeros(tile.key_blocks * (tile.headdim_v // 8) * 4)
        k_tile = cta.smem + smem.k + keys * 128
        k_frags = key_fragments(config, k_tile, lane, tile.headdim_qk, tile.k_in_registers)
        if cutlass.const_expr(not tile.keeps_k):
            kv_read = once_read(cta.smem + smem.kv_read, registers_of(k_frags, tile.headdim_qk))
            arrive(lane, config.every_lane_arrives, kv_read)

        q_stage, p_stage, ds_stage, do_stage = Int32(0), Int32(0), Int32(0), Int32(0)
        q_phase, p_phase, ds_phase, do_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        m_block, head = first_tile(config, cta)
        dq_block, dq_head = first_tile(config, cta)
        for t in cutlass.range(0, cta.tiles, unroll=1):
            if cutlass.const_expr(self.frees_do_late):
                # Ahead of the cleaning, in which this group waits for the warp that waits for dO to be free.
                wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
                if t > 0:
                    before = cutlass.select_(do_stage == 0, Int32(tile.do_stages - 1), do_stage - 1)
                    arrive(lane, config.every_lane_arrives, cta.smem + smem.do_empty + 8 * before)
            if cutlass.const_expr(config.padded):
                place = (q_stage, q_phase, do_stage, do_phase)
                clean_query_tile(config, cta, m_block, *place, head_in_group(config, cta, head) & 1)
            stages = (q_stage, q_phase, do_stage, do_phase)
            if cutlass.const_expr(config.warps_skip):
                if cta.mask.drops_tile(m_block * tile.tile_m, tile.tile_m, cta.first_key + keys, config.warp_keys):
                    wait_for_tile(config, cta, *stages)
                    arrive(lane, config.every_lane_arrives, cta.smem + smem.q_empty + 8 * q_stage)
                else:
                    self.visit(cta, acc_dv, k_frags, m_block, head, scale_log2, *stages, p_stage, p_phase)
                    p_stage, p_phase = next_stage(p_stage, p_phase, tile.p_stages)
            else:
                self.visit(cta, acc_dv, k_frags, m_block, head, scale_log2, *stages, p_stage, p_phase)
                p_stage, p_phase = next_stage(p_stage, p_phase, tile.p_stages)

            do_empty = cta.smem + smem.do_empty + 8 * do_stage  # behind a branch: pipeline.py says why
            if cutlass.const_expr(tile.dq.in_scores_group):
                if t >= self.dq_lag:
                    self.dq.add(cta, cta.warp_in_group, dq_block, dq_head, ds_stage, ds_phase, do_empty)
                    ds_stage, ds_phase = next_stage(ds_stage, ds_phase, tile.ds_stages)
                    dq_block, dq_head = next_tile(config, cta, dq_block, dq_head)
                else:
                    arrive(lane, config.every_lane_arrives, do_empty)
            elif cutlass.const_expr(not self.frees_do_late):
                arrive(lane, config.every_lane_arrives, do_empty)
            m_block, head = next_tile(config, cta, m_block, head)
            q_stage, q_phase = next_stage(q_stage, q_phase, tile.q_stages)
            do_stage, do_phase = next_stage(do_stage, do_phase, tile.do_stages)
        if cutlass.const_expr(self.dq_lag > 0):
            if cta.tiles > 0:
                self.dq.add(cta, cta.warp_in_group, dq_block, dq_head, ds_stage, ds_phase)
        return acc_dv

    @cute.jit
    def visit(
        self,
        cta: Cta,
        acc_dv,
        k_frags,
        m_block,
        head,
        scale_log2,
        q_stage,
        q_phase,
        do_stage,
        do_phase,
        p_stage,
        p_phase,
    ):
        """P of a query tile, to the partner warp and into dV; frees the Q stage."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        keys = cta.warp_in_group * config.warp_keys
        wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
        q_tile = cta.smem + smem.q + q_stage * smem.q_bytes + b_lane_offset(lane)
        acc_s = gemm_scores(k_frags, q_tile, tile.headdim_qk, tile.tile_m, config.dtype)
        p_frags = self.probabilities(cta, acc_s, m_block, head, keys, q_stage, scale_log2)

        wait(cta.smem + smem.p_empty + 8 * (p_stage * 4 + cta.warp_in_group), p_phase ^ 1)
        hand_over = p_slot(config, cta, p_stage, cta.warp_in_group)
        for block in cutlass.range_constexpr(tile.key_blocks):
            for k in cutlass.range_constexpr(tile.tile_m // 16):
                value = cutlass.Vector.from_elements(tuple(p_frags[block][k]), Int32)
                (hand_over + (block * (tile.tile_m // 16) + k) * 128).store(value, alignment=16)
        # P took in every score, so that Q and its LSE rows have been read.
        handed_over = cta.smem + smem.p_full + 8 * (p_stage * 4 + cta.warp_in_group)
        arrive(lane, config.every_lane_arrives, handed_over, cta.smem + smem.q_empty + 8 * q_stage)

        wait(cta.smem + smem.do_full + 8 * do_stage, do_phase)
        do_tile = cta.smem + smem.do + do_stage * smem.do_bytes + a_lane_offset(lane)
        gemm_accumulate(acc_dv, p_frags, do_tile, tile.headdim_v, tile.tile_m, config.dtype)

    @cute.jit
    def probabilities(self, cta: Cta, acc_s, m_block, head, keys, q_stage, scale_log2):
        """P^T as A operands of dV: [key_blocks][tile_m / 16][4] registers."""
        tile, smem = self.config.tile, self.config.smem
        columns = tile.tile_m // 8
        lse = smem_ptr(cta.smem + smem.lse + q_stage * smem.row_bytes + 8 * (cta.lane & 3), Float32)
        query, key = m_block * tile.tile_m, cta.first_key + keys
        place = (cta.batch, head, query, key, cta.lane)
        x = log2_probabilities(acc_s, lse, cta.bias, *place, scale_log2, tile.key_blocks, tile.tile_m)
        early = cta.bias is not None  # with a bias, masking late takes more registers than there are
        if cutlass.const_expr(early):
            mask_log2(x, cta.mask, query, key, cta.lane, tile.key_blocks, tile.tile_m)
        p = cutlass.Array(Int32, tile.key_blocks * columns * 2, alignment=16)
        for at in cutlass.range_constexpr(tile.key_blocks * columns * 2):
            ex = [cute.math.exp2(x[2 * at + e], fastmath=True) for e in range(2)]
            p[at] = pack_pair(ex[0], ex[1], self.config.dtype)
        if cutlass.const_expr(not early):
            mask_packed(p, cta.mask, query, key, cta.lane, tile.key_blocks, tile.tile_m)
        return [
            [[p[(block * columns + 2 * k) * 2 + e] for e in range(4)] for k in range(columns // 2)]
            for block in range(tile.key_blocks)
        ]

"""Warps 0-3 of the main kernel: S^T = K Q^T, P = exp2(scale S - LSE), dV += P^T dO, and dQ."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config.roles import THREADS, NamedBarrier
from ..device.copy import a_lane_offset, b_lane_offset, smem_ptr
from ..device.mma import gemm_accumulate, gemm_scores, pack_pair
from ..device.pipeline import arrive, next_stage, wait
from .main_cleaning import clean_query_tile
from .main_dq import DqTile
from .main_setup import Cta, MainConfig, key_fragments, next_tile


class ScoresGroup:
    """dQ lags one tile behind the scores, so that it does not wait for dS (unless both groups compute it)."""

    def __init__(self, config: MainConfig):
        self.config = config
        self.dq = DqTile(config)

    @cute.jit
    def run(self, cta: Cta, scale_log2):
        """Walk the query tiles; returns the dV accumulator."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        keys = cta.warp_in_group * config.warp_keys
        acc_dv = cutlass.Array(Float32, tile.key_blocks * (tile.headdim_v // 8) * 4, alignment=16)
        for x in cutlass.range_constexpr(tile.key_blocks * (tile.headdim_v // 8) * 4):
            acc_dv[x] = Float32(0.0)
        a_lane, b_lane = a_lane_offset(lane), b_lane_offset(lane)
        k_tile = cta.smem + smem.k + keys * 128
        k_frags = key_fragments(config, k_tile, lane, tile.headdim_qk, tile.k_in_registers)
        cute.arch.barrier(barrier_id=NamedBarrier.V_CONSUMED, number_of_threads=THREADS)

        q_stage, p_stage, ds_stage, do_stage = Int32(0), Int32(0), Int32(0), Int32(0)
        q_phase, p_phase, ds_phase, do_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        m_block, head, dq_block, dq_head = cta.begin, cta.first_head_q, cta.begin, cta.first_head_q
        for t in cutlass.range(0, cta.tiles, unroll=1):
            if cutlass.const_expr(config.padded):
                clean_query_tile(config, cta, m_block, q_stage, q_phase, do_stage, do_phase)
            wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
            acc_s = gemm_scores(
                k_frags, cta.smem + smem.q + q_stage * smem.q_bytes + b_lane, tile.headdim_qk, tile.tile_m, config.dtype
            )
            arrive(lane, cta.smem + smem.q_empty + 8 * q_stage)
            p_frags = self.probabilities(cta, acc_s, m_block, head, keys, q_stage, scale_log2)

            wait(cta.smem + smem.p_empty + 8 * (p_stage * 4 + cta.warp_in_group), p_phase ^ 1)
            hand_over = smem_ptr(
                cta.smem + smem.p + p_stage * smem.p_bytes + cta.warp_in_group * (smem.p_bytes // 4) + lane * 16
            )
            for block in cutlass.range_constexpr(tile.key_blocks):
                for k in cutlass.range_constexpr(tile.tile_m // 16):
                    value = cutlass.Vector.from_elements(tuple(p_frags[block][k]), Int32)
                    (hand_over + (block * (tile.tile_m // 16) + k) * 128).store(value, alignment=16)
            arrive(lane, cta.smem + smem.p_full + 8 * (p_stage * 4 + cta.warp_in_group))

            wait(cta.smem + smem.do_full + 8 * do_stage, do_phase)
            gemm_accumulate(
                acc_dv,
                p_frags,
                cta.smem + smem.do + do_stage * smem.do_bytes + a_lane,
                tile.headdim_v,
                tile.tile_m,
                config.dtype,
            )
            arrive(lane, cta.smem + smem.do_empty + 8 * do_stage)

            if cutlass.const_expr(tile.dq_both_groups):
                self.dq.add(cta, cta.warp_in_group, dq_block, dq_head, ds_stage, ds_phase)
                ds_stage, ds_phase = next_stage(ds_stage, ds_phase, tile.ds_stages)
                dq_block, dq_head = next_tile(config, cta, dq_block, dq_head)
            elif t > 0:
                self.dq.add(cta, cta.warp_in_group, dq_block, dq_head, ds_stage, ds_phase)
                ds_stage, ds_phase = next_stage(ds_stage, ds_phase, tile.ds_stages)
                dq_block, dq_head = next_tile(config, cta, dq_block, dq_head)
            m_block, head = next_tile(config, cta, m_block, head)
            q_stage, q_phase = next_stage(q_stage, q_phase, tile.q_stages)
            do_stage, do_phase = next_stage(do_stage, do_phase, tile.do_stages)
            p_stage, p_phase = next_stage(p_stage, p_phase, tile.p_stages)
        if cutlass.const_expr(not tile.dq_both_groups):
            if cta.tiles > 0:
                self.dq.add(cta, cta.warp_in_group, dq_block, dq_head, ds_stage, ds_phase)
        return acc_dv

    @cute.jit
    def probabilities(self, cta: Cta, acc_s, m_block, head, keys, q_stage, scale_log2):
        """P^T as A operands of dV: [key_blocks][tile_m / 16][4] registers.

        Scaled first, masked second: `-inf` never meets the scale, which may be negative or zero.
        """
        config, tile, lane = self.config, self.config.tile, cta.lane
        columns = tile.tile_m // 8
        x = cutlass.Array(Float32, tile.key_blocks * columns * 4, alignment=16)
        lse = smem_ptr(cta.smem + config.smem.lse + q_stage * config.smem.row_bytes + 8 * (lane & 3), Float32)
        for j in cutlass.range_constexpr(columns):
            pair = (lse + 8 * j).load(count=2, alignment=8)
            for block in cutlass.range_constexpr(tile.key_blocks):
                for e in cutlass.range_constexpr(4):
                    x[(block * columns + j) * 4 + e] = acc_s[block][j][e] * scale_log2 - pair[e & 1]
        query, key = m_block * tile.tile_m, cta.first_key + keys
        if cutlass.const_expr(config.bias_dtype is not None):
            self.add_bias(cta, x, head, query, key)
        if cta.mask.cuts_tile(query, tile.tile_m, key, config.warp_keys):
            for block in cutlass.range_constexpr(tile.key_blocks):
                for half in cutlass.range_constexpr(2):
                    own = key + 16 * block + 8 * half + (lane >> 2)
                    first, end = cta.mask.first_query(own), cta.mask.end_query(own)
                    for j in cutlass.range_constexpr(columns):
                        for e in cutlass.range_constexpr(2):
                            at = (block * columns + j) * 4 + 2 * half + e
                            own_query = query + 8 * j + 2 * (lane & 3) + e
                            drop = own_query < first
                            if cutlass.const_expr(end is not None):
                                drop = drop | (own_query >= end)
                            x[at] = cutlass.select_(drop, Float32(float("-inf")), x[at])
        p = [[[None] * 4 for _ in range(tile.tile_m // 16)] for _ in range(tile.key_blocks)]
        for block in cutlass.range_constexpr(tile.key_blocks):
            for j in cutlass.range_constexpr(columns):
                at = (block * columns + j) * 4
                ex = [cute.math.exp2(x[at + e], fastmath=True) for e in range(4)]
                p[block][j >> 1][(j & 1) * 2] = pack_pair(ex[0], ex[1], config.dtype)
                p[block][j >> 1][(j & 1) * 2 + 1] = pack_pair(ex[2], ex[3], config.dtype)
        return p

    @cute.jit
    def add_bias(self, cta: Cta, x, head, query, key):
        """x[key_blocks][tile_m / 8][4], scores in log2 units, plus the bias of the tile at (query, key)."""
        tile, lane, bias = self.config.tile, cta.lane, cta.bias
        columns = tile.tile_m // 8
        own_query, own_key = query + 2 * (lane & 3), key + (lane >> 2)
        origin = bias.tile(cta.batch, head, own_query, own_key)
        for block in cutlass.range_constexpr(tile.key_blocks):
            for half in cutlass.range_constexpr(2):
                key_offset = bias.key_offset(own_key, 16 * block + 8 * half)
                for j in cutlass.range_constexpr(columns):
                    for e in cutlass.range_constexpr(2):
                        at = (block * columns + j) * 4 + 2 * half + e
                        x[at] = x[at] + bias.log2(origin + (bias.query_offset(own_query, 8 * j + e) + key_offset))

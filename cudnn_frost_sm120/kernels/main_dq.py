"""dQ of one query tile: dS K, added to the fp32 accumulator in global memory."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from ..device import accumulator
from ..device.copy import a_lane_offset, ds_offset, ldmatrix_x4, reduce_add_v4
from ..device.mma import mma
from ..device.pipeline import arrive, wait
from .main_setup import Cta, MainConfig, head_in_group


class DqTile:
    """The warps that compute dQ split a [tile_m, headdim] tile: `rows` query rows each, columns dealt to the rest."""

    def __init__(self, config: MainConfig):
        tile = config.tile
        self.config = config
        self.row_blocks = tile.dq_rows_per_warp // accumulator.ROWS
        self.row_warps = tile.tile_m // tile.dq_rows_per_warp
        self.warps = tile.dq_warps
        self.column_warps = self.warps // self.row_warps
        self.steps = tile.headdim_qk // self.column_warps // 16  # 16-column steps of a warp
        assert self.steps * self.column_warps * 16 == tile.headdim_qk
        self.stride = self.column_warps if tile.dq_interleaved else 1  # between a warp's steps

    @cute.jit
    def add(self, cta: Cta, dq_warp, m_block, head, stage, phase, read=None):
        """Wait for dS of the stage, which belongs to this query tile, free it, and add its product with K.

        `read`: the barrier of a stage that the products before this one have read.

        In the relay a full stage also means that it is this CTA's turn (main_gradient_group).
        """
        config, smem, lane = self.config, self.config.smem, cta.lane
        wait(cta.smem + smem.ds_full + 8 * stage, phase)
        if cutlass.const_expr(read is not None):
            arrive(lane, config.every_lane_arrives, read)
        acc_dq = self.product(cta, dq_warp, stage, self.key_fragments(cta, dq_warp))
        if cutlass.const_expr(not config.relay):
            arrive(lane, config.every_lane_arrives, cta.smem + smem.ds_empty + 8 * stage)
        self.reduce(cta, dq_warp, m_block, head, acc_dq)
        if cutlass.const_expr(config.relay):  # the stage's next owner hands the turn on: only now
            arrive(lane, config.every_lane_arrives, cta.smem + smem.ds_empty + 8 * stage)

    def first_step(self, dq_warp):
        column_warp = dq_warp // self.row_warps
        return column_warp if self.config.tile.dq_interleaved else column_warp * self.steps

    def key_fragments(self, cta: Cta, dq_warp) -> Callable[[int, int], list]:
        """`(k, j) -> B fragments` of K, of 16 key rows and the warp's 16-column step j, read when called for."""
        tile, first_step, k_lane = self.config.tile, self.first_step(dq_warp), a_lane_offset(cta.lane)

        def load(k: int, j: int) -> list:
            if self.stride % 4 == 0:  # whole chunks apart: one base, constant offsets
                base = cta.smem + (first_step >> 2) * (tile.tile_n * 128) + (k_lane ^ ((first_step & 3) << 5))
                return ldmatrix_x4(base, self.stride * j // 4 * tile.tile_n * 128 + 16 * k * 128, transpose=True)
            step = first_step + self.stride * j
            base = cta.smem + (step >> 2) * (tile.tile_n * 128) + (k_lane ^ ((step & 3) << 5))
            return ldmatrix_x4(base, 16 * k * 128, transpose=True)

        return load

    @cute.jit
    def product(self, cta: Cta, dq_warp, stage, key_frags: cutlass.Constexpr) -> list:
        """The warp's part of dS K, [row blocks][columns / 8][4]; `key_frags` as `key_fragments` returns it."""
        config, tile, smem, lane = self.config, self.config.tile, self.config.smem, cta.lane
        row_warp = dq_warp % self.row_warps
        ds = cta.smem + smem.ds + stage * smem.ds_bytes
        acc_dq = [[None] * (2 * self.steps) for _ in range(self.row_blocks)]
        for k in cutlass.range_constexpr(tile.tile_n // 16):
            a = []
            for m in cutlass.range_constexpr(self.row_blocks):
                chunk = 2 * (row_warp * self.row_blocks + m) + ((lane >> 3) & 1)
                offset = ds_offset((lane & 7) + (lane >> 4) * 8, chunk, tile.tile_m)
                a.append(ldmatrix_x4(ds + offset, 16 * k * tile.tile_m * 2, transpose=True))
            for j in cutlass.range_constexpr(self.steps):
                b = key_frags(k, j)
                for m in cutlass.range_constexpr(self.row_blocks):
                    for e in cutlass.range_constexpr(2):
                        c = acc_dq[m][2 * j + e]
                        acc_dq[m][2 * j + e] = mma(c, a[m], b[2 * e], b[2 * e + 1], config.dtype)
        return acc_dq

    @cute.jit
    def reduce(self, cta: Cta, dq_warp, m_block, head, acc_dq):
        """Add the warp's part of a query tile's dQ to the accumulator."""
        config, tile, lane = self.config, self.config.tile, cta.lane
        row_warp, first_step = dq_warp % self.row_warps, self.first_step(dq_warp)
        accum = cta.dq_accum
        if cutlass.const_expr(config.grouped):
            accum = accum + Int64(head_in_group(config, cta, head)) * cta.dq_head_stride
        row_block = m_block * (tile.tile_m // accumulator.ROWS) + row_warp * self.row_blocks
        target = accum + accumulator.fragment_offset(row_block, 2 * first_step, tile.headdim_qk) + 4 * lane
        for m in cutlass.range_constexpr(self.row_blocks):
            for j in cutlass.range_constexpr(2 * self.steps):
                column = 2 * self.stride * (j // 2) + j % 2
                reduce_add_v4(target + accumulator.fragment_offset(m, column, tile.headdim_qk), acc_dq[m][j])

"""Warps 8-11 of the main kernel, where a configuration has them: dQ of every query tile, with K held in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.pipeline import arrive, next_stage, once_read, wait
from ..device.relay import fence, pass_turn, peek, wait_turn
from .main_dq import DqTile
from .main_setup import Cta, MainConfig, first_tile, key_turn_of, next_tile, turn_counter


class DqGroup:
    def __init__(self, config: MainConfig):
        self.config = config
        self.dq = DqTile(config)

    @cute.jit
    def run(self, cta: Cta):
        """Walk the query tiles. In the relay a warp waits for its turn, adds, and hands the turn on by itself."""
        config, tile, smem, lane, warp = self.config, self.config.tile, self.config.smem, cta.lane, cta.warp_in_group
        load = self.dq.key_fragments(cta, warp)
        keys = [[load(k, j) for j in range(self.dq.steps)] for k in range(tile.tile_n // 16)]
        registers = [register for step in keys for fragment in step for register in fragment]
        arrive(lane, config.every_lane_arrives, once_read(cta.smem + smem.kv_read, registers))
        stage, phase = Int32(0), Int32(0)
        m_block, head = first_tile(config, cta)
        seen = Int32(-1)
        for t in cutlass.range(0, cta.tiles, unroll=1):
            wait(cta.smem + smem.ds_full + 8 * stage, phase)
            acc_dq = self.dq.product(cta, warp, stage, lambda k, j: keys[k][j])
            arrive(lane, config.every_lane_arrives, cta.smem + smem.ds_empty + 8 * stage)
            counter = turn_counter(config, cta, m_block, head) if config.relay else None
            if cutlass.const_expr(config.relay):
                wait_turn(counter, key_turn_of(config, cta, m_block), seen, lane)
            self.dq.reduce(cta, warp, m_block, head, acc_dq)
            m_block, head = next_tile(config, cta, m_block, head)
            if cutlass.const_expr(config.relay):
                if t + 1 < cta.tiles:
                    seen = peek(turn_counter(config, cta, m_block, head))
                cute.arch.sync_warp()
                fence()
                pass_turn(counter, lane)
            stage, phase = next_stage(stage, phase, tile.ds_stages)

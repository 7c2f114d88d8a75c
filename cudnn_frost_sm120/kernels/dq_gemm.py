"""dQ = scale * dS K from the dS that the main kernel left in workspace: one CTA per query tile, in registers.

A CTA's warps own query rows. K streams past them through shared memory; dS goes from global memory straight into the
fragments of the MMA (device/ds_store.py), a key tile ahead. One order of key tiles, fp32 sums in registers, one write:
deterministic, and nothing to zero, to add to or to convert.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Int32, Int64, Uint8
from cutlass.experimental import primitives as prims

from ..config.gemm import STAGES, TILE_M, TILE_N, column_warps
from ..config.smem import ROW_BYTES, chunks
from ..device import ds_store
from ..device.block_range import key_tiles
from ..device.copy import a_lane_offset, gmem_ptr, scale_of, smem_ptr, tensor_map, tma_load_tile, zero_rows
from ..device.mask import Mask
from ..device.mma import gemm_accumulate, transposed_a, zeros
from ..device.pipeline import arrive, expect_bytes, next_stage, wait
from ..device.scheduler import key_tile_of
from .main_epilogue import store_rows
from .main_setup import MainConfig, mask_of
from .operands import Common, Strided

STEPS = TILE_N // 16
ROW_BLOCKS = 2
WARP_ROWS = 16 * ROW_BLOCKS


class DqGemmKernel:
    """A warp reads K once for its 32 query rows; it sums all columns of dQ, or half of them at wide head dims."""

    def __init__(self, config: MainConfig):
        self.config = config
        self.headdim = config.tile.headdim_qk
        self.column_warps = column_warps(self.headdim)
        self.row_warps = TILE_M // WARP_ROWS
        self.warps = self.row_warps * self.column_warps
        self.threads = 32 * self.warps
        assert config.tile.tile_m % WARP_ROWS == 0  # a warp's rows lie in one query tile of the main kernel
        self.k_bytes = chunks(self.headdim) * TILE_N * ROW_BYTES
        self.full = STAGES * self.k_bytes
        self.empty = self.full + 8 * STAGES
        self.smem_bytes = self.empty + 8 * STAGES

    @cute.kernel
    def kernel(
        self,
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        dq: Strided,
        common: Common,
        first_head: Int32,
    ):
        config, tile, extents, band = self.config, self.config.tile, common.extents, common.band
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tid & 31, cute.arch.make_warp_uniform(tid >> 5)
        m_blocks = (extents.seqlen_q + (TILE_M - 1)) // TILE_M
        block = block + first_head * m_blocks
        m_block, head, batch = key_tile_of(block, m_blocks, extents.heads_q, extents.batch, common.head_group)
        if cutlass.const_expr(config.mask.right):
            m_block = m_blocks - 1 - m_block  # the longest first
        head_k = head // (extents.heads_q // extents.heads_k)
        seqlen, mask = mask_of(config, batch, common)
        begin, end = key_tiles(m_block, TILE_M, TILE_N, seqlen, mask)
        query = m_block * TILE_M + warp % self.row_warps * WARP_ROWS
        first_column = 0 if self.column_warps == 1 else warp // self.row_warps * (64 // self.column_warps)
        # What the main kernel visits, in tiles of its query rows: the rest of dS was never written.
        main_block = query >> (tile.tile_m.bit_length() - 1)
        own_begin, own_end = key_tiles(main_block, tile.tile_m, TILE_N, seqlen, mask)

        storage = cutlass.Array(Uint8, self.smem_bytes, space=cutlass.AddressSpace.smem, alignment=1024)
        base = Int32(storage.data_ptr().toint(Int32))
        if tid == 0:
            lanes = 32 if config.every_lane_arrives else 1
            for stage in cutlass.range_constexpr(STAGES):
                prims.mbarrier_init(smem_ptr(base + self.full + 8 * stage, Int64), 1)
                prims.mbarrier_init(smem_ptr(base + self.empty + 8 * stage, Int64), lanes * self.warps)
            prims.fence_mbarrier_init()
        cute.arch.barrier()
        for stage in cutlass.range_constexpr(STAGES):
            if (warp == 0) & (begin + stage < end):
                if prims.elect_sync():
                    self.load_k(tma_k, base, Int32(stage), begin + stage, head_k, batch)
                cute.arch.sync_warp()

        keys = ds_store.strip_keys(extents.seqlen_k, config.mask, band.left_bound, band.right_bound)
        head_strip = (batch * extents.heads_q + head) * ds_store.strips(extents.seqlen_q)
        offset = ds_store.tile_offset(head_strip, query, begin * TILE_N, keys, mask)
        source = gmem_ptr(common.scratch.ds, Int32) + offset + 4 * lane
        ds = cutlass.Array(Int32, ROW_BLOCKS * STEPS * 4, alignment=16)
        for x in cutlass.range_constexpr(ROW_BLOCKS * STEPS * 4):
            ds[x] = Int32(0)
        acc = zeros(ROW_BLOCKS * (self.headdim // 8 // self.column_warps) * 4)

        # Up to here nothing depends on the main kernel: K is the caller's.
        cute.arch.griddepcontrol_wait()
        main_query = main_block * tile.tile_m
        if (begin == own_begin) & (own_begin < own_end):
            self.load_ds(ds, source, mask, main_query, begin * TILE_N)
        stage, phase = Int32(0), Int32(0)
        before, before_phase = Int32(0), Int32(0)  # the stage and phase of the tile before
        for n_block in cutlass.range(begin, end, unroll=1):
            # Refill the stage of the tile before: by now every warp has left it, or is about to.
            if (warp == 0) & (n_block > begin) & (n_block - 1 + STAGES < end):
                wait(base + self.empty + 8 * before, before_phase)
                if prims.elect_sync():
                    self.load_k(tma_k, base, before, n_block - 1 + STAGES, head_k, batch)
                cute.arch.sync_warp()
            k_tile = base + stage * self.k_bytes
            wait(base + self.full + 8 * stage, phase)
            if cutlass.const_expr(config.padded):
                self.clean(k_tile, tid, mask.len_k - n_block * TILE_N)
            source = source + ds_store.fragment_offset(0, STEPS)
            if (n_block >= own_begin) & (n_block < own_end):
                frags = [
                    [transposed_a([ds[(m * STEPS + k) * 4 + e] for e in range(4)]) for k in range(STEPS)]
                    for m in range(ROW_BLOCKS)
                ]
                if n_block + 1 < own_end:
                    self.load_ds(ds, source, mask, main_query, (n_block + 1) * TILE_N)
                k_rows = (k_tile + a_lane_offset(lane)) ^ (2 * first_column)
                gemm_accumulate(acc, frags, k_rows, self.headdim, TILE_N, config.dtype, column_warps=self.column_warps)
            elif (n_block + 1 == own_begin) & (own_begin < own_end):
                self.load_ds(ds, source, mask, main_query, (n_block + 1) * TILE_N)
            arrive(lane, config.every_lane_arrives, base + self.empty + 8 * stage)
            before, before_phase = stage, phase
            stage, phase = next_stage(stage, phase, STAGES)

        scale = scale_of(common.scale, common.scale_address)
        target = (dq, batch, head, query, first_column, extents.seqlen_q, extents.headdim_qk)
        store_rows(acc, *target, scale, config.dtype, lane, ROW_BLOCKS, self.headdim, self.column_warps)

    def load_k(self, tma_k, base, stage, n_block, head_k, batch) -> None:
        """Called by one elected thread."""
        bar = base + self.full + 8 * stage
        expect_bytes(bar, self.k_bytes)
        k_tile = base + stage * self.k_bytes
        tma_load_tile(tma_k, k_tile, bar, n_block * TILE_N, head_k, batch, TILE_N, chunks(self.headdim))

    @cute.jit
    def load_ds(self, ds, source, mask: Mask, main_query, key):
        """ds[ROW_BLOCKS][STEPS][4] of the key tile at `key`; zeros where a warp of the main kernel passed over."""
        config = self.config
        steps = config.warp_keys // 16
        for part in cutlass.range_constexpr(STEPS // steps):
            first_key = key + part * config.warp_keys
            if mask.drops_tile(main_query, config.tile.tile_m, first_key, config.warp_keys):
                for m in cutlass.range_constexpr(ROW_BLOCKS):
                    for x in cutlass.range_constexpr(4 * steps):
                        ds[(m * STEPS + part * steps) * 4 + x] = Int32(0)
            else:
                self.load_steps(ds, source, part * steps, steps)

    def load_steps(self, ds, source, first: int, steps: int) -> None:
        for m in range(ROW_BLOCKS):
            for k in range(first, first + steps):
                value = (source + ds_store.fragment_offset(m, k)).load(count=4, alignment=16)
                for e in range(4):
                    ds[(m * STEPS + k) * 4 + e] = value[e]

    @cute.jit
    def clean(self, k_tile, tid, valid):
        """Zero the rows past the key length in the last tile: padded storage may hold NaN, and 0 * NaN is NaN."""
        if valid < TILE_N:
            zero_rows(k_tile, valid, TILE_N, chunks(self.headdim), tid, self.threads)
            cute.arch.barrier()

    @cute.jit
    def launch(
        self,
        k: Strided,
        dq: Strided,
        common: Common,
        first_head: Int32,
        heads: Int32,
        stream,
    ):
        """`heads` (batch, query head) from `first_head` on, a multiple of `head_group`."""
        e = common.extents
        tma_k = tensor_map(self.config.dtype, k, (e.batch, e.heads_k, e.seqlen_k, e.headdim_qk), TILE_N)
        grid = (e.seqlen_q + (TILE_M - 1)) // TILE_M * heads
        self.kernel(tma_k, dq, common, first_head).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

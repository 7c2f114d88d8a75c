"""dQ by recomputing the scores: one CTA per query tile, the key tiles streamed past it; in place of preprocess.

S and dP are computed a second time (the main kernel needs them transposed), and in return dQ is summed in registers, in
one order: deterministic, no fp32 accumulator to zero, add to, read back and convert. Pays where a query tile sees few
key tiles: narrow windows, short sequences. The rows' statistics, which every later kernel reads, are written here too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as prims

from ..config.padding import padded_queries
from ..config.recompute import ROW_WARPS, TILE_M, recompute_tile
from ..config.smem import chunks
from ..device.bias import LOG2_E, Bias
from ..device.block_range import key_tiles
from ..device.copy import (
    a_lane_offset,
    b_lane_offset,
    gmem_ptr,
    scale_of,
    smem_ptr,
    tma_load_tile,
    zero_rows,
)
from ..device.mask import Mask
from ..device.mma import a_fragments, gemm_accumulate, gemm_scores, pack_pair, registers_of, zeros
from ..device.pipeline import arrive, expect_bytes, next_stage, once_read, wait
from ..device.scheduler import key_tile_of
from .main_setup import MainConfig, mask_of, tensor_maps
from .operands import Common, Strided
from .row_statistics import RowStatistics


class DqRecomputeKernel:
    def __init__(self, config: MainConfig):
        self.config = config
        self.tile = recompute_tile(config.tile.headdim_qk, config.tile.headdim_v)
        self.statistics = RowStatistics(config, self.tile.threads)

    @cute.kernel
    def kernel(
        self,
        tma_q: cutlass.GridConstant[cuda.TensorMap],
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        tma_v: cutlass.GridConstant[cuda.TensorMap],
        tma_do: cutlass.GridConstant[cuda.TensorMap],
        o: Strided,
        do: Strided,
        lse: Strided,
        dq: Strided,
        common: Common,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        config, tile, extents, bias = self.config, self.tile, common.extents, common.bias
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tid & 31, cute.arch.make_warp_uniform(tid >> 5)
        row_warp, key_warp = warp % ROW_WARPS, warp // ROW_WARPS
        m_blocks = padded_queries(extents.seqlen_q) // TILE_M
        m_block, head, batch = key_tile_of(block, m_blocks, extents.heads_q, extents.batch, common.head_group)
        if cutlass.const_expr(config.mask.right):
            m_block = m_blocks - 1 - m_block  # the longest first
        head_k = head // (extents.heads_q // extents.heads_k)
        first_query = m_block * TILE_M
        seqlen, mask = mask_of(config, batch, common)
        begin, end = key_tiles(m_block, TILE_M, tile.tile_n, seqlen, mask)

        storage = cutlass.Array(Uint8, tile.total, space=cutlass.AddressSpace.smem, alignment=1024)
        base = Int32(storage.data_ptr().toint(Int32))
        if tid == 0:
            lanes = 32 if config.every_lane_arrives else 1
            prims.mbarrier_init(smem_ptr(base + tile.query_full, Int64), 1)
            prims.mbarrier_init(smem_ptr(base + tile.query_read, Int64), lanes * tile.threads // 32)
            for stage in cutlass.range_constexpr(tile.stages):
                prims.mbarrier_init(smem_ptr(base + tile.full + 8 * stage, Int64), 1)
                prims.mbarrier_init(smem_ptr(base + tile.empty + 8 * stage, Int64), lanes * tile.threads // 32)
            prims.fence_mbarrier_init()
            bar = base + tile.query_full
            expect_bytes(bar, tile.q_bytes + tile.do_bytes)
            tma_load_tile(tma_q, base + tile.q, bar, first_query, head, batch, TILE_M, chunks(tile.headdim_qk))
            tma_load_tile(tma_do, base + tile.do, bar, first_query, head, batch, TILE_M, chunks(tile.headdim_v))
            for stage in cutlass.range_constexpr(tile.early_stages):
                if begin + stage < end:
                    self.load(tma_k, tma_v, base, Int32(stage), begin + stage, head_k, batch)
        shared = base + tile.rows
        self.statistics.write(
            tid, batch, head, first_query, o, do, lse, common.scratch, extents, common.lengths, shared
        )
        cute.arch.barrier()

        # Row `lane / 4` of this warp's 16, and the one 8 below it.
        query = first_query + 16 * row_warp
        own_rows = smem_ptr(shared, Float32) + (16 * row_warp + (lane >> 2))
        own_lse = [(own_rows + 8 * half).load() for half in range(2)]
        own_delta = [(own_rows + (TILE_M + 8 * half)).load() for half in range(2)]

        wait(base + tile.query_full, Int32(0))
        rows = 16 * row_warp * 128 + a_lane_offset(lane)
        q_frags = a_fragments(base + tile.q + rows, tile.headdim_qk, TILE_M, 1, tile.q_in_registers)
        do_frags = a_fragments(base + tile.do + rows, tile.headdim_v, TILE_M, 1, in_registers=True)
        if cutlass.const_expr(tile.early_stages < tile.stages):
            registers = registers_of(do_frags, tile.headdim_v)
            if cutlass.const_expr(tile.q_in_registers):
                registers = registers + registers_of(q_frags, tile.headdim_qk)
            arrive(lane, config.every_lane_arrives, once_read(base + tile.query_read, registers))
            if warp == 0:
                wait(base + tile.query_read, Int32(0))
        for stage in cutlass.range_constexpr(tile.early_stages, tile.stages):
            if (warp == 0) & (begin + stage < end):
                if prims.elect_sync():
                    self.load(tma_k, tma_v, base, Int32(stage), begin + stage, head_k, batch)
                cute.arch.sync_warp()

        acc = zeros(tile.headdim_qk // 2)
        scale = scale_of(common.scale, common.scale_address)
        values = None if bias is None else Bias(config.bias_dtype, *bias, extents.seqlen_q, extents.seqlen_k)
        stage, phase = Int32(0), Int32(0)
        before, before_phase = Int32(0), Int32(0)  # the stage and phase of the tile before
        for n_block in cutlass.range(begin, end, unroll=1):
            # Free the stage of the tile before, and refill it: by now every warp has left it, or is about to.
            if n_block > begin:
                arrive(lane, config.every_lane_arrives, base + tile.empty + 8 * before)
            if (warp == 0) & (n_block > begin) & (n_block - 1 + tile.stages < end):
                wait(base + tile.empty + 8 * before, before_phase)
                if prims.elect_sync():
                    self.load(tma_k, tma_v, base, before, n_block - 1 + tile.stages, head_k, batch)
                cute.arch.sync_warp()
            wait(base + tile.full + 8 * stage, phase)
            k_tile = base + tile.ring + stage * tile.stage_bytes
            if cutlass.const_expr(config.padded):
                self.clean(k_tile, tid, mask.len_k - n_block * tile.tile_n)
            for part in cutlass.range_constexpr(tile.warp_keys // tile.score_keys):
                row = key_warp * tile.warp_keys + part * tile.score_keys
                place = (batch, head, query, n_block * tile.tile_n + row, lane)
                operands = (q_frags, do_frags, k_tile, row, mask, values, place, own_lse, own_delta, scale * LOG2_E)
                if cutlass.const_expr(mask.kinds.right or mask.kinds.left):
                    if not mask.drops_tile(query, 16, place[3], tile.score_keys):
                        self.add(acc, *operands)
                else:
                    self.add(acc, *operands)
            before, before_phase = stage, phase
            stage, phase = next_stage(stage, phase, tile.stages)

        if cutlass.const_expr(tile.key_warps > 1):
            self.sum_key_warps(acc, base, row_warp, key_warp, lane)
        if key_warp == 0:
            self.store(acc, dq, batch, head, query + (lane >> 2), lane, seqlen, scale, extents.headdim_qk)

    def load(self, tma_k, tma_v, base, stage, n_block, head_k, batch) -> None:
        """K and V of a key tile; called by one elected thread."""
        tile = self.tile
        bar, dst = base + tile.full + 8 * stage, base + tile.ring + stage * tile.stage_bytes
        key, rows = n_block * tile.tile_n, tile.tile_n
        expect_bytes(bar, tile.stage_bytes)
        tma_load_tile(tma_k, dst, bar, key, head_k, batch, rows, chunks(tile.headdim_qk))
        tma_load_tile(tma_v, dst + tile.k_bytes, bar, key, head_k, batch, rows, chunks(tile.headdim_v))

    @cute.jit
    def clean(self, k_tile, tid, valid):
        """Zero the rows past the key length in the last tile: padded storage may hold NaN, and 0 * NaN is NaN."""
        tile = self.tile
        if valid < tile.tile_n:
            zero_rows(k_tile, valid, tile.tile_n, chunks(tile.headdim_qk), tid, tile.threads)
            zero_rows(k_tile + tile.k_bytes, valid, tile.tile_n, chunks(tile.headdim_v), tid, tile.threads)
            cute.arch.barrier()

    @cute.jit
    def add(
        self,
        acc,
        q_frags,
        do_frags,
        k_tile,
        row,
        mask: Mask,
        bias: Bias | None,
        place,
        own_lse,
        own_delta,
        scale_log2,
    ):
        """acc += dS K for key rows from `row` of the tile on; `place`: (batch, head, query, key, lane) of the scores.

        Value e of a lane in columns 8 j: query lane / 4 + 8 (e / 2), key 8 j + 2 (lane % 4) + e % 2.
        """
        tile, dtype, keys = self.tile, self.config.dtype, self.tile.score_keys
        lane = place[4]
        b_rows = row * 128 + b_lane_offset(lane)
        s = gemm_scores(q_frags, k_tile + b_rows, tile.headdim_qk, keys, dtype, tile.tile_n)[0]
        dp = gemm_scores(do_frags, k_tile + tile.k_bytes + b_rows, tile.headdim_v, keys, dtype, tile.tile_n)[0]
        ds = cutlass.Array(Int32, keys // 4, alignment=16)
        for j in cutlass.range_constexpr(keys // 8):
            x = [s[j][e] * scale_log2 - own_lse[e >> 1] for e in range(4)]
            if cutlass.const_expr(bias is not None):
                self.add_bias(x, bias, place, j)
            p = [cute.math.exp2(value, fastmath=True) for value in x]
            g = [p[e] * (dp[j][e] - own_delta[e >> 1]) for e in range(4)]
            for half in cutlass.range_constexpr(2):
                ds[2 * j + half] = pack_pair(g[2 * half], g[2 * half + 1], dtype)
        self.mask_packed(ds, mask, place)
        frags = [[[ds[4 * k + e] for e in range(4)] for k in range(keys // 16)]]
        a_rows = row * 128 + a_lane_offset(lane)
        gemm_accumulate(acc, frags, k_tile + a_rows, tile.headdim_qk, keys, dtype, tile.tile_n)

    def add_bias(self, x: list, bias: Bias, place, j: int) -> None:
        batch, head, query, key, lane = place
        own_query, own_key = query + (lane >> 2), key + 2 * (lane & 3)
        origin = bias.tile(batch, head, own_query, own_key)
        for e in range(4):
            offset = bias.query_offset(own_query, 8 * (e >> 1)) + bias.key_offset(own_key, 8 * j + (e & 1))
            x[e] = x[e] + bias.log2(origin + offset)

    @cute.jit
    def mask_packed(self, ds, mask: Mask, place):
        """Zero what the mask drops of ds[keys / 8][2]: pairs of keys in the lane's two query rows."""
        _, _, query, key, lane = place
        keys = self.tile.score_keys
        if mask.cuts_tile(query, 16, key, keys):
            for half in cutlass.range_constexpr(2):
                own_query = query + (lane >> 2) + 8 * half
                first, end = mask.first_key(own_query), mask.end_key(own_query)
                for j in cutlass.range_constexpr(keys // 8):
                    keep = Int32(0)
                    for e in cutlass.range_constexpr(2):
                        own_key = key + 8 * j + 2 * (lane & 3) + e
                        drop = own_key >= end
                        if cutlass.const_expr(first is not None):
                            drop = drop | (own_key < first)
                        keep = keep | cutlass.select_(drop, Int32(0), Int32(-0x10000 if e else 0xFFFF))
                    ds[2 * j + half] = ds[2 * j + half] & keep

    @cute.jit
    def sum_key_warps(self, acc, base, row_warp, key_warp, lane):
        """Add the sums of the second key warp to those of the first, through shared memory."""
        count = self.tile.headdim_qk // 2
        slot = smem_ptr(base + (row_warp * count * 32 + lane) * 4, Float32)
        cute.arch.barrier()  # every warp is done with the tiles
        if key_warp == 1:
            for x in cutlass.range_constexpr(count):
                (slot + 32 * x).store(acc[x])
        cute.arch.barrier()
        if key_warp == 0:
            for x in cutlass.range_constexpr(count):
                acc[x] = acc[x] + (slot + 32 * x).load()

    @cute.jit
    def store(self, acc, dq: Strided, batch, head, row, lane, seqlen, scale, headdim_out):
        """Write the rows and columns that exist; rows past the query length as zeros, whatever Q holds there."""
        target = gmem_ptr(dq.address, self.config.dtype) + dq.row(batch, head, row) + 2 * (lane & 3)
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < seqlen.seqlen_q:
                counts = row + 8 * half < seqlen.len_q
                for j in cutlass.range_constexpr(self.tile.headdim_qk // 8):
                    if 8 * j < headdim_out:
                        pair = pack_pair(
                            acc[4 * j + 2 * half] * scale, acc[4 * j + 2 * half + 1] * scale, self.config.dtype
                        )
                        if cutlass.const_expr(self.config.padded):
                            pair = cutlass.select_(counts, pair, Int32(0))
                        cutlass.Pointer(target + 8 * half * dq.stride_s + 8 * j, dtype=Int32).store(pair)

    @cute.jit
    def launch(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        o: Strided,
        do: Strided,
        lse: Strided,
        dq: Strided,
        common: Common,
        stream,
    ):
        dtype, tile, e = self.config.dtype, self.tile, common.extents
        maps = tensor_maps(dtype, q, k, v, do, e, TILE_M, tile.tile_n)
        grid = padded_queries(e.seqlen_q) // TILE_M * e.heads_q * e.batch
        self.kernel(*maps, o, do, lse, dq, common).launch(
            grid=(grid, 1, 1),
            block=(tile.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=tile.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; left out, the compiler asks a device
        )

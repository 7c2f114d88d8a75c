"""dBias = dS summed over the dims that the bias broadcasts, as a kernel of its own behind the preprocess kernel.

One CTA owns one tile of dBias and walks everything that is summed into it (batches, heads, and query or key tiles where
those are broadcast) in one fixed order, in fp32 registers: deterministic, no workspace, no atomics. The price is that S
and dP are computed a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as prims

from ..config.padding import padded_queries
from ..config.smem import chunks
from ..device.bias import LOG2_E, Bias
from ..device.block_range import query_tiles
from ..device.copy import (
    b_lane_offset,
    bulk_load,
    gmem_ptr,
    scale_of,
    smem_ptr,
    tma_load_tile,
    zero_rows,
)
from ..device.mma import gemm_scores, zeros
from ..device.pipeline import expect_bytes, wait
from ..device.scores import log2_probabilities, mask_log2
from ..device.select import maximum, minimum
from .main_setup import MainConfig, key_fragments, mask_of, tensor_maps
from .operands import BiasOperand, Common, Extents, Strided

WARPS = 4
THREADS = 32 * WARPS
TILE_N = 16 * WARPS


@dataclass(frozen=True)
class DbiasConfig:
    """`over_*`: that dim of dBias has extent 1, so the kernel sums over it."""

    dtype: Any  # of dBias
    over_q: bool
    over_k: bool


class DbiasKernel:
    def __init__(self, main: MainConfig, config: DbiasConfig):
        self.config = config
        tile_m = 64 if max(main.tile.headdim_qk, main.tile.headdim_v) <= 128 else 32
        self.main = replace(main, tile=replace(main.tile, tile_m=tile_m, key_blocks=1))
        tile = self.main.tile
        self.q = 0
        self.do = self.q + chunks(tile.headdim_qk) * tile_m * 128
        self.k = self.do + chunks(tile.headdim_v) * tile_m * 128
        self.v = self.k + chunks(tile.headdim_qk) * TILE_N * 128
        self.lse = self.v + chunks(tile.headdim_v) * TILE_N * 128
        self.delta = self.lse + tile_m * 4
        self.full = self.delta + tile_m * 4
        self.sums = self.full + 16  # fp32 [WARPS][tile_m], for the sum over keys
        self.smem_bytes = self.sums + WARPS * tile_m * 4
        self.load_bytes = self.lse + 2 * tile_m * 4

    @cute.kernel
    def kernel(
        self,
        tma_q: cutlass.GridConstant[cuda.TensorMap],
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        tma_v: cutlass.GridConstant[cuda.TensorMap],
        tma_do: cutlass.GridConstant[cuda.TensorMap],
        dbias: BiasOperand,
        common: Common,
        batches: Int32,
        heads: Int32,
    ):
        extents, scratch = common.extents, common.scratch
        main, tile, over_q, over_k = self.main, self.main.tile, self.config.over_q, self.config.over_k
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tid & 31, cute.arch.make_warp_uniform(tid >> 5)
        m_blocks = (extents.seqlen_q + (tile.tile_m - 1)) // tile.tile_m
        n_blocks = (extents.seqlen_k + (TILE_N - 1)) // TILE_N
        n_tiles, m_tiles = (1 if over_k else n_blocks), (1 if over_q else m_blocks)
        n_own, rest = block % n_tiles, block // n_tiles
        m_own, rest = rest % m_tiles, rest // m_tiles
        head_own, batch_own = rest % heads, rest // heads

        storage = cutlass.Array(Uint8, self.smem_bytes, space=cutlass.AddressSpace.smem, alignment=1024)
        base = Int32(storage.data_ptr().toint(Int32))
        if tid == 0:
            prims.mbarrier_init(smem_ptr(base + self.full, Int64), 1)
            prims.fence_mbarrier_init()
        acc = zeros(tile.tile_m // 2)
        padded_q = padded_queries(extents.seqlen_q)
        group = extents.heads_q // extents.heads_k
        values = Bias(main.bias_dtype, *common.bias, extents.seqlen_q, extents.seqlen_k)
        b_lane, keys = b_lane_offset(lane), 16 * warp
        phase = Int32(0)
        scale_log2 = scale_of(common.scale, common.scale_address) * LOG2_E
        cute.arch.griddepcontrol_wait()
        for batch in cutlass.range(batch_own, extents.batch, batches, unroll=1):
            seqlen, mask = mask_of(main, batch, common)
            for n_block in cutlass.range(n_own, n_blocks, n_tiles, unroll=1):
                begin, end = query_tiles(n_block, tile.tile_m, TILE_N, seqlen, mask)
                if cutlass.const_expr(not over_q):  # this CTA's query tile, where the key tile visits it at all
                    begin, end = maximum(begin, m_own), minimum(end, m_own + 1)
                for head in cutlass.range(head_own, extents.heads_q, heads, unroll=1):
                    for m_block in cutlass.range(begin, end, unroll=1):
                        cute.arch.barrier()  # the last tile is consumed (and, at first, the barrier is there)
                        if tid == 0:
                            bar, query, key = base + self.full, m_block * tile.tile_m, n_block * TILE_N
                            expect_bytes(bar, self.load_bytes)
                            qk, vo, head_k = chunks(tile.headdim_qk), chunks(tile.headdim_v), head // group
                            tma_load_tile(tma_q, base + self.q, bar, query, head, batch, tile.tile_m, qk)
                            tma_load_tile(tma_do, base + self.do, bar, query, head, batch, tile.tile_m, vo)
                            tma_load_tile(tma_k, base + self.k, bar, key, head_k, batch, TILE_N, qk)
                            tma_load_tile(tma_v, base + self.v, bar, key, head_k, batch, TILE_N, vo)
                            row = Int64(batch * extents.heads_q + head) * padded_q + query
                            bulk_load(base + self.lse, gmem_ptr(scratch.lse, Float32) + row, tile.tile_m * 4, bar)
                            bulk_load(base + self.delta, gmem_ptr(scratch.delta, Float32) + row, tile.tile_m * 4, bar)
                        wait(base + self.full, phase)
                        phase = phase ^ 1
                        if cutlass.const_expr(main.padded):
                            self.clean(base, tid, seqlen, m_block, n_block)
                        k_tile, v_tile = base + self.k + keys * 128, base + self.v + keys * 128
                        k_frags = key_fragments(main, k_tile, lane, tile.headdim_qk, in_registers=False)
                        v_frags = key_fragments(main, v_tile, lane, tile.headdim_v, in_registers=False)
                        acc_s = gemm_scores(k_frags, base + self.q + b_lane, tile.headdim_qk, tile.tile_m, main.dtype)
                        acc_dp = gemm_scores(v_frags, base + self.do + b_lane, tile.headdim_v, tile.tile_m, main.dtype)
                        lse = smem_ptr(base + self.lse + 8 * (lane & 3), Float32)
                        delta = smem_ptr(base + self.delta + 8 * (lane & 3), Float32)
                        place = (batch, head, m_block * tile.tile_m, n_block * TILE_N + keys, lane)
                        x = log2_probabilities(acc_s, lse, values, *place, scale_log2, 1, tile.tile_m)
                        mask_log2(x, mask, *place[2:], 1, tile.tile_m)
                        for j in cutlass.range_constexpr(tile.tile_m // 8):
                            rows = (delta + 8 * j).load(count=2, alignment=8)
                            for e in cutlass.range_constexpr(4):
                                p = cute.math.exp2(x[4 * j + e], fastmath=True)
                                acc[4 * j + e] = acc[4 * j + e] + p * (acc_dp[0][j][e] - rows[e & 1])
        first_query = Int32(0) if over_q else m_own * tile.tile_m
        first_key = Int32(0) if over_k else n_own * TILE_N
        target = gmem_ptr(dbias.address, self.config.dtype)
        target = target + (Int64(batch_own) * dbias.stride_b + Int64(head_own) * dbias.stride_h)
        self.store(base, target, dbias, acc, lane, warp, first_query, first_key, extents)

    @cute.jit
    def clean(self, base, tid, seqlen, m_block, n_block):
        """Zero the rows past the lengths: padded storage may hold NaN."""
        tile = self.main.tile
        queries, keys = seqlen.len_q - m_block * tile.tile_m, seqlen.len_k - n_block * TILE_N
        if (queries < tile.tile_m) | (keys < TILE_N):
            zero_rows(base + self.q, queries, tile.tile_m, chunks(tile.headdim_qk), tid, THREADS)
            zero_rows(base + self.do, queries, tile.tile_m, chunks(tile.headdim_v), tid, THREADS)
            zero_rows(base + self.k, keys, TILE_N, chunks(tile.headdim_qk), tid, THREADS)
            zero_rows(base + self.v, keys, TILE_N, chunks(tile.headdim_v), tid, THREADS)
            cute.arch.barrier()

    @cute.jit
    def store(self, base, target, dbias: BiasOperand, acc, lane, warp, first_query, first_key, extents: Extents):
        """Finish the sums over the tile where a dim is broadcast, and write every element of dBias that this CTA owns.

        acc[tile_m / 8][4]: key 16 warp + lane / 4 + 8 (e / 2), query 8 j + 2 (lane % 4) + e % 2.
        """
        tile_m, over_q, over_k = self.main.tile.tile_m, self.config.over_q, self.config.over_k
        out_q = 1 if over_q else extents.seqlen_q
        out_k = 1 if over_k else extents.seqlen_k
        sums = smem_ptr(base + self.sums, Float32)
        if cutlass.const_expr(over_q):  # one value for each of this lane's two keys
            per_key = [Float32(0.0), Float32(0.0)]
            for half in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(tile_m // 8):
                    per_key[half] = per_key[half] + (acc[4 * j + 2 * half] + acc[4 * j + 2 * half + 1])
                for step in cutlass.range_constexpr(2):
                    per_key[half] = per_key[half] + cute.arch.shuffle_sync_bfly(per_key[half], offset=1 << step)
            if cutlass.const_expr(over_k):
                total = per_key[0] + per_key[1]
                for step in cutlass.range_constexpr(2, 5):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
                if lane == 0:
                    (sums + warp).store(total)
                cute.arch.barrier()
                if (warp == 0) & (lane == 0):
                    result = Float32(0.0)
                    for w in cutlass.range_constexpr(WARPS):
                        result = result + (sums + w).load()
                    target.store(result.to(self.config.dtype))
            else:
                for half in cutlass.range_constexpr(2):
                    key = first_key + 16 * warp + (lane >> 2) + 8 * half
                    if ((lane & 3) == 0) & (key < out_k):
                        (target + Int64(key) * dbias.stride_k).store(per_key[half].to(self.config.dtype))
        elif cutlass.const_expr(over_k):
            for j in cutlass.range_constexpr(tile_m // 8):
                for e in cutlass.range_constexpr(2):
                    value = acc[4 * j + e] + acc[4 * j + 2 + e]
                    for step in cutlass.range_constexpr(2, 5):
                        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
                    if lane < 4:
                        (sums + (warp * tile_m + 8 * j + 2 * lane + e)).store(value)
            cute.arch.barrier()
            row = warp * 32 + lane
            if (row < tile_m) & (first_query + row < out_q):
                result = Float32(0.0)
                for w in cutlass.range_constexpr(WARPS):
                    result = result + (sums + (w * tile_m + row)).load()
                (target + Int64(first_query + row) * dbias.stride_q).store(result.to(self.config.dtype))
        else:
            for j in cutlass.range_constexpr(tile_m // 8):
                for e in cutlass.range_constexpr(4):
                    query = first_query + 8 * j + 2 * (lane & 3) + (e & 1)
                    key = first_key + 16 * warp + (lane >> 2) + 8 * (e >> 1)
                    if (query < out_q) & (key < out_k):
                        at = Int64(query) * dbias.stride_q + Int64(key) * dbias.stride_k
                        (target + at).store(acc[4 * j + e].to(self.config.dtype))

    @cute.jit
    def launch(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        do: Strided,
        dbias: BiasOperand,
        batches,
        heads,
        common: Common,
        stream,
    ):
        """`batches`, `heads`: extents of those dims of dBias."""
        e, dtype, tile = common.extents, self.main.dtype, self.main.tile
        maps = tensor_maps(dtype, q, k, v, do, e, tile.tile_m, TILE_N)
        m_tiles = 1 if self.config.over_q else (e.seqlen_q + (tile.tile_m - 1)) // tile.tile_m
        n_tiles = 1 if self.config.over_k else (e.seqlen_k + (TILE_N - 1)) // TILE_N
        self.kernel(*maps, dbias, common, batches, heads).launch(
            grid=(n_tiles * m_tiles * heads * batches, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

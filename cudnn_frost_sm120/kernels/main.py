"""The main kernel: five GEMMs, one CTA per key tile, the query tiles of its head group streamed past it.

Warp groups split the work by role (main_scores_group, main_gradient_group, main_dq_group). Scores are transposed (S^T =
K Q^T), so that a warp owns key rows and P^T, dS^T turn into A operands in registers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as prims

from ..config.padding import padded_queries
from ..config.roles import DQ_GROUP_REGISTERS, GROUP_REGISTERS, LOAD_WARP, WARPS, WARPS_PER_GROUP, DqWarps
from ..config.smem import chunks
from ..device import ds_store
from ..device.bias import LOG2_E, Bias
from ..device.block_range import query_tiles
from ..device.copy import gmem_ptr, scale_of, smem_ptr, tma_load_tile
from ..device.pipeline import expect_bytes, wait
from ..device.relay import take_ticket
from ..device.relay_order import ordered_key_tile
from ..device.scheduler import key_tile_of
from .main_cleaning import clean_key_tile
from .main_dq_group import DqGroup
from .main_epilogue import store_key_tile
from .main_gradient_group import GradientGroup, QuerySources
from .main_scores_group import ScoresGroup
from .main_setup import Cta, DsStrips, MainConfig, mask_of, tensor_maps
from .operands import Common, Scratch, Strided


class MainKernel:
    def __init__(self, config: MainConfig):
        self.config = config

    @cute.kernel
    def kernel(
        self,
        tma_q: cutlass.GridConstant[cuda.TensorMap],
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        tma_v: cutlass.GridConstant[cuda.TensorMap],
        tma_do: cutlass.GridConstant[cuda.TensorMap],
        dk: Strided,
        dv: Strided,
        common: Common,
        key_group: Int32,
        first_slot: Int32 | None,
    ):
        config, tile, smem = self.config, self.config.tile, self.config.smem
        scratch, extents, bias = common.scratch, common.extents, common.bias
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid >> 5)
        n_blocks = (extents.seqlen_k + (tile.tile_n - 1)) // tile.tile_n
        heads = extents.heads_q // extents.heads_per_cta  # CTAs per key tile
        storage = cutlass.Array(Uint8, smem.total, space=cutlass.AddressSpace.smem, alignment=1024)
        base = Int32(storage.data_ptr().toint(Int32))
        if cutlass.const_expr(config.relay):
            block = self.ticket(base, tid, scratch)
        if cutlass.const_expr(first_slot is not None):
            block = block + first_slot * n_blocks
        n_block, head, batch = key_tile_of(block, n_blocks, heads, extents.batch, common.head_group)
        if cutlass.const_expr(config.relay):
            n_block = ordered_key_tile(n_block, n_blocks, key_group)
        heads_walked = extents.heads_per_cta if config.grouped else 1
        first_head_q = head * heads_walked
        head_k, part = head, 0
        if cutlass.const_expr(config.grouped):
            head_k = head // extents.group_splits
            part = head - head_k * extents.group_splits

        seqlen, mask = mask_of(config, batch, common)
        begin, end = query_tiles(n_block, tile.tile_m, tile.tile_n, seqlen, mask)

        padded_q = padded_queries(extents.seqlen_q)
        first_row = Int64(batch * extents.heads_q + first_head_q) * padded_q
        dq_head_stride = Int64(padded_q) * tile.headdim_qk
        cta = Cta(
            smem=base,
            lane=tid & 31,
            warp=warp,
            batch=batch,
            head_k=head_k,
            part=part,
            first_head_q=first_head_q,
            end_head_q=first_head_q + heads_walked,
            first_key=n_block * tile.tile_n,
            begin=begin,
            end=end,
            tiles=(end - begin) * heads_walked,
            mask=mask,
            bias=None if bias is None else Bias(config.bias_dtype, *bias, extents.seqlen_q, extents.seqlen_k),
            turns=self.turns(scratch, first_row) if config.relay else None,
            head_turns=padded_q // tile.tile_m * WARPS_PER_GROUP,
            key_group=key_group,
            dq_accum=gmem_ptr(scratch.dq_accum, Float32) + first_row * tile.headdim_qk,
            dq_head_stride=dq_head_stride,
            ds=self.ds_strips(common, batch) if config.stores_ds else None,
        )
        if tid == 0:
            lanes = 32 if config.every_lane_arrives else 1
            for first, count, warps in smem.barriers():
                for i in cutlass.range_constexpr(count):
                    prims.mbarrier_init(smem_ptr(base + first + 8 * i, Int64), max(1, lanes * warps))
            prims.fence_mbarrier_init()
        cute.arch.barrier()
        if warp == LOAD_WARP:
            if prims.elect_sync():
                expect_bytes(base + smem.kv_full, smem.k_bytes + smem.v_bytes)
                for tma, dst, headdim in ((tma_k, smem.k, tile.headdim_qk), (tma_v, smem.v, tile.headdim_v)):
                    tma_load_tile(
                        tma, base + dst, base + smem.kv_full, cta.first_key, head_k, batch, tile.tile_n, chunks(headdim)
                    )
        # Up to here nothing depends on the preprocess kernel: K and V are the caller's.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        wait(base + smem.kv_full, Int32(0))
        if cutlass.const_expr(config.padded):
            clean_key_tile(config, cta, tid)

        scale = scale_of(common.scale, common.scale_address)
        if cutlass.const_expr(tile.dq is not DqWarps.DQ_GROUP):
            if warp < WARPS_PER_GROUP:
                self.scores(cta, common, scale, dv)
            else:
                self.gradients(cta, common, scale, dk, tma_q, tma_do, first_row, padded_q)
        elif warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_increase(GROUP_REGISTERS)
            self.scores(cta, common, scale, dv)
        elif warp < WARPS:
            cute.arch.setmaxregister_increase(GROUP_REGISTERS)
            self.gradients(cta, common, scale, dk, tma_q, tma_do, first_row, padded_q)
        else:
            cute.arch.setmaxregister_decrease(DQ_GROUP_REGISTERS)
            DqGroup(config).run(cta)

    @cute.jit
    def scores(self, cta: Cta, common: Common, scale, dv: Strided):
        """What the scores group does."""
        config, headdim = self.config, self.config.tile.headdim_v
        acc_dv = ScoresGroup(config).run(cta, scale * LOG2_E)
        extents, one = common.extents, Float32(1.0)
        store_key_tile(config, cta, acc_dv, dv, common.scratch.dv_partial, extents, one, extents.headdim_v, headdim)

    @cute.jit
    def gradients(self, cta: Cta, common: Common, scale, dk: Strided, tma_q, tma_do, first_row, padded_q):
        """What the gradient group does."""
        config, headdim = self.config, self.config.tile.headdim_qk
        extents, partial = common.extents, common.scratch.dk_partial
        first = 0 if config.grouped else first_row
        lse, delta = (gmem_ptr(a, Float32) + first for a in (common.scratch.lse, common.scratch.delta))
        sources = QuerySources(tma_q, tma_do, lse, delta, cta.batch * extents.heads_q, padded_q)
        acc_dk = GradientGroup(config).run(cta, sources)
        store_key_tile(config, cta, acc_dk, dk, partial, extents, scale, extents.headdim_qk, headdim)

    @cute.jit
    def ticket(self, base, tid, scratch: Scratch):
        """The CTA's place in the order of work, once the counters are zeroed."""
        cute.arch.griddepcontrol_wait()
        slot = smem_ptr(base + self.config.smem.ticket, Int32)
        if tid == 0:
            slot.store(take_ticket(gmem_ptr(scratch.ticket, Int32)))
        cute.arch.barrier()
        return slot.load()

    def ds_strips(self, common: Common, batch) -> DsStrips:
        extents, band = common.extents, common.band
        keys = ds_store.strip_keys(extents.seqlen_k, self.config.mask, band.left_bound, band.right_bound)
        per_head = ds_store.strips(extents.seqlen_q)
        return DsStrips(gmem_ptr(common.scratch.ds, Int32), batch * extents.heads_q * per_head, per_head, keys)

    def turns(self, scratch: Scratch, first_row):
        """The relay's counters of the head whose padded query rows start at `first_row`."""
        tile = self.config.tile
        return gmem_ptr(scratch.turns, Int32) + first_row // tile.tile_m * WARPS_PER_GROUP

    @cute.jit
    def launch(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        do: Strided,
        dk: Strided,
        dv: Strided,
        common: Common,
        key_group: Int32,
        first_slot: Int32 | None,
        slots: Int32,
        stream,
    ):
        """`slots` (batch, walked heads) from `first_slot` on, a multiple of `head_group`; None is from the first on."""
        dtype, tile, e = self.config.dtype, self.config.tile, common.extents

        maps = tensor_maps(dtype, q, k, v, do, e, tile.tile_m, tile.tile_n)
        n_blocks = (e.seqlen_k + (tile.tile_n - 1)) // tile.tile_n
        self.kernel(*maps, dk, dv, common, key_group, first_slot).launch(
            grid=(n_blocks * slots, 1, 1),
            block=(tile.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

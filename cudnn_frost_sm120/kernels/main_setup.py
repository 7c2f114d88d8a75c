"""What both warp groups of the main kernel share: compile-time parts, and the values of one CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from ..config.roles import WARPS_PER_GROUP
from ..config.smem import SmemLayout
from ..config.tiles import TileConfig
from ..device.bias import Bias
from ..device.copy import a_lane_offset, gmem_ptr, smem_ptr, tensor_map
from ..device.mask import Mask, MaskKinds
from ..device.mma import a_fragments
from ..device.pipeline import wait
from ..device.relay_order import key_turn
from ..device.seqlen import SeqlenInfo
from ..knobs import ReductionMode
from .operands import Common, Extents, Strided


@dataclass(frozen=True)
class MainConfig:
    """Everything the main kernel is specialised on."""

    dtype: Any
    tile: TileConfig
    mask: MaskKinds
    grouped: bool  # several query heads share a key head (GQA); a CTA walks all of them, or a part
    padded: bool  # per-batch lengths
    reduction: ReductionMode  # how dQ is summed
    bias_dtype: Any = None  # None: no bias
    every_lane_arrives: bool = False
    """For race checkers, which do not see that a lane's accesses are ordered by a warp barrier before lane 0 arrives:
    every lane arrives for itself. The same protocol, slower."""

    @property
    def relay(self) -> bool:
        """dQ is added in a fixed order (device/relay.py)."""
        return self.reduction is ReductionMode.RELAY

    @property
    def dq_in_main(self) -> bool:
        """The main kernel computes dQ, else a kernel of its own (dq_recompute, dq_gemm) does so."""
        return self.reduction.dq_in_main

    @property
    def recomputes(self) -> bool:
        """dq_recompute has computed dQ before the main kernel."""
        return self.reduction is ReductionMode.RECOMPUTE

    @property
    def stores_ds(self) -> bool:
        """The main kernel leaves dS in workspace, for dq_gemm."""
        return self.reduction is ReductionMode.DS_STORE

    @property
    def keeps_ds_ahead(self) -> bool:
        """dS goes to workspace ahead of dK's product, which then hides the stores, else behind it."""
        return self.stores_ds and self.tile.ds_ahead

    @property
    def warps_skip(self) -> bool:
        """A warp passes over tiles that the mask drops for its own keys; with dQ, every warp's dS is waited for."""
        return not self.dq_in_main

    @property
    def walks_down(self) -> bool:
        """A CTA walks the query tiles from the last one down, each for all heads of the group, else up, head by head.

        With a right bound alone, the last tile is where all CTAs of a head can start, and they then read the same tiles
        at about the same time. In the relay they walk up, as its turns do.
        """
        return not self.relay and self.mask.right and not self.mask.left

    @property
    def smem(self) -> SmemLayout:
        return SmemLayout(self.tile)

    @property
    def warp_keys(self) -> int:
        """Key rows of one warp."""
        return 16 * self.tile.key_blocks


@dataclass(frozen=True)
class DsStrips:
    """Where dS goes (device/ds_store.py): few multiplications lead from here to a tile, and each tile makes them."""

    base: Any  # pointer to the first strip of all
    before: Any  # strips before those of the batch entry
    per_head: Any  # strips of a head
    keys: Any  # that a strip has room for


@dataclass(frozen=True)
class Cta:
    """Values of one CTA. It walks `tiles` query tiles: `[begin, end)` of query heads `[first_head_q, end_head_q)`."""

    smem: Any  # 32-bit shared base address
    lane: Any
    warp: Any
    batch: Any
    head_k: Any
    part: Any  # which part of the group's query heads the CTA walks
    first_head_q: Any
    end_head_q: Any
    first_key: Any  # of the key tile
    begin: Any
    end: Any
    tiles: Any
    mask: Mask
    bias: Bias | None
    turns: Any  # pointer to the relay's counters of first_head_q: [query tile][warp pair]; None without the relay
    head_turns: Any  # counters of one head
    key_group: Any  # device/relay_order.py
    dq_accum: Any  # pointer to the fp32 accumulator of first_head_q
    dq_head_stride: Any  # fp32 values between the accumulators of two query heads
    ds: DsStrips | None  # None where no kernel reads dS

    @property
    def warp_in_group(self):
        return self.warp & 3


def mask_of(config: MainConfig, batch, common: Common):
    """(lengths, mask) of one batch entry."""
    extents, band, lengths = common.extents, common.band, common.lengths
    len_q, len_k = None, None
    if config.padded:
        len_q = gmem_ptr(lengths.seqlens_q, Int32)[batch]
        len_k = gmem_ptr(lengths.seqlens_k, Int32)[batch]
    seqlen = SeqlenInfo.create(extents.seqlen_q, extents.seqlen_k, len_q, len_k)
    diagonal = seqlen.diagonal(band.bottom_right != 0)
    return seqlen, Mask.create(config.mask, seqlen.len_q, seqlen.len_k, diagonal, band.left_bound, band.right_bound)


def tensor_maps(dtype, q: Strided, k: Strided, v: Strided, do: Strided, e: Extents, rows: int, keys: int) -> list:
    """Host side: the TMA descriptors of Q, K, V and dO, for tiles of `rows` query rows and `keys` key rows."""
    return [
        tensor_map(dtype, q, (e.batch, e.heads_q, e.seqlen_q, e.headdim_qk), rows),
        tensor_map(dtype, k, (e.batch, e.heads_k, e.seqlen_k, e.headdim_qk), keys),
        tensor_map(dtype, v, (e.batch, e.heads_k, e.seqlen_k, e.headdim_v), keys),
        tensor_map(dtype, do, (e.batch, e.heads_q, e.seqlen_q, e.headdim_v), rows),
    ]


def first_tile(config: MainConfig, cta: Cta):
    """The (query tile, query head) that a CTA starts with."""
    return cta.end - 1 if config.walks_down else cta.begin, cta.first_head_q


def next_tile(config: MainConfig, cta: Cta, m_block, head):
    """The (query tile, query head) after this one: after a head's last tile comes the next head's first; where the walk
    goes down, after a tile of the last head the next tile of the first."""
    if not config.grouped:
        return m_block - 1 if config.walks_down else m_block + 1, head
    if config.walks_down:
        last = head + 1 == cta.end_head_q
        return cutlass.select_(last, m_block - 1, m_block), cutlass.select_(last, cta.first_head_q, head + 1)
    last = m_block + 1 == cta.end
    return cutlass.select_(last, cta.begin, m_block + 1), cutlass.select_(last, head + 1, head)


def tile_after(config: MainConfig, cta: Cta, m_block, head, steps: int):
    """The (query tile, query head) a number of tiles after this one."""
    for _ in range(steps):
        m_block, head = next_tile(config, cta, m_block, head)
    return m_block, head


def head_in_group(config: MainConfig, cta: Cta, head):
    """Index of a query head among those the CTA walks."""
    return head - cta.first_head_q if config.grouped else 0


def key_fragments(config: MainConfig, tile_base, lane, headdim: int, in_registers: bool):
    """`a_fragments` of a warp's key rows in a [tile_n, headdim] smem tile; `tile_base` is at its first row."""
    tile = config.tile
    return a_fragments(tile_base + a_lane_offset(lane), headdim, tile.tile_n, tile.key_blocks, in_registers)


def wait_for_tile(config: MainConfig, cta: Cta, q_stage, q_phase, do_stage, do_phase) -> None:
    """Wait for a query tile that the mask drops for this warp's keys, before its stages are freed: a warp that ran
    ahead would arrive twice in one phase."""
    smem = config.smem
    wait(cta.smem + smem.q_full + 8 * q_stage, q_phase)
    wait(cta.smem + smem.do_full + 8 * do_stage, do_phase)


def turn_counter(config: MainConfig, cta: Cta, m_block, head):
    """The relay's counter of a query tile, for this warp and its partner."""
    index = m_block * WARPS_PER_GROUP + cta.warp_in_group
    return cta.turns + (head_in_group(config, cta, head) * cta.head_turns + index)


def key_turn_of(config: MainConfig, cta: Cta, m_block):
    """The CTA's turn in the relay to add to a query tile."""
    tile = config.tile
    return key_turn(cta.first_key // tile.tile_n, m_block, tile.tile_m, tile.tile_n, cta.mask, cta.key_group)


def p_slot(config: MainConfig, cta: Cta, stage, warp_in_group):
    """Where a warp of the scores group leaves P for its readers, as fragments: pointer at this lane's first one."""
    smem = config.smem
    return smem_ptr(
        cta.smem + smem.p + stage * smem.p_bytes + warp_in_group * (smem.p_bytes // WARPS_PER_GROUP) + cta.lane * 16
    )

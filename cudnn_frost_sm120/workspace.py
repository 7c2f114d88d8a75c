"""The workspace of a plan: one table of regions, the only place that computes their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from .config.padding import padded_keys, padded_queries
from .config.roles import WARPS_PER_GROUP
from .config.tiles import TileConfig
from .device import ds_store
from .device.mask import MaskKinds
from .facts import BwdFacts, effective_bounds
from .knobs import ReductionMode

REGION_ALIGNMENT = 256
WORKSPACE_ALIGNMENT = 16
"""Bytes: what the base address must be a multiple of (TMA bulk loads and 16-byte reductions)."""


@dataclass(frozen=True)
class Region:
    name: str  # a field of kernels.operands.Scratch
    offset: int  # bytes from the workspace base, a multiple of REGION_ALIGNMENT
    nbytes: int


@dataclass(frozen=True)
class WorkspaceTable:
    """Regions in address order. All sizes are Python integers: they pass 2^31 without notice."""

    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        last = self.regions[-1]
        return last.offset + last.nbytes

    def offset(self, name: str) -> int:
        """Byte offset of a region; 0 for one that the plan does not have."""
        return next((region.offset for region in self.regions if region.name == name), 0)


def layout(
    facts: BwdFacts, tile: TileConfig, heads_per_cta: int, mode: ReductionMode, ds_heads: int = 0
) -> WorkspaceTable:
    """Regions of a plan, linear in S but for that of dS, which has room for `ds_heads` (batch, query head).

    Per padded query row of a head: 4 bytes of LSE, 4 of delta, and 4 * (native headdim_qk) of fp32 dQ where the main
    kernel adds it up. Where the query heads of a group are split over CTAs, per padded key row of a key head and part:
    4 * (native head dims) of dK, dV.
    """
    rows = facts.batch * facts.heads_q * padded_queries(facts.seqlen_q)
    sizes = {"lse": 4 * rows, "delta": 4 * rows}
    if mode.dq_in_main:
        sizes["dq_accum"] = 4 * rows * tile.headdim_qk
    if mode is ReductionMode.DS_STORE:
        sizes["ds"] = ds_region_bytes(facts, ds_heads)
    if heads_per_cta < facts.group:
        parts = facts.batch * facts.heads_q // heads_per_cta * padded_keys(facts.seqlen_k)
        sizes |= {"dk_partial": 4 * parts * tile.headdim_qk, "dv_partial": 4 * parts * tile.headdim_v}
    if mode is ReductionMode.RELAY:
        sizes |= {"turns": 4 * rows // tile.tile_m * WARPS_PER_GROUP, "ticket": 4}
    regions, offset = [], 0
    for name, nbytes in sizes.items():
        regions.append(Region(name, offset, nbytes))
        offset = -(-(offset + nbytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return WorkspaceTable(tuple(regions))


def ds_region_bytes(facts: BwdFacts, heads: int) -> int:
    """What storing dS of so many (batch, query head) takes: 2 bytes for every padded query row and key that there is
    room for in its strip."""
    left, right = effective_bounds(facts)
    kinds = MaskKinds(right=right is not None, left=left is not None)
    keys = ds_store.strip_keys(facts.seqlen_k, kinds, left, right)
    return ds_store.ds_bytes(heads, facts.seqlen_q, keys)

"""The workspace of a plan: one table of regions, the only place that computes their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from .config.query_padding import padded_queries
from .config.tiles import TileConfig
from .facts import BwdFacts

REGION_ALIGNMENT = 256
WORKSPACE_ALIGNMENT = 16
"""Bytes: what the base address must be a multiple of (TMA bulk loads and 16-byte reductions)."""


@dataclass(frozen=True)
class Region:
    name: str
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
        return next(region.offset for region in self.regions if region.name == name)


def layout(facts: BwdFacts, tile: TileConfig) -> WorkspaceTable:
    """Regions of the atomic route, linear in S_q. Per padded query row of a head: 4 bytes of LSE, 4 of delta, and
    4 * (native headdim_qk) of fp32 dQ."""
    rows = facts.batch * facts.heads_q * padded_queries(facts.seqlen_q)
    sizes = {"lse": 4 * rows, "delta": 4 * rows, "dq_accum": 4 * rows * tile.headdim_qk}
    regions, offset = [], 0
    for name, nbytes in sizes.items():
        regions.append(Region(name, offset, nbytes))
        offset = -(-(offset + nbytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return WorkspaceTable(tuple(regions))

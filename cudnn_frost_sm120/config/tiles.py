"""Tile configurations of the main kernel: the rows of each native pair of head dims, with their evidence.

A native pair is what the MMAs run on. Other head dims (multiples of 8) run on the smallest native pair that covers
them: TMA zero-fills the missing columns in shared memory, and the epilogues do not store them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .roles import WARPS, WARPS_PER_GROUP, DqWarps


@dataclass(frozen=True)
class TileConfig:
    """Shape and staging of the main kernel for one native pair of head dims.

    `tile_m` query rows and `tile_n = 64 * key_blocks` key rows per tile; a warp owns `16 * key_blocks` key rows.
    `dq`: which warps compute dQ. `dq_interleaved`: a warp's dQ columns are 16-column steps dealt in turn instead of one
    contiguous block (one K base address, fewer registers). `k_in_registers`: K fragments of the scores are read once
    per key tile, else once per query tile (fewer registers, more loads). `ds_ahead`: dS for dq_gemm is stored ahead of
    dK's product, else behind it.
    """

    headdim_qk: int
    headdim_v: int
    tile_m: int
    key_blocks: int
    q_stages: int
    do_stages: int
    ds_stages: int
    p_stages: int
    dq: DqWarps = DqWarps.SCORES_GROUP
    dq_interleaved: bool = False
    k_in_registers: bool = True
    ds_ahead: bool = False
    evidence: str = field(default="", compare=False, repr=False)  # kernels do not depend on it

    @property
    def tile_n(self) -> int:
        return 64 * self.key_blocks

    @property
    def dq_warps(self) -> int:
        """Warps that share the dQ of a query tile."""
        return WARPS if self.dq is DqWarps.BOTH_GROUPS else WARPS_PER_GROUP

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return WARPS + (WARPS_PER_GROUP if self.dq is DqWarps.DQ_GROUP else 0)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    @property
    def keeps_k(self) -> bool:
        """K stays in shared memory, else it is read into registers once, as V is."""
        return not self.k_in_registers or self.dq.in_scores_group

    @property
    def dq_rows_per_warp(self) -> int:
        """Query rows (16 or 32) of a tile that one warp's dQ fragment covers: columns are dealt to the other warps."""
        columns_fit = self.tile_m == 64 or (self.headdim_qk // self.dq_warps) % 16 == 0
        return 32 if columns_fit else 16


_SWEEP = "swept among {} on the H200 (Hopper stand-in), 2026-11-30, whole chain of atomic adds, S 4096 bf16, TFLOP/s: "
_NARROW = "for grids of fewer CTAs than SMs: {} of the time of the row above, H200, 2026-11-30, B 1 H 8 S 1024"

TABLE: tuple[TileConfig, ...] = (
    TileConfig(32, 32, 64, 2, 4, 2, 1, 1, dq=DqWarps.DQ_GROUP, evidence=_SWEEP.format(3) + "258/242 full/causal"),
    TileConfig(32, 32, 64, 1, 2, 2, 2, 1, evidence="for small grids, as at D64; not timed against the row above"),
    TileConfig(64, 64, 64, 2, 3, 3, 1, 2, dq=DqWarps.DQ_GROUP, evidence=_SWEEP.format(10) + "354/331"),
    TileConfig(64, 64, 64, 1, 2, 2, 2, 1, evidence=_NARROW.format("0.72-0.75")),
    TileConfig(128, 128, 32, 2, 3, 2, 2, 1, dq_interleaved=True, evidence=_SWEEP.format(41) + "378/343"),
    TileConfig(128, 128, 32, 1, 3, 2, 2, 1, dq_interleaved=True, evidence=_NARROW.format("0.69-0.71")),
    TileConfig(
        192, 128, 32, 1, 3, 2, 2, 2, dq_interleaved=True, evidence=_SWEEP.format(17) + "296/285, within 2 % of the best"
    ),
    TileConfig(192, 192, 32, 1, 3, 2, 2, 1, dq_interleaved=True, evidence=_SWEEP.format(25) + "311/298"),
    TileConfig(
        256, 256, 32, 1, 2, 1, 2, 1, dq=DqWarps.BOTH_GROUPS, dq_interleaved=True, evidence=_SWEEP.format(7) + "300/293"
    ),
)

WITHOUT_DQ_GROUP: dict[str, Any] = {
    "dq": DqWarps.SCORES_GROUP,
    "q_stages": 2,
    "do_stages": 2,
    "ds_stages": 2,
    "p_stages": 1,
}
"""What a row with a dQ group becomes with a bias or lengths, which take more registers than it leaves the others."""


def _without_dq(q_stages: int, do_stages: int, p_stages: int, ds_ahead: bool = False) -> dict[str, Any]:
    return {"q_stages": q_stages, "do_stages": do_stages, "p_stages": p_stages, "ds_ahead": ds_ahead}


WITHOUT_DQ = {
    (32, 32): _without_dq(3, 3, 3),
    (64, 64): _without_dq(3, 3, 3),
    (128, 128): _without_dq(3, 3, 2, ds_ahead=True),
    (192, 128): _without_dq(4, 3, 2),
    (192, 192): _without_dq(3, 3, 2, ds_ahead=True),
    (256, 256): _without_dq(2, 2, 2),
}
"""Where a kernel of its own computes dQ and K is in registers, by native head dims.

H200 (Hopper stand-in), 2026-11-30, dS stored, S 4096, bf16, time over that of (2, 2, 2) at 64 in a window of 1024, of
(3, 2, 2) at 192, of (2, 1, 2) at 256, full / causal: D64 0.96; 192/128 0.96 / 0.99; D192 0.98 / 0.97; D256 0.77 / 0.83.
D32 as D64, not timed; D128: none better among (4, 3, 2), (4, 4, 2), (3, 3, 3). `ds_ahead`, over dS stored behind dK's
product: D128 0.95-1.02, 0.96 in the mean (64-key tiles 0.98-1.05); D192 0.95 full, 1.01 causal; others 0.98-1.05."""

HEADDIM_MULTIPLE = 8
MAX_HEADDIM = max(row.headdim_qk for row in TABLE)


def configs_for(headdim_qk: int, headdim_v: int) -> tuple[TileConfig, ...]:
    """Configurations that serve these head dims, the widest key tiles first; empty when none does.

    Only rows of the smallest native pair that covers both head dims are listed.
    """
    if headdim_qk < 1 or headdim_v < 1 or headdim_qk % HEADDIM_MULTIPLE or headdim_v % HEADDIM_MULTIPLE:
        return ()
    covering = [row for row in TABLE if row.headdim_qk >= headdim_qk and row.headdim_v >= headdim_v]
    if not covering:
        return ()
    native = min((row.headdim_qk + row.headdim_v, row.headdim_qk, row.headdim_v) for row in covering)[1:]
    return tuple(row for row in covering if (row.headdim_qk, row.headdim_v) == native)

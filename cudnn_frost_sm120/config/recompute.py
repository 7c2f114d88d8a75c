"""Tiles and shared memory of the kernel that recomputes the scores for dQ: one row per native pair of head dims.

Query rows stay, key tiles stream past them. A CTA of 4 warps of 16 query rows leaves room for a second one on its SM,
so that one's prologue hides behind the other's loop; at the widest head dims there is room for one, of twice the warps.
"""

from __future__ import annotations

from dataclasses import dataclass

from .padding import QUERY_PADDING
from .smem import ROW_BYTES, chunks

ROW_WARPS = 4
TILE_M = 16 * ROW_WARPS
assert TILE_M == QUERY_PADDING  # a CTA owns whole padded rows of the workspace


@dataclass(frozen=True)
class RecomputeTile:
    """`key_warps`: warps that share query rows, each with its part of every key tile. Q and dO are read into registers
    once (Q not if `q_in_registers` is off), and their space is the pipeline's then: the stages behind the first
    `early_stages` lie over them, and are loaded that much later."""

    headdim_qk: int
    headdim_v: int
    tile_n: int
    stages: int
    early_stages: int
    score_keys: int  # key rows whose scores a warp holds at a time
    key_warps: int = 1
    q_in_registers: bool = True

    @property
    def threads(self) -> int:
        return 32 * ROW_WARPS * self.key_warps

    @property
    def warp_keys(self) -> int:
        """Key rows of a tile that one warp works on."""
        return self.tile_n // self.key_warps

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.key_warps == 1 else 1

    @property
    def q_bytes(self) -> int:
        return chunks(self.headdim_qk) * TILE_M * ROW_BYTES

    @property
    def do_bytes(self) -> int:
        return chunks(self.headdim_v) * TILE_M * ROW_BYTES

    @property
    def k_bytes(self) -> int:
        return chunks(self.headdim_qk) * self.tile_n * ROW_BYTES

    @property
    def v_bytes(self) -> int:
        return chunks(self.headdim_v) * self.tile_n * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.k_bytes + self.v_bytes

    @property
    def ring(self) -> int:
        """Stages of K, V."""
        return 0 if self.q_in_registers else self.q_bytes

    @property
    def q(self) -> int:
        return self.ring + self.early_stages * self.stage_bytes if self.q_in_registers else 0

    @property
    def do(self) -> int:
        return self.q + self.q_bytes if self.q_in_registers else self.ring + self.early_stages * self.stage_bytes

    @property
    def rows(self) -> int:
        """LSE of the query rows, then delta: fp32."""
        return max(self.do + self.do_bytes, self.ring + self.stages * self.stage_bytes)

    @property
    def query_full(self) -> int:
        """Barriers are 8 bytes each; this one is Q's and dO's."""
        return self.rows + 2 * 4 * TILE_M

    @property
    def query_read(self) -> int:
        """Every warp holds its Q and dO fragments: the pipeline may take their space."""
        return self.query_full + 8

    @property
    def full(self) -> int:
        return self.query_read + 8

    @property
    def empty(self) -> int:
        return self.full + 8 * self.stages

    @property
    def total(self) -> int:
        return self.empty + 8 * self.stages


TABLE: tuple[RecomputeTile, ...] = (
    RecomputeTile(32, 32, 64, 2, 2, 32),
    RecomputeTile(64, 64, 64, 2, 2, 32),
    RecomputeTile(128, 128, 32, 3, 1, 32),
    RecomputeTile(192, 128, 32, 2, 0, 16),
    RecomputeTile(192, 192, 32, 2, 1, 16, key_warps=2, q_in_registers=False),
    RecomputeTile(256, 256, 32, 2, 1, 16, key_warps=2, q_in_registers=False),
)


def recompute_tile(headdim_qk: int, headdim_v: int) -> RecomputeTile:
    """The row of a native pair of head dims."""
    return next(row for row in TABLE if (row.headdim_qk, row.headdim_v) == (headdim_qk, headdim_v))

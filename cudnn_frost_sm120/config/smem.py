"""Shared-memory layout of the main kernel: exact byte offsets, used by the kernel and by the cubin report."""

from __future__ import annotations

from dataclasses import dataclass

from .roles import WARPS, WARPS_PER_GROUP
from .tiles import TileConfig

ELEMENT_BYTES = 2
ROW_BYTES = 128
"""Q, K, V and dO tiles are stored as column chunks of 64 elements: [chunk][row][128 bytes], 128-byte swizzle."""


def chunks(headdim: int) -> int:
    """64-column chunks of a tile row."""
    return (headdim + 63) // 64


@dataclass(frozen=True)
class SmemLayout:
    """Byte offsets from the CTA's shared base (1024-byte aligned).

    V is staged behind K, read into registers once, and its space reused by the pipelines; that of K too, where it does
    not stay. Barriers are 8 bytes each; `*_full` and `*_empty` are arrays over stages, the P pairs over
    [stage][warp of a group].
    """

    tile: TileConfig

    @property
    def q_bytes(self) -> int:
        return chunks(self.tile.headdim_qk) * self.tile.tile_m * ROW_BYTES

    @property
    def do_bytes(self) -> int:
        return chunks(self.tile.headdim_v) * self.tile.tile_m * ROW_BYTES

    @property
    def k_bytes(self) -> int:
        return chunks(self.tile.headdim_qk) * self.tile.tile_n * ROW_BYTES

    @property
    def v_bytes(self) -> int:
        return chunks(self.tile.headdim_v) * self.tile.tile_n * ROW_BYTES

    @property
    def ds_bytes(self) -> int:
        return self.tile.tile_m * self.tile.tile_n * ELEMENT_BYTES

    p_bytes = ds_bytes

    @property
    def row_bytes(self) -> int:
        """LSE or delta of one query tile."""
        return self.tile.tile_m * 4

    k = 0

    @property
    def v(self) -> int:
        return self.k_bytes

    @property
    def q(self) -> int:
        return self.v if self.tile.keeps_k else self.k

    @property
    def do(self) -> int:
        return self.q + self.tile.q_stages * self.q_bytes

    @property
    def ds(self) -> int:
        return self.do + self.tile.do_stages * self.do_bytes

    @property
    def p(self) -> int:
        return self.ds + self.tile.ds_stages * self.ds_bytes

    @property
    def lse(self) -> int:
        return max(self.p + self.tile.p_stages * self.p_bytes, self.v + self.v_bytes)

    @property
    def delta(self) -> int:
        return self.lse + self.tile.q_stages * self.row_bytes

    @property
    def kv_full(self) -> int:
        return self.delta + self.tile.do_stages * self.row_bytes

    @property
    def q_full(self) -> int:
        return self.kv_full + 8

    @property
    def q_empty(self) -> int:
        return self.q_full + 8 * self.tile.q_stages

    @property
    def do_full(self) -> int:
        return self.q_empty + 8 * self.tile.q_stages

    @property
    def do_empty(self) -> int:
        return self.do_full + 8 * self.tile.do_stages

    @property
    def ds_full(self) -> int:
        return self.do_empty + 8 * self.tile.do_stages

    @property
    def ds_empty(self) -> int:
        return self.ds_full + 8 * self.tile.ds_stages

    @property
    def p_full(self) -> int:
        return self.ds_empty + 8 * self.tile.ds_stages

    @property
    def p_empty(self) -> int:
        return self.p_full + 8 * WARPS_PER_GROUP * self.tile.p_stages

    @property
    def kv_read(self) -> int:
        """K and V are in registers as far as they do not stay: the pipelines may take their space."""
        return self.p_empty + 8 * WARPS_PER_GROUP * self.tile.p_stages

    @property
    def cleaned(self) -> int:
        """Rows past the query length are zeroed in a tile that straddles it; one phase for each query head."""
        return self.kv_read + 8

    @property
    def ticket(self) -> int:
        return self.cleaned + 8

    @property
    def total(self) -> int:
        return self.ticket + 8

    def barriers(self) -> tuple[tuple[int, int, int], ...]:
        """(offset of the first, how many, arriving warps or 0 for one loading thread) of every mbarrier array."""
        tile = self.tile
        pairs = WARPS_PER_GROUP * tile.p_stages
        return (
            (self.kv_full, 1, 0),
            (self.q_full, tile.q_stages, 0),
            (self.q_empty, tile.q_stages, WARPS),
            (self.do_full, tile.do_stages, 0),
            (self.do_empty, tile.do_stages, WARPS),
            (self.ds_full, tile.ds_stages, WARPS_PER_GROUP),
            (self.ds_empty, tile.ds_stages, tile.dq_warps),
            (self.p_full, pairs, 1),
            (self.p_empty, pairs, 1),
            (self.kv_read, 1, WARPS_PER_GROUP if tile.keeps_k else tile.warps),
            (self.cleaned, 1, WARPS),
        )

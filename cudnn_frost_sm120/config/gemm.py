"""Tiles of the kernel that multiplies stored dS by K (kernels/dq_gemm.py), the same at every head dim."""

TILE_M = 128
"""Query rows of a CTA."""
TILE_N = 64
"""Key rows of a tile; every tile_n of the main kernel is a multiple."""
STAGES = 3


def column_warps(headdim: int) -> int:
    """Warps that share the columns of the same query rows: the sums of a wide head dim are too many for one."""
    return 1 if headdim <= 128 else 2


def ctas_per_sm(headdim: int) -> int:
    """By shared memory and registers."""
    return 2 // column_warps(headdim)

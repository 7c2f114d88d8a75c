"""The cost model behind the ranking: the kernels whose time depends on the knobs.

Terms, in seconds: visited tiles (device/block_range.py, on plain integers) at a rate per SM; the schedule of CTAs onto
SMs, in launch order; bytes of the fp32 dQ accumulator and of fp32 partial sums, written and read back; launches. The
rates are those of an RTX PRO 6000 (466 TFLOP/s dense bf16 over 188 SMs, 1.8 TB/s); only ratios matter for an order.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from .config.padding import padded_keys, padded_queries
from .config.recompute import TILE_M, recompute_tile
from .config.roles import WARPS_PER_GROUP
from .config.tiles import TileConfig
from .facts import BwdFacts, effective_bounds
from .knobs import ReductionMode

FLOPS_PER_SM = 0.75 * 466e12 / 188  # a main loop reaches about three quarters of the tensor peak
BYTES_PER_SECOND = 0.85 * 1.8e12
RECOMPUTE_SHARE = 0.9  # of that rate, in the kernel that recomputes scores for dQ
LAUNCH_SECONDS = 3e-6
EXACT_SCHEDULE_CTAS = 4096  # beyond this a grid is long enough for an average to do
SAMPLED_TILES = 1024  # beyond this, evenly spaced tiles stand for all


@lru_cache(maxsize=64)
def visited_tiles(facts: BwdFacts, tile_m: int, tile_n: int, by_query: bool = False) -> tuple[tuple[int, ...], float]:
    """(query tiles that each key tile visits, or key tiles that each query tile does; how many tiles each stands for).

    In launch order. Per-batch lengths are taken as full.
    """
    from .device.block_range import key_tiles, query_tiles
    from .device.mask import Mask, MaskKinds
    from .device.seqlen import SeqlenInfo

    left, right = effective_bounds(facts)
    seqlen = SeqlenInfo.create(facts.seqlen_q, facts.seqlen_k)
    kinds = MaskKinds(right=right is not None, left=left is not None)
    diagonal = seqlen.diagonal(facts.mask.bottom_right)
    mask = Mask.create(kinds, facts.seqlen_q, facts.seqlen_k, diagonal, left or 0, right or 0)
    count = -(-facts.seqlen_q // tile_m) if by_query else -(-facts.seqlen_k // tile_n)
    blocks = range(0, count, -(-count // SAMPLED_TILES))
    tiles = key_tiles if by_query else query_tiles
    ranges = (tiles(block, tile_m, tile_n, seqlen, mask) for block in blocks)
    return tuple(end - begin for begin, end in ranges), count / len(blocks)


def chain_seconds(facts: BwdFacts, tile: TileConfig, sm_count: int, heads_per_cta: int, mode: ReductionMode) -> float:
    """Time of the kernels that depend on the knobs: all but the statistics of rows, dBias and dSink."""
    seconds = main_seconds(facts, tile, sm_count, heads_per_cta, mode)
    if mode is ReductionMode.RECOMPUTE:
        return seconds + recompute_seconds(facts, tile, sm_count)
    accumulator = 4 * facts.batch * facts.heads_q * padded_queries(facts.seqlen_q) * tile.headdim_qk
    return seconds + 2.5 * accumulator / BYTES_PER_SECOND + LAUNCH_SECONDS  # zeroed, read, written in 16 bits


def main_seconds(
    facts: BwdFacts, tile: TileConfig, sm_count: int, heads_per_cta: int, mode: ReductionMode = ReductionMode.ATOMIC
) -> float:
    """Time of the main kernel with this many query heads per CTA, and of summing the parts where that splits groups."""
    tiles, weight = visited_tiles(facts, tile.tile_m, tile.tile_n)
    columns: float = 3 * tile.headdim_qk + 2 * tile.headdim_v
    if not mode.dq_in_main:  # without dQ; and warps pass over tiles that their own keys do not visit
        columns -= tile.headdim_qk
        by_warp, warp_weight = visited_tiles(facts, tile.tile_m, tile.tile_n // WARPS_PER_GROUP)
        columns *= sum(by_warp) * warp_weight / WARPS_PER_GROUP / max(1, sum(tiles) * weight)
    slots = facts.batch * facts.heads_q // heads_per_cta
    makespan = _makespan([heads_per_cta * n for n in tiles], weight * slots, sm_count)
    seconds = makespan * 2 * tile.tile_m * tile.tile_n * columns / FLOPS_PER_SM
    if heads_per_cta < facts.group:
        partial_bytes = 4 * slots * padded_keys(facts.seqlen_k) * (tile.headdim_qk + tile.headdim_v)
        seconds += 2 * partial_bytes / BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    return seconds


def recompute_seconds(facts: BwdFacts, tile: TileConfig, sm_count: int) -> float:
    """Time of the kernel that recomputes the scores for dQ: three GEMMs."""
    shape = recompute_tile(tile.headdim_qk, tile.headdim_v)
    tiles, weight = visited_tiles(facts, TILE_M, shape.tile_n, by_query=True)
    flops = 2 * TILE_M * shape.tile_n * (2 * tile.headdim_qk + tile.headdim_v)
    workers = sm_count * shape.ctas_per_sm
    makespan = _makespan(list(tiles), weight * facts.batch * facts.heads_q, workers)
    return makespan * flops / (RECOMPUTE_SHARE * FLOPS_PER_SM / shape.ctas_per_sm)


def _makespan(jobs: list[int], repeats: float, workers: int) -> float:
    """Time to run every job `repeats` times on the workers, jobs handed out in order as workers come free."""
    if len(jobs) * repeats > EXACT_SCHEDULE_CTAS:  # at the end, the last jobs leave workers idle for half their time
        return max(sum(jobs) * repeats / workers + jobs[-1] / 2, max(jobs))
    free = [0] * workers
    for job in jobs:
        for _ in range(round(repeats)):
            heapq.heapreplace(free, free[0] + job)
    return max(free)

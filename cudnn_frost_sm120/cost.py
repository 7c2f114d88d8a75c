"""The cost model behind the ranking: what the main kernel's grid takes, and what splitting a group's heads adds.

Terms, in seconds: `tiles` visited query tiles (device/block_range.py, on plain integers) at a rate per SM; the schedule
of CTAs onto SMs, in launch order; bytes of fp32 partial sums written and read back. The rates are those of an RTX PRO
6000 (466 TFLOP/s dense bf16 over 188 SMs, 1.8 TB/s); only their ratio matters for an order.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from .config.padding import padded_keys
from .config.tiles import TileConfig
from .facts import BwdFacts

FLOPS_PER_SM = 0.75 * 466e12 / 188  # a main loop reaches about three quarters of the tensor peak
BYTES_PER_SECOND = 0.85 * 1.8e12
LAUNCH_SECONDS = 3e-6
EXACT_SCHEDULE_CTAS = 4096  # beyond this a grid is long enough for an average to do
SAMPLED_KEY_TILES = 1024  # beyond this, evenly spaced key tiles stand for all


@lru_cache(maxsize=64)
def visited_query_tiles(facts: BwdFacts, tile: TileConfig) -> tuple[tuple[int, ...], float]:
    """(query tiles that each key tile visits, in launch order; how many key tiles each of them stands for).

    Per-batch lengths are taken as full.
    """
    from .device.block_range import query_tiles
    from .device.mask import Mask, MaskKinds
    from .device.seqlen import SeqlenInfo
    from .plan import effective_bounds

    left, right = effective_bounds(facts)
    seqlen = SeqlenInfo.create(facts.seqlen_q, facts.seqlen_k)
    kinds = MaskKinds(right=right is not None, left=left is not None)
    diagonal = seqlen.diagonal(facts.mask.bottom_right)
    mask = Mask.create(kinds, facts.seqlen_q, facts.seqlen_k, diagonal, left or 0, right or 0)
    count = -(-facts.seqlen_k // tile.tile_n)
    blocks = range(0, count, -(-count // SAMPLED_KEY_TILES))
    ranges = (query_tiles(n, tile.tile_m, tile.tile_n, seqlen, mask) for n in blocks)
    return tuple(end - begin for begin, end in ranges), count / len(blocks)


def main_seconds(facts: BwdFacts, tile: TileConfig, sm_count: int, heads_per_cta: int) -> float:
    """Time of the main kernel with this many query heads per CTA, and of summing the parts where that splits groups."""
    tiles, weight = visited_query_tiles(facts, tile)
    tile_flops = 2 * tile.tile_m * tile.tile_n * (3 * tile.headdim_qk + 2 * tile.headdim_v)
    slots = facts.batch * facts.heads_q // heads_per_cta
    makespan = _makespan([heads_per_cta * n for n in tiles], weight * slots, sm_count)
    seconds = makespan * tile_flops / FLOPS_PER_SM
    if heads_per_cta < facts.group:
        partial_bytes = 4 * slots * padded_keys(facts.seqlen_k) * (tile.headdim_qk + tile.headdim_v)
        seconds += 2 * partial_bytes / BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    return seconds


def _makespan(jobs: list[int], repeats: float, workers: int) -> float:
    """Time to run every job `repeats` times on the workers, jobs handed out in order as workers come free."""
    if len(jobs) * repeats > EXACT_SCHEDULE_CTAS:  # at the end, the last jobs leave workers idle for half their time
        return max(sum(jobs) * repeats / workers + jobs[-1] / 2, max(jobs))
    free = [0] * workers
    for job in jobs:
        for _ in range(round(repeats)):
            heapq.heapreplace(free, free[0] + job)
    return max(free)

"""The cost model behind the ranking: the kernels whose time depends on the knobs.

Terms, in seconds: visited tiles (device/block_range.py, on plain integers) at a rate per SM; the schedule of CTAs onto
SMs, in launch order; bytes of the fp32 dQ accumulator, of dS, and of fp32 partial sums, written and read; launches. The
rates are those of one board for each target. What a term is worth was set by the measurements of docs/performance.md.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

from .config.padding import QUERY_PADDING, padded_keys, padded_queries
from .config.recompute import TILE_M, recompute_tile
from .config.roles import WARPS_PER_GROUP
from .config.tiles import TileConfig
from .facts import BwdFacts, effective_bounds
from .knobs import BwdKnobs, ReductionMode
from .plan import slots_per_launch
from .target import Target


@dataclass(frozen=True)
class Rates:
    flops_per_sm: float  # of the main loop
    bytes_per_second: float


LOOP_SHARE = 0.75  # of the tensor peak, in a main loop
PER_SM = LOOP_SHARE * 466e12 / 188  # an RTX PRO 6000: 466 TFLOP/s dense bf16
RATES = {
    "sm_120": Rates(PER_SM, 0.85 * 1.8e12),
    "sm_121": Rates(PER_SM, 0.85 * 0.27e12),  # the same SM, on LPDDR5X
    "sm_90": Rates(365e12 / 132, 0.85 * 4.8e12),  # measured on an H200, D128
}
DS_WRITES = 3  # dS is written at this multiple of the memory's rate, as the main kernel hides most of it
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


def chain_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of the kernels that depend on the knobs: all but the statistics of rows, dBias and dSink."""
    mode, rates = knobs.reduction_mode, RATES[target.name]
    seconds = main_seconds(facts, tile, target, knobs)
    if mode is ReductionMode.RECOMPUTE:
        return seconds + _recompute_seconds(facts, tile, target)
    if mode is ReductionMode.DS_STORE:
        return seconds + _ds_seconds(facts, tile, target, knobs)
    accumulator = 4 * facts.batch * facts.heads_q * padded_queries(facts.seqlen_q) * tile.headdim_qk
    # Zeroed, read, and written in 16 bits.
    return seconds + 2.5 * accumulator / rates.bytes_per_second + LAUNCH_SECONDS


def main_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of the main kernel, and of summing the parts where the knobs split groups."""
    rates, heads = RATES[target.name], knobs.heads_per_cta
    tiles, weight = visited_tiles(facts, tile.tile_m, tile.tile_n)
    columns: float = 3 * tile.headdim_qk + 2 * tile.headdim_v
    if not knobs.reduction_mode.dq_in_main:  # and warps pass over tiles that their own keys do not visit
        columns -= tile.headdim_qk
        by_warp, warp_weight = visited_tiles(facts, tile.tile_m, tile.tile_n // WARPS_PER_GROUP)
        columns *= sum(by_warp) * warp_weight / WARPS_PER_GROUP / max(1, sum(tiles) * weight)
    slots = facts.batch * facts.heads_q // heads
    per_launch = slots_per_launch(facts, knobs, target)
    in_turn = makespan([heads * n for n in tiles], weight * per_launch, target.sm_count) * slots / per_launch
    seconds = in_turn * 2 * tile.tile_m * tile.tile_n * columns / rates.flops_per_sm
    if heads < facts.group:
        partial_bytes = 4 * slots * padded_keys(facts.seqlen_k) * (tile.headdim_qk + tile.headdim_v)
        seconds += 2 * partial_bytes / rates.bytes_per_second + 2 * LAUNCH_SECONDS
    return seconds


def _recompute_seconds(facts: BwdFacts, tile: TileConfig, target: Target) -> float:
    """Time of the kernel that recomputes the scores for dQ: three GEMMs."""
    shape = recompute_tile(tile.headdim_qk, tile.headdim_v)
    tiles, weight = visited_tiles(facts, TILE_M, shape.tile_n, by_query=True)
    flops = 2 * TILE_M * shape.tile_n * (2 * tile.headdim_qk + tile.headdim_v)
    workers = target.sm_count * shape.ctas_per_sm
    in_turn = makespan(list(tiles), weight * facts.batch * facts.heads_q, workers)
    return in_turn * flops / (RATES[target.name].flops_per_sm / shape.ctas_per_sm)


def stored_scores(facts: BwdFacts, tile: TileConfig) -> int:
    """Scores whose dS is stored, where it is: those of tiles that a warp visits."""
    warp_keys = tile.tile_n // WARPS_PER_GROUP
    tiles, weight = visited_tiles(facts, QUERY_PADDING, warp_keys, by_query=True)
    return round(sum(tiles) * weight) * QUERY_PADDING * warp_keys * facts.batch * facts.heads_q


def _ds_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of writing dS, and of the kernel that reads it and multiplies it by K."""
    rates = RATES[target.name]
    scores = stored_scores(facts, tile)
    read = 2 * scores / rates.bytes_per_second
    multiply = 2 * scores * tile.headdim_qk / (rates.flops_per_sm * target.sm_count)
    launches = facts.batch * facts.heads_q / (slots_per_launch(facts, knobs, target) * knobs.heads_per_cta)
    return read / DS_WRITES + max(read, multiply) + (2 * launches - 1) * LAUNCH_SECONDS


def makespan(jobs: list[int], repeats: float, workers: int) -> float:
    """Time to run every job `repeats` times on the workers, jobs handed out in order as workers come free."""
    if len(jobs) * repeats > EXACT_SCHEDULE_CTAS:  # at the end, the last jobs leave workers idle for half their time
        return max(sum(jobs) * repeats / workers + jobs[-1] / 2, max(jobs))
    free = [0] * workers
    for job in jobs:
        for _ in range(round(repeats)):
            heapq.heapreplace(free, free[0] + job)
    return max(free)

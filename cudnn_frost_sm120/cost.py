"""The cost model behind the ranking: the kernels whose time depends on the knobs.

Terms, in seconds: visited tiles (device/block_range.py, on plain integers) at a rate per SM, and what a CTA takes
beside them; the schedule of CTAs onto SMs, in launch order; bytes of the fp32 dQ accumulator, of dS, and of fp32
partial sums, written and read; launches. The rates are those of one board for each target. On the stand-in they were
fitted to 476 timings of plans of 64 problems at D64 and D128, S 512 to 16384, on an H200, 2026-11-30; 6 % is left.
What splitting a group's heads costs was fitted to 556 timings of 74 problems with grouped heads, on the same day.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .boards import GB10, H200, RTX_5090, RTX_PRO_6000, Board
from .config import gemm, recompute
from .config.padding import QUERY_PADDING, padded_keys, padded_queries
from .config.roles import WARPS_PER_GROUP
from .config.tiles import TileConfig, configs_for
from .facts import BwdFacts, effective_bounds
from .knobs import BwdKnobs, ReductionMode
from .plan import head_group_of, slots_per_launch
from .target import Target


@dataclass(frozen=True)
class Rates:
    """`narrow`, `gemm`, `recompute`: time for a FLOP over that of the main loop on its widest key tiles; of the main
    loop on 64 keys where a head dim has 128 too, of dq_gemm, of dq_recompute."""

    flops_per_sm: float  # of the main loop
    bytes_per_sm: float  # a second; boards of fewer SMs have less memory bandwidth too
    ds_bytes_per_sm: float  # the same for dS as it is read: in long streams, in part from L2
    narrow: float
    gemm: float
    recompute: float


LOOP_SHARE = 0.75  # of the tensor peak, in a main loop
MEMORY_SHARE, DS_SHARE = 0.65, 0.85  # of a memory's peak


def _unmeasured(board: Board) -> Rates:
    """Ratios are those of a stand-in build that issues every HMMA twice: `narrow` 1.15 at D64, 1.08 at D128."""
    loop, memory = LOOP_SHARE * board.tensor_flops / board.sms, board.memory_bytes / board.sms
    return Rates(loop, MEMORY_SHARE * memory, DS_SHARE * memory, narrow=1.12, gemm=1.0, recompute=0.9)


_RATES = {
    ("sm_120", False): _unmeasured(RTX_PRO_6000),
    ("sm_120", True): _unmeasured(RTX_5090),
    ("sm_121", False): _unmeasured(GB10),
    ("sm_90", False): Rates(
        380e12 / H200.sms, 3.12e12 / H200.sms, 5.6e12 / H200.sms, narrow=1.28, gemm=0.62, recompute=0.8
    ),
}
DS_WRITES = 1.5  # dS is written at this multiple of the rate that it is read at, as the main kernel hides some of it
PART_PASSES = 1.3  # over their bytes: parts of dK and dV are written and read once, in part beside other work
PART_SECONDS = 5e-6  # two launches, of few CTAs each
CTA_SECONDS = 3.5e-6  # before its first tile and behind its last
GEMM_CTA_SECONDS = 6.5e-6  # the same in dq_gemm
LAUNCH_SECONDS = 1.3e-6
EXACT_SCHEDULE_CTAS = 512  # beyond this a grid is long enough for an average to do
SAMPLED_TILES = 256  # beyond this, evenly spaced tiles stand for all


def rates_of(target: Target) -> Rates:
    return _RATES[target.name, target.half_tensor_rate]


def bytes_per_second(target: Target) -> float:
    return rates_of(target).bytes_per_sm * target.sm_count


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
    mode = knobs.reduction_mode
    seconds = main_seconds(facts, tile, target, knobs)
    if mode is ReductionMode.RECOMPUTE:
        return seconds + _recompute_seconds(facts, tile, target, knobs)
    if mode is ReductionMode.DS_STORE:
        return seconds + _ds_seconds(facts, tile, target, knobs)
    accumulator = 4 * facts.batch * facts.heads_q * padded_queries(facts.seqlen_q) * tile.headdim_qk
    # Zeroed, read, and written in 16 bits.
    return seconds + 2.5 * accumulator / bytes_per_second(target) + LAUNCH_SECONDS


def main_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of the main kernel, and of summing the parts where the knobs split groups."""
    rates, heads = rates_of(target), knobs.heads_per_cta
    tiles, weight = visited_tiles(facts, tile.tile_m, tile.tile_n)
    columns: float = 3 * tile.headdim_qk + 2 * tile.headdim_v
    if not knobs.reduction_mode.dq_in_main:  # and warps pass over tiles that their own keys do not visit
        columns -= tile.headdim_qk
        by_warp, warp_weight = visited_tiles(facts, tile.tile_m, tile.tile_n // WARPS_PER_GROUP)
        columns *= sum(by_warp) * warp_weight / WARPS_PER_GROUP / max(1, sum(tiles) * weight)
    slots = facts.batch * facts.heads_q // heads
    per_launch = slots_per_launch(facts, knobs, target)
    narrow = rates.narrow if tile.key_blocks < widest_key_blocks(tile) else 1.0
    each = 2 * tile.tile_m * tile.tile_n * columns * narrow / rates.flops_per_sm
    ctas = [heads * each * n + CTA_SECONDS for n in tiles]
    group = head_group_of(facts, knobs)
    seconds = makespan(ctas, weight * per_launch, target.sm_count, group) * slots / per_launch
    if heads < facts.group:
        partial_bytes = 4 * slots * padded_keys(facts.seqlen_k) * (tile.headdim_qk + tile.headdim_v)
        seconds += PART_PASSES * partial_bytes / bytes_per_second(target) + PART_SECONDS
    return seconds


def widest_key_blocks(tile: TileConfig) -> int:
    """Among the rows of the same head dims."""
    return max(row.key_blocks for row in configs_for(tile.headdim_qk, tile.headdim_v))


def _recompute_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of the kernel that recomputes the scores for dQ: three GEMMs."""
    shape = recompute.recompute_tile(tile.headdim_qk, tile.headdim_v)
    tiles, weight = visited_tiles(facts, recompute.TILE_M, shape.tile_n, by_query=True)
    flops = 2 * recompute.TILE_M * shape.tile_n * (2 * tile.headdim_qk + tile.headdim_v)
    rates, shared = rates_of(target), shape.ctas_per_sm
    each = flops * rates.recompute * shared / rates.flops_per_sm
    ctas = [each * n + CTA_SECONDS for n in tiles]
    heads = weight * facts.batch * facts.heads_q
    return makespan(ctas, heads, target.sm_count * shared, head_group_of(facts, knobs))


def stored_scores(facts: BwdFacts, tile: TileConfig) -> int:
    """Scores whose dS is stored, where it is: those of tiles that a warp visits."""
    warp_keys = tile.tile_n // WARPS_PER_GROUP
    tiles, weight = visited_tiles(facts, QUERY_PADDING, warp_keys, by_query=True)
    return round(sum(tiles) * weight) * QUERY_PADDING * warp_keys * facts.batch * facts.heads_q


def _ds_seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Time of writing dS, and of the kernel that reads it and multiplies it by K."""
    rates = rates_of(target)
    scores = stored_scores(facts, tile)
    read = 2 * scores / (rates.ds_bytes_per_sm * target.sm_count)
    heads_at_once = slots_per_launch(facts, knobs, target) * knobs.heads_per_cta
    parts = facts.batch * facts.heads_q / heads_at_once
    tiles, weight = visited_tiles(facts, gemm.TILE_M, gemm.TILE_N, by_query=True)
    shared = gemm.ctas_per_sm(tile.headdim_qk)
    each = 2 * gemm.TILE_M * gemm.TILE_N * tile.headdim_qk * rates.gemm * shared / rates.flops_per_sm
    ctas = [each * n + GEMM_CTA_SECONDS for n in tiles]
    group = head_group_of(facts, knobs)
    multiply = makespan(ctas, weight * heads_at_once, target.sm_count * shared, group) * parts
    return read / DS_WRITES + max(read, multiply) + (2 * parts - 1) * LAUNCH_SECONDS


def makespan(jobs: Sequence[float], repeats: float, workers: int, group: int) -> float:
    """Time to run every job `repeats` times on the workers, handed out as workers come free: `group` of each job, then
    of the next, and so on (device/scheduler.py)."""
    if min(jobs) == max(jobs):
        return -(-round(len(jobs) * repeats) // workers) * jobs[0]
    if len(jobs) * repeats > EXACT_SCHEDULE_CTAS:  # at the end, the last jobs leave workers idle for half their time
        return max(sum(jobs) * repeats / workers + jobs[-1] / 2, max(jobs))
    free = [0.0] * workers
    left = round(repeats)
    while left > 0:
        for job in jobs:
            for _ in range(min(group, left)):
                heapq.heapreplace(free, free[0] + job)
        left -= group
    return max(free)

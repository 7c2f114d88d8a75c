"""Time of a whole chain on a GPU of the model: tiles, their schedule on SMs, memory and launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..bench.cells import Cell
from ..config.tiles import TileConfig
from ..cost import LAUNCH_SECONDS, makespan, visited_query_tiles
from ..facts import BwdFacts
from ..plan import effective_bounds
from ..target import Target
from .engines import Engine, Masks
from .gpus import REACHABLE_BANDWIDTH, Gpu


@dataclass(frozen=True)
class Stalls:
    """What the counts do not say, from measurements (calibration.py); with none of it, times are bounds.

    `exposed`: share of the work of the pipes beside the busiest one that it does not hide. `cta_cycles`: what a CTA
    takes beside its query tiles: its key tile comes in, dK and dV go out.
    """

    exposed: float = 0.0
    cta_cycles: float = 0.0


NONE = Stalls()


@dataclass(frozen=True)
class ChainTime:
    """Seconds. The main kernel takes what its tiles or its memory traffic take, whichever is more."""

    main: float
    around: float  # kernels beside it, by their bytes
    launches: float

    @property
    def total(self) -> float:
        return self.main + self.around + self.launches


def chain_time(engine: Engine, cell: Cell, gpu: Gpu, target: Target, stalls: Stalls = NONE) -> ChainTime:
    """`target` is what the engine plans and compiles for; the schedule is on the SMs of `gpu`."""
    facts, here = cell.facts(), replace(target, sm_count=gpu.sms)
    bandwidth = REACHABLE_BANDWIDTH * gpu.memory_bytes_per_second
    main_bytes = engine.main_traffic(facts, here).total
    around = engine.around(facts, here)
    return ChainTime(
        max(main_seconds(engine, cell, gpu, target, stalls), main_bytes / bandwidth),
        sum(traffic.total for traffic in around.values()) / bandwidth,
        LAUNCH_SECONDS * (1 + len(around)),
    )


def main_seconds(engine: Engine, cell: Cell, gpu: Gpu, target: Target, stalls: Stalls = NONE) -> float:
    """Of the main kernel, by its tiles and their schedule."""
    facts, here = cell.facts(), replace(target, sm_count=gpu.sms)
    tile, masks = engine.tile(facts, here), masks_of(facts)
    plain = engine.work(tile, masks, target).pipes(gpu).cycles(stalls.exposed)
    cut = engine.work(tile, masks, target, masked=True).pipes(gpu).cycles(stalls.exposed)
    share = cut_share(facts, tile)
    schedule = _schedule(facts, tile, engine.heads_per_cta(facts, here), gpu.sms)
    cycles = schedule.tiles * ((1 - share) * plain + share * cut) + schedule.ctas * stalls.cta_cycles
    return cycles / gpu.clock_hz


@dataclass(frozen=True)
class Schedule:
    """Of the SM that ends last: query tiles, and CTAs."""

    tiles: float
    ctas: float


@lru_cache(maxsize=256)
def _schedule(facts: BwdFacts, tile: TileConfig, heads_per_cta: int, sms: int) -> Schedule:
    visits, weight = visited_query_tiles(facts, tile)
    slots = facts.batch * facts.heads_q // heads_per_cta
    tiles = makespan([heads_per_cta * n for n in visits], weight * slots, sms)
    return Schedule(tiles, max(1.0, len(visits) * weight * slots / sms))


def masks_of(facts: BwdFacts) -> Masks:
    left, right = effective_bounds(facts)
    return right is not None, left is not None


def cut_share(facts: BwdFacts, tile: TileConfig) -> float:
    """Share of the visited tiles that the mask cuts: some of their pairs are dropped. Top-left diagonals."""
    visited = cut = 0
    for end_query, whole in _key_tiles(facts, tile):
        visited += end_query
        cut += end_query - whole
    return cut / visited if visited else 0.0


def _key_tiles(facts: BwdFacts, tile: TileConfig) -> Iterator[tuple[int, int]]:
    """(query tiles visited, of these whole ones) of each key tile."""
    left, right = effective_bounds(facts)
    visits, weight = visited_query_tiles(facts, tile)
    step = round(weight)
    for place, visited in enumerate(visits):
        first_key = place * step * tile.tile_n
        last_key = min(first_key + tile.tile_n, facts.seqlen_k) - 1
        first, end = 0, -(-facts.seqlen_q // tile.tile_m)
        if right is not None:  # every query of the tile sees the last key
            first = max(0, -(-(last_key - right) // tile.tile_m))
        if left is not None:  # and the first one
            end = min(end, (first_key + left) // tile.tile_m)
        yield visited, min(visited, max(0, end - first))

"""Time of a whole chain on a GPU of the model: tiles, their schedule on SMs, memory and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..bench.cells import Cell
from ..cost import LAUNCH_SECONDS, makespan, visited_tiles
from ..facts import BwdFacts, effective_bounds
from ..target import Target
from .engines import Engine, TiledKernel
from .gpus import REACHABLE_BANDWIDTH, Gpu


@dataclass(frozen=True)
class Stalls:
    """What the counts do not say, from measurements (calibration.py); with none of it, times are bounds.

    `exposed`: share of the work of the pipes beside the busiest one that it does not hide. `cta_cycles`: what a CTA
    takes beside its tiles: what stays comes in, and results go out.
    """

    exposed: float = 0.0
    cta_cycles: float = 0.0


NONE = Stalls()
StallsOf = Callable[[TiledKernel], Stalls]


def no_stalls(_: TiledKernel) -> Stalls:
    return NONE


@dataclass(frozen=True)
class ChainTime:
    """Seconds. A tiled kernel takes what its tiles or its memory traffic take, whichever is more."""

    tiled: float
    around: float  # the other kernels, by their bytes
    launches: float

    @property
    def total(self) -> float:
        return self.tiled + self.around + self.launches


def on_board(target: Target, gpu: Gpu) -> Target:
    """The target as it is on that GPU."""
    return replace(target, sm_count=gpu.sms, half_tensor_rate=gpu.half_tensor_rate)


def chain_time(engine: Engine, cell: Cell, gpu: Gpu, target: Target, stalls: StallsOf = no_stalls) -> ChainTime:
    """`target` is what the engine plans and compiles for, on the board of `gpu`."""
    facts, here = cell.facts(), on_board(target, gpu)
    bandwidth = REACHABLE_BANDWIDTH * gpu.memory_bytes_per_second
    kernels, around = engine.tiled_kernels(facts, here), engine.around(facts, here)
    return ChainTime(
        sum(max(kernel_seconds(k, facts, gpu, stalls(k)), k.traffic.total / bandwidth) for k in kernels),
        sum(traffic.total for traffic in around.values()) / bandwidth,
        LAUNCH_SECONDS * (len(kernels) + len(around)),
    )


def kernel_seconds(kernel: TiledKernel, facts: BwdFacts, gpu: Gpu, stalls: Stalls = NONE) -> float:
    """Of a tiled kernel, by its tiles and their schedule. CTAs that share an SM count as if one came after another."""
    tile = kernel.whole.tile
    whole, cut = (work.pipes(gpu).cycles(stalls.exposed) for work in (kernel.whole, kernel.cut))
    share = cut_share(facts, tile.rows, tile.keys)
    tiles, ctas = _schedule(facts, tile.rows, tile.keys, kernel.by_query, kernel.heads_per_cta, gpu.sms)
    return (tiles * ((1 - share) * whole + share * cut) + ctas * stalls.cta_cycles) / gpu.clock_hz


@lru_cache(maxsize=256)
def _schedule(
    facts: BwdFacts, rows: int, keys: int, by_query: bool, heads_per_cta: int, sms: int
) -> tuple[float, float]:
    """(tiles, CTAs) of the SM that ends last, where all heads go through their tiles together."""
    visits, weight = visited_tiles(facts, rows, keys, by_query)
    slots = facts.batch * facts.heads_q // heads_per_cta
    tiles = makespan([heads_per_cta * n for n in visits], weight * slots, sms, group=slots)
    return tiles, max(1.0, len(visits) * weight * slots / sms)


def cut_share(facts: BwdFacts, rows: int, keys: int) -> float:
    """Share of the visited tiles that the mask cuts: some of their pairs are dropped. Top-left diagonals."""
    left, right = effective_bounds(facts)
    visits, weight = visited_tiles(facts, rows, keys)
    whole = 0
    for place, visited in enumerate(visits):
        first_key = place * round(weight) * keys
        last_key = min(first_key + keys, facts.seqlen_k) - 1
        first, end = 0, -(-facts.seqlen_q // rows)
        if right is not None:  # every query of the tile sees the last key
            first = max(0, -(-(last_key - right) // rows))
        if left is not None:  # and the first one
            end = min(end, (first_key + left) // rows)
        whole += min(visited, max(0, end - first))
    return 1 - whole / max(1, sum(visits))

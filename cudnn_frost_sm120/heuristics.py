"""Which plans to offer for a graph that is admitted, best first.

The cost model (cost.py) orders the ways to sum dQ, and chooses how many query heads of a group a CTA walks; walking the
whole group is always offered. The relay waits, and so is taken to need more time than the same adds in any order.
"""

from __future__ import annotations

from .config.tiles import TileConfig, configs_for
from .cost import chain_seconds, main_seconds
from .facts import BwdFacts, effective_bounds
from .knobs import BwdKnobs, ReductionMode
from .plan import knobs_of
from .target import Target
from .workspace import ds_region_bytes

RELAY_SLOWDOWN, RELAY_WALK_SLOWDOWN = 1.1, 1.4
"""Of the relay against atomic adds: as such, and where a CTA walks several heads of a causal mask and so waits, head
after head, for the longest one (docs/determinism.md has what was measured)."""


def ranked_knobs(facts: BwdFacts, target: Target) -> tuple[BwdKnobs, ...]:
    """Complete assignments for ``facts``, best first; empty only where admission declines the head dims."""
    adding = ReductionMode.RELAY if facts.deterministic else ReductionMode.ATOMIC
    ranked: list[tuple[float, BwdKnobs]] = []
    for tile in configs_for(facts.headdim_qk, facts.headdim_v):
        for mode in (adding, ReductionMode.RECOMPUTE):
            best = _heads_per_cta(facts, tile, target, mode)
            for heads in dict.fromkeys((best, facts.group)):
                seconds = chain_seconds(facts, tile, target.sm_count, heads, mode)
                if mode is ReductionMode.RELAY:
                    waits = heads > 1 and effective_bounds(facts)[1] is not None
                    seconds *= RELAY_WALK_SLOWDOWN if waits else RELAY_SLOWDOWN
                ranked.append((seconds, knobs_of(tile, heads, mode)))
    best_first = [knobs for _, knobs in sorted(ranked, key=lambda entry: entry[0])]
    return (*best_first, *_storing_ds(facts, target))


def _storing_ds(facts: BwdFacts, target: Target) -> list[BwdKnobs]:
    """Plans that store dS, where its workspace is within the budget; none has been measured to come first yet."""
    if ds_region_bytes(facts) > target.ds_budget:
        return []
    mode, tiles = ReductionMode.DS_STORE, configs_for(facts.headdim_qk, facts.headdim_v)
    return [knobs_of(tile, _heads_per_cta(facts, tile, target, mode), mode) for tile in tiles]


def _heads_per_cta(facts: BwdFacts, tile: TileConfig, target: Target, mode: ReductionMode) -> int:
    """How many query heads of a group a CTA walks: a divisor of the group's size."""
    if mode is ReductionMode.RELAY and effective_bounds(facts)[1] is not None:
        return 1  # RELAY_WALK_SLOWDOWN
    walks = [heads for heads in range(facts.group, 0, -1) if facts.group % heads == 0]
    if len(walks) == 1:
        return 1
    return min(
        walks, key=lambda heads: main_seconds(facts, tile, target.sm_count, heads, mode)
    )  # the longest of equals

"""Which plans to offer for a graph that is admitted, best first.

The cost model (cost.py) orders the ways to sum dQ, and chooses how many query heads of a group a CTA walks; walking the
whole group is always offered. What the relay's waiting costs, and where stored dS departs from the model, was measured.
"""

from __future__ import annotations

from functools import lru_cache

from .config.tiles import TileConfig, configs_for
from .cost import chain_seconds
from .facts import BwdFacts, effective_bounds
from .knobs import BwdKnobs, ReductionMode
from .plan import key_group_of, knobs_of
from .target import Target
from .workspace import ds_region_bytes

RELAY_SLOWDOWN = {32: 1.1, 64: 1.2, 128: 1.2, 192: 1.65, 256: 1.4}
"""Of the relay against atomic adds, by native head dim of the scores. At 64: 1.1 at S 2048, 1.2 at 16384."""
RELAY_WALK_SLOWDOWN = 1.75
"""The same where a CTA walks several heads of a causal mask: it waits, head after head, for the longest one."""
RELAY_WALK_SHARE = 0.25
"""What is left of the slowdown in `RELAY_SLOWDOWN` where a CTA walks several heads with no right bound: few CTAs of a
head run at a time, and wait little for each other."""
DS_STORE_MEASURED = {
    (64, 64, "window"): 0.94,
    (128, 128, "full"): 0.95,
    (128, 128, "causal"): 0.95,
    (192, 128, "full"): 0.88,
    (192, 128, "causal"): 0.88,
    (192, 192, "full"): 0.93,
    (192, 192, "causal"): 0.92,
    (256, 256, "full"): 0.86,
    (256, 256, "causal"): 0.86,
}
"""Of stored dS, time that was measured over what the model says, both against atomic adds (docs/performance.md); by
native head dims and mask."""
DS_STORE_TIE = 1.01
"""Elsewhere: a tie goes to a route that needs less memory than stored dS."""
WALK_TIE = 1.01
"""Of walks that take the same, the longest needs the fewest fp32 parts."""


def offered_modes(facts: BwdFacts, target: Target) -> tuple[ReductionMode, ...]:
    """The ways to sum dQ that ``facts`` may choose from."""
    adding = ReductionMode.RELAY if facts.deterministic else ReductionMode.ATOMIC
    fits = ds_region_bytes(facts, 1) <= target.ds_budget
    return (adding, ReductionMode.RECOMPUTE, *([ReductionMode.DS_STORE] if fits else []))


@lru_cache(maxsize=64)  # planning one graph asks several times
def ranked_knobs(facts: BwdFacts, target: Target) -> tuple[BwdKnobs, ...]:
    """Complete assignments for ``facts``, best first; empty only where admission declines the head dims."""
    ranked: list[tuple[float, BwdKnobs]] = []
    modes = offered_modes(facts, target)
    for tile in configs_for(facts.headdim_qk, facts.headdim_v):
        for mode in modes:
            walks = [knobs_of(tile, heads, mode) for heads in _walks(facts, target, mode)]
            timed = [(_seconds(facts, tile, target, knobs), knobs) for knobs in walks]
            least = min(seconds for seconds, _ in timed)
            best = next(entry for entry in timed if entry[0] <= WALK_TIE * least)
            ranked += dict.fromkeys((best, timed[0]))
    return tuple(knobs for _, knobs in sorted(ranked, key=lambda entry: entry[0]))


def _walks(facts: BwdFacts, target: Target, mode: ReductionMode) -> list[int]:
    """How many query heads of a group a CTA may walk: divisors of the group's size, the longest first."""
    walks = [heads for heads in range(facts.group, 0, -1) if facts.group % heads == 0]
    if mode is ReductionMode.DS_STORE:  # the dS of a walk is in memory at once
        walks = [heads for heads in walks if ds_region_bytes(facts, heads) <= target.ds_budget]
    return walks


def _seconds(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    seconds = chain_seconds(facts, tile, target, knobs)
    if knobs.reduction_mode is ReductionMode.RELAY:
        bounded = effective_bounds(facts)[1] is not None
        slowdown = RELAY_SLOWDOWN[tile.headdim_qk]
        if knobs.heads_per_cta > 1:
            slowdown = RELAY_WALK_SLOWDOWN if bounded else 1 + RELAY_WALK_SHARE * (slowdown - 1)
        seconds *= slowdown
        seconds *= 1.0 if bounded else 1.0 + _turns_before_the_first(facts, tile, target, knobs)
    if knobs.reduction_mode is ReductionMode.DS_STORE:
        seconds *= DS_STORE_MEASURED.get((tile.headdim_qk, tile.headdim_v, _mask(facts)), DS_STORE_TIE)
    return seconds


def _turns_before_the_first(facts: BwdFacts, tile: TileConfig, target: Target, knobs: BwdKnobs) -> float:
    """Over the tiles of a CTA, those that the last of its group waits for its first turn: with no right bound all of
    them start at the first query tile. By the order of turns; not measured on grids as small as it tells on."""
    key_tiles, query_tiles = -(-facts.seqlen_k // tile.tile_n), -(-facts.seqlen_q // tile.tile_m)
    at_once = min(key_group_of(facts, knobs, target), key_tiles)
    return (at_once - 1) / (query_tiles * knobs.heads_per_cta)


def _mask(facts: BwdFacts) -> str:
    left, right = effective_bounds(facts)
    return "window" if left is not None else "full" if right is None else "causal"

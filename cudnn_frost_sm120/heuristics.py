"""Which plans to offer for a graph that is admitted, best first.

The order among tile configurations is that of config/tiles.py, whose rows carry the evidence for it. How many query
heads of a group a CTA walks comes from the cost model (cost.py), except for the relay under a causal mask, where it is
one; walking the whole group is always offered.
"""

from __future__ import annotations

from .config.tiles import TileConfig, configs_for
from .cost import main_seconds
from .facts import BwdFacts
from .knobs import BwdKnobs, ReductionMode
from .plan import effective_bounds, knobs_of
from .target import Target


def ranked_knobs(facts: BwdFacts, target: Target) -> tuple[BwdKnobs, ...]:
    """Complete assignments for ``facts``, best first; empty only where admission declines the head dims."""
    ranked: list[BwdKnobs] = []
    mode = ReductionMode.RELAY if facts.deterministic else ReductionMode.ATOMIC
    for tile in configs_for(facts.headdim_qk, facts.headdim_v):
        best = _heads_per_cta(facts, tile, target, mode)
        ranked += [knobs_of(tile, heads, mode) for heads in dict.fromkeys((best, facts.group))]
    return tuple(ranked)


def _heads_per_cta(facts: BwdFacts, tile: TileConfig, target: Target, mode: ReductionMode) -> int:
    """How many query heads of a group a CTA walks: a divisor of the group's size."""
    if mode is ReductionMode.RELAY and effective_bounds(facts)[1] is not None:
        return 1  # a CTA that walks several heads of a causal mask waits, head after head, for the longest one
    walks = [heads for heads in range(facts.group, 0, -1) if facts.group % heads == 0]
    if len(walks) == 1:
        return 1
    return min(walks, key=lambda heads: main_seconds(facts, tile, target.sm_count, heads))  # the longest of equals

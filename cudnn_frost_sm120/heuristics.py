"""Which plans to offer for a graph that is admitted, best first.

The order among tile configurations is that of config/tiles.py, whose rows carry the evidence for it.
"""

from __future__ import annotations

from .config.tiles import configs_for
from .facts import BwdFacts
from .knobs import BwdKnobs
from .plan import knobs_of
from .target import Target


def ranked_knobs(facts: BwdFacts, target: Target) -> tuple[BwdKnobs, ...]:
    """Complete assignments for ``facts``, best first; empty only where admission declines the head dims."""
    configs = configs_for(facts.headdim_qk, facts.headdim_v)
    return tuple(dict.fromkeys(knobs_of(config) for config in configs))

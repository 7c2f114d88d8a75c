"""The plans to offer, best first: the model's ranking (heuristics.py), with what a tuner measured fastest in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .admission import decline_reason
from .facts import BwdFacts
from .heuristics import ranked_knobs
from .knobs import BwdKnobs
from .register import ENGINE_NAME
from .target import Target
from .tuning_file import Winner, winner_for


def plans_for(facts: BwdFacts, target: Target) -> tuple[BwdKnobs, ...]:
    """Complete assignments for facts that admission has accepted."""
    ranked = ranked_knobs(facts, target)
    winner = winner_for(facts, target)
    first = _knobs_of(winner, facts, target) if winner is not None and winner.engine == ENGINE_NAME else None
    return ranked if first is None else (first, *(knobs for knobs in ranked if knobs != first))


def _knobs_of(winner: Winner, facts: BwdFacts, target: Target) -> BwdKnobs | None:
    """The winner's knobs, if this graph of its bucket is served with them."""
    try:
        knobs = BwdKnobs.from_public(public_knobs(winner.knobs))
    except ValueError:
        return None
    return knobs if decline_reason(facts, target, knobs) is None else None


def public_knobs(named: Mapping[str, int]) -> dict[Any, int]:
    """``{cudnn.knob_type: value}`` of knobs by name. Raises ValueError for a name that cudnn does not have."""
    import cudnn

    unknown = [name for name in named if not hasattr(cudnn.knob_type, name)]
    if unknown:
        raise ValueError(f"cudnn.knob_type has no {', '.join(unknown)}")
    return {getattr(cudnn.knob_type, name): value for name, value in named.items()}

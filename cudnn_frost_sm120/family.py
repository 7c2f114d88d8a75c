"""The hooks that our copy of the ``frost_sdpa_bwd`` family names, under the names of the fields they fill.

Each asks the original's hook for all that concerns the engines already there, so that their plans, their order among
themselves and their validation stay what they were, and adds ours while it is offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .engine import BACKEND, PlanConfig, Request, Sm120BwdEngine
from .engine import analyze as analyze_ours
from .log import logger
from .register import ENGINE_NAME, is_offered, is_registered, original_family, original_hook
from .tuning_file import BACKEND_NAME
from .validator import validator

__all__ = ["FamilyFacts", "analyzer", "backend_guard", "heuristics", "validator"]

_LOG = logger(__name__)


@dataclass(frozen=True)
class FamilyFacts:
    """What the family's hooks are given: the original analyzer's record, and ours while our engine is offered."""

    original: Any
    ours: Request | None


def analyzer(graph: Any) -> FamilyFacts | None:
    """The record for ``graph``, or None where neither side can describe it."""
    analyze_original = original_hook("analyzer")
    original = graph._facts_for(analyze_original) if analyze_original is not None else None
    ours = graph._facts_for(analyze_ours) if is_offered() else None
    return FamilyFacts(original, ours) if original is not None or ours is not None else None


def heuristics(kind: str, facts: FamilyFacts, offered: dict[str, int]) -> list[PlanConfig]:
    """Our plans, best first, then what the original proposes for its engines, its placement of the backend included.

    Where a tuner measured another engine fastest, ours stand behind its plans. ``offered`` holds the engines that
    accepted the graph, so ours are admitted plans only.
    """
    ours: list[PlanConfig] = []
    if ENGINE_NAME in offered and facts.ours is not None:
        ours = [PlanConfig(offered[ENGINE_NAME], knobs) for knobs in facts.ours.knobs()]
    others = {name: engine_id for name, engine_id in offered.items() if name != ENGINE_NAME}
    recommend = original_hook("heuristics")
    if recommend is None:  # as the planner does for a family without the hook
        theirs = [PlanConfig(engine_id, None) for engine_id in others.values()]
    else:
        theirs = list(recommend(kind, facts.original, others)) if facts.original is not None else []
    winner = facts.ours.measured_winner() if ours and facts.ours is not None else None
    return _placed(ours, theirs, winner, others)


def _placed(
    ours: list[PlanConfig], theirs: list[PlanConfig], winner: str | None, others: dict[str, int]
) -> list[PlanConfig]:
    """Ours first, or right behind the plans of the engine ``winner``."""
    if winner == BACKEND_NAME:
        rest = [config for config in theirs if config.engine_id != BACKEND.engine_id]
        return [BACKEND, *ours, *rest]
    last = max((i for i, config in enumerate(theirs) if config.engine_id == others.get(winner or "")), default=-1)
    return [*theirs[: last + 1], *ours, *theirs[last + 1 :]]


def backend_guard(graph: Any, facts: FamilyFacts) -> str | None:
    """The original's answer to whether the cuDNN library must not be asked about ``graph``."""
    guard = original_hook("backend_guard")
    return guard(graph, facts.original) if guard is not None and facts.original is not None else None


def _make_engines(ids: dict[str, int]) -> list[Any]:
    """The engines of ``ids``: the original factory's, then ours."""
    others = {name: engine_id for name, engine_id in ids.items() if name != ENGINE_NAME}
    engines: list[Any] = []
    try:
        factory = _original_factory()
        made = factory(others) if others else []
        engines += made if isinstance(made, (list, tuple)) else [made]
    except ImportError as error:
        _LOG.info("the engines of %s are unavailable here: %s", original_family().name, error)
    except Exception:
        # As the planner itself does: loud, and planning goes on with the engines that work.
        _LOG.warning("the engines of %s failed to load", original_family().name, exc_info=True)
    if ENGINE_NAME in ids:
        engines.append(Sm120BwdEngine(ids[ENGINE_NAME]))
    return engines


def _original_factory() -> Callable[[dict[str, int]], Any]:
    import importlib

    family = original_family()
    return getattr(importlib.import_module(family.module), family.factory)


def __getattr__(name: str) -> Any:
    # The planner, and cudnn.engines.__getattr__, look the factory up here by the name that the original gave it.
    if is_registered() and name == original_family().factory:
        return _make_engines
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

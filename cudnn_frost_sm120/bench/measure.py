"""One cell: build everybody, check the gradients of ours, time everybody in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..traffic import outside_bytes
from .candidates import Candidate, Lineup
from .cells import Cell
from .problem import TOLERANCE, Problem
from .result import ATOMIC, OURS, THROTTLED, Result
from .stages import kernel_microseconds
from .timing import interleaved


@dataclass(frozen=True)
class Wishes:
    peers: Sequence[str]
    rounds: int = 9
    every_plan: bool = False  # of ours; else the first one alone
    throttled: bool = False
    stages: bool = False


def measure(cell: Cell, wishes: Wishes) -> Result:
    """What cannot be had, whatever the reason, is in the result's `missing`, and so is a plan of ours whose gradients
    are wrong: it is not timed."""
    result = Result(cell)
    try:
        _measure(result, wishes)
    except Exception as error:
        result.missing[OURS] = _first_line(error)
    gc.collect()  # graphs hold buffers in cycles, and the next cell may need the memory
    torch.cuda.empty_cache()
    return result


def _measure(result: Result, wishes: Wishes) -> None:
    lineup = Lineup(Problem(result.cell))
    builders = list(lineup.ours(wishes.every_plan))
    if wishes.throttled:
        builders.append((THROTTLED, lineup.throttled))
    if result.cell.deterministic:
        builders.append((ATOMIC, lineup.atomic))
    for peer in wishes.peers:
        builders += lineup.peer(peer)
    candidates = [made for name, build in builders if (made := _made(name, build, lineup.problem, result))]
    result.timings = interleaved({c.name: c.run for c in candidates}, wishes.rounds)
    if wishes.stages:
        found = {c.name: kernel_microseconds(c.run) for c in candidates}
        result.stages = {name: kernels for name, kernels in found.items() if kernels}
        if len(result.stages) < len(found):
            result.missing["stages"] = "the profiler recorded no kernels"
    _keep_the_fastest(result)


def _made(name: str, build: Callable[[], Candidate], problem: Problem, result: Result) -> Candidate | None:
    """Built, run once and checked."""
    try:
        candidate = build()
        problem.wipe()
        candidate.run()
        torch.cuda.synchronize()
    except Exception as error:  # whatever an engine raises, the others are still worth measuring
        result.missing[name] = _first_line(error)
        return None
    result.build_seconds[name] = candidate.build_seconds
    if name != "fa2":  # which returns new tensors
        result.errors[name] = problem.errors()
    if candidate.plan is not None:
        result.knobs[name] = candidate.plan.knobs
        if not max(result.errors[name].values()) < TOLERANCE:
            result.missing[name] = f"its gradients are wrong: {result.errors[name]}"
            return None
        if name == OURS:
            result.outside_bytes = outside_bytes(candidate.plan)
    return candidate


def _keep_the_fastest(result: Result) -> None:
    """Of a peer with several plans, the fastest is the peer."""
    for name in list(result.timings):
        peer, _, place = name.rpartition(" ")
        if place.isdigit() and peer in result.timings:
            other, stages = result.timings.pop(name), result.stages.pop(name, None)
            if other.median < result.timings[peer].median:
                result.timings[peer] = other
                result.stages |= {peer: stages} if stages else {}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

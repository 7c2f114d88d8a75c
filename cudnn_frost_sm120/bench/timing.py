"""Timing candidates against each other: in turn, in one process, by CUDA events around whole chains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from .result import Timing

WARM_UP = 2
SPAN_MS = 1.0  # what one measurement lasts at least, so that events cost nothing beside it
MOST_CALLS = 20
HOST_CALLS = 8


def interleaved(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, Timing]:
    """Medians over `rounds`. In every other round the candidates come in reverse order."""
    calls = {who: _calls_in_a_span(run) for who, run in runs.items()}
    events = {who: [_events() for _ in range(rounds)] for who in runs}
    for turn in range(rounds):
        for who in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            begin, end = events[who][turn]
            begin.record()
            for _ in range(calls[who]):
                runs[who]()
            end.record()
    torch.cuda.synchronize()  # once: after every run it would add the host's time to submit the next one
    timings = {}
    for who, run in runs.items():
        times = [begin.elapsed_time(end) / calls[who] for begin, end in events[who]]
        median = statistics.median(times)
        timings[who] = Timing(median, (max(times) - min(times)) / median, _host_us(run))
    return timings


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _calls_in_a_span(run: Callable[[], None]) -> int:
    for _ in range(WARM_UP):
        run()
    begin, end = _events()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return max(1, min(MOST_CALLS, round(SPAN_MS / begin.elapsed_time(end))))


def _host_us(run: Callable[[], None]) -> float:
    """What it takes to submit one call, by the host's clock, while the GPU keeps up."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6

"""What becomes of a cell: who is timed, who is missing, and why. Engines are made up; nothing runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudnn_frost_sm120.bench import measure as measuring
from cudnn_frost_sm120.bench.candidates import Candidate, Declined
from cudnn_frost_sm120.bench.cells import Cell
from cudnn_frost_sm120.bench.measure import Wishes, measure
from cudnn_frost_sm120.bench.report import markdown
from cudnn_frost_sm120.bench.result import ATOMIC, OURS, THROTTLED, Result, Timing
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.target import named

SM120 = named("sm_120")
CELL = Cell(64, 64, 1, 8, 2, 512)
PLANS = [make_plan(CELL.facts(), knobs, SM120) for knobs in ranked_knobs(CELL.facts(), SM120)]
MILLISECONDS = {
    OURS: 2.0,
    "ours, slow": 3.0,
    THROTTLED: 4.0,
    ATOMIC: 1.6,
    "baseline": 6.0,
    "baseline 2": 5.0,
    "fa2": 1.0,
}


class FakeProblem:
    """Gradients are right unless `wrong` names the candidate that ran last."""

    def __init__(self, cell: Cell):
        self.wrong: set[str] = set()
        self.ran = ""

    def wipe(self) -> None:
        self.ran = "nobody"

    def errors(self) -> dict[str, float]:
        return {"dq": 0.5 if self.ran in self.wrong else 1e-3}


class FakeLineup:
    wrong: frozenset[str] = frozenset()

    def __init__(self, problem: FakeProblem):
        self.problem = problem
        problem.wrong = set(self.wrong)

    def _builder(self, name: str, plan: Any = None) -> tuple[str, Callable[[], Candidate]]:
        def run() -> None:
            self.problem.ran = name

        return name, lambda: Candidate(name, run, plan, 0.5)

    def ours(self, every_plan: bool) -> Iterator[tuple[str, Callable[[], Candidate]]]:
        yield self._builder(OURS, PLANS[0])
        if every_plan:
            yield self._builder("ours, slow", PLANS[1])

    def throttled(self) -> Candidate:
        return self._builder(THROTTLED, PLANS[0])[1]()

    def atomic(self) -> Candidate:
        return self._builder(ATOMIC, PLANS[0])[1]()

    def peer(self, peer: str) -> Iterator[tuple[str, Callable[[], Candidate]]]:
        if peer == "cudnn":

            def declines() -> Candidate:
                raise Declined("lists no plan\nand more of it")

            yield peer, declines
            return
        yield self._builder(peer)
        if peer == "baseline":
            yield self._builder("baseline 2")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Problem", FakeProblem)
    monkeypatch.setattr(measuring, "Lineup", FakeLineup)
    monkeypatch.setattr(measuring, "kernel_microseconds", lambda run: {"main": 1.0})
    monkeypatch.setattr(
        measuring,
        "interleaved",
        lambda runs, rounds: {who: Timing(MILLISECONDS[who], 0.0, float(rounds)) for who in runs},
    )
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def test_everybody_is_measured_and_the_fastest_of_a_peer_counts() -> None:
    result = measure(CELL, Wishes(["baseline", "fa2", "cudnn"], 3, every_plan=True, throttled=True, stages=True))
    assert {who: timing.median for who, timing in result.timings.items()} == {
        OURS: 2.0,
        "ours, slow": 3.0,
        THROTTLED: 4.0,
        "baseline": 5.0,
        "fa2": 1.0,
    }
    assert result.missing == {"cudnn": "lists no plan"}
    assert set(result.stages) == set(result.timings)
    assert result.knobs == {OURS: PLANS[0].knobs, "ours, slow": PLANS[1].knobs, THROTTLED: PLANS[0].knobs}
    assert result.ratio("baseline") == 2.5
    assert result.ratio("cudnn") is None
    assert result.outside_bytes > 0
    assert set(result.errors) == {OURS, "ours, slow", THROTTLED, "baseline", "baseline 2"}


def test_a_deterministic_plan_is_timed_beside_atomic_adds() -> None:
    result = measure(replace(CELL, deterministic=True), Wishes(["baseline"]))
    assert result.over_atomic() == 1.25
    shown = markdown([result], "made here")
    assert "| over atomic adds |" in shown
    assert "| 1.25 |" in shown
    assert ATOMIC not in shown.split("over atomic adds")[0]  # it is no peer, and no plan of the graph
    assert measure(CELL, Wishes([])).over_atomic() is None


def test_a_plan_with_wrong_gradients_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLineup, "wrong", frozenset({OURS, "baseline"}))
    result = measure(CELL, Wishes(["baseline"]))
    assert "wrong" in result.missing[OURS]
    assert "baseline" in result.timings  # what a peer computes is shown, and is the peer's own affair
    assert result.ratio("baseline") is None


def test_a_cell_that_cannot_be_posed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(cell: Cell) -> FakeProblem:
        raise RuntimeError("out of memory\nat some place")

    monkeypatch.setattr(measuring, "Problem", out_of_memory)
    result: Result = measure(CELL, Wishes(["baseline"]))
    assert result.missing == {OURS: "out of memory"}
    assert not result.timings

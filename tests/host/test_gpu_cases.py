"""Every case of the GPU tests can be posed and planned: a slip in one would stop their whole run, on the one machine
where they can be run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cudnn_frost_sm120.admission import decline_reason
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.kernel_store import KERNELS_ENV
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.target import Target
from tests.gpu.cases import Case, facts_of, unserved

GPU_TESTS = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("test_*.py"))
STAND_IN = Target("sm_90", "sm_90a", 0, 132)


def cases_of(module: str) -> list[Case]:
    """The cases that the tests of a module are parametrized over."""
    tests = vars(importlib.import_module(f"tests.gpu.{module}")).values()
    marks = [
        mark for test in tests for mark in getattr(test, "pytestmark", []) if getattr(mark, "name", "") == "parametrize"
    ]
    values = [value for mark in marks for value in mark.args[1]]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in flat if isinstance(part, Case)]


@pytest.mark.parametrize("module", GPU_TESTS)
def test_cases_can_be_planned(module: str) -> None:
    for case in cases_of(module):
        if unserved(case):
            continue
        facts = facts_of(case)
        assert decline_reason(facts, STAND_IN) is None, case
        for knobs in ranked_knobs(facts, STAND_IN):
            make_plan(facts, knobs, STAND_IN)


def test_reruns_cover_every_deterministic_route() -> None:
    from tests.gpu.test_numerics import DETERMINISTIC

    for case in DETERMINISTIC:
        offered = {knobs.reduction_mode for knobs in ranked_knobs(facts_of(case), STAND_IN)}
        assert offered == set(ReductionMode) - {ReductionMode.ATOMIC}, case


def test_a_negative_stride_of_a_dim_of_size_1_can_be_allocated() -> None:
    """Seed 20195 of the fuzzer: q with one row, and rows reversed, is served."""
    torch = pytest.importorskip("torch")
    from tests.gpu.harness import GUARD, allocate

    facts = facts_of(Case(64, seqlen_q=1, seqlen_k=8))
    q = replace(facts.q, stride=(*facts.q.stride[:2], -64, 1))
    assert decline_reason(replace(facts, q=q), STAND_IN) is None
    view = allocate(q, "cpu", 1.0)
    assert (tuple(view.shape), view.storage_offset()) == (q.dim, GUARD)
    assert bool((view == 1).all())
    assert view.dtype is torch.bfloat16


def test_there_are_cases() -> None:
    assert sum(len(cases_of(module)) for module in GPU_TESTS) > 500


@pytest.mark.compile
def test_kernels_of_the_gpu_tests_are_compiled_ahead(tmp_path: Path) -> None:
    """Where there is no GPU, so that one whose time is dear only runs them."""
    chosen = "tests/gpu/test_features.py::test_a_scale_passed_by_value"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--warm", "sm_90", chosen],
        cwd=Path(__file__).parents[2],
        env={**os.environ, KERNELS_ENV: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored = len(list(tmp_path.glob("*/entry.json")))
    assert stored > 0
    assert f"{stored} of {stored} chains for sm_90" in done.stdout + done.stderr

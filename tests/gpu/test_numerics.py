"""Data and scales that break careless kernels, and gradients that must not vary."""

import pytest
import torch

from . import harness
from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, Case, each
from .test_masks import NATIVE


@each(
    Case(d, dtype=dtype, seqlen_q=sq, seqlen_k=sk, mask=mask, values="very_negative_lse")
    for d in (64, 128)
    for dtype in ("bf16", "fp16")
    for sq, sk in ((1, 130), (100, 70), (200, 200))
    for mask in (FULL, CAUSAL)
)
def test_very_negative_lse(check, case):
    """LSE of about -500 and less, where a key tail of zeros would overflow"""
    check(case)


@each(
    Case(d, seqlen_q=130, seqlen_k=200, mask=mask, scale=scale, heads_q=4, heads_k=heads_k)
    for d in (64, 128)
    for scale in (-0.125, 0.0, 0.01, 1.0)
    for mask in (FULL, CAUSAL_BOTTOM_RIGHT)
    for heads_k in (4, 2)
)
def test_scales(check, case):
    """Scales of either sign, zero and one"""
    check(case)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@each(Case(64, mask=CAUSAL, scale=scale) for scale in (-0.125, 0.0))
def test_scales_through_the_front(check, case, via):
    """Negative and zero scale through a graph and through the wrapper"""
    check(case, via=via)


@each(
    Case(*headdim, seqlen_q=400, seqlen_k=300, mask=mask, layouts=("bhsd",))
    for headdim in NATIVE
    for mask in (CAUSAL_BOTTOM_RIGHT,)
)
def test_rows_that_keep_nothing(check, case):
    """Rows that keep nothing, at every native pair of head dims: exact zeros"""
    check(case)


@each(
    [
        Case(64, batch=2, heads_q=8, seqlen_q=1000, mask=CAUSAL),
        Case(128, batch=2, heads_q=8, heads_k=2, seqlen_q=1000, mask=CAUSAL),
        Case(192, 128, batch=1, heads_q=8, seqlen_q=700),
        Case(256, batch=1, heads_q=8, heads_k=1, seqlen_q=700, mask=CAUSAL),
    ]
)
def test_dk_and_dv_do_not_vary(judge, case):
    """100 runs under load from another stream: dK and dV bitwise equal, dQ within tolerance every time"""
    problem = harness.Problem(case)
    for knobs in harness.offered(problem):
        _, _, run = harness.make_launch(problem, knobs)
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)
        first = {name: problem.outputs[name].clone() for name in ("dk", "dv")}
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        worst_dq = torch.zeros((), dtype=torch.float64, device="cuda")
        exact_dq, noise = problem.expected.dq, torch.cuda.Stream()
        load = torch.randn(2048, 2048, device="cuda")
        for repeat in range(100):
            with torch.cuda.stream(noise):
                for _ in range(1 + repeat % 3):
                    load = (load @ load).clamp(-1, 1)
            problem.wipe_outputs()
            run()
            differing += sum((problem.outputs[name] != first[name]).sum() for name in first)
            error = torch.linalg.vector_norm(problem.outputs["dq"].double() - exact_dq)
            worst_dq = torch.maximum(worst_dq, error)
        torch.cuda.synchronize()
        assert int(differing) == 0, f"{int(differing)} elements differed from the first run"
        limit = harness.TOLERANCE[case.dtype] * max(exact_dq.norm().item(), problem.expected.floors["dq"])
        assert float(worst_dq) <= limit


@each(Case(*headdim, seqlen_q=300, mask=CAUSAL) for headdim in NATIVE)
def test_a_dirty_workspace(judge, case):
    """The same launch again on the workspace it left behind, and on one full of NaN, zeros and ones"""
    problem = harness.Problem(case)
    _, workspace, run = harness.make_launch(problem)
    for fill in (None, 0xFF, 0x00, 0x7F, 0x3F):
        if fill is not None:
            workspace.view.fill_(fill)
        problem.wipe_outputs()
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)


def test_a_workspace_that_is_aligned_to_16_bytes_only(judge):
    """A workspace at an odd multiple of 16 bytes"""
    for case in (Case(64, seqlen_q=100), Case(256, seqlen_q=100, heads_q=4, heads_k=2)):
        problem = harness.Problem(case)
        for knobs in harness.offered(problem):
            problem.wipe_outputs()
            judge(problem, harness.launch_once(problem, knobs, shift=16))

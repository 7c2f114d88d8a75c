"""Data and scales that break careless kernels, and gradients that must not vary."""

from dataclasses import replace

import pytest
import torch

from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.knobs import ReductionMode

from . import harness
from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, Case, each, unserved
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


BUSY = [
    Case(64, batch=2, heads_q=8, seqlen_q=1000, mask=CAUSAL),
    Case(64, batch=2, heads_q=8, heads_k=2, seqlen_q=900, mask=MaskFacts(left_bound=200, right_bound=0)),
    Case(128, batch=2, heads_q=8, heads_k=2, seqlen_q=1000, mask=CAUSAL),
    Case(192, 128, batch=1, heads_q=8, seqlen_q=700),
    Case(256, batch=1, heads_q=8, heads_k=1, seqlen_q=700, mask=CAUSAL),
    Case(64, batch=2, heads_q=4, heads_k=2, seqlen_q=400, bias=(0, 1, 1, 1), dbias=True, sink=True),
]
PADDED = {"len_q": (700, 333), "len_k": (610, 700)}
FEATURES: list[dict] = [
    {"mask": FULL},
    {"mask": CAUSAL},
    {"mask": MaskFacts(left_bound=200, right_bound=10)},
    {"mask": CAUSAL_BOTTOM_RIGHT, **PADDED},
    {"mask": CAUSAL, "heads_k": 2},
    {"mask": CAUSAL, "sink": True},
    {"mask": CAUSAL, "bias": (0, 1, 1, 1), "dbias": True},
]
DETERMINISTIC = [
    Case(*headdim, batch=2, heads_q=16, seqlen_q=700, deterministic=True, **feature)
    for headdim in ((64,), (128,), (192, 128), (256,))
    for feature in FEATURES
]
"""All deterministic routes are offered for each of them."""


@each(BUSY + [replace(case, deterministic=True) for case in BUSY] + DETERMINISTIC)
def test_reruns_under_load(judge, case):
    """100 runs beside a busy stream: every gradient bitwise equal, dQ by atomic adds within rounding, and right"""
    problem = harness.Problem(case)
    if unserved(case):
        pytest.skip(f"not served yet: {', '.join(unserved(case))}")
    exact = problem.expected
    noise, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for knobs in harness.offered(problem):
        _, _, run = harness.make_launch(problem, knobs)
        problem.wipe_outputs()
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)
        first = {name: tensor.clone() for name, tensor in problem.outputs.items()}
        atomic = knobs.reduction_mode is ReductionMode.ATOMIC
        beside = 0.02 * first["dq"].float().abs() + 0.02 * first["dq"].float().square().mean().sqrt()
        differing = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in first}
        worst_dq = torch.zeros((), dtype=torch.float64, device="cuda")
        for repeat in range(100):
            with torch.cuda.stream(noise):
                for _ in range(1 + repeat % 3):
                    load = (load @ load).clamp(-1, 1)
            problem.wipe_outputs()
            run()
            for name, tensor in problem.outputs.items():
                if name == "dq" and atomic:  # another order of sums is seen in the last bits alone
                    differing[name] += ((tensor.float() - first[name].float()).abs() > beside).sum()
                else:
                    differing[name] += (tensor != first[name]).sum()
            worst_dq = torch.maximum(worst_dq, torch.linalg.vector_norm(problem.outputs["dq"].double() - exact.dq))
        torch.cuda.synchronize()
        for name, count in differing.items():
            assert int(count) == 0, f"{int(count)} elements of {name} differed, knobs {knobs}"
        assert float(worst_dq) <= harness.TOLERANCE[case.dtype] * max(exact.dq.norm().item(), exact.floors["dq"])


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

"""Sinks, biases, deterministic plans, scales in device memory; all skipped while support.py says "no"."""

from dataclasses import replace

import pytest
import torch

from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.workspace import ds_region_bytes

from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MIXED, Case, each, facts_of, unserved
from .test_masks import LENGTHS, NATIVE, SOME, WINDOWS, padded

BIASES = [
    (1, 1, 1, 1),
    (0, 1, 1, 1),
    (1, 0, 1, 1),
    (0, 0, 1, 1),
    (0, 1, 1, 0),
    (1, 0, 0, 1),
    (0, 0, 0, 1),
    (0, 0, 0, 0),
]
GROUPED = {"heads_q": 6, "heads_k": 2}


@each(
    Case(*headdim, dtype, seqlen_q=190, seqlen_k=270, sink=True, mask=mask)
    for headdim in NATIVE
    for dtype in ("bf16", "fp16")
    for mask in (FULL, CAUSAL)
)
def test_sinks(check, case):
    """Sinks and dSink"""
    check(case)


@each(
    padded(lengths, (d,), sink=True, mask=mask, layouts=MIXED, **GROUPED)
    for d in (64, 128)
    for lengths in ((None, None), SOME)
    for mask in (FULL, CAUSAL_BOTTOM_RIGHT, WINDOWS[1])
)
def test_sinks_with_everything(check, case):
    """Sinks with GQA, lengths and windows: real rows only"""
    check(case)


@each(
    Case(64, seqlen_q=130, seqlen_k=200, bias=bias, bias_dtype=dtype, dbias=dbias, mask=mask)
    for bias in BIASES
    for dtype in ("fp32", "io")
    for dbias in (False, True)
    for mask in (FULL, CAUSAL)
)
def test_biases(check, case):
    """Bias of every broadcast, fp32 and io dtype, with and without dBias"""
    check(case)


@each(
    padded(SOME, headdim, "fp16", bias=(0, 1, 1, 1), dbias=True, sink=True, mask=mask, layouts=MIXED, **GROUPED)
    for headdim in NATIVE
    for mask in (FULL, WINDOWS[2])
)
def test_biases_with_everything(check, case):
    """Bias, dBias and sinks with GQA, lengths and windows at every native pair of head dims"""
    check(case)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@each(
    [
        Case(64, sink=True, mask=CAUSAL, **GROUPED),
        Case(64, seqlen_q=100, seqlen_k=130, bias=(1, 1, 1, 1), dbias=True),
        Case(64, seqlen_q=100, seqlen_k=130, bias=(0, 1, 1, 1), dbias=True, mask=CAUSAL_BOTTOM_RIGHT),
    ]
)
def test_features_through_the_front(check, case, via):
    """Sinks and biases through a graph and through the wrapper"""
    check(case, via=via)


@each(
    Case(*headdim, dtype, seqlen_q=190, seqlen_k=270, mask=mask, deterministic=True, **more)
    for headdim in NATIVE
    for dtype in ("bf16", "fp16")
    for mask in (FULL, CAUSAL, MaskFacts(left_bound=64, right_bound=0))
    for more in ({}, GROUPED)
)
def test_deterministic(check, case):
    """Deterministic plans"""
    check(case)


@each(
    padded(lengths, (d,), mask=mask, deterministic=True, **more)
    for d in (64, 256)
    for lengths in LENGTHS
    for mask in (CAUSAL_BOTTOM_RIGHT, WINDOWS[1], WINDOWS[3], WINDOWS[7])
    for more in ({}, {**GROUPED, "sink": True})
)
def test_deterministic_with_everything(check, case):
    """Deterministic plans with lengths, windows and groups: every turn is taken, none is waited for in vain"""
    check(case)


@each(
    Case(*headdim, batch=3, heads_q=8, heads_k=heads_k, seqlen_q=330, seqlen_k=300, mask=mask, layouts=MIXED, **more)
    for headdim in ((64,), (128,), (192, 128), (256,))
    for mask in (FULL, CAUSAL, WINDOWS[1])
    for heads_k, more in ((8, {}), (2, {"len_q": (330, 0, 65), "len_k": (300, 44, 129)}))
)
@pytest.mark.parametrize("heads", [1, 5])
def test_dS_in_parts(judge, monkeypatch, case, heads):
    """dS stored for a few heads at a time, the parts not all of one size"""
    from cudnn_frost_sm120.knobs import ReductionMode

    from . import harness

    problem = harness.Problem(case)
    monkeypatch.setenv("CUDNN_FROST_SM120_DS_BUDGET", str(ds_region_bytes(problem.facts, heads)))
    storing = [knobs for knobs in harness.offered(problem) if knobs.reduction_mode is ReductionMode.DS_STORE]
    assert storing
    for knobs in storing:
        plan, _, run = harness.make_launch(problem, knobs)
        assert plan.slots_per_launch * knobs.heads_per_cta <= heads
        problem.wipe_outputs()
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)


@each(
    Case(64, batch=batch, heads_q=heads_q, seqlen_q=seqlen, mask=mask, deterministic=True)
    for batch, heads_q, seqlen in ((4, 32, 1000), (1, 1, 8000), (1, 2, 4096))
    for mask in (FULL, CAUSAL, MaskFacts(left_bound=300, right_bound=0))
)
def test_deterministic_with_more_tiles_than_sms(check, case):
    """Deterministic plans whose CTAs cannot all be resident at once"""
    check(case)


@pytest.mark.parametrize("via", ["launcher", "graph"])
@each(
    Case(d, dtype=dtype, seqlen_q=130, seqlen_k=200, mask=mask, scale=scale, scale_tensor=True)
    for d, dtype in ((64, "bf16"), (128, "fp16"))
    for mask in (FULL, CAUSAL)
    for scale in (None, -0.125)
)
def test_scale_tensors(check, case, via):
    """The scale in device memory, of either sign"""
    check(case, via=via)


@each(
    [
        padded(SOME, (128,), scale_tensor=True, mask=CAUSAL_BOTTOM_RIGHT, layouts=MIXED, sink=True, **GROUPED),
        padded(
            SOME, (256,), dtype="fp16", scale_tensor=True, scale=-0.125, mask=WINDOWS[1], deterministic=True, **GROUPED
        ),
        Case(64, seqlen_q=130, seqlen_k=200, scale_tensor=True, bias=(1, 1, 1, 1), dbias=True, mask=CAUSAL),
        Case(192, 128, "fp16", seqlen_q=130, seqlen_k=200, scale_tensor=True, bias=(0, 1, 1, 1), dbias=True, scale=0.0),
        Case(128, seqlen_q=130, seqlen_k=200, scale_tensor=True, deterministic=True, mask=CAUSAL),
        Case(64, seqlen_q=130, scale_tensor=True, values="very_negative_lse"),
    ]
)
def test_scale_tensors_with_everything(check, case):
    """The scale in device memory with GQA, lengths, sinks, bias, dBias, deterministic plans, and zero"""
    check(case)


@pytest.mark.parametrize("via", ["launcher", "graph"])
@each([Case(64, seqlen_q=130, seqlen_k=200, mask=CAUSAL, scale=-0.125, scale_tensor=True)])
def test_a_scale_passed_by_value(judge, case, via):
    """A scale that the graph leaves open, and that each execute passes in host memory"""
    from . import harness

    if unserved(case):
        pytest.skip(f"not served yet: {', '.join(unserved(case))}")
    facts = facts_of(case)
    problem = harness.Problem(case, facts=replace(facts, scale_tensor=replace(facts.scale_tensor, by_value=True)))
    for got in harness.RUNNERS[via](problem):
        judge(problem, got)

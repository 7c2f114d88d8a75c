"""Strides and extents at their limits: odd strides of size-1 dims, many batches or heads, past 2^31 elements."""

import math

import pytest
import torch

from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.facts import BwdFacts, TensorFacts
from cudnn_frost_sm120.knobs import ReductionMode

from . import harness
from .cases import CAUSAL, FULL, MIXED, Case, strides


@pytest.mark.parametrize("via", ["launcher", "graph", "wrapper"])
@pytest.mark.parametrize("sizes", [(1, 1, 100, 90), (1, 3, 100, 90), (3, 1, 1, 90), (2, 2, 100, 1), (1, 1, 1, 1)])
def test_odd_strides_of_size_1_dims(check, via, sizes):
    """Dims of size 1 with strides that no alignment rule would take, beyond 2^32 too"""
    batch, heads, sq, sk = sizes
    check(Case(64, batch=batch, heads_q=heads, seqlen_q=sq, seqlen_k=sk, layouts=("odd_ones",)), via=via)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "gaps"])
def test_one_layout_for_all(check, layout):
    """Every layout for all tensors at once"""
    check(Case(96, batch=3, heads_q=4, heads_k=2, seqlen_q=150, layouts=(layout,), mask=CAUSAL))


@pytest.mark.parametrize("turn", range(9))
def test_each_tensor_has_its_own_strides(check, turn):
    """The mixed layouts turned, so that every tensor meets every layout"""
    layouts = MIXED[turn:] + MIXED[:turn]
    check(Case(64, batch=3, heads_q=4, heads_k=2, seqlen_q=150, layouts=layouts, mask=CAUSAL))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 65_537, "heads_q": 1},
        {"batch": 1, "heads_q": 65_537},
        {"batch": 2, "heads_q": 131_072, "heads_k": 65_536},
        {"batch": 70_000, "heads_q": 4, "heads_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_many_batches_or_heads(check, sizes, mask):
    """65,536 batches or heads and more"""
    check(Case(8, seqlen_q=3, seqlen_k=5, mask=mask, layouts=("bshd", "bhsd"), **sizes))


def test_many_batches_with_lengths(check):
    """65,537 batches, each with lengths"""
    lengths = {"len_q": tuple(i % 4 for i in range(65_537)), "len_k": tuple(i % 6 for i in range(65_537))}
    check(Case(8, batch=65_537, heads_q=1, seqlen_q=3, seqlen_k=5, **lengths))


def test_long_keys_and_few_queries(check):
    """100,000 keys for 40 queries, and the reverse"""
    check(Case(64, batch=1, seqlen_q=40, seqlen_k=100_000))
    check(Case(64, batch=1, seqlen_q=100_000, seqlen_k=40))


def test_batch_strides_past_2_to_31(judge):
    """Two batches more than 2^31 elements apart, in every tensor"""
    case = Case(64, seqlen_q=200, seqlen_k=150, mask=CAUSAL)
    step, record = 2**31 + 8 * 1024**2, {}
    facts = harness.facts_of(case)
    pool = torch.full((step + 2**22,), math.nan, dtype=torch.bfloat16, device="cuda")
    problem = harness.Problem(case)
    offset = 0
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        b, h, s, d = getattr(facts, name).dim
        record[name] = TensorFacts(name, (b, h, s, d), (step, s * d, d, 1), case.dtype)
        far = pool.as_strided((b, h, s, d), record[name].stride, offset)
        far.copy_(problem.tensors[name])
        problem.tensors[name] = far
        offset += h * s * d
    problem.facts = BwdFacts(**record, stats=facts.stats, mask=facts.mask, scale=facts.scale)
    _, workspace, run = harness.make_launch(problem)
    run()
    torch.cuda.synchronize()
    assert workspace.intact
    judge(problem, {name: problem.tensors[name].clone() for name in ("dq", "dk", "dv")})


@pytest.mark.slow
def test_past_2_to_31_elements(judge):
    """More than 2^31 elements in every tensor and in the dQ accumulator, every plan; first and last heads compared"""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    batch, heads, seqlen, headdim = 513, 512, 128, 64
    dim = (batch, heads, seqlen, headdim)
    assert math.prod(dim) > 2**31
    case = Case(headdim, batch=batch, heads_q=heads, seqlen_q=seqlen, layouts=("bhsd",))
    facts = harness.facts_of(case)
    tensors = {name: torch.empty(dim, dtype=torch.bfloat16, device="cuda") for name in ("q", "k", "v", "o", "do")}
    generator = torch.Generator("cuda").manual_seed(0)
    for tensor in tensors.values():
        for part in tensor.split(64):
            part.normal_(generator=generator)
    tensors["stats"] = torch.full((batch, heads, seqlen, 1), 6.0, device="cuda")
    for name in ("dq", "dk", "dv"):
        tensors[name] = torch.full(dim, math.nan, dtype=torch.bfloat16, device="cuda")

    parts = [(slice(0, 1), slice(0, 2)), (slice(batch - 1, batch), slice(heads - 4, heads))]
    small = [_slice_problem(case, part, tensors) for part in parts]
    problem = harness.Problem.__new__(harness.Problem)
    problem.case, problem.device, problem.facts, problem.tensors = case, "cuda", facts, tensors
    for knobs in harness.offered(problem):
        problem.wipe_outputs()
        plan, workspace, run = harness.make_launch(problem, knobs)
        assert plan.key.reduction is not ReductionMode.ATOMIC or workspace.nbytes > 2**33
        run()
        torch.cuda.synchronize()
        assert workspace.intact
        for name in ("dq", "dk", "dv"):
            assert all(bool(torch.isfinite(part).all()) for part in tensors[name].split(64)), f"{name} has NaN"
        for part, expected in zip(parts, small, strict=True):
            judge(expected, {name: tensors[name][part] for name in ("dq", "dk", "dv")})
        del workspace, run


def _slice_problem(case, part, tensors):
    """The heads of `part` as a problem of their own; their o and stats are put into the whole."""
    batches, heads = part[0].stop - part[0].start, part[1].stop - part[1].start
    own = harness.Problem.__new__(harness.Problem)
    own.case = Case(case.headdim, batch=batches, heads_q=heads, seqlen_q=case.seqlen_q, layouts=case.layouts)
    own.device, own.facts = "cuda", harness.facts_of(own.case)
    own.tensors = {name: tensors[name][part].clone() for name in ("q", "k", "v", "do")}
    o, lse = reference.sdpa_forward(*(own.tensors[n] for n in ("q", "k", "v")), **own.features)
    own.tensors["o"], own.tensors["stats"] = o.to(torch.bfloat16), lse.float()
    for name in ("dq", "dk", "dv"):
        own.tensors[name] = torch.empty(getattr(own.facts, name).dim, dtype=torch.bfloat16, device="cuda")
    for name in ("o", "stats"):
        tensors[name][part] = own.tensors[name]
    return own


def test_layouts_are_what_they_say():
    """The harness's own strides"""
    dim = (2, 3, 5, 8)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}
    for layout, axes in order.items():
        like = torch.empty([dim[a] for a in axes]).permute(*(axes.index(i) for i in range(4)))
        assert strides(dim, layout) == like.stride(), layout

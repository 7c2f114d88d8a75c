"""The oracle against an independent dense implementation under torch autograd, in fp64."""

import math

import pytest
import torch

from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.facts import BwdFacts, MaskFacts, TensorFacts

B, HQ, SQ, SK, D, DV = 2, 4, 9, 7, 8, 6
NAMES = ("dq", "dk", "dv")


def kept(mask: MaskFacts, b, q, k, len_q, len_k) -> bool:
    """The keep rule for one pair of plain integers, written as the semantics table states it."""
    diag = len_k[b] - len_q[b] if mask.bottom_right else 0
    inside = q < len_q[b] and k < len_k[b]
    right = mask.right_bound is None or k <= q + diag + mask.right_bound
    left = mask.left_bound is None or k > q + diag - mask.left_bound
    return inside and right and left


def dense(q, k, v, *, scale, mask, len_q, len_k, bias=None, sink=None):
    """o and lse by plain differentiable operations; rows that keep nothing give zeros and sink or -inf."""
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    keep = torch.tensor(
        [[[kept(mask, i, r, c, len_q, len_k) for c in range(sk)] for r in range(sq)] for i in range(b)]
    )[:, None]
    k, v = k.repeat_interleave(hq // k.shape[1], 1), v.repeat_interleave(hq // v.shape[1], 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if bias is not None:
        scores = scores + bias
    weight = torch.where(keep, scores, 0.0).exp() * keep
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        real = torch.tensor([[r < len_q[i] for r in range(sq)] for i in range(b)])[:, None, :, None]
        total = total + torch.where(real, sink.exp(), 0.0)
    o = torch.where(total > 0, (weight @ v) / torch.where(total > 0, total, 1.0), 0.0)
    return o, total.log()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "dense": {},
    "causal": {"mask": MaskFacts(right_bound=0)},
    "causal, bottom right, S_q > S_k": {"mask": MaskFacts(right_bound=0, bottom_right=True)},
    "causal, bottom right, S_q < S_k": {"mask": MaskFacts(right_bound=0, bottom_right=True), "sq": 5, "sk": 11},
    "right bound": {"mask": MaskFacts(right_bound=2)},
    "window": {"mask": MaskFacts(right_bound=1, left_bound=3)},
    "left only": {"mask": MaskFacts(left_bound=2)},
    "window, bottom right": {"mask": MaskFacts(right_bound=0, left_bound=2, bottom_right=True), "sq": 6, "sk": 13},
    "window leaves rows empty": {"mask": MaskFacts(left_bound=2, right_bound=0), "sq": 12, "sk": 4},
    "gqa": {"hk": 2, "hv": 2},
    "mqa": {"hk": 1, "hv": 1},
    "different key and value heads": {"hk": 2, "hv": 1},
    "one row, one key": {"sq": 1, "sk": 1},
    "padding": {"lens": ([9, 4], [3, 7])},
    "padding, empty and over-long": {"lens": ([0, 99], [7, -3])},
    "padding, causal bottom right": {"mask": MaskFacts(right_bound=0, bottom_right=True), "lens": ([8, 3], [5, 6])},
    "padding, window, gqa": {
        "mask": MaskFacts(right_bound=0, left_bound=3),
        "lens": ([9, 5], [6, 2]),
        "hk": 2,
        "hv": 2,
    },
    "key lengths only": {"lens": (None, [2, 5])},
    "sink": {"sink": True},
    "sink, causal, padding": {"sink": True, "mask": MaskFacts(right_bound=0), "lens": ([6, 9], [7, 0])},
    "bias": {"bias": (B, HQ, SQ, SK)},
    "bias over batch": {"bias": (1, HQ, SQ, SK)},
    "bias over heads": {"bias": (B, 1, SQ, SK)},
    "bias over both, causal": {"bias": (1, 1, SQ, SK), "mask": MaskFacts(right_bound=0)},
    "bias over rows": {"bias": (B, HQ, 1, SK)},
    "bias over keys": {"bias": (1, HQ, SQ, 1)},
    "bias, sink, padding, gqa": {"bias": (1, HQ, SQ, SK), "sink": True, "lens": ([7, 9], [4, 6]), "hk": 2, "hv": 2},
    "scale zero": {"scale": 0.0, "mask": MaskFacts(right_bound=0)},
    "scale negative": {"scale": -0.7, "mask": MaskFacts(right_bound=0)},
    "scale large": {"scale": 5.0},
}


def problem(case, seed=1):
    sq, sk = case.get("sq", SQ), case.get("sk", SK)
    hk, hv = case.get("hk", HQ), case.get("hv", HQ)
    q, k, v = randn(B, HQ, sq, D, seed=seed), randn(B, hk, sk, D, seed=seed + 1), randn(B, hv, sk, DV, seed=seed + 2)
    do = randn(B, HQ, sq, DV, seed=seed + 3)
    bias = randn(*case["bias"], seed=seed + 4) if "bias" in case else None
    sink = randn(1, HQ, 1, 1, seed=seed + 5) if case.get("sink") else None
    lens = case.get("lens", (None, None))
    features = {
        "scale": case.get("scale", D**-0.5),
        "mask": case.get("mask", MaskFacts()),
        "seq_len_q": None if lens[0] is None else torch.tensor(lens[0], dtype=torch.int32).reshape(B, 1, 1, 1),
        "seq_len_kv": None if lens[1] is None else torch.tensor(lens[1], dtype=torch.int32).reshape(B, 1, 1, 1),
        "bias": bias,
        "sink": sink,
    }
    len_q = [min(max(n, 0), sq) for n in lens[0]] if lens[0] else [sq] * B
    len_k = [min(max(n, 0), sk) for n in lens[1]] if lens[1] else [sk] * B
    return (q, k, v, do), features, len_q, len_k


def autograd(tensors, features, len_q, len_k):
    """o, lse and the gradients of the dense implementation, keyed like the oracle's."""
    q, k, v, do = tensors
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": features["bias"], "dsink": features["sink"]}
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items() if t is not None}
    o, lse = dense(
        *(leaves[n] for n in NAMES),
        scale=features["scale"],
        mask=features["mask"],
        len_q=len_q,
        len_k=len_k,
        bias=leaves.get("dbias"),
        sink=leaves.get("dsink"),
    )
    o.backward(do)
    return o.detach(), lse.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [1, 1 << 22], ids=["cut small", "whole"])
def test_agrees_with_autograd(name, piece, monkeypatch):
    monkeypatch.setattr(reference, "_PIECE_CPU", piece)
    tensors, features, len_q, len_k = problem(CASES[name])
    want_o, want_lse, want = autograd(tensors, features, len_q, len_k)

    o, lse = reference.sdpa_forward(*tensors[:3], **features)
    torch.testing.assert_close(o, want_o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)

    got = reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features)
    for key, gradient in want.items():
        torch.testing.assert_close(
            getattr(got, key), gradient, rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert set(got.errors(want)) == set(want)
    assert max(got.errors(want).values()) < 1e-9


@pytest.mark.parametrize("name", [n for n in CASES if "lens" in CASES[n] or "sink" in CASES[n]])
def test_padded_storage_may_hold_nan(name):
    tensors, features, len_q, len_k = problem(CASES[name])
    o, lse = reference.sdpa_forward(*tensors[:3], **features)
    clean = reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features)

    q, k, v, do, o, lse = (t.clone() for t in (*tensors, o, lse))
    bias = None if features["bias"] is None else features["bias"].expand(B, HQ, q.shape[2], k.shape[2]).clone()
    for b in range(B):
        for rows in (q, do, o, lse):
            rows[b, :, len_q[b] :] = math.nan
        for keys in (k, v):
            keys[b, :, len_k[b] :] = math.nan
        if bias is not None:
            bias[b, :, len_q[b] :] = math.nan
            bias[b, :, :, len_k[b] :] = math.nan
    dims = None if bias is None else features["bias"].shape
    dirty = reference.sdpa_backward(q, k, v, o, do, lse, **{**features, "bias": bias}, want_dbias_dims=dims)
    for key in (*NAMES, "dbias", "dsink"):
        if getattr(clean, key) is not None:
            assert torch.equal(getattr(clean, key), getattr(dirty, key)), key
    for b in range(B):
        assert not dirty.dq[b, :, len_q[b] :].any()
        assert not dirty.dk[b, :, len_k[b] :].any()
        assert not dirty.dv[b, :, len_k[b] :].any()
    forward_o, _ = reference.sdpa_forward(q, k, v, **{**features, "bias": bias})
    assert torch.isfinite(forward_o).all()


def test_rows_and_keys_that_nothing_keeps_give_exact_zeros():
    mask = MaskFacts(right_bound=0, bottom_right=True)
    tensors, features, _, _ = problem({"mask": mask, "sq": 9, "sk": 4})
    q, k, v, do = tensors
    o, lse = reference.sdpa_forward(q, k, v, **features)
    assert (lse[:, :, :5] == -math.inf).all()
    o[:, :, :5] = math.nan  # a forward pass may leave anything here
    lse[:, :, :5] = math.nan
    got = reference.sdpa_backward(q, k, v, o, do, lse, **features)
    assert not got.dq[:, :, :5].any()
    assert all(torch.isfinite(t).all() for t in (got.dq, got.dk, got.dv))

    window = {**features, "mask": MaskFacts(right_bound=0, left_bound=1)}  # the key of each row is the row itself
    keys = randn(B, HQ, 12, D, seed=9), randn(B, HQ, 12, DV, seed=10)
    o, lse = reference.sdpa_forward(q, *keys, **window)
    got = reference.sdpa_backward(q, *keys, o, do, lse, **window)
    assert not got.dk[:, :, 9:].any()
    assert not got.dv[:, :, 9:].any()


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min])
def test_bias_that_masks_whole_rows(masked):
    tensors, features, _, _ = problem({"bias": (B, 1, SQ, SK)})
    features["bias"][:, :, 2] = masked
    features["bias"][:, :, :, 3] = masked
    o, lse = reference.sdpa_forward(*tensors[:3], **features)
    got = reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features)
    for gradient in (got.dq, got.dk, got.dv, got.dbias):
        assert torch.isfinite(gradient).all()
    if masked == -math.inf:
        assert not got.dq[:, :, 2].any()
        assert not got.dbias[:, :, 2].any()
        assert not got.dv[:, :, 3].any()


def test_finite_differences_of_sink_and_bias():
    case = {"bias": (1, HQ, SQ, SK), "sink": True, "mask": MaskFacts(right_bound=1), "lens": ([9, 6], [7, 5])}
    (q, k, v, do), features, _, _ = problem(case)
    o, lse = reference.sdpa_forward(q, k, v, **features)
    got = reference.sdpa_backward(q, k, v, o, do, lse, **features)
    step = 1e-5
    for name, gradient in (("sink", got.dsink), ("bias", got.dbias)):
        for index in ((0, 1, 0, 0), (0, 3, 0, 0)) if name == "sink" else ((0, 0, 3, 2), (0, 2, 5, 6), (0, 1, 0, 5)):
            loss = []
            for sign in (1, -1):
                moved = features[name].clone()
                moved[index] += sign * step
                loss.append((reference.sdpa_forward(q, k, v, **{**features, name: moved})[0] * do).sum().item())
            slope = (loss[0] - loss[1]) / (2 * step)
            assert slope == pytest.approx(gradient[index].item(), rel=1e-6, abs=1e-8), (name, index)


def test_dbias_may_be_wanted_in_other_dims_than_bias():
    tensors, features, _, _ = problem({"bias": (B, HQ, SQ, SK)})
    o, lse = reference.sdpa_forward(*tensors[:3], **features)
    full = reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features).dbias
    for dims, over in (((1, HQ, SQ, SK), 0), ((B, 1, SQ, SK), 1), ((1, 1, 1, SK), (0, 1, 2))):
        got = reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features, want_dbias_dims=dims).dbias
        torch.testing.assert_close(got, full.sum(over, keepdim=True))
    with pytest.raises(ValueError, match="dbias dims"):
        reference.sdpa_backward(*tensors[:3], o, tensors[3], lse, **features, want_dbias_dims=(B, 2, SQ, SK))


def test_relative_error():
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert reference.relative_error(torch.tensor([3.0, 4.5]), ref, floor=50.0) == pytest.approx(0.01)
    assert reference.relative_error(torch.tensor([3.0, math.nan]), ref) == math.inf
    zero = torch.zeros(2)
    assert reference.relative_error(zero, zero) == 0.0
    assert reference.relative_error(torch.ones(2), zero) == math.inf


def test_floor_covers_cancellation_and_changes_nothing_elsewhere():
    """With one key dS is exactly zero, and what fp32 leaves there must not count; elsewhere floors are idle."""
    q, k, v, do = (
        randn(1, 2, 64, 64),
        randn(1, 2, 1, 64, seed=1),
        randn(1, 2, 1, 64, seed=2),
        randn(1, 2, 64, 64, seed=3),
    )
    o, lse = reference.sdpa_forward(q, k, v, scale=0.125)
    got = reference.sdpa_backward(q, k, v, o, do, lse, scale=0.125)
    assert got.dq.norm() < 1e-12 * do.norm()
    single = [t.float() for t in (q, k, v, o, do, lse)]
    p = torch.exp(0.125 * single[0] @ single[1].mT - single[5])
    ds = p * (single[4] @ single[2].mT - (single[4] * single[3]).sum(-1, keepdim=True))
    assert got.errors({"dq": 0.125 * ds @ single[1]})["dq"] < 1e-3

    q, k, v, do = (randn(1, 2, 256, 64, seed=s) for s in range(4))
    o, lse = reference.sdpa_forward(q, k, v, scale=0.125)
    got = reference.sdpa_backward(q, k, v, o, do, lse, scale=0.125)
    for name in NAMES:
        size = getattr(got, name).norm().item()
        assert 0.3 * size < got.floors[name] < 1.5 * size, (name, got.floors[name] / size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dense", "causal, bottom right, S_q > S_k", "padding", "bias, sink, padding, gqa"])
def test_same_dtype_gradients_are_near(name, dtype):
    tensors, features, _, _ = problem(CASES[name])
    q, k, v, do = (t.to(dtype) for t in tensors)
    if features["bias"] is not None:
        features["bias"] = features["bias"].to(dtype)
    near = reference.same_dtype_gradients(q, k, v, do, **features)
    o, lse = reference.sdpa_forward(q, k, v, **features)
    errors = reference.sdpa_backward(q, k, v, o, do, lse, **features).errors(near)
    assert all(1e-5 < e < (2e-2 if dtype == torch.bfloat16 else 3e-3) for e in errors.values()), errors


def facts_of(tensors: dict[str, torch.Tensor], **more) -> BwdFacts:
    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
    records = {n: TensorFacts(n, tuple(t.shape), t.stride(), short[t.dtype]) for n, t in tensors.items()}
    return BwdFacts(**records, **more)


def test_run_graph_fills_every_output():
    (q, k, v, do), features, _, _ = problem({"bias": (1, HQ, SQ, SK), "sink": True, "lens": ([9, 4], [3, 7])})
    o, lse = reference.sdpa_forward(q, k, v, **features)
    half = {"q": q, "k": k, "v": v, "o": o, "do": do}
    tensors = {name: t.to(torch.bfloat16) for name, t in half.items()}
    tensors["stats"] = lse.float()
    tensors |= {"seq_len_q": features["seq_len_q"], "seq_len_kv": features["seq_len_kv"]}
    tensors |= {"sink": features["sink"].float(), "bias": features["bias"].float()}
    for output, source in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dsink", "sink"), ("dbias", "bias")):
        tensors[output] = torch.full_like(tensors[source], math.nan)
    facts = facts_of(tensors, mask=MaskFacts(padding=True), scale=features["scale"])

    reference.run_graph(facts, tensors)
    exact = reference.sdpa_backward(q, k, v, o, do, lse, **features)
    errors = exact.errors({n: tensors[n] for n in ("dq", "dk", "dv", "dbias", "dsink")})
    assert all(0 < e < 3e-2 for e in errors.values()), errors

    with pytest.raises(ValueError, match="the graph has a tensor sink"):
        reference.run_graph(facts, {n: t for n, t in tensors.items() if n != "sink"})
    with pytest.raises(ValueError, match="q is declared as"):
        reference.run_graph(facts, tensors | {"q": q[:1]})


def test_bad_head_counts_are_refused():
    with pytest.raises(ValueError, match="no multiple"):
        reference.sdpa_forward(randn(1, 3, 4, 8), randn(1, 2, 4, 8), randn(1, 2, 4, 8), scale=1.0)


@pytest.mark.slow
def test_a_large_head_stays_within_memory():
    """S = 4096, D = 256: 17 M scores; spot rows against a direct computation."""
    q, k, v, do = (randn(1, 1, 4096, 256, seed=s).bfloat16() for s in range(4))
    mask = MaskFacts(right_bound=0)
    o, lse = reference.sdpa_forward(q, k, v, scale=1 / 16, mask=mask)
    got = reference.sdpa_backward(q, k, v, o, do, lse, scale=1 / 16, mask=mask)
    row = 2500
    p = torch.softmax(q[0, 0, row].double() @ k[0, 0, : row + 1].double().T / 16, -1)
    ds = p * (v[0, 0, : row + 1].double() @ do[0, 0, row].double() - o[0, 0, row] @ do[0, 0, row].double())
    torch.testing.assert_close(got.dq[0, 0, row], ds @ k[0, 0, : row + 1].double() / 16)

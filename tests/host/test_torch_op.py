"""The operators and scaled_dot_product_attention on CPU tensors, where the fp64 reference serves them."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint
from torch_problems import CALLS, DV, HQ, LIMITS, SK, SQ, B, D, attend, filled, operands

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.torch import ops


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients(name, dtype):
    arguments, mask = CALLS[name]
    tensors, lengths = operands(dtype)
    features = {"scale": arguments.get("scale", D**-0.5), "mask": mask}
    for argument, port in (("attn_bias", "bias"), ("sinks", "sink")):
        if argument in arguments:
            features[port] = tensors[arguments[argument]].detach()
    if mask.padding:
        features["seq_len_q"], features["seq_len_kv"] = lengths

    out = attend(tensors, **filled(arguments, tensors, lengths))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    qkv = [tensors[n].detach() for n in ("q", "k", "v")]
    exact_out, lse = reference.sdpa_forward(*qkv, **features)
    assert reference.relative_error(out, exact_out) <= LIMITS[dtype]
    assert out.transpose(1, 2).is_contiguous()

    exact = reference.sdpa_backward(*qkv, exact_out, grad_out, lse, **features)
    used = ["q", "k", "v", *(value for value in arguments.values() if value in ("bias", "sinks"))]
    got = dict(zip(used, torch.autograd.grad(out, [tensors[n] for n in used], grad_out), strict=True))
    got = {"dsink" if n == "sinks" else f"d{n}": gradient for n, gradient in got.items()}
    assert max(exact.errors(got).values()) <= LIMITS[dtype], exact.errors(got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(dtype, causal):
    """torch's causal mask starts in the top left corner for S_q other than S_k; so does ours."""
    tensors, _ = operands(dtype)
    qkv = [tensors[n] for n in ("q", "k", "v")]
    theirs = torch_sdpa(*qkv, is_causal=causal, enable_gqa=True)
    mine = attend(tensors, is_causal=causal)
    grad_out = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    pairs = zip(torch.autograd.grad(mine, qkv, grad_out), torch.autograd.grad(theirs, qkv, grad_out), strict=True)
    for got, expected in ((mine, theirs), *pairs):
        assert reference.relative_error(got, expected.double()) <= 2 * LIMITS[dtype]


def test_gradcheck():
    tensors, lengths = operands()
    arguments = filled(CALLS["all"][0], tensors, lengths)

    def call(q, k, v, bias):
        return attend({"q": q, "k": k, "v": v}, **arguments | {"attn_bias": bias})

    assert torch.autograd.gradcheck(call, [tensors[n] for n in ("q", "k", "v", "bias")], atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    arguments, mask = CALLS[name]
    tensors, lengths = operands(torch.float32)
    given = filled(arguments, tensors, lengths)
    optional = [given.get("attn_bias"), given.get("sinks"), *(lengths if mask.padding else (None, None))]
    options = [0.25, mask.bottom_right, mask.left_bound, mask.right_bound, False, False]
    qkv = [tensors[n] for n in ("q", "k", "v")]
    torch.library.opcheck(ops.sdpa_forward, (*qkv, *optional, *options))

    out, lse = (t.detach() for t in ops.sdpa_forward(*qkv, *optional, *options))
    constants = [t if t is None else t.detach() for t in (*qkv, out, lse, *optional)]
    for want_dbias in (False, True):
        torch.library.opcheck(ops.sdpa_backward, (torch.randn_like(out), *constants, *options, want_dbias))


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_a_graph_break(name):
    arguments, _ = CALLS[name]
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    def loss(tensors, lengths):
        return attend(tensors, **filled(arguments, tensors, lengths)).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True)
    for sq, sk in ((SQ, SK), (12, 18), (16, 20)):
        tensors, lengths = operands(torch.float32, sq=sq, sk=sk)
        compiled(tensors, lengths).backward()
        got = {n: t.grad for n, t in tensors.items() if t.grad is not None}
        tensors, lengths = operands(torch.float32, sq=sq, sk=sk)
        loss(tensors, lengths).backward()
        assert got.keys() == {n for n, t in tensors.items() if t.grad is not None} >= {"q", "k", "v"}
        for n, gradient in got.items():
            torch.testing.assert_close(gradient, tensors[n].grad)
    assert len(graphs) == 1, "lengths are dynamic"


def test_compiled_backward_by_inductors_partitioner():
    """Forward and backward of a small layer, traced by AOTAutograd."""
    tensors, _ = operands(torch.float32)
    weight = torch.randn(DV, DV, generator=torch.Generator().manual_seed(2))

    def loss(q, k, v):
        return (ours.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) @ weight).square().sum()

    qkv = [tensors[n] for n in ("q", "k", "v")]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*qkv), qkv)
    for gradient, expected in zip(got, torch.autograd.grad(loss(*qkv), qkv), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_activation_checkpointing():
    tensors, _ = operands(torch.float32)
    qkv = [tensors[n] for n in ("q", "k", "v")]

    def call(q, k, v):
        return ours.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square()

    expected = torch.autograd.grad(call(*qkv).sum(), qkv)
    kept = torch.autograd.grad(checkpoint(call, *qkv, use_reentrant=False).sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(expected, kept, strict=True))
    checkpoint(call, *qkv, use_reentrant=True).sum().backward()
    for tensor, gradient in zip(qkv, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_autocast():
    tensors, _ = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(tensors, is_causal=True)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert tensors["q"].grad.dtype == torch.float32


def test_second_derivatives_are_an_error():
    tensors, _ = operands()
    (gradient,) = torch.autograd.grad(attend(tensors).sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_bool_bias_says_who_takes_part():
    tensors, _ = operands(torch.float32)
    keep = torch.rand(SQ, SK, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[2] = False
    out = attend(tensors, attn_bias=keep)
    expected = torch_sdpa(tensors["q"], tensors["k"], tensors["v"], attn_mask=keep, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    assert not out[:, :, 2].any()
    out.sum().backward()
    assert not tensors["q"].grad[:, :, 2].any()
    assert tensors["q"].grad.isfinite().all()


def test_padding_may_hold_anything():
    tensors, lengths = operands(torch.float32)
    with torch.no_grad():
        tensors["q"][0, :, 7:] = math.nan
        tensors["k"][1, :, 5:] = math.nan
        tensors["v"][1, :, 5:] = math.nan
    out = attend(tensors, seq_lens=lengths)
    assert not out[0, :, 7:].any()
    out.sum().backward()
    for name in ("q", "k", "v"):
        assert tensors[name].grad.isfinite().all()


@pytest.mark.parametrize("flag", [False, True])
def test_deterministic_follows_torch(flag, monkeypatch):
    seen, forward = [], ops.forward

    def watched(*arguments):
        seen.append(arguments[-2])
        return forward(*arguments)

    monkeypatch.setattr(ops, "forward", watched)
    tensors, _ = operands(torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(flag)
    try:
        attend(tensors)
        attend(tensors, deterministic=not flag)
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [flag, not flag]


def test_without_a_gradient_torch_runs(monkeypatch):
    monkeypatch.setattr(ops, "forward", None)
    tensors, _ = operands(torch.float32)
    with torch.no_grad():
        out = attend(tensors, is_causal=True)
    torch.testing.assert_close(out, torch_sdpa(*(tensors[n] for n in ("q", "k", "v")), is_causal=True, enable_gqa=True))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window": (-1, None)}, "left side of a window is 0 or more"),
        ({"causal_bottom_right": True}, "needs is_causal=True"),
        ({"is_causal": True, "window": (None, 3)}, "contradicts is_causal"),
        ({"sinks": torch.zeros(HQ + 1)}, "5 logits, and there are 4 query heads"),
        ({"seq_lens": torch.ones(B, dtype=torch.int64)}, "2 int32 values"),
        ({"enable_gqa": False}, "enable_gqa=True"),
    ],
)
def test_contradictions(arguments, sentence):
    tensors, _ = operands(torch.float32)
    with pytest.raises(ValueError, match=sentence):
        ours.scaled_dot_product_attention(tensors["q"], tensors["k"], tensors["v"], **{"enable_gqa": True} | arguments)


def test_shapes_that_do_not_fit():
    q = torch.zeros(B, HQ, SQ, D, requires_grad=True)
    with pytest.raises(ValueError, match="do not fit"):
        ours.scaled_dot_product_attention(q, q[:1], q[:1])
    with pytest.raises(ValueError, match="must be"):
        ours.scaled_dot_product_attention(q[0], q[0], q[0])
    with pytest.raises(ValueError, match="one floating dtype"):
        ours.scaled_dot_product_attention(q, q.double(), q)

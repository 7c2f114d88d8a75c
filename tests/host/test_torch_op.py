"""The operators and scaled_dot_product_attention on CPU tensors, where the fp64 reference serves them."""

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.torch import admits, cuda, cudnn_forward, dispatch, notices, ops, plain

ROOT = Path(__file__).resolve().parents[2]
B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 10, 14, 16, 8
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 6e-3}

# (keyword arguments, MaskFacts); a name that is a string stands for a tensor of `features`
CALLS = {
    "none": ({}, MaskFacts()),
    "causal": ({"is_causal": True}, MaskFacts(right_bound=0)),
    "bottom_right": ({"is_causal": True, "causal_bottom_right": True}, MaskFacts(right_bound=0, bottom_right=True)),
    "window": ({"window": (3, 2)}, MaskFacts(left_bound=4, right_bound=2)),
    "causal_window": ({"is_causal": True, "window": (0, None)}, MaskFacts(left_bound=1, right_bound=0)),
    "sinks": ({"is_causal": True, "sinks": "sinks"}, MaskFacts(right_bound=0)),
    "bias": ({"attn_bias": "bias"}, MaskFacts()),
    "lengths": ({"is_causal": True, "seq_lens": "lengths"}, MaskFacts(right_bound=0, padding=True)),
    "all": (
        {"window": (4, 1), "sinks": "sinks", "attn_bias": "bias", "seq_lens": "lengths", "scale": -0.3},
        MaskFacts(left_bound=5, right_bound=1, padding=True),
    ),
}


def operands(dtype=torch.float64, seed=0, sq=SQ, sk=SK):
    generator = torch.Generator().manual_seed(seed)

    def made(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = {"q": made(B, HQ, sq, D), "k": made(B, HK, sk, D), "v": made(B, HK, sk, DV)}
    tensors |= {"bias": made(1, HQ, sq, sk), "sinks": made(HQ, dtype=torch.float32)}
    lengths = (torch.tensor([7, sq], dtype=torch.int32), torch.tensor([sk, 5], dtype=torch.int32))
    return tensors, lengths


def filled(arguments, tensors, lengths):
    named = {**tensors, "lengths": lengths}
    return {name: named[value] if isinstance(value, str) else value for name, value in arguments.items()}


def attend(tensors, **arguments):
    return ours.scaled_dot_product_attention(tensors["q"], tensors["k"], tensors["v"], enable_gqa=True, **arguments)


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


# ---- where the engine declines --------------------------------------------------------------------------------------


@pytest.fixture
def declining(monkeypatch):
    """Every call is declined, as on a GPU that is not served."""
    monkeypatch.setattr(
        admits, "static_decline_reason", torch.compiler.assume_constant_result(lambda *_: "no such GPU")
    )
    monkeypatch.setattr(notices, "_said", set())


@pytest.mark.parametrize("name", CALLS)
def test_declined_calls_run_on_torch(name, declining, caplog):
    arguments, _ = CALLS[name]
    results = []
    for attention in (attend, attend, served_attend):
        tensors, lengths = operands(torch.float32)
        out = attention(tensors, **filled(arguments, tensors, lengths))
        out.square().sum().backward()
        results.append([out, *(t.grad for t in tensors.values() if t.grad is not None)])
    for got, _, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert said(caplog) == ["attention runs on torch's own kernels, forward and backward: no such GPU"], (
        "said once for two calls"
    )


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "cudnn_frost_sm120"]


def served_attend(tensors, **arguments):
    """As where nothing declines, whatever the fixture says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admits, "static_decline_reason", lambda *_: None)
        return attend(tensors, **arguments)


@pytest.mark.parametrize("name", CALLS)
def test_written_out_has_the_log_sum_exp(name):
    """The last resort of the forward hands it to our backward."""
    arguments, mask = CALLS[name]
    tensors, lengths = operands(torch.float32)
    given = filled(arguments, tensors, lengths)
    optional = {"bias": given.get("attn_bias"), "sink": given.get("sinks")}
    lengths = lengths if mask.padding else (None, None)
    qkv = [tensors[n].detach() for n in ("q", "k", "v")]
    exact, lse = reference.sdpa_forward(
        *qkv, scale=0.25, mask=mask, **optional, seq_len_q=lengths[0], seq_len_kv=lengths[1]
    )
    both = lengths if mask.padding else None
    got = plain.written_out(*qkv, optional["bias"], optional["sink"], both, mask, 0.25)
    torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), lse, rtol=1e-5, atol=1e-6)
    assert got[0].stride() == ops.empty_results(qkv[0], qkv[2])[0].stride()


def test_strict_raises_instead(declining):
    tensors, _ = operands(torch.float32)
    with pytest.raises(NotImplementedError, match="no such GPU"):
        attend(tensors, strict=True)


def test_declined_calls_compile(declining, caplog):
    tensors, _ = operands(torch.float32)
    qkv = [tensors[n] for n in ("q", "k", "v")]

    def loss(q, k, v):
        return ours.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*qkv), qkv)
    for gradient, expected in zip(got, torch.autograd.grad(loss(*qkv), qkv), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert len(said(caplog)) == 1


def test_torch_beyond_its_own_setting_is_deterministic(monkeypatch):
    """Torch's fused backward kernels follow the global setting only; ours asked for it, so the math backend runs."""
    chosen = []
    monkeypatch.setattr(plain, "sdpa_kernel", lambda backend: chosen.append(backend) or torch.no_grad())
    tensors, _ = operands(torch.float32)
    q = tensors["q"]
    for deterministic in (False, True):
        plain.attention(q, tensors["k"], tensors["v"], None, None, None, MaskFacts(), 0.25, deterministic)
    assert chosen == [torch.nn.attention.SDPBackend.MATH]


# ---- what a CUDA call would do, as far as that needs no GPU --------------------------------------------------------


@pytest.fixture
def sm120(monkeypatch):
    from cudnn_frost_sm120 import target

    monkeypatch.setattr(target, "for_device", lambda index: target.Target("sm_120", "sm_120a", index, 188))
    admits._reason.cache_clear()
    yield
    admits._reason.cache_clear()


def on_gpu(*shape, dtype=torch.bfloat16):
    """The signature of a tensor on cuda:0, in (B, S, H, D) storage."""
    meta = torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=dtype, device="meta").transpose(1, 2)
    return meta.shape, meta.stride(), dtype, torch.device("cuda:0")


def test_served_and_declined_by_the_rules_of_admission(sm120):
    q, k = on_gpu(2, 8, 100, 64), on_gpu(2, 2, 120, 64)
    assert admits._reason(q, k, k, (), MaskFacts(right_bound=0), 0.125, True) is None
    wide = on_gpu(2, 8, 100, 512)
    assert "head dims up to 256" in admits._reason(wide, wide, wide, (), MaskFacts(), 0.1, False)
    assert "q is fp32" in admits.static_decline_reason("cuda", 0, "float32", 64, 64)
    assert admits.static_decline_reason("cuda", 0, "bfloat16", 192, 128) is None
    assert "need a CUDA device" in admits.static_decline_reason("mps", 0, "float16", 64, 64)
    with pytest.raises(ValueError, match="k must be bf16"):
        admits._reason(q, on_gpu(2, 2, 120, 64, dtype=torch.float16), k, (), MaskFacts(), 1.0, False)


@pytest.mark.planning
@pytest.mark.parametrize("name", CALLS)
def test_the_forward_graph_is_well_formed(name):
    cudnn = pytest.importorskip("cudnn")
    arguments, mask = CALLS[name]
    tensors = {"q": on_gpu(B, HQ, SK, 64), "k": on_gpu(B, HK, SK, 64), "v": on_gpu(B, HK, SK, 64)}
    tensors["out"] = tensors["q"]
    tensors["lse"] = (torch.Size((B, HQ, SK, 1)), (HQ * SK, SK, 1, 1), torch.float32, torch.device("cuda:0"))
    column = torch.Size((B, 1, 1, 1)), (1, 1, 1, 1), torch.int32, torch.device("cuda:0")
    if "sinks" in arguments:
        tensors["sink"] = torch.Size((1, HQ, 1, 1)), (HQ, 1, 1, 1), torch.float32, torch.device("cuda:0")
    if "attn_bias" in arguments:
        tensors["bias"] = on_gpu(1, HQ, SK, SK)
    if mask.padding:
        tensors |= {"seq_len_q": column, "seq_len_kv": column}
    graph = cudnn_forward.declare_graph(tensors, mask, 0.125)
    assert isinstance(graph, cudnn.pygraph)
    (node,) = graph._nodes
    ports = {"sinks": "sink_token", "attn_bias": "bias", "seq_lens": "seq_len_kv"}
    assert {ports[a] for a in arguments if a in ports} <= set(node.inputs)
    assert node.params["generate_stats"] is True
    assert node.params.get("diagonal_band_left_bound") == mask.left_bound
    assert node.params.get("diagonal_band_right_bound") == mask.right_bound
    assert tuple(node.outputs["Stats"].dim) == (B, HQ, SK, 1)
    graph.validate()


def test_which_forward_runs(monkeypatch):
    """cuDNN's graph where it has one, then flash with the same diagonal, then torch operations."""
    taken = []
    monkeypatch.setattr(cuda, "cudnn_forward", lambda *_: taken.append("cudnn") or False)
    monkeypatch.setattr(cuda, "_flash", lambda *_: taken.append("flash"))
    monkeypatch.setattr(cuda, "written_out", lambda *_: taken.append("torch"))
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    longer = torch.zeros(1, 2, 12, 16, dtype=torch.bfloat16)

    def routes(key, mask=MaskFacts(), bias=None, scale=1.0, query=q):
        taken.clear()
        cuda.forward(query, key, key, bias, None, None, mask, scale, ops.empty_results(query, key))
        return taken[:]

    causal = MaskFacts(right_bound=0)
    assert routes(q, causal) == ["cudnn", "flash"]
    assert routes(longer) == ["cudnn", "flash"]
    assert routes(longer, causal) == ["cudnn", "torch"], "flash would align the diagonal bottom-right"
    assert routes(longer, MaskFacts(right_bound=0, bottom_right=True)) == ["cudnn", "flash"]
    assert routes(q, bias=torch.zeros(1, 1, 8, 8)) == ["cudnn", "torch"]
    assert routes(q, scale=-1.0) == ["torch"]
    assert routes(q.float(), query=q.float()) == ["torch"]


def test_backward_copies_what_no_kernel_takes(monkeypatch):
    calls = []

    def gradients(operands, *options):
        calls.append((operands, options))
        if operands["do"].stride(0) == 0:
            raise NotImplementedError("do has stride 0 [broadcast]")
        return {"dq": 1, "dk": 2, "dv": 3, "dsink": torch.ones(1, HQ, 1, 1)}

    monkeypatch.setattr(cuda, "gradients", gradients)
    q = torch.zeros(B, HQ, SQ, D)
    expanded = torch.ones(()).expand(q.shape)
    mask = MaskFacts(left_bound=4, right_bound=2)
    more = (None, torch.zeros(HQ), None, mask, 0.5, True)
    results = cuda.backward(q, q, q, q, q[..., :1], expanded, *more, False, False)
    assert results[:3] == (1, 2, 3)
    assert results[4].shape == (HQ,)
    assert [operands["do"].is_contiguous() for operands, _ in calls] == [False, True], "copied, and tried again"
    operands, options = calls[-1]
    assert options == (mask, 0.5, True, False)
    assert operands["sink"].shape == (1, HQ, 1, 1)
    assert operands.keys() == {"q", "k", "v", "o", "do", "stats", "sink"}
    with pytest.raises(NotImplementedError, match="broadcast"):
        cuda.backward(q, q, q, q, q[..., :1], expanded, *more, True, False)


@pytest.mark.parametrize(
    "listening",
    "mode,function mode,profiler,vmap,batched grads,grad transform,inference,below autograd,fake".split(","),
)
def test_the_dispatcher_is_left_out_only_where_nothing_listens(listening):
    q, seen = torch.randn(1, 2, 4, 8), []

    def watched(*tensors):
        seen.append(dispatch.only_passes_on(*tensors))
        return tensors[0].sum()

    def inside(context, *tensors):
        with context:
            return watched(*tensors)

    assert watched(q, None, q).ndim == 0
    assert seen.pop(), "a plain tensor"
    assert watched(torch.nn.Parameter(q)).ndim == 0
    assert seen.pop(), "and a parameter"
    match listening:
        case "mode":
            inside(FlopCounterMode(display=False), q)
        case "function mode":
            inside(torch.device("cpu"), q)
        case "profiler":
            inside(torch.profiler.profile(), q)
        case "vmap":
            torch.func.vmap(watched)(q)
        case "batched grads":
            leaf = q.clone().requires_grad_()
            leaf.register_hook(lambda gradient: seen.append(dispatch.only_passes_on(gradient)))
            torch.autograd.grad(leaf * 2, leaf, torch.ones(3, *q.shape), is_grads_batched=True)
        case "grad transform":
            torch.func.grad(watched)(q)
        case "inference":
            inside(torch.inference_mode(), q)
        case "below autograd":
            inside(torch._C._AutoDispatchBelowAutograd(), q)
        case "fake":
            inside(FakeTensorMode(allow_non_fake_inputs=True), q)
            watched(FakeTensorMode().from_tensor(q))
    assert seen, "it was reached"
    assert not any(seen)


@pytest.mark.parametrize("mode", ["torch.inference_mode()", "FakeTensorMode()", "FlopCounterMode(display=False)"])
def test_what_is_plain_does_not_depend_on_where_it_is_first_asked(mode):
    program = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
q = torch.zeros(2)
with {mode}:
    from cudnn_frost_sm120.torch.dispatch import only_passes_on
    assert not only_passes_on(torch.zeros(2)) and not only_passes_on(q)
assert only_passes_on(q)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=ROOT)


def test_forward_mode_raises_where_a_tangent_would_be_lost():
    tensors, _ = operands(torch.float32)
    with torch.no_grad(), forward_ad.dual_level():
        tensors["q"] = forward_ad.make_dual(tensors["q"].detach(), torch.ones(B, HQ, SQ, D))
        with pytest.raises(NotImplementedError, match="jvp"):
            attend(tensors, sinks=tensors["sinks"])


def test_a_profile_shows_the_operators():
    """A profile names the operators, though eager mode leaves their dispatch out"""
    tensors, _ = operands(torch.float32)
    with torch.profiler.profile() as profile:
        attend(tensors).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"cudnn_frost_sm120::sdpa_forward", "cudnn_frost_sm120::sdpa_backward"} <= names


def test_a_notice_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    with caplog.at_level(logging.WARNING, "cudnn_frost_sm120"):
        for _ in range(3):
            notices.say_once("something")
    assert said(caplog) == ["something"]

"""cudnn_frost_sm120.torch on a GPU: forward and backward against the fp64 oracle and torch's own attention."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.torch import cuda, notices, ops

LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
OUT_LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
B, HQ, HK, SQ, SK = 2, 8, 2, 200, 264

# (keyword arguments, MaskFacts); a string stands for a tensor of `operands`
CALLS = {
    "none": ({}, MaskFacts()),
    "causal": ({"is_causal": True}, MaskFacts(right_bound=0)),
    "bottom_right": ({"is_causal": True, "causal_bottom_right": True}, MaskFacts(right_bound=0, bottom_right=True)),
    "window": ({"window": (40, 9)}, MaskFacts(left_bound=41, right_bound=9)),
    "causal_window": ({"is_causal": True, "window": (31, None)}, MaskFacts(left_bound=32, right_bound=0)),
    "sinks": ({"is_causal": True, "sinks": "sinks"}, MaskFacts(right_bound=0)),
    "bias": ({"attn_bias": "bias"}, MaskFacts()),
    "lengths": ({"is_causal": True, "seq_lens": "lengths"}, MaskFacts(right_bound=0, padding=True)),
    "negative_scale": ({"scale": -0.2}, MaskFacts()),
    "all": (
        {"is_causal": True, "window": (60, None), "sinks": "sinks", "attn_bias": "bias", "seq_lens": "lengths"},
        MaskFacts(left_bound=61, right_bound=0, padding=True),
    ),
}


@pytest.fixture(autouse=True)
def _notices(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())


def operands(dtype=torch.bfloat16, sq=SQ, sk=SK, hk=HK, d=64, dv=None, seed=0):
    """Leaves as a model has them: (B, H, S, D) views of (B, S, H, D) storage."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def made(*shape, kind=dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    tensors = {"q": made(B, sq, HQ, d), "k": made(B, sk, hk, d), "v": made(B, sk, hk, dv or d)}
    tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
    tensors |= {"bias": made(1, HQ, sq, sk), "sinks": made(HQ, kind=torch.float32)}
    for tensor in tensors.values():
        tensor.requires_grad_()
    return tensors


def lengths_of(sq=SQ, sk=SK):
    return (
        torch.tensor([sq - 71, sq], dtype=torch.int32, device="cuda"),
        torch.tensor([sk, sk - 150], dtype=torch.int32, device="cuda"),
    )


def filled(arguments, tensors):
    named = {**tensors, "lengths": lengths_of(tensors["q"].shape[2], tensors["k"].shape[2])}
    return {name: named[value] if isinstance(value, str) else value for name, value in arguments.items()}


def attend(tensors, **arguments):
    qkv = (tensors["q"], tensors["k"], tensors["v"])
    return ours.scaled_dot_product_attention(*qkv, enable_gqa=True, **{"strict": True} | arguments)


def features_of(arguments, mask, tensors):
    given = filled(arguments, tensors)
    features = {"scale": arguments.get("scale", tensors["q"].shape[3] ** -0.5), "mask": mask}
    for argument, port in (("attn_bias", "bias"), ("sinks", "sink")):
        if argument in given:
            features[port] = given[argument].detach()
    if mask.padding:
        features["seq_len_q"], features["seq_len_kv"] = given["seq_lens"]
    return features


@pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients(name, dtype):
    """Output, log-sum-exp and every gradient against the fp64 oracle, feature by feature"""
    arguments, mask = CALLS[name]
    tensors = operands(dtype)
    features = features_of(arguments, mask, tensors)
    qkv = [tensors[n].detach() for n in ("q", "k", "v")]
    exact_out, exact_lse = reference.sdpa_forward(*qkv, **features)

    out = attend(tensors, **filled(arguments, tensors))
    assert out.transpose(1, 2).is_contiguous()
    assert reference.relative_error(out, exact_out) <= OUT_LIMITS[dtype]
    optional = (features.get("bias"), features.get("sink"), features.get("seq_len_q"), features.get("seq_len_kv"))
    options = (features["scale"], mask.bottom_right, mask.left_bound, mask.right_bound, False, True)
    _, lse = ops.sdpa_forward(*qkv, *optional, *options)
    kept = exact_lse.isfinite()
    torch.testing.assert_close(lse.double()[kept], exact_lse[kept], rtol=2e-3, atol=2e-3)

    grad_out = torch.randn_like(out)
    exact = reference.sdpa_backward(*qkv, exact_out, grad_out, exact_lse, **features)
    used = ["q", "k", "v", *(value for value in arguments.values() if value in ("bias", "sinks"))]
    got = dict(zip(used, torch.autograd.grad(out, [tensors[n] for n in used], grad_out), strict=True))
    got = {"dsink" if n == "sinks" else f"d{n}": gradient for n, gradient in got.items()}
    # O comes in the io dtype from the forward; what its rounding does to delta is in the oracle's floor.
    errors = exact.errors(got)
    assert max(errors.values()) <= 2 * LIMITS[dtype], errors


@pytest.mark.parametrize("headdims", [(32, 32), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(headdims):
    """Head dims up to 256, d_v other than d_qk"""
    tensors = operands(d=headdims[0], dv=headdims[1])
    qkv = [tensors[n].detach() for n in ("q", "k", "v")]
    features = {"scale": headdims[0] ** -0.5, "mask": MaskFacts(right_bound=0)}
    exact_out, lse = reference.sdpa_forward(*qkv, **features)
    out = attend(tensors, is_causal=True)
    assert reference.relative_error(out, exact_out) <= 6e-3
    grad_out = torch.randn_like(out)
    exact = reference.sdpa_backward(*qkv, exact_out, grad_out, lse, **features)
    gradients = torch.autograd.grad(out, [tensors[n] for n in ("q", "k", "v")], grad_out)
    errors = exact.errors(dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    assert max(errors.values()) <= 1.2e-2, errors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_against_torch_math(causal, wide):
    """Gradients against torch's math backend in fp32 and fp64, at most twice torch's own error in bf16"""
    tensors = operands(sk=SQ)
    qkv = [tensors[n] for n in ("q", "k", "v")]
    grad_out = torch.randn(B, HQ, SQ, 64, device="cuda")

    def gradients(leaves, attention):
        out = attention(*leaves, is_causal=causal, enable_gqa=True)
        return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))

    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients([t.detach().to(wide).requires_grad_() for t in qkv], torch_sdpa)
        near = gradients(qkv, torch_sdpa)
    for name, got, bf16, exact in zip(
        "qkv", gradients(qkv, ours.scaled_dot_product_attention), near, expected, strict=True
    ):
        error, torchs = (reference.relative_error(g, exact.double()) for g in (got, bf16))
        assert error <= 2 * torchs + 1e-3, f"d{name}: {error:.1e}, torch in bf16 {torchs:.1e}"


def test_flash_takes_over(monkeypatch):
    """torch's flash kernel, where cuDNN has no plan: the same output, log-sum-exp and gradients"""
    for arguments, mask, sk in (
        ({}, MaskFacts(), SK),
        ({"is_causal": True}, MaskFacts(right_bound=0), SQ),
        ({"window": (40, 9)}, MaskFacts(left_bound=41, right_bound=9), SQ),
        ({"window": (40, None)}, MaskFacts(left_bound=41), SQ),
        ({"is_causal": True, "causal_bottom_right": True}, MaskFacts(right_bound=0, bottom_right=True), SK),
    ):
        tensors = operands(sk=sk)
        qkv = [tensors[n].detach() for n in ("q", "k", "v")]
        exact_out, exact_lse = reference.sdpa_forward(*qkv, scale=0.125, mask=mask)
        assert cuda._flash_serves(*qkv, mask)
        out, lse = cuda._flash(*qkv, mask, 0.125)
        assert reference.relative_error(out, exact_out) <= 6e-3, arguments
        torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-3, atol=2e-3)
        assert (out.stride(), lse.stride()) == tuple(t.stride() for t in ops.empty_results(qkv[0], qkv[2]))
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "cudnn_forward", lambda *_: False)
            attend(tensors, **arguments).square().sum().backward()
        assert all(tensors[n].grad.isfinite().all() for n in ("q", "k", "v"))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    """torch.library.opcheck of both operators"""
    arguments, mask = CALLS[name]
    tensors = operands()
    given = filled(arguments, tensors)
    lengths = given.get("seq_lens", (None, None))
    optional = [given.get("attn_bias"), given.get("sinks"), *lengths]
    options = [0.125, mask.bottom_right, mask.left_bound, mask.right_bound, True, True]
    qkv = [tensors[n] for n in ("q", "k", "v")]
    checks = {"atol": 2e-2, "rtol": 2e-2}
    # Not strict there: opcheck takes the gradient of a plain sum, which is expanded, and then copied.
    torch.library.opcheck(ops.sdpa_forward, (*qkv, *optional, *options[:-1], False), **checks)
    out, lse = (t.detach() for t in ops.sdpa_forward(*qkv, *optional, *options))
    constants = [t if t is None else t.detach() for t in (*qkv, out, lse, *optional)]
    torch.library.opcheck(ops.sdpa_backward, (torch.randn_like(out), *constants, *options, True), **checks)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["causal", "all"])
def test_compile(name, backend):
    """torch.compile, fullgraph: the gradients of eager mode, and no recompilation for a third length"""
    arguments, _ = CALLS[name]
    weight = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) / 8

    def loss(tensors, arguments):
        return (attend(tensors, **arguments) @ weight).float().square().mean()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True)
    for index, (sq, sk) in enumerate(((200, 264), (160, 240), (312, 320))):
        tensors, twins = operands(sq=sq, sk=sk), operands(sq=sq, sk=sk)
        with torch.compiler.set_stance("fail_on_recompile" if index else "default"):
            compiled(tensors, filled(arguments, tensors)).backward()
        loss(twins, filled(arguments, twins)).backward()
        for n in ("q", "k", "v"):
            assert reference.relative_error(tensors[n].grad, twins[n].grad.double()) <= 1.2e-2, n


def test_autocast():
    """Under autocast, fp32 leaves: bf16 inside, fp32 gradients"""
    tensors = operands(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = attend(tensors, is_causal=True)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(tensors[n].grad.dtype == torch.float32 and tensors[n].grad.isfinite().all() for n in ("q", "k", "v"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    """Forward run again in the backward: the same bits with the deterministic mode, where the first run is recorded

    A reentrant checkpoint runs its first forward without recording, which is torch's own: equal but for rounding.
    """
    results = []
    for keep in (True, False):
        tensors = operands()
        qkv = [tensors[n] for n in ("q", "k", "v")]

        def call(*leaves):
            return ours.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, deterministic=True)

        out = call(*qkv) if keep else checkpoint(call, *qkv, use_reentrant=reentrant)
        out.float().square().sum().backward()
        results.append([t.grad for t in qkv])
    for kept, again in zip(*results, strict=True):
        assert reference.relative_error(again, kept.double()) <= 6e-3
        assert reentrant or torch.equal(kept, again)


@pytest.mark.parametrize("explicit", [None, True])
def test_deterministic(explicit):
    """torch.use_deterministic_algorithms, or the argument: the same bits in 20 runs"""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(explicit is None)
    try:
        first = None
        for _ in range(20):
            tensors = operands(sq=1024, sk=1024)
            out = attend(tensors, is_causal=True, deterministic=explicit)
            out.float().square().sum().backward()
            bits = [tensors[n].grad for n in ("q", "k", "v")]
            first = first or bits
            assert all(torch.equal(a, b) for a, b in zip(first, bits, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "q is fp32"),
        ({"d": 60}, "multiples of 8"),
        ({"d": 512}, "up to 256"),
    ],
)
def test_declined_calls_run_on_torch(change, reason, caplog):
    """Where our engine declines: torch's gradients, the reason said once, an error with strict"""
    tensors = operands(**change)
    qkv = [tensors[n] for n in ("q", "k", "v")]
    for _ in range(2):
        got = torch.autograd.grad(attend(tensors, is_causal=True, strict=False).float().square().sum(), qkv)
    theirs = torch_sdpa(*qkv, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(theirs.float().square().sum(), qkv)
    for mine, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=2e-2, atol=2e-2)
    said = [r.getMessage() for r in caplog.records if r.name == "cudnn_frost_sm120"]
    assert len(said) == 1
    assert reason in said[0]
    with pytest.raises(NotImplementedError, match=reason):
        attend(tensors, is_causal=True)


def test_odd_strides_are_declined_before_anything_runs():
    """Strides that TMA does not take go to torch in eager mode"""
    q = torch.randn(B, SQ, HQ, 70, device="cuda", dtype=torch.bfloat16)[..., :64].transpose(1, 2).requires_grad_()
    with pytest.raises(NotImplementedError, match="multiple of 8"):
        ours.scaled_dot_product_attention(q, q, q, strict=True)
    out = ours.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out, torch_sdpa(q, q, q), rtol=2e-2, atol=2e-2)


def test_expanded_gradient(caplog):
    """The gradient of a plain sum has strides of 0: copied, which is said once; an error with strict"""
    tensors, twins = operands(), operands()
    attend(tensors, is_causal=True, strict=False).sum().backward()
    out = attend(twins, is_causal=True)
    out.backward(torch.ones_like(out))
    for n in ("q", "k", "v"):
        assert reference.relative_error(tensors[n].grad, twins[n].grad.double()) <= 6e-3
    assert sum("copies an operand" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(NotImplementedError, match="stride"):
        attend(operands(), is_causal=True).sum().backward()


def test_a_constant_bias_has_no_gradient():
    """A bias that wants no gradient: the other gradients as with one, and no dBias kernel"""
    results = []
    for wanted in (True, False):
        tensors = operands()
        tensors["bias"].requires_grad_(wanted)
        out = attend(tensors, attn_bias=tensors["bias"])
        leaves = [tensors[n] for n in ("q", "k", "v")]
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for got, expected in zip(*results, strict=True):
        assert reference.relative_error(got, expected.double()) <= 6e-3


def test_rows_that_keep_nothing():
    """Rows that a bool mask empties: zeros in the output and in dQ, finite gradients elsewhere"""
    tensors = operands(sk=SQ)
    keep = torch.rand(1, 1, SQ, SQ, device="cuda") > 0.3
    keep[..., 10:20, :] = False
    out = attend(tensors, attn_bias=keep)
    out.float().square().sum().backward()
    assert not out[:, :, 10:20].any()
    assert not tensors["q"].grad[:, :, 10:20].any()
    assert all(tensors[n].grad.isfinite().all() for n in ("q", "k", "v"))


def test_padding_may_hold_anything():
    """Large values in keys, and NaN in queries, past the lengths reach neither the output nor a gradient"""
    tensors = operands()
    len_q, len_k = lengths_of()
    with torch.no_grad():
        tensors["q"][0, :, len_q[0] :] = torch.nan
        tensors["k"][1, :, len_k[1] :] = 1e4  # finite: cuDNN's forward multiplies them by zero
        tensors["v"][1, :, len_k[1] :] = 1e4
    out = attend(tensors, seq_lens=(len_q, len_k))
    assert not out[0, :, len_q[0] :].any()
    out.float().square().sum().backward()
    assert all(tensors[n].grad.isfinite().all() for n in ("q", "k", "v"))


def test_no_copies_and_no_synchronisation():
    """A training step in eager mode waits for nothing and copies no operand"""
    tensors = operands(sk=SQ)
    grad_out = torch.randn(B, SQ, HQ, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def step():
        attend(tensors, is_causal=True).backward(grad_out)
        for name in ("q", "k", "v"):
            tensors[name].grad = None

    step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    events = {event.name for event in profile.events()}
    assert "cudnn_frost_sm120::sdpa_backward" in events
    assert not events & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::item"}


def test_captured_into_a_cuda_graph():
    """A whole step, captured once and replayed with new contents"""
    tensors = operands(sk=SQ)
    qkv = [tensors[n] for n in ("q", "k", "v")]
    grad_out = torch.randn(B, SQ, HQ, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def step():
        return torch.autograd.grad(attend(tensors, is_causal=True), qkv, grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in qkv:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(captured, step(), strict=True):
        assert reference.relative_error(got, expected.double()) <= 6e-3


def test_a_model_is_switched_over():
    """nn.TransformerEncoderLayer inside replace_torch_sdpa, in bf16"""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True).cuda().bfloat16()
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for switched in (False, True):
        layer.zero_grad()
        if switched:
            with ours.replace_torch_sdpa(strict=True):
                layer(x).float().square().mean().backward()
        else:
            layer(x).float().square().mean().backward()
        results.append([parameter.grad.clone() for parameter in layer.parameters()])
    for expected, got in zip(*results, strict=True):
        assert reference.relative_error(got, expected.double()) <= 3e-2

"""What the torch function does with CUDA tensors, as far as that needs no GPU."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from torch_problems import CALLS, HK, HQ, SK, SQ, B, D, attend, operands, said

from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.torch import admits, cuda, cudnn_forward, dispatch, notices, ops

ROOT = Path(__file__).resolve().parents[2]


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

"""The torch function where our engine declines: torch's own kernels run, and it is said once."""

import pytest
import torch
from torch_problems import CALLS, attend, filled, operands, said

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import reference
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.torch import admits, notices, ops, plain


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

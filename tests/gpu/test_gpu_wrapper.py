"""The wrapper on a GPU: layouts, streams and repeated calls; numerics in depth are the other files' job."""

import pytest
import torch

from cudnn_frost_sm120 import reference, sdpa_bwd_wrapper_dsl_sm120
from cudnn_frost_sm120.facts import MaskFacts

LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def operands(dtype, mask, b=2, hq=4, hk=2, sq=190, sk=257, d=64, scale=0.125, device="cuda"):
    """q, k, v as views of one packed (B, S, H, D) buffer each, o and lse from the oracle, do in (B, H, S, D) order."""

    def io(heads, seqlen):
        return torch.randn(b, seqlen, 2, heads, d, device=device, dtype=dtype)[:, :, 1].transpose(1, 2)

    q, k, v = io(hq, sq), io(hk, sk), io(hk, sk)
    o, lse = reference.sdpa_forward(q, k, v, scale=scale, mask=mask)
    do = torch.randn(b, hq, sq, d, device=device, dtype=dtype)
    return q, k, v, o.to(dtype), do, lse.float()


def check(results, tensors, mask, scale=0.125):
    exact = reference.sdpa_backward(*tensors, scale=scale, mask=mask)
    errors = exact.errors({name: results[f"{name}_tensor"] for name in ("dq", "dk", "dv")})
    assert max(errors.values()) <= LIMITS[tensors[0].dtype], errors


@pytest.mark.parametrize("dtype", list(LIMITS), ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ({}, MaskFacts()),
        ({"is_causal": True}, MaskFacts(right_bound=0)),
        ({"is_causal": True, "causal_bottom_right": True}, MaskFacts(right_bound=0, bottom_right=True)),
        ({"is_causal": True, "window_size_left": 40}, MaskFacts(right_bound=0, left_bound=41)),
        ({"window_size_left": 40}, MaskFacts(left_bound=41)),
    ],
)
def test_gradients(dtype, arguments, mask):
    tensors = operands(dtype, mask)
    results = sdpa_bwd_wrapper_dsl_sm120(*tensors, **arguments)
    check(results, tensors, mask)
    for name, tensor in zip(("dq", "dk", "dv"), tensors, strict=False):
        assert results[f"{name}_tensor"].shape == tensor.shape
        assert results[f"{name}_tensor"].transpose(1, 2).is_contiguous(), "same dim order, no gaps"


def test_default_and_given_scale():
    for scale in (0.125, -0.3, 0.0):
        tensors = operands(torch.bfloat16, MaskFacts(right_bound=0), scale=scale)
        given = {} if scale == 0.125 else {"scale_softmax": scale}
        results = sdpa_bwd_wrapper_dsl_sm120(*tensors, is_causal=True, **given)
        check(results, tensors, MaskFacts(right_bound=0), scale)


def test_key_lengths_alone():
    """Query lengths may be left out: every query row is real."""
    q, k, v, _, do, _ = operands(torch.bfloat16, MaskFacts())
    lengths = torch.tensor([100, 257], dtype=torch.int32, device="cuda")
    o, lse = reference.sdpa_forward(q, k, v, scale=0.125, seq_len_kv=lengths)
    tensors = (q, k, v, o.to(q.dtype), do, lse.float())
    results = sdpa_bwd_wrapper_dsl_sm120(*tensors, seq_kv_lens=lengths)
    exact = reference.sdpa_backward(*tensors, scale=0.125, seq_len_kv=lengths)
    errors = exact.errors({name: results[f"{name}_tensor"] for name in ("dq", "dk", "dv")})
    assert max(errors.values()) <= LIMITS[q.dtype], errors
    assert not results["dk_tensor"][0, :, 100:].any()


def test_side_stream_and_no_synchronisation():
    """Operands produced on a side stream are seen, and the call itself waits for nothing."""
    mask = MaskFacts(right_bound=0)
    tensors = operands(torch.bfloat16, mask)
    sdpa_bwd_wrapper_dsl_sm120(*tensors, is_causal=True)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(tensors[4])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(tensors[4])
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = sdpa_bwd_wrapper_dsl_sm120(*tensors[:4], late, tensors[5], is_causal=True)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    stream.synchronize()
    check(results, tensors, mask)


def test_new_lengths_compile_nothing():
    from cudnn_frost_sm120.compile import compile_count

    mask = MaskFacts()
    sdpa_bwd_wrapper_dsl_sm120(*operands(torch.bfloat16, mask))
    before = compile_count()
    for sq in range(64, 164, 10):
        tensors = operands(torch.bfloat16, mask, b=1 + sq % 3, sq=sq, sk=sq + 7)
        check(sdpa_bwd_wrapper_dsl_sm120(*tensors), tensors, mask)
    assert compile_count() == before


def test_tensors_on_two_devices_are_refused():
    q, k, v, o, do, lse = operands(torch.bfloat16, MaskFacts())
    with pytest.raises(ValueError, match="all tensors belong on one device"):
        sdpa_bwd_wrapper_dsl_sm120(q, k, v, o, do, lse.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current():
    with torch.cuda.device(0):
        tensors = operands(torch.bfloat16, MaskFacts(right_bound=0), device="cuda:1")
        results = sdpa_bwd_wrapper_dsl_sm120(*tensors, is_causal=True)
        assert results["dq_tensor"].device == torch.device("cuda:1")
        check(results, tensors, MaskFacts(right_bound=0))

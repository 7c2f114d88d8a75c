"""Attention problems for the tests of the torch function, small enough for CPU tensors."""

import torch

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120.facts import MaskFacts

B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 10, 14, 16, 8
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 6e-3}

# (keyword arguments, MaskFacts); a name that is a string stands for one of `operands`
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


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "cudnn_frost_sm120"]

"""Masks, sinks, biases and lengths through the torch function, each with its gradients checked.

    python samples/04_masks_and_sinks.py

The operands are those of one attention layer that read real text. With an SM12x GPU our kernels run; without one the
fp64 reference serves the same calls on the CPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny_layer import attention_layer

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import reference, target
from cudnn_frost_sm120.facts import MaskFacts

LIMIT = 1.2e-2  # bf16, with a bf16 output of the forward in between


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=512)
    seqlen = parser.parse_args().seqlen
    device = pick_device()
    layer = attention_layer(seqlen=seqlen, device=device)
    heads = layer.q.shape[1]

    sinks = torch.linspace(-1, 1, heads, device=device)  # one logit per head
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=device)
    place = torch.arange(seqlen, device=device)
    alibi = (-slopes[:, None, None] * (place[:, None] - place).abs())[None].bfloat16()  # (1, H, S, S)
    lengths = torch.tensor([seqlen, seqlen // 3], dtype=torch.int32, device=device)

    # What is asked of our function, and what the oracle is told
    causal = MaskFacts(right_bound=0)
    cases: dict[str, tuple[dict[str, Any], MaskFacts, dict[str, Any]]] = {
        "causal": ({"is_causal": True}, causal, {}),
        "a causal window of 64 keys": (
            {"is_causal": True, "window": (63, None)},
            MaskFacts(left_bound=64, right_bound=0),
            {},
        ),
        "a band, 32 before and 8 after": ({"window": (32, 8)}, MaskFacts(left_bound=33, right_bound=8), {}),
        "sinks": ({"is_causal": True, "sinks": sinks}, causal, {"sink": sinks}),
        "an additive bias (ALiBi)": ({"is_causal": True, "attn_bias": alibi}, causal, {"bias": alibi}),
        "lengths of each text": (
            {"is_causal": True, "seq_lens": lengths},
            MaskFacts(right_bound=0, padding=True),
            {"seq_len_q": lengths, "seq_len_kv": lengths},
        ),
    }
    print(f"q is {tuple(layer.q.shape)} bf16; relative errors against the fp64 oracle")
    worst = 0.0
    for title, (arguments, mask, features) in cases.items():
        errors = gradient_errors(layer, arguments, mask, features)
        worst = max(worst, *errors.values())
        print(f"  {title:<32}", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    where = (
        f"our kernels on {torch.cuda.get_device_name()}" if device.type == "cuda" else "the fp64 reference on the CPU"
    )
    print(f"computed by {where}; {'all within' if worst <= LIMIT else 'NOT all within'} {LIMIT:.1e}")
    return 0 if worst <= LIMIT else 1


def pick_device() -> torch.device:
    """The GPU if it is one that the engine serves."""
    if torch.cuda.is_available():
        try:
            target.for_device(torch.cuda.current_device())
            return torch.device("cuda", torch.cuda.current_device())
        except NotImplementedError as declined:
            print(f"not using the GPU: {declined}")
    return torch.device("cpu")


def gradient_errors(
    layer: Any, arguments: dict[str, Any], mask: MaskFacts, features: dict[str, Any]
) -> dict[str, float]:
    """Errors of every gradient that the call gives."""
    leaves = {"dq": layer.q, "dk": layer.k, "dv": layer.v}
    leaves |= {f"d{port}": tensor for port, tensor in features.items() if port in ("bias", "sink")}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    replaced = {"attn_bias": leaves.get("dbias"), "sinks": leaves.get("dsink")}
    arguments = arguments | {name: leaf for name, leaf in replaced.items() if name in arguments}
    out = ours.scaled_dot_product_attention(
        leaves["dq"], leaves["dk"], leaves["dv"], scale=layer.scale, strict=True, **arguments
    )
    got = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), layer.do), strict=True))

    options: dict[str, Any] = {"scale": layer.scale, "mask": mask, **features}
    exact_out, lse = reference.sdpa_forward(layer.q, layer.k, layer.v, **options)
    return reference.sdpa_backward(layer.q, layer.k, layer.v, exact_out, layer.do, lse, **options).errors(got)


if __name__ == "__main__":
    raise SystemExit(main())

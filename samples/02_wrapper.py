"""The engine through one function call: torch tensors in, gradients out.

    python samples/02_wrapper.py

The call is that of cudnn-frontend's function of the same name. Without an SM12x GPU the sample says so and shows what
the fp64 reference gives for the same operands.
"""

from __future__ import annotations

import argparse

import torch
from tiny_layer import attention_layer

from cudnn_frost_sm120 import reference, sdpa_bwd_wrapper_dsl_sm120
from cudnn_frost_sm120.facts import MaskFacts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seqlen", type=int, default=512)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = attention_layer(seqlen=options.parse_args().seqlen, device=device)
    operands = (layer.q, layer.k, layer.v, layer.o, layer.do, layer.lse)

    exact = reference.sdpa_backward(*operands, scale=layer.scale, mask=MaskFacts(right_bound=0))
    try:
        results = sdpa_bwd_wrapper_dsl_sm120(*operands, is_causal=True)
        gradients = {name: results[f"{name}_tensor"] for name in layer.autograd}
        made_by = f"our kernels on {torch.cuda.get_device_name()}"
    except (ValueError, NotImplementedError) as refused:
        print(f"the wrapper needs an SM12x GPU: {refused}")
        gradients = {name: getattr(exact, name).to(layer.q.dtype) for name in layer.autograd}
        made_by = "the fp64 reference, rounded to bf16"

    print(f"the gradients of one causal layer, q {tuple(layer.q.shape)}, by {made_by}:")
    for name, error in exact.errors(gradients).items():
        off = reference.relative_error(gradients[name], layer.autograd[name])
        print(f"  {name}: off the fp64 reference by {error:.1e}, off torch autograd by {off:.1e}")


if __name__ == "__main__":
    main()

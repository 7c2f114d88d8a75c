"""Attention for torch models, whose backward runs on our kernels.

``scaled_dot_product_attention`` is torch's function with windows, sinks and lengths. ``replace_torch_sdpa`` and
``register_with_transformers`` switch a model over without editing it. Everything works on CPU tensors too, where the
fp64 reference serves, so that a program can be developed anywhere.
"""

from .attention import scaled_dot_product_attention
from .switch import replace_torch_sdpa
from .transformers import register_with_transformers

__all__ = ["register_with_transformers", "replace_torch_sdpa", "scaled_dot_product_attention"]

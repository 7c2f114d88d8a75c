"""What is served, as data: admission's rules are made from it, and docs/support.md is rendered from it.

``python -m cudnn_frost_sm120.support --write`` renders the page, ``--check`` fails if it is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .config.arch import TMA_ALIGNMENT
from .config.tiles import HEADDIM_MULTIPLE, MAX_HEADDIM
from .facts import ITEMSIZE, BwdFacts

TARGETS = ("sm_120", "sm_121", "sm_90")
DTYPES = ("fp16", "bf16")
STATS_DTYPE = "fp32"
LENGTH_DTYPE = "int32"
SINK_DTYPE = "fp32"
SCALE_DTYPE = "fp32"
MAX_SEQLEN = 2**28
"""Rows of queries or keys: sums of lengths and mask bounds stay within 32 bits in a kernel."""
MAX_HEAD_ELEMENTS = 2**31
"""Padded query rows times native head dim: offsets within one head's dQ accumulator are 32-bit."""
MAX_BIAS_ROW_STRIDE = 2**24
"""Elements between two query rows of a bias: offsets within a tile are 32-bit."""
STRIDE_MULTIPLE = TMA_ALIGNMENT // ITEMSIZE["bf16"]
"""Elements: every stride of an io tensor but the head dim's is a multiple of this."""

YES, NO = "yes", "no"
BASELINE = "sdpa_bwd_sm120"
NATIVE = "native cuDNN"
COMPARED_WITH = "cudnn-frontend 1.32.0"
_LET_THROUGH = "refused by validation unless our engine admits the graph"  # validator.py


@dataclass(frozen=True)
class Feature:
    """Something a graph may ask for. While ``served`` is False, admission has a rule of this name that declines it."""

    name: str
    title: str
    asked: Callable[[BwdFacts], bool]
    served: bool
    baseline: str  # what the sdpa_bwd_sm120 engine of cudnn-frontend does
    native: str  # what cudnn-frontend's own rules for the cuDNN library say, on an SM12x GPU
    note: str = ""


FEATURES: tuple[Feature, ...] = (
    Feature("gqa", "grouped-query and multi-query heads", lambda f: f.heads_q != f.heads_k, True, YES, YES),
    Feature("causal", "causal mask, top-left", lambda f: f.mask.right_bound == 0, True, YES, YES),
    Feature("bottom_right", "causal mask, bottom-right", lambda f: f.mask.bottom_right, True, YES, YES),
    Feature("right_bound", "right bound above 0", lambda f: bool(f.mask.right_bound), True, YES, YES),
    Feature("window", "left bound (sliding window)", lambda f: f.mask.left_bound is not None, True, YES, YES),
    Feature(
        "bottom_right_window",
        "left bound alone, bottom-right",
        lambda f: f.mask.bottom_right and f.mask.right_bound is None,
        True,
        NO,
        YES,
    ),
    Feature(
        "long_query",
        "a window or bottom-right with S_q > S_k",
        lambda f: f.seqlen_q > f.seqlen_k and (f.mask.bottom_right or f.mask.left_bound is not None),
        True,
        NO,
        NO,
        _LET_THROUGH,
    ),
    Feature(
        "single_position",
        "S_q = S_k = 1",
        lambda f: f.seqlen_q == f.seqlen_k == 1,
        True,
        NO,
        NO,
        _LET_THROUGH,
    ),
    Feature("wide_v", "d_v > d_qk", lambda f: f.headdim_v > f.headdim_qk, True, NO, "up to 128"),
    Feature("zero_scale", "attn_scale = 0", lambda f: f.scale == 0, True, NO, YES),
    Feature("padding", "padding mask", lambda f: f.mask.padding, True, YES, YES),
    Feature("bias", "additive bias", lambda f: f.bias is not None, True, "(1 or B, H_q, S_q, S_k), contiguous", YES),
    Feature(
        "bottom_right_bias",
        "bias with a bottom-right diagonal",
        lambda f: f.bias is not None and f.mask.bottom_right,
        True,
        NO,
        NO,
        _LET_THROUGH,
    ),
    Feature("dbias", "dBias", lambda f: f.dbias is not None, True, "of the bias's dims", YES),
    Feature("sink", "attention sink", lambda f: f.sink is not None, True, YES, YES),
    Feature("dsink", "dSink", lambda f: f.dsink is not None, True, YES, YES),
    Feature("deterministic", "use_deterministic_algorithm", lambda f: f.deterministic, True, YES, YES),
    Feature("scale_tensor", "attn_scale as a tensor", lambda f: f.scale_tensor is not None, True, NO, YES),
    Feature(
        "ragged",
        "packed variable-length tensors (ragged offsets)",
        lambda f: any(tensor.ragged for tensor in (*f.inputs(), *f.outputs())),
        False,
        NO,
        "not deterministic, dense stats",
    ),
    Feature(
        "max_total_seq_len",
        "max_total_seq_len_q, max_total_seq_len_kv",
        lambda f: f.max_total_seq_len_q is not None or f.max_total_seq_len_kv is not None,
        False,
        NO,
        "ignored",
    ),
    Feature("cu_seq_len", "prefix sums of lengths", lambda f: f.cu_seq_len, False, NO, NO),
    Feature("dropout", "dropout", lambda f: f.dropout is not None, False, NO, YES),
    Feature("rng_dump", "rng_dump", lambda f: f.rng_dump, False, NO, YES),
    Feature("alibi", "ALiBi", lambda f: f.alibi, False, NO, YES),
    Feature("score_mod", "score_mod callbacks", lambda f: f.score_mod, False, NO, YES),
    Feature("paged", "paged K and V", lambda f: f.paged, False, NO, NO),
    Feature("block_mask", "block mask", lambda f: f.block_mask, False, NO, NO),
    Feature("score_max", "score_max", lambda f: f.score_max, False, NO, NO),
    Feature("score_sum_exp", "score_sum_exp", lambda f: f.score_sum_exp, False, NO, NO),
    Feature("unfuse_fma", "unfuse_fma", lambda f: f.unfuse_fma, False, NO, NO),
    Feature("softmax_precision", "softmax_precision", lambda f: f.softmax_precision is not None, False, NO, NO),
    Feature("scale_prefolded", "attn_scale_prefolded", lambda f: f.scale_prefolded, False, NO, NO),
    Feature("side_outputs", "amax outputs", lambda f: bool(f.side_outputs), False, NO, NO),
    Feature(
        "shape_overrides",
        "is_override_shape_enabled (other shapes at execute)",
        lambda f: f.shape_overrides,
        True,
        "ignored",
        YES,
        "batch and sequence lengths; from cudnn-frontend 1.31 on",
    ),
)

_LIMITS = (
    ("GPUs", "SM120, SM121", "SM120 to SM129", YES),
    ("dtypes", " and ".join(DTYPES), "fp16 and bf16", "fp16 and bf16"),
    ("fp8 and mxfp8 graphs", NO, NO, NO),
    ("head dims", f"multiples of {HEADDIM_MULTIPLE} up to {MAX_HEADDIM}", "the same, d_v <= d_qk", "up to 128"),
    (
        "layouts",
        f"head dim contiguous, other strides multiples of {STRIDE_MULTIPLE}, each tensor its own",
        "the same",
        "the same",
    ),
    ("lengths", f"up to {MAX_SEQLEN}, and S_q times the native d_qk below 2^31", "not compared", "not compared"),
    ("stats strides", "any that do not broadcast", "the same", "from cuDNN 9.26 on"),
    ("kernel compiles for other B, H, S or strides", "none", "one each", "not compared"),
    ("planning with no GPU", YES, NO, "with a device_property"),
)


def rows() -> list[tuple[str, str, str, str]]:
    """(feature, ours, baseline, native) for every line of the table."""
    served = [(f.title + (f" ({f.note})" if f.note else ""), YES if f.served else NO, f) for f in FEATURES]
    return [*_LIMITS, *((title, ours, f.baseline, f.native) for title, ours, f in served)]


def render() -> str:
    """The text of docs/support.md."""
    lines = [
        "# What is served",
        "",
        "Generated from `cudnn_frost_sm120/support.py`, which admission uses too; do not edit. To render it again:",
        "`python -m cudnn_frost_sm120.support --write`.",
        "",
        f"`{BASELINE}` is the engine of {COMPARED_WITH} for the same graphs. The last column is what {COMPARED_WITH}",
        "lets through to the cuDNN library on an SM12x GPU; the library may decline more. A graph that asks for",
        f'anything with a "{NO}" in our column is declined at planning, in one sentence, and the other engines of the',
        "list serve it if they can.",
        "",
        f"| feature | this engine | `{BASELINE}` | {NATIVE} |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows()),
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cudnn_frost_sm120.support", description="Render docs/support.md.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the page")
    action.add_argument("--check", action="store_true", help="fail if the page is out of date")
    default = Path(__file__).resolve().parent.parent / "docs" / "support.md"
    parser.add_argument("--path", type=Path, default=default, help="the page (default: docs/support.md of this tree)")
    options = parser.parse_args(arguments)
    if options.write:
        options.path.parent.mkdir(parents=True, exist_ok=True)
        options.path.write_text(render(), encoding="utf-8")
        return 0
    if options.path.exists() and options.path.read_text(encoding="utf-8") == render():
        return 0
    print(f"{options.path} is out of date; run python -m cudnn_frost_sm120.support --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

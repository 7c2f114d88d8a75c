"""Every rule of admission: a graph that it declines, and near it one that is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cudnn
import pytest
from seam_graphs import BF16, FP16, FP32, bshd, fp8_graph, lengths, make_graph, scalars

from cudnn_frost_sm120.admission import RULES, decline_reason
from cudnn_frost_sm120.facts import BwdFacts, facts_from_graph
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.support import FEATURES
from cudnn_frost_sm120.target import Target

pytestmark = pytest.mark.planning

SM120 = Target("sm_120", "sm_120a", None, 188)


@dataclass(frozen=True)
class Case:
    """``declined`` makes a graph that the rule declines, with ``says`` in the reason; ``accepted`` one it lets pass."""

    declined: Callable[[], Any]
    says: str
    accepted: Callable[[], Any] = make_graph


def with_tensor(name: str, dim: list[int], dtype: Any = FP32, **attributes: Any) -> Callable[[], Any]:
    stride = [dim[1] * dim[2] * dim[3], dim[2] * dim[3], dim[3], 1]
    return lambda: make_graph(
        extra=lambda graph: {name: graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)}, **attributes
    )


def ragged() -> Any:
    graph = make_graph()
    offsets = graph.tensor(name="offsets", dim=[3, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)
    graph.find_tensor("q").set_ragged_offset(offsets)
    return graph


def two_nodes() -> Any:
    graph = make_graph()
    graph.relu(graph.find_tensor("q")).set_output(True)
    return graph


def no_stats() -> Any:
    graph = cudnn.pygraph(io_data_type=BF16)
    ports = {n: graph.tensor(name=n, dim=[2, 4, 128, 64], stride=bshd(2, 4, 128, 64)) for n in ("q", "k", "v", "o")}
    graph.sdpa_backward(**ports, dO=ports["o"])
    return graph


def rank_three() -> Any:
    graph = make_graph()
    graph.find_tensor("v").set_dim([2, 128, 64]).set_stride([8192, 64, 1])
    return graph


def changed(**fields: Any) -> Callable[[], BwdFacts]:
    """Facts that no graph of this release can carry."""
    return lambda: replace(facts_from_graph(make_graph()), **fields)


def attributed(**attributes: Any) -> Callable[[], Any]:
    return lambda: make_graph(**attributes)


CASES: dict[str, Case] = {
    "target": Case(make_graph, "sm_75"),
    "kind": Case(fp8_graph, "sdpa_fp8_backward"),
    "single_node": Case(two_nodes, "POINTWISE"),
    "unknown": Case(attributed(brand_new=1), "brand_new", attributed(brand_new=False)),
    "operands": Case(no_stats, "no stats"),
    "rank": Case(rank_three, "v must have 4 dims"),
    "shapes": Case(
        lambda: make_graph_with("o", [2, 4, 128, 32]), "o has dims (2, 4, 128, 32)", attributed(dv=32, sk=77)
    ),
    "ragged": Case(ragged, "ragged"),
    "max_total_seq_len": Case(attributed(max_total_seq_len_q=9), "max_total_seq_len"),
    "cu_seq_len": Case(with_tensor("cu_seq_len_q", [3, 1, 1, 1], cudnn.data_type.INT32), "prefix sums"),
    "dropout": Case(attributed(dropout=(0.1, None, None)), "dropout"),
    "rng_dump": Case(with_tensor("rng_dump", [2, 4, 128, 128]), "rng_dump"),
    "alibi": Case(attributed(use_alibi_mask=True, use_causal_mask=True), "ALiBi", attributed(use_causal_mask=True)),
    "score_mod": Case(attributed(score_mod=lambda graph, scores: scores), "score_mod"),
    "paged": Case(with_tensor("paged_attention_k_table", [2, 1, 4, 1]), "paged"),
    "block_mask": Case(with_tensor("block_mask", [2, 4, 1, 1]), "block mask"),
    "score_max": Case(with_tensor("score_max", [2, 4, 128, 1]), "score_max"),
    "score_sum_exp": Case(with_tensor("score_sum_exp", [2, 4, 128, 1]), "score_sum_exp"),
    "unfuse_fma": Case(attributed(unfuse_fma=True), "unfuse_fma", attributed(unfuse_fma=False)),
    "softmax_precision": Case(attributed(softmax_precision=FP16), "softmax_precision"),
    "scale_prefolded": Case(attributed(attn_scale_prefolded=True), "attn_scale_prefolded"),
    "side_outputs": Case(changed(side_outputs=("amax_dQ",)), "amax"),
    "dtype": Case(attributed(dtype=FP32), "q is fp32", attributed(dtype=FP16)),
    "uniform_dtype": Case(lambda: make_graph_with("do", dtype=FP16), "do must be bf16"),
    "stats_dtype": Case(attributed(stats_dtype=BF16), "stats is bf16"),
    "heads": Case(attributed(hq=4, hk=2, hv=4), "H_v=4", attributed(hq=4, hk=1)),
    "headdim_multiple": Case(attributed(d=68), "d_qk=68", attributed(d=72)),
    "headdim_max": Case(attributed(d=264), "d_qk=264", attributed(d=256)),
    "length_max": Case(
        attributed(b=1, hq=1, hk=1, d=128, sq=2**24, sk=64, use_causal_mask=True),
        "up to 16777152 query rows",
        attributed(b=1, hq=1, hk=1, d=128, sq=2**24 - 64, sk=2**28, use_causal_mask=True),
    ),
    # On q, which no lowering describes as transposed.
    "headdim_contiguous": Case(attributed(strides={"q": [32768, 8192, 1, 128]}), "q must have stride 1"),
    "broadcast": Case(attributed(strides={"do": [0, 64, 256, 1]}), "stride 0 on its batch", attributed(b=1)),
    "stride_multiple": Case(
        attributed(strides={"v": [16384, 64, 132, 1]}),
        "the sequence stride of v is 132",
        attributed(strides={"v": [65536, 64, 136, 1]}),
    ),
    "stride_max": Case(attributed(strides={"q": [2**40, 64, 256, 1]}), "below"),
    "virtual": Case(attributed(outputs=("dQ", "dV")), "dk must be set_output(True)"),
    "overlap": Case(
        attributed(strides={"dQ": [32768, 64, 64, 1]}),
        "on one address",
        attributed(strides={"o": [32768, 64, 64, 1]}),
    ),
    "mask_bounds": Case(attributed(sliding_window_length=0), "left bound is 0", attributed(sliding_window_length=1)),
    "lengths": Case(attributed(extra=lengths()), "without use_padding_mask"),
    "bias_shape": Case(
        with_tensor("bias", [3, 4, 128, 128]), "bias has dims (3, 4, 128, 128)", with_tensor("bias", [1, 4, 1, 128])
    ),
    "scale_tensor_shape": Case(
        with_tensor("attn_scale", [1, 1, 1, 2], attn_scale=None),
        "one fp32 value",
        attributed(attn_scale=None, extra=lambda g: scalars(g, "attn_scale")),
    ),
    "sink_shape": Case(
        with_tensor("sink_token", [1, 3, 1, 1]), "sink has dims", with_tensor("sink_token", [1, 4, 1, 1])
    ),
    "scale": Case(attributed(attn_scale=math.inf), "attn_scale is inf", attributed(attn_scale=-3e38)),
}


def make_graph_with(name: str, dim: list[int] | None = None, dtype: Any = None) -> Any:
    """The plain graph with one tensor changed."""
    graph = make_graph()
    tensor = graph.find_tensor(name)
    if dim is not None:
        tensor.set_dim(dim).set_stride(bshd(*dim))
    if dtype is not None:
        tensor.set_data_type(dtype)
    return graph


def facts_of(made: Any) -> BwdFacts:
    return made if isinstance(made, BwdFacts) else facts_from_graph(made)


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES)), "a name appears twice"
    assert set(CASES) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", list(CASES))
def test_reject(name: str) -> None:
    case = CASES[name]
    target = Target("sm_75", "sm_75", 0, 40) if name == "target" else SM120
    reason = decline_reason(facts_of(case.declined()), target)
    assert reason is not None
    assert case.says in reason
    assert reason.endswith(f"[{name}]"), f"another rule declined first: {reason}"
    assert "\n" not in reason


@pytest.mark.parametrize("name", list(CASES))
def test_accept(name: str) -> None:
    rule = next(rule for rule in RULES if rule.name == name)
    assert not rule.predicate(facts_of(CASES[name].accepted()), SM120)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"dtype": FP16},
        {"hq": 4, "hk": 4},
        {"hq": 8, "hk": 1},
        {"use_causal_mask": True},
        {"use_causal_mask_bottom_right": True},
        {"use_causal_mask_bottom_right": True, "sq": 300, "sk": 5},
        {"diagonal_band_right_bound": 7},
        {"sliding_window_length": 1},
        {"sliding_window_length": 128, "sq": 500, "sk": 1},
        {"sliding_window_length": 3, "diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT},
        {"sq": 1, "sk": 1},
        {"sq": 1, "sk": 4097},
        {"sq": 63, "sk": 65},
        {"attn_scale": 0.0},
        {"attn_scale": -3.0},
        {"b": 70000, "hq": 1, "hk": 1, "sq": 1, "sk": 1, "d": 8},
        {"hq": 70000, "hk": 70000, "b": 1},
        {"b": 4, "hq": 64, "hk": 64, "sq": 1 << 17, "sk": 1 << 17, "d": 128},
        *({"d": d} for d in (8, 40, 64, 72, 96, 128, 160, 192, 256)),
        *({"d": d, "dv": dv} for d, dv in ((192, 128), (256, 8), (64, 128), (8, 256))),
        {"strides": {"q": [4 * 128 * 64, 128 * 64, 64, 1], "do": [64 * 4, 64, 2 * 64 * 4, 1]}},  # BHSD, SBHD
        {"strides": {"stats": [1, 2, 8, 1]}},
        {"strides": {"stats": [4096, 512, 3, 7]}},
        # Strides of size-1 dims mean nothing.
        {"b": 1, "hq": 1, "hk": 1, "strides": {"q": [3, 0, 64, 1], "dQ": [-1, 5, 64, 1], "stats": [0, 0, 1, 0]}},
        {"sq": 1, "sk": 1, "strides": {"k": [128, 64, 0, 1]}},
        {"graph": {"is_dynamic_shape_enabled": True}},
    ],
    ids=str,
)
def test_served(attributes: dict[str, Any]) -> None:
    facts = facts_from_graph(make_graph(**attributes))
    assert decline_reason(facts, SM120) is None
    assert ranked_knobs(facts, SM120)
    for knobs in ranked_knobs(facts, SM120):
        assert decline_reason(facts, SM120, knobs) is None


@pytest.mark.parametrize("name", ["sm_120", "sm_121", "sm_90"])
def test_targets(name: str) -> None:
    assert decline_reason(facts_from_graph(make_graph()), Target(name, f"{name}a", None, 48)) is None


def test_knobs_of_no_configuration_are_declined() -> None:
    facts = facts_from_graph(make_graph())
    knobs = replace(ranked_knobs(facts, SM120)[0], tile_m=17)
    reason = decline_reason(facts, SM120, knobs)
    assert reason is not None
    assert "TILE_M=17" in reason
    assert reason.endswith("[knobs]")


def test_features_and_rules_agree() -> None:
    """A feature is served or has a rule of its name, never both."""
    ruled = {rule.name for rule in RULES}
    for feature in FEATURES:
        assert (feature.name in ruled) != feature.served
        assert not feature.asked(facts_from_graph(make_graph(hq=2, hk=2)))


@pytest.mark.parametrize("scale", [math.nan, -math.inf, 1e39])
def test_scales_that_fp32_cannot_hold(scale: float) -> None:
    reason = decline_reason(facts_from_graph(make_graph(attn_scale=scale)), SM120)
    assert reason is not None
    assert reason.endswith("[scale]")


LENGTHS = {
    "missing": ({"use_padding_mask": True}, "needs both"),
    "dtype": ({"use_padding_mask": True, "extra": lengths(dtype=cudnn.data_type.INT64)}, "int64"),
    "dims": ({"use_padding_mask": True, "extra": lengths(b=3)}, "(3, 1, 1, 1)"),
}


@pytest.mark.parametrize("name", list(LENGTHS))
def test_lengths_rule(name: str) -> None:
    attributes, says = LENGTHS[name]
    rule = next(rule for rule in RULES if rule.name == "lengths")
    facts = facts_from_graph(make_graph(**attributes))
    assert rule.predicate(facts, SM120)
    assert says in rule.reason(facts, SM120)
    good = facts_from_graph(make_graph(use_padding_mask=True, extra=lengths()))
    assert not rule.predicate(good, SM120)

"""Random graphs through facts, rules and planning: no exception but the typed ones, and our plans exactly where the
rules admit the graph."""

from __future__ import annotations

import random
from typing import Any

import cudnn
import pytest
from cudnn.engines.base import VariantPack
from seam_graphs import BF16, FP16, FP32, INT32, bshd, make_graph

from cudnn_frost_sm120.admission import decline_reason
from cudnn_frost_sm120.engine import analyze
from cudnn_frost_sm120.facts import facts_from_graph
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.register import ENGINE_ID
from cudnn_frost_sm120.target import resolve

pytestmark = [pytest.mark.planning, pytest.mark.usefixtures("opted_in")]

OPTIONAL: dict[str, list[Any]] = {
    "use_causal_mask": [True, False],
    "use_causal_mask_bottom_right": [True, False],
    "diagonal_alignment": [cudnn.diagonal_alignment.TOP_LEFT, cudnn.diagonal_alignment.BOTTOM_RIGHT],
    "diagonal_band_left_bound": [-1, 0, 1, 17, 4096],
    "diagonal_band_right_bound": [-1, 0, 1, 17, 4096],
    "sliding_window_length": [0, 1, 64],
    "attn_scale": [None, 0.0, -1.5, 1, float("nan"), float("inf")],
    "use_deterministic_algorithm": [True, False],
    "use_alibi_mask": [True, False],
    "use_padding_mask": [True, False],
    "max_total_seq_len_q": [0, 100],
    "unfuse_fma": [True, False],
    "softmax_precision": [FP32, FP16],
    "attn_scale_prefolded": [True, False],
    "dropout": [(0.1, None, None), (0.0, None, None), (None,), ()],
    "score_mod": [lambda graph, scores: scores],
    "made_up": [1, None, "x", 0.5, False],
}


def random_graph(seed: int) -> Any:
    """A graph that is plain in most respects and odd in a few."""
    rng = random.Random(seed)

    def some(usual: list[Any], odd: list[Any], share: float = 0.06) -> Any:
        return rng.choice(odd if rng.random() < share else usual)

    hk = some([1, 2, 4], [3])
    shape = {
        "b": some([1, 2], [7]),
        "hk": hk,
        "hq": hk * some([1, 2], [3]) + some([0], [1]),
        "hv": some([hk], [1, 8]),
        "sq": some([64, 128, 300], [1, 63]),
        "sk": some([64, 128, 300], [1, 65]),
        "d": some([32, 64, 128], [8, 40, 192, 256, 264, 4, 100]),
        "dtype": some([BF16, FP16], [FP32, cudnn.data_type.FP8_E4M3]),
        "stats_dtype": some([FP32], [BF16]),
        "outputs": some([("dQ", "dK", "dV")], [("dQ",), ()]),
        "graph": some([{}], [{"is_override_shape_enabled": True}, {"is_dynamic_shape_enabled": True}]),
    }
    shape["dv"] = some([shape["d"]], [64, 16, 512])
    b, sq, sk = shape["b"], shape["sq"], shape["sk"]
    strides = {}
    for name in ("q", "k", "v", "o", "do", "dQ", "stats"):
        if rng.random() < 0.03:
            strides[name] = [rng.choice([0, 1, 8, 64, 4096, 1 << 20, -8]) for _ in range(3)] + [rng.choice([1, 1, 2])]

    def extra(graph: Any) -> dict[str, Any]:
        hq = shape["hq"]
        choices = {
            "bias": [rng.choice([1, b]), rng.choice([1, hq]), sq, sk],
            "dBias": [1, hq, sq, sk],
            "sink_token": [1, hq, 1, 1],
            "dSink_token": [1, hq, 1, 1],
            "seq_len_q": [b, 1, 1, 1],
            "seq_len_kv": [b, 1, 1, 1],
            "cu_seq_len_q": [b + 1, 1, 1, 1],
            "attn_scale": [1, 1, 1, 1],
            "block_mask": [b, hq, 1, 1],
            "rng_dump": [b, hq, sq, sk],
            "made_up_tensor": [1],
        }
        picked = [name for name in choices if rng.random() < 0.02]
        return {
            name: graph.tensor(
                name=name,
                dim=choices[name],
                stride=bshd(*choices[name]) if len(choices[name]) == 4 else [1],
                data_type=INT32 if "seq_len" in name else FP32,
            )
            for name in picked
        }

    attributes = {name: rng.choice(values) for name, values in OPTIONAL.items() if rng.random() < 0.04}
    graph = make_graph(**shape, strides=strides, extra=extra, **attributes)
    if rng.random() < 0.05:
        offsets = graph.tensor(name="offsets", dim=[b + 1, 1, 1, 1], data_type=INT32)
        graph.find_tensor(rng.choice(["q", "k", "o", "stats"])).set_ragged_offset(offsets)
    if rng.random() < 0.03:
        graph.relu(graph.find_tensor("q")).set_output(True)
    return graph


@pytest.mark.parametrize("block", range(10))
def test_random_graphs(block: int) -> None:
    served = 0
    for seed in range(block * 40, block * 40 + 40):
        graph = random_graph(seed)
        facts = facts_from_graph(graph)
        target = resolve(graph)
        reason = decline_reason(facts, target)
        assert reason is None or ("\n" not in reason and reason.endswith("]"))
        for knobs in ranked_knobs(facts, target) if reason is None else ():
            assert decline_reason(facts, target, knobs) is None
            assert make_plan(facts, knobs, target).workspace_bytes > 0
        if facts.shape_overrides and not hasattr(VariantPack, "overridden"):
            continue  # cudnn-frontend 1.30, with which the engine declines them
        try:
            graph.validate()
        except (cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError):
            # RuntimeError where the cuDNN library was asked, with no device.
            assert reason is not None, f"seed {seed}: validation refuses a graph that we serve"
            continue
        assert facts_from_graph(graph) == facts, f"seed {seed}: validation changed the facts"
        try:
            graph.create_execution_plans()
        except (cudnn.cudnnGraphNotSupportedError, TypeError):
            # TypeError where the cuDNN library's binding was asked and has no such attribute.
            assert reason is not None, f"seed {seed}: not planned, though we serve it"
            continue
        listed = [config for config in graph.plans if config.engine_id == ENGINE_ID]
        assert bool(listed) == (reason is None), f"seed {seed}: {reason}"
        assert graph._facts_for(analyze).declined == reason
        served += bool(listed)
    assert served >= 4, "the generator makes too few graphs that are served"

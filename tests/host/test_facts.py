"""Facts describe every attribute that an sdpa_backward graph can carry, and never raise on one."""

from __future__ import annotations

from typing import Any

import cudnn
import pytest
from seam_graphs import BF16, FP16, FP32, dropout, fp8_graph, lengths, make_graph, mxfp8_graph, scalars

from cudnn_frost_sm120.facts import MISSING, MaskFacts, TensorFacts, facts_from_graph

pytestmark = pytest.mark.planning

BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT


def test_plain_graph() -> None:
    facts = facts_from_graph(make_graph(b=3, hq=8, hk=2, sq=65, sk=33, d=96, dv=64))
    assert facts.q == TensorFacts("q", (3, 8, 65, 96), (8 * 65 * 96, 96, 8 * 96, 1), "bf16", uid=1)
    assert facts.stats.dim == (3, 8, 65, 1)
    assert facts.stats.dtype == "fp32"
    assert (facts.batch, facts.heads_q, facts.heads_k, facts.heads_v, facts.group) == (3, 8, 2, 2, 4)
    assert (facts.seqlen_q, facts.seqlen_k, facts.headdim_qk, facts.headdim_v) == (65, 33, 96, 64)
    assert facts.mask == MaskFacts()
    assert facts.scale == 0.125
    assert facts.kind == "sdpa_backward"
    assert facts.compute_dtype == "fp32"
    assert facts.unknown == ()
    assert [tensor.name for tensor in facts.outputs()] == ["dq", "dk", "dv"]
    assert facts.dv.dim == facts.v.dim


def test_dtypes_are_short_names() -> None:
    assert facts_from_graph(make_graph(dtype=FP16)).dtype == "fp16"
    assert facts_from_graph(fp8_graph()).dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("attributes", "mask"),
    [
        ({"use_causal_mask": True}, MaskFacts(right_bound=0)),
        ({"use_causal_mask_bottom_right": True}, MaskFacts(bottom_right=True, right_bound=0)),
        ({"diagonal_band_right_bound": 0}, MaskFacts(right_bound=0)),
        ({"diagonal_band_right_bound": 5}, MaskFacts(right_bound=5)),
        ({"sliding_window_length": 9}, MaskFacts(left_bound=9)),
        ({"diagonal_band_left_bound": 9}, MaskFacts(left_bound=9)),
        # The later setter of the binding wins.
        ({"sliding_window_length": 9, "diagonal_band_left_bound": 4}, MaskFacts(left_bound=4)),
        ({"use_causal_mask": True, "diagonal_band_right_bound": 3}, MaskFacts(right_bound=3)),
        ({"use_causal_mask": True, "diagonal_alignment": BOTTOM_RIGHT}, MaskFacts(right_bound=0)),
        (
            {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
            MaskFacts(bottom_right=True, right_bound=0),
        ),
        (
            {"diagonal_alignment": BOTTOM_RIGHT, "diagonal_band_left_bound": 2},
            MaskFacts(bottom_right=True, left_bound=2),
        ),
        ({"diagonal_alignment": BOTTOM_RIGHT}, MaskFacts()),  # no bound, so no diagonal
        ({"use_padding_mask": True, "extra": lengths()}, MaskFacts(padding=True)),
    ],
)
def test_mask_spellings(attributes: dict[str, Any], mask: MaskFacts) -> None:
    assert facts_from_graph(make_graph(**attributes)).mask == mask


def test_scale_forms() -> None:
    assert facts_from_graph(make_graph(attn_scale=None)).scale == 1.0
    assert facts_from_graph(make_graph(attn_scale=-2)).scale == -2.0
    on_device = facts_from_graph(make_graph(attn_scale=None, extra=lambda g: scalars(g, "attn_scale")))
    assert on_device.scale is None
    assert on_device.scale_tensor is not None
    assert on_device.scale_tensor.dim == (1, 1, 1, 1)


def test_embedded_scale() -> None:
    def graph(kind: Any) -> Any:
        return make_graph(attn_scale=None, extra=lambda g: {"attn_scale": g.tensor_scalar(0.5, kind)})

    constant = facts_from_graph(graph(cudnn.scalar_type.COMPILE_TIME_CONST))
    assert (constant.scale, constant.scale_tensor) == (0.5, None)
    changeable = facts_from_graph(graph(cudnn.scalar_type.RUNTIME_PARAM))
    assert changeable.scale is None
    assert changeable.scale_tensor is not None
    assert changeable.scale_tensor.by_value


def side(name: str, dim: list[int], dtype: Any = FP32) -> Any:
    stride = [dim[1] * dim[2] * dim[3], dim[2] * dim[3], dim[3], 1]
    return lambda graph: {name: graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)}


@pytest.mark.parametrize(
    ("field", "expected", "attributes"),
    [
        ("deterministic", True, {"use_deterministic_algorithm": True}),
        ("alibi", True, {"use_alibi_mask": True, "use_causal_mask": True}),
        ("score_mod", True, {"score_mod": lambda graph, scores: scores}),
        ("score_mod", True, {"score_mod_bprop": lambda graph, scores: scores}),
        ("unfuse_fma", True, {"unfuse_fma": True}),
        ("softmax_precision", "fp16", {"softmax_precision": FP16}),
        ("scale_prefolded", True, {"attn_scale_prefolded": True}),
        ("max_total_seq_len_q", 77, {"max_total_seq_len_q": 77}),
        ("max_total_seq_len_kv", 78, {"max_total_seq_len_kv": 78}),
        ("paged", True, {"paged_attention_max_seq_len_kv": 64}),
        ("paged", True, {"extra": side("paged_attention_k_table", [2, 1, 4, 1])}),
        ("block_mask", True, {"extra": side("block_mask", [2, 4, 1, 1])}),
        ("score_max", True, {"extra": side("score_max", [2, 4, 128, 1])}),
        ("score_sum_exp", True, {"extra": side("score_sum_exp", [2, 4, 128, 1])}),
        ("cu_seq_len", True, {"extra": side("cu_seq_len_q", [3, 1, 1, 1])}),
        ("rng_dump", True, {"extra": side("rng_dump", [2, 4, 128, 128])}),
        ("shape_overrides", True, {"graph": {"is_override_shape_enabled": True}}),
        ("dynamic_shapes", True, {"graph": {"is_dynamic_shape_enabled": True}}),
        ("unknown", ("brand_new",), {"brand_new": 3}),
        ("unknown", ("brand_new",), {"extra": side("brand_new", [1, 1, 1, 1])}),
        ("unknown", (), {"brand_new": False}),
        ("unknown", ("generate_stats",), {"generate_stats": True}),
    ],
)
def test_attributes(field: str, expected: Any, attributes: dict[str, Any]) -> None:
    assert getattr(facts_from_graph(make_graph(**attributes)), field) == expected


@pytest.mark.parametrize(
    ("field", "name", "dim"),
    [
        ("bias", "bias", [1, 4, 128, 128]),
        ("dbias", "dBias", [1, 4, 128, 128]),
        ("sink", "sink_token", [1, 4, 1, 1]),
        ("dsink", "dSink_token", [1, 4, 1, 1]),
        ("seq_len_q", "seq_len_q", [2, 1, 1, 1]),
        ("seq_len_kv", "seq_len_kv", [2, 1, 1, 1]),
    ],
)
def test_further_tensors(field: str, name: str, dim: list[int]) -> None:
    facts = facts_from_graph(make_graph(extra=side(name, dim)))
    tensor = getattr(facts, field)
    assert tensor.dim == tuple(dim)
    assert tensor.name == field
    assert tensor in [*facts.inputs(), *facts.outputs()]


def test_dropout_forms() -> None:
    philox = facts_from_graph(make_graph(extra=dropout(0.1, "seed", "offset")))
    assert (philox.dropout, philox.dropout_probability) == ("philox", 0.1)
    masked = facts_from_graph(make_graph(extra=dropout("mask", "scale", "scale_inv")))
    assert (masked.dropout, masked.dropout_probability) == ("mask", None)
    assert facts_from_graph(make_graph(dropout=(None, None))).dropout == "malformed"
    assert facts_from_graph(make_graph()).dropout is None


def test_ragged_and_virtual_and_by_value() -> None:
    graph = make_graph(outputs=("dQ", "dK"))
    offsets = graph.tensor(name="offsets", dim=[3, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)
    graph.find_tensor("q").set_ragged_offset(offsets)
    facts = facts_from_graph(graph)
    assert facts.q.ragged
    assert not facts.k.ragged
    assert facts.dv.virtual
    assert not facts.dq.virtual
    by_value = facts_from_graph(
        make_graph(
            attn_scale=None,
            extra=lambda g: {"attn_scale": g.tensor(dim=[1, 1, 1, 1], data_type=FP32, is_pass_by_value=True)},
        )
    )
    assert by_value.scale_tensor is not None
    assert by_value.scale_tensor.by_value


def test_quantized_siblings() -> None:
    fp8 = facts_from_graph(fp8_graph())
    assert fp8.kind == "sdpa_fp8_backward"
    assert fp8.mask == MaskFacts(left_bound=7, right_bound=0)
    assert fp8.side_outputs == ("amax_dQ",)
    mxfp8 = facts_from_graph(mxfp8_graph())
    assert mxfp8.kind == "sdpa_mxfp8_backward"
    assert mxfp8.o.dtype == "bf16"
    assert mxfp8.do.dtype == "fp8_e4m3"
    assert fp8.unknown == mxfp8.unknown == ()


def test_more_nodes() -> None:
    graph = make_graph()
    graph.relu(graph.find_tensor("q")).set_output(True)
    assert facts_from_graph(graph).other_nodes == ("POINTWISE",)
    with pytest.raises(ValueError, match="no sdpa_backward node"):
        facts_from_graph(cudnn.pygraph())


def test_missing_operand() -> None:
    graph = cudnn.pygraph(io_data_type=BF16)
    q, k, v, o, do = (graph.tensor(name=n, dim=[1, 1, 8, 8]) for n in ("q", "k", "v", "o", "do"))
    graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=do)
    assert facts_from_graph(graph).stats == TensorFacts("stats", (), (), MISSING)


@pytest.mark.parametrize("sk", [64, 96])
def test_transposed_ports_are_undone(sk: int) -> None:
    """Lowering to the cuDNN library may leave K and V described as (B, H, D, S) views."""
    graph = make_graph(d=64, sk=sk)
    wanted = facts_from_graph(graph)
    for name in ("k", "v"):
        tensor = graph.find_tensor(name)
        b, h, s, d = tensor.stride
        tensor.stride = [b, h, d, s]
        if sk != 64:
            b, h, s, d = tensor.dim
            tensor.dim = [b, h, d, s]
    assert facts_from_graph(graph) == wanted
    only_strides = make_graph(d=64, sk=sk)
    b, h, s, d = only_strides.find_tensor("k").stride
    only_strides.find_tensor("k").stride = [b, h, d, s]
    assert facts_from_graph(only_strides) == wanted


def test_facts_are_the_same_before_and_after_planning(opted_in: None) -> None:
    graph = make_graph(use_causal_mask=True)
    before = facts_from_graph(graph)
    graph.validate()
    graph.create_execution_plans()
    assert facts_from_graph(graph) == before


def test_required_bytes() -> None:
    dense = TensorFacts("q", (2, 3, 4, 8), (96, 32, 8, 1), "bf16")
    assert dense.required_bytes == 2 * 3 * 4 * 8 * 2
    gaps = TensorFacts("q", (2, 1, 4, 8), (1000, 7, 16, 1), "fp32")
    assert gaps.required_bytes == (1000 + 3 * 16 + 7 + 1) * 4

"""What the wrapper makes of its arguments, as far as that needs no GPU."""

import inspect
import math
from dataclasses import fields, replace

import pytest
import torch

import cudnn_frost_sm120
from cudnn_frost_sm120 import gradients, target, wrapper
from cudnn_frost_sm120.facts import MaskFacts, TensorFacts, facts_from_graph

B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 24, 40, 64, 32


def operands(dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Meta tensors (no storage) in (B, S, H, D) memory order, gradients as the wrapper allocates them."""

    def io(heads, seqlen, headdim):
        return torch.empty(B, seqlen, heads, headdim, dtype=dtype, device="meta").transpose(1, 2)

    tensors = {"q": io(HQ, SQ, D), "k": io(HK, SK, D), "v": io(HK, SK, DV), "o": io(HQ, SQ, DV), "do": io(HQ, SQ, DV)}
    tensors["stats"] = torch.empty(B, HQ, SQ, 1, device="meta")
    return tensors | {f"d{name}": torch.empty_like(tensors[name]) for name in ("q", "k", "v")}


def facts(tensors, mask=MaskFacts(), scale=0.125):
    signatures = {name: (t.shape, t.stride(), t.dtype, t.device) for name, t in tensors.items()}
    return gradients.facts_from_signatures(signatures, mask, scale, False)


def test_is_a_public_name():
    assert cudnn_frost_sm120.sdpa_bwd_wrapper_dsl_sm120 is wrapper.sdpa_bwd_wrapper_dsl_sm120


@pytest.mark.planning
def test_signature_is_that_of_cudnn_frontend():
    theirs = pytest.importorskip("cudnn.sdpa.bwd.api_dsl").sdpa_bwd_wrapper_dsl_sm120
    ours = inspect.signature(wrapper.sdpa_bwd_wrapper_dsl_sm120).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        assert name in ours, name
        assert ours[name].default == parameter.default, name
    shared = [name for name in ours if name in inspect.signature(theirs).parameters]
    assert shared == list(inspect.signature(theirs).parameters), "positional calls must mean the same"


def test_cpu_tensors_are_refused_with_a_way_out():
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"on cpu.*reference\.sdpa_backward"):
        wrapper.sdpa_bwd_wrapper_dsl_sm120(q, q, q, q, q, torch.zeros(1, 1, 8, 1))


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ((False, False, None, None, False), MaskFacts()),
        ((True, False, None, None, False), MaskFacts(right_bound=0)),
        ((True, True, None, None, False), MaskFacts(right_bound=0, bottom_right=True)),
        ((True, False, None, 3, False), MaskFacts(right_bound=3)),
        ((True, False, 0, None, False), MaskFacts(right_bound=0, left_bound=1)),
        ((True, False, 128, 0, True), MaskFacts(right_bound=0, left_bound=129, padding=True)),
        ((False, False, 5, None, False), MaskFacts(left_bound=6)),
    ],
)
def test_mask_arguments(arguments, mask):
    assert wrapper._mask(*arguments) == mask


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((True, False, -1, None, False), "window_size_left must be 0 or more, got -1"),
        ((True, False, None, -1, False), "window_size_right must be 0 or more"),
        ((False, True, None, None, False), "needs is_causal=True"),
        ((False, False, 4, 4, False), "window_size_right widens a causal mask"),
    ],
)
def test_contradictory_mask_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrapper._mask(*arguments)


def test_facts_of_ordinary_tensors():
    got = facts(operands(), MaskFacts(right_bound=0))
    assert (got.dtype, got.batch, got.heads_q, got.heads_k, got.group) == ("bf16", B, HQ, HK, HQ // HK)
    assert (got.seqlen_q, got.seqlen_k, got.headdim_qk, got.headdim_v) == (SQ, SK, D, DV)
    assert got.q.stride == (SQ * HQ * D, D, HQ * D, 1)
    assert got.dq.stride == got.q.stride
    assert got.stats.dtype == "fp32"
    gradients.refuse(got, target.Target("sm_120", "sm_120a", None, 188))


@pytest.mark.planning
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("arguments", "attributes"),
    [
        ({}, {}),
        ({"causal": True}, {"use_causal_mask": True}),
        ({"causal": True, "bottom_right": True}, {"use_causal_mask_bottom_right": True}),
        (
            {"causal": True, "left": 7, "right": 2},
            {"diagonal_band_left_bound": 8, "diagonal_band_right_bound": 2},
        ),
    ],
)
def test_states_the_problem_as_a_graph_does(arguments, attributes, padded):
    cudnn = pytest.importorskip("cudnn")
    tensors = operands()
    mask = {"causal": False, "bottom_right": False, "left": None, "right": None} | arguments
    if padded:
        lengths = torch.empty(B, 1, 1, 1, dtype=torch.int32, device="meta")
        tensors |= {"seq_len_q": lengths, "seq_len_kv": lengths}
        attributes = attributes | {"use_padding_mask": True}

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, compute_data_type=cudnn.data_type.FLOAT)
    types = {torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT", torch.int32: "INT32"}
    ports = {
        {"do": "dO"}.get(name, name): graph.tensor(
            dim=list(t.shape), stride=list(t.stride()), data_type=getattr(cudnn.data_type, types[t.dtype]), name=name
        )
        for name, t in tensors.items()
        if name not in ("dq", "dk", "dv")
    }
    results = graph.sdpa_backward(**ports, attn_scale=0.125, **attributes)
    for name, gradient in zip(("dq", "dk", "dv"), results, strict=True):
        like = tensors[name]
        gradient.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        gradient.set_data_type(cudnn.data_type.BFLOAT16)
    described = facts_from_graph(graph)
    without_uids = {
        field.name: replace(record, uid=None)
        for field in fields(described)
        if isinstance(record := getattr(described, field.name), TensorFacts)
    }
    assert replace(described, **without_uids, compute_dtype=None) == facts(
        tensors, wrapper._mask(*mask.values(), padded), 0.125
    )


def test_lengths_of_any_shape_become_the_graphs_shape():
    for shape in ((B,), (B, 1, 1, 1), (1, B)):
        lengths = torch.empty(shape, dtype=torch.int32, device="meta")
        got = facts(operands() | {"seq_len_q": lengths, "seq_len_kv": lengths}, MaskFacts(padding=True))
        assert (got.seq_len_q.dim, got.seq_len_q.dtype) == ((B, 1, 1, 1), "int32")


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"k": torch.empty(B, HK, SK, D + 8, device="meta", dtype=torch.bfloat16)}, ValueError, "k has dims"),
        ({"do": torch.empty(B, HQ, SQ + 1, DV, device="meta", dtype=torch.bfloat16)}, ValueError, "do has dims"),
        ({"v": torch.empty(B, HK, SK, DV, device="meta", dtype=torch.float16)}, ValueError, "v must be bf16"),
        ({"stats": torch.empty(B, HQ, SQ, 1, device="meta", dtype=torch.bfloat16)}, ValueError, "stats is bf16"),
        ({"o": torch.empty(B, HQ, SQ, device="meta", dtype=torch.bfloat16)}, ValueError, "o must have 4 dims"),
        ({"sink": torch.empty(1, HQ + 1, 1, 1, device="meta")}, ValueError, "sink has dims"),
        ({"bias": torch.empty(1, 3, SQ, SK, device="meta")}, ValueError, "bias has dims"),
        ({"do": torch.empty(1, 1, 1, 1, device="meta", dtype=torch.bfloat16).expand(B, HQ, SQ, DV)}, None, "do"),
    ],
)
def test_what_is_refused(change, error, sentence):
    got = facts(operands() | change)
    with pytest.raises(error or NotImplementedError, match=sentence):
        gradients.refuse(got, target.Target("sm_120", "sm_120a", None, 188))


def test_other_dtypes_are_declined():
    with pytest.raises(NotImplementedError, match="fp16 and bf16"):
        gradients.refuse(facts(operands(torch.float64)), target.Target("sm_120", "sm_120a", None, 188))


@pytest.mark.compile
def test_plans_and_compiles_the_first_plan(monkeypatch):
    """All that comes before the launch, for a GPU that is not there."""
    monkeypatch.setattr(target, "for_device", lambda device: target.Target("sm_120", "sm_120a", None, 188))
    made = ("dq", "dk", "dv")
    given = {name: gradients.signature(t) for name, t in operands().items() if name not in made}
    more = (made, MaskFacts(right_bound=0), 0.125, False)
    launcher, workspace_bytes = gradients._launcher.__wrapped__(tuple(given), tuple(given.values()), *more)
    assert workspace_bytes >= B * HQ * SQ * 4 * 2, "LSE and delta"
    with pytest.raises(ValueError, match="workspace"):
        launcher.run({}, 0, workspace_bytes, 0)

    given["stats"] = (*given["stats"][:3], torch.device("cpu"))
    with pytest.raises(ValueError, match="q is on meta and stats on cpu; all tensors belong on one device"):
        gradients._launcher.__wrapped__(tuple(given), tuple(given.values()), *more)


def test_results_unpack_and_index():
    dq, dk, dv = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    results = wrapper.NamedResults(dq_tensor=dq, dk_tensor=dk, dv_tensor=dv)
    first, second, third = results
    assert (first is dq, second is dk, third is dv) == (True, True, True)
    assert results["dk_tensor"] is dk
    assert results[2] is dv
    assert list(results.keys()) == ["dq_tensor", "dk_tensor", "dv_tensor"]
    assert {**results}.keys() == results.keys()
    assert math.isclose(dict(results)["dv_tensor"].item(), 2.0)

"""Reads a ``cudnn.pygraph`` into BwdFacts: the spellings of 1.30 to 1.32 and their precedence, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .facts import MISSING, BwdFacts, MaskFacts, TensorFacts

_KINDS = {
    "SDPA_BWD": "sdpa_backward",
    "SDPA_FP8_BWD": "sdpa_fp8_backward",
    "SDPA_MXFP8_BWD": "sdpa_mxfp8_backward",
}
_DTYPES = {
    "HALF": "fp16",
    "BFLOAT16": "bf16",
    "FLOAT": "fp32",
    "DOUBLE": "fp64",
    "BOOLEAN": "bool",
}

# Ports and attributes by what reads them; a name in neither set ends in BwdFacts.unknown.
_DROPOUT = ("dropout_0", "dropout_1", "dropout_2")
_QUANTIZED = frozenset(
    "q_T k_T dO_T o_f16 dO_f16 descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP descale_q_T"
    " descale_k_T descale_dO_T scale_s scale_dQ scale_dK scale_dV scale_dP".split()
)
_PORTS = frozenset(
    "q k v o dO stats attn_scale bias sink_token seq_len_q seq_len_kv cu_seq_len_q cu_seq_len_kv block_mask"
    " paged_attention_k_table paged_attention_v_table score_max score_sum_exp dQ dK dV dBias dSink_token rng_dump"
    " amax_dQ amax_dK amax_dV amax_dP".split()
).union(_QUANTIZED, _DROPOUT)
_ATTRIBUTES = frozenset(
    "attn_scale use_alibi_mask use_padding_mask max_total_seq_len_q max_total_seq_len_kv use_causal_mask"
    " use_causal_mask_bottom_right sliding_window_length diagonal_alignment diagonal_band_left_bound"
    " diagonal_band_right_bound left_bound right_bound use_deterministic_algorithm score_mod score_mod_bprop"
    " paged_attention_max_seq_len_kv unfuse_fma softmax_precision attn_scale_prefolded _dropout_n".split()
).union(_DROPOUT)
_INERT = ("", False, None)  # an unknown attribute with one of these values asks for nothing


def read(graph: Any) -> BwdFacts:
    """The facts of the first sdpa_backward node of ``graph``. Raises ValueError if it has none."""
    nodes = list(graph.nodes)
    node = next((node for node in nodes if node.node_type.name in _KINDS), None)
    if node is None:
        raise ValueError("the graph has no sdpa_backward node")
    ports = _Ports({**node.inputs, **node.outputs}, graph.context)
    params = node.params
    options = getattr(graph, "_cpp_graph_kwargs", {})
    scale, scale_tensor = _scale(params, ports)
    probability = params.get("dropout_0")
    dk, dv = _tensor(ports, "dK", "dk"), _tensor(ports, "dV", "dv")
    return BwdFacts(
        q=_tensor(ports, "q", "q"),
        k=_as_declared(_tensor(ports, "k", "k"), dk),
        v=_as_declared(_tensor(ports, "v", "v"), dv),
        o=_tensor(ports, "o" if ports.get("o") is not None else "o_f16", "o"),
        do=_tensor(ports, "dO", "do"),
        stats=_tensor(ports, "stats", "stats"),
        dq=_tensor(ports, "dQ", "dq"),
        dk=dk,
        dv=dv,
        mask=_mask(params),
        scale=scale,
        deterministic=bool(params.get("use_deterministic_algorithm")),
        seq_len_q=_optional(ports, "seq_len_q", "seq_len_q"),
        seq_len_kv=_optional(ports, "seq_len_kv", "seq_len_kv"),
        bias=_optional(ports, "bias", "bias"),
        dbias=_optional(ports, "dBias", "dbias"),
        sink=_optional(ports, "sink_token", "sink"),
        dsink=_optional(ports, "dSink_token", "dsink"),
        scale_tensor=scale_tensor,
        kind=_KINDS[node.node_type.name],
        other_nodes=tuple(other.node_type.name for other in nodes if other is not node),
        dropout=_dropout(params, ports),
        dropout_probability=float(probability) if _is_number(probability) else None,
        rng_dump=_given(ports, params, "rng_dump"),
        alibi=bool(params.get("use_alibi_mask")),
        score_mod=_given(ports, params, "score_mod", "score_mod_bprop"),
        paged=_given(
            ports, params, "paged_attention_k_table", "paged_attention_v_table", "paged_attention_max_seq_len_kv"
        ),
        block_mask=_given(ports, params, "block_mask"),
        score_max=_given(ports, params, "score_max"),
        score_sum_exp=_given(ports, params, "score_sum_exp"),
        unfuse_fma=bool(params.get("unfuse_fma")),
        softmax_precision=_dtype(params["softmax_precision"]) if params.get("softmax_precision") is not None else None,
        scale_prefolded=bool(params.get("attn_scale_prefolded")),
        cu_seq_len=_given(ports, params, "cu_seq_len_q", "cu_seq_len_kv"),
        max_total_seq_len_q=params.get("max_total_seq_len_q"),
        max_total_seq_len_kv=params.get("max_total_seq_len_kv"),
        side_outputs=tuple(
            name for name, tensor in node.outputs.items() if name.startswith("amax") and not tensor.is_virtual
        ),
        unknown=_unknown(ports, params),
        shape_overrides=bool(options.get("is_override_shape_enabled")),
        dynamic_shapes=bool(options.get("is_dynamic_shape_enabled")),
        cuda_graph_replay=bool(getattr(graph, "is_cuda_graph_replay_expected", False)),
        compute_dtype=_dtype(node.compute_data_type) if node.compute_data_type is not None else None,
    )


def _dtype(data_type: Any) -> str:
    """A short lower-case name of a cudnn.data_type or a torch dtype; "unset" for none."""
    if type(data_type).__module__ == "torch":
        from cudnn.datatypes import _torch_to_cudnn_data_type

        data_type = _torch_to_cudnn_data_type(data_type)
    name = getattr(data_type, "name", None)
    return "unset" if name is None else _DTYPES.get(name, name.lower())


class _Ports(dict[str, Any]):
    """The node's tensors by port, with the graph's dtypes for those that have none of their own."""

    def __init__(self, tensors: Mapping[str, Any], context: Any) -> None:
        super().__init__(tensors)
        self.defaults = {False: context.io_data_type, True: context.intermediate_data_type}


def _tensor(ports: _Ports, port: str, name: str) -> TensorFacts:
    return _optional(ports, port, name) or TensorFacts(name, (), (), MISSING)


def _optional(ports: _Ports, port: str, name: str) -> TensorFacts | None:
    tensor = ports.get(port)
    if tensor is None:
        return None
    data_type = tensor.data_type if tensor.data_type is not None else ports.defaults[bool(tensor.is_virtual)]
    return TensorFacts(
        name=name,
        dim=tuple(int(extent) for extent in tensor.dim or ()),
        stride=tuple(int(stride) for stride in tensor.stride or ()),
        dtype=_dtype(data_type),
        uid=int(tensor.uid),
        ragged=tensor.ragged_offset is not None,
        virtual=bool(tensor.is_virtual),
        by_value=bool(tensor.is_pass_by_value),
    )


def _as_declared(tensor: TensorFacts, gradient: TensorFacts) -> TensorFacts:
    """K or V as the user declared it.

    Lowering to the backend may leave a port described as its transposed view, (B, H, D, S). The gradient keeps the
    declared dims, and a declared K or V always has unit stride on its last dim, or validation would have refused it.
    """
    from dataclasses import replace

    if len(tensor.dim) != 4 or len(tensor.stride) != 4:
        return tensor
    (b, h, s, d), (sb, sh, ss, sd) = tensor.dim, tensor.stride
    if (b, h, d, s) == gradient.dim and tensor.dim != gradient.dim:
        tensor = replace(tensor, dim=(b, h, d, s))
    if sd != 1 and ss == 1 and tensor.dim[3] != 1:
        tensor = replace(tensor, stride=(sb, sh, sd, ss))
    return tensor


def _mask(params: Mapping[str, Any]) -> MaskFacts:
    """The later setter wins, as in cudnn-frontend's binding: the alignment, then the two causal flags, then the
    bounds, with the window's older spelling before the newer one. The quantized siblings say left_bound, right_bound.
    """
    bottom_right = getattr(params.get("diagonal_alignment"), "name", "TOP_LEFT") == "BOTTOM_RIGHT"
    right: int | None = None
    if params.get("use_causal_mask"):
        bottom_right, right = False, 0
    if params.get("use_causal_mask_bottom_right"):
        bottom_right, right = True, 0
    right = _last(right, params.get("right_bound"), params.get("diagonal_band_right_bound"))
    left = _last(params.get("sliding_window_length"), params.get("left_bound"), params.get("diagonal_band_left_bound"))
    return MaskFacts(
        bottom_right=bottom_right and (left is not None or right is not None),  # with no bound there is no diagonal
        left_bound=left,
        right_bound=right,
        padding=bool(params.get("use_padding_mask")),
    )


def _last(*values: int | None) -> int | None:
    given = [int(value) for value in values if value is not None]
    return given[-1] if given else None


def _scale(params: Mapping[str, Any], ports: _Ports) -> tuple[float | None, TensorFacts | None]:
    """(value, None), or (None, tensor). Without attn_scale nothing is scaled; a constant scalar holds a value."""
    tensor = ports.get("attn_scale")
    if tensor is None:
        value = params.get("attn_scale")
        return (1.0 if value is None else float(value)), None
    if tensor.pass_by_value is not None and getattr(tensor.scalar_type, "name", "") != "RUNTIME_PARAM":
        return float(tensor.pass_by_value), None
    return None, _optional(ports, "attn_scale", "scale_tensor")


def _dropout(params: Mapping[str, Any], ports: Mapping[str, Any]) -> str | None:
    if not params.get("_dropout_n"):
        return None
    if _is_number(params.get("dropout_0")):
        return "philox"
    return "mask" if ports.get("dropout_0") is not None else "malformed"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _given(ports: Mapping[str, Any], params: Mapping[str, Any], *names: str) -> bool:
    return any(ports.get(name) is not None or params.get(name) is not None for name in names)


def _unknown(ports: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[str, ...]:
    odd_ports = {name for name, tensor in ports.items() if tensor is not None and name not in _PORTS}
    odd_params = {
        name
        for name, value in params.items()
        if name not in _ATTRIBUTES and not any(value is inert or value == inert for inert in _INERT)
    }
    return tuple(sorted(odd_ports | odd_params))

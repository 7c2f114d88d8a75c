"""A graph of one sdpa_backward node as JSON: what to attach to a report, and what ``explain`` reads.

    {
      "format": 1,
      "graph": {"io_data_type": "BFLOAT16", "intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT"},
      "tensors": {"q": {"dim": [2, 8, 512, 64], "stride": [262144, 64, 512, 1], "data_type": "BFLOAT16"}, ...},
      "node": {
        "op": "sdpa_backward",
        "inputs": {"q": "q", "k": "k", "v": "v", "o": "o", "dO": "dO", "stats": "stats"},
        "outputs": {"dQ": "dQ", "dK": "dK", "dV": "dV"},
        "attributes": {"attn_scale": 0.125, "use_causal_mask": true}
      }
    }

Names of ops, ports and attributes are those of ``cudnn.pygraph``; enum values are their member names. A tensor may
leave out ``stride`` (row-major), ``data_type`` (the graph's io_data_type), ``uid`` and everything else that is at its
default. ``graph`` may hold any plain constructor argument of pygraph. Callbacks cannot be saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 1

_OPS = {
    "SDPA_BWD": "sdpa_backward",
    "SDPA_FP8_BWD": "sdpa_fp8_backward",
    "SDPA_MXFP8_BWD": "sdpa_mxfp8_backward",
}
_GIVEN_OUTPUTS = ("dBias", "dSink_token", "rng_dump")  # outputs whose tensors the caller of the op passes in
_CONTEXT = ("io_data_type", "intermediate_data_type", "compute_data_type")
_OPTIONS = ("name", "sm_count", "sm_version", "is_dynamic_shape_enabled", "is_override_shape_enabled")
_ENUMS = {
    "data_type": "data_type",
    "io_data_type": "data_type",
    "intermediate_data_type": "data_type",
    "compute_data_type": "data_type",
    "softmax_precision": "data_type",
    "diagonal_alignment": "diagonal_alignment",
    "reordering_type": "tensor_reordering",
    "scalar_type": "scalar_type",
}
"""Field -> the enum of cudnn that its name is a member of."""


def save(graph: Any, path: str | Path) -> None:
    """Write ``graph``, a ``cudnn.pygraph`` of one sdpa_backward node, to ``path``.

    Raises ValueError for another graph, or one that holds a value JSON cannot (a score_mod callback).
    """
    Path(path).write_text(json.dumps(to_dict(graph), indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> Any:
    """The ``cudnn.pygraph`` that a file describes, written by ``save`` or by hand. Raises ValueError if it does not."""
    try:
        description = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return from_dict(description)


def to_dict(graph: Any) -> dict[str, Any]:
    """The description of ``graph``, with plain values only. Raises ValueError as ``save`` does."""
    nodes = list(graph.nodes)
    if len(nodes) != 1 or nodes[0].node_type.name not in _OPS:
        kinds = ", ".join(node.node_type.name for node in nodes) or "no node"
        raise ValueError(f"only a graph of one sdpa_backward node can be saved; this one has {kinds}")
    node = nodes[0]
    tensors = _Tensors()
    attributes = {name: _plain(name, value) for name, value in node.params.items() if not name.startswith("_")}
    inputs = {port: tensors.name_of(tensor) for port, tensor in node.inputs.items()}
    outputs = {port: tensors.name_of(tensor) for port, tensor in node.outputs.items()}
    options = {name: graph._cpp_graph_kwargs.get(name) for name in _OPTIONS}
    if getattr(graph, "is_cuda_graph_replay_expected", False):
        options["is_cuda_graph_replay_expected"] = True
    return {
        "format": FORMAT,
        "graph": {
            **{name: _plain(name, getattr(graph.context, name)) for name in _CONTEXT},
            **{name: _plain(name, value) for name, value in options.items() if value is not None},
        },
        "tensors": tensors.described,
        "node": {
            "op": _OPS[node.node_type.name],
            "name": node.name,
            "compute_data_type": _plain("compute_data_type", node.compute_data_type),
            "inputs": inputs,
            "outputs": outputs,
            "attributes": attributes,
        },
    }


def from_dict(description: Any) -> Any:
    """The graph of a description. Raises ValueError, saying what is wrong with it."""
    import cudnn

    try:
        if description["format"] != FORMAT:
            raise ValueError(f"its format is {description['format']}; this version reads {FORMAT}")
        graph = cudnn.pygraph(**{name: _typed(name, value) for name, value in description["graph"].items()})
        node = description["node"]
        if node["op"] not in _OPS.values():
            raise ValueError(f"its op is {node['op']}; known are {', '.join(_OPS.values())}")
        _build(graph, node, description["tensors"])
    except KeyError as error:
        raise ValueError(f"this is not a graph description: {error} is missing or unknown") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a graph description: {error}") from error
    return graph


class _Tensors:
    """Names for a graph's tensors, each described once."""

    def __init__(self) -> None:
        self.described: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}

    def name_of(self, tensor: Any) -> str:
        if tensor.uid not in self._names:
            name = tensor.name or f"tensor_{tensor.uid}"
            if name in self.described:
                name = f"{name}#{tensor.uid}"
            self._names[tensor.uid] = name
            self.described[name] = {}  # takes the name before a ragged offset can
            self.described[name].update(self._describe(tensor))
        return self._names[tensor.uid]

    def _describe(self, tensor: Any) -> dict[str, Any]:
        optional = {
            "data_type": tensor.data_type,
            "uid": tensor.uid if tensor.uid_assigned else None,
            "is_virtual": tensor.is_virtual or None,
            "is_pass_by_value": tensor.is_pass_by_value or None,
            "value": tensor.pass_by_value,
            "scalar_type": tensor.scalar_type,
            "reordering_type": tensor.reordering_type,
        }
        described: dict[str, Any] = {"dim": list(tensor.dim or ()), "stride": list(tensor.stride or ())}
        described.update({name: _plain(name, value) for name, value in optional.items() if value is not None})
        if tensor.ragged_offset is not None:
            described["ragged_offset"] = self.name_of(tensor.ragged_offset)
            described["ragged_offset_multiplier"] = tensor.ragged_offset_multiplier
        return described


def _build(graph: Any, node: dict[str, Any], described: dict[str, dict[str, Any]]) -> None:
    made: dict[str, Any] = {}

    def tensor(name: str) -> Any:
        if name not in made:
            made[name] = _make_tensor(graph, name, dict(described[name]), tensor)
        return made[name]

    arguments = {name: _typed(name, value) for name, value in node.get("attributes", {}).items()}
    arguments.update({port: tensor(name) for port, name in node["inputs"].items()})
    dropout = [arguments.pop(f"dropout_{i}") for i in range(3) if f"dropout_{i}" in arguments]
    if dropout:
        arguments["dropout"] = tuple(dropout)
    outputs = node.get("outputs", {})
    arguments.update({port: tensor(name) for port, name in outputs.items() if port in _GIVEN_OUTPUTS})
    if node.get("compute_data_type") is not None:
        arguments["compute_data_type"] = _typed("compute_data_type", node["compute_data_type"])
    getattr(graph, node["op"])(**arguments, name=node.get("name", ""))
    produced = graph.nodes[-1].outputs
    for port, name in outputs.items():
        if port not in _GIVEN_OUTPUTS:
            _declare(produced[port], name, described[name])


def _make_tensor(graph: Any, name: str, fields: dict[str, Any], tensor: Any) -> Any:
    fields = {field: _typed(field, value) for field, value in fields.items()}
    if "value" in fields:
        return graph.tensor_scalar(fields["value"], fields["scalar_type"], name=name)
    if "ragged_offset" in fields:
        fields["ragged_offset"] = tensor(fields["ragged_offset"])
    return graph.tensor(name=name, **fields)


def _declare(tensor: Any, name: str, fields: dict[str, Any]) -> None:
    """Set what a description says of a tensor that the op made."""
    tensor.set_name(name)
    tensor.set_output(not fields.get("is_virtual", False))
    if fields.get("dim"):
        tensor.set_dim(fields["dim"])
    if fields.get("stride"):
        tensor.set_stride(fields["stride"])
    if "data_type" in fields:
        tensor.set_data_type(_typed("data_type", fields["data_type"]))
    if "uid" in fields:
        tensor.set_uid(fields["uid"])


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if name in _ENUMS:
        return getattr(value, "name", None) or str(value)
    raise ValueError(f"{name} is a {type(value).__name__}, which cannot be saved")


def _typed(name: str, value: Any) -> Any:
    import cudnn

    if name not in _ENUMS or not isinstance(value, str):
        return value
    enum = getattr(cudnn, _ENUMS[name])
    if not hasattr(enum, value):
        raise ValueError(f"{name} has no value {value}")
    return getattr(enum, value)

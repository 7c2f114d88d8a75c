"""The forward pass through cudnn-frontend's graph API: one ``sdpa`` node that also writes the log-sum-exp."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..facts import MaskFacts
from ..gradients import Signature, current, signature, stream_of
from .notices import say_once

_GRAPHS_KEPT = 1024  # per process
_UIDS = {"q": 1, "k": 2, "v": 3, "out": 4, "lse": 5, "bias": 6, "sink": 7, "seq_len_q": 8, "seq_len_kv": 9}
_PORTS = {"sink": "sink_token"}
_PLANNING = threading.Lock()
_per_thread = threading.local()


@dataclass(frozen=True)
class _Planned:
    graph: Any
    workspace_bytes: int
    uids: tuple[int, ...] | None  # where execute takes operands in an order: cudnn-frontend 1.31 and later


def cudnn_forward(tensors: dict[str, torch.Tensor], mask: MaskFacts, scale: float) -> bool:
    """Enqueue the forward and return True, or return False where cuDNN has no plan for it, which is said once.

    ``tensors`` are on one CUDA device: q, k, v, out, lse, and what there is of bias, sink (1, Hq, 1, 1), seq_len_q and
    seq_len_kv (B, 1, 1, 1); out and lse are written. A first call with new shapes or strides plans, and may compile.
    """
    device = tensors["q"].device
    with current(device):
        handle = _handle(device)
        planned = _planned(tuple((name, signature(t)) for name, t in tensors.items()), mask, scale)
        if planned is None:
            return False
        workspace = torch.empty(max(planned.workspace_bytes, 1), dtype=torch.uint8, device=device)
        if planned.uids is not None:
            planned.graph.execute(tuple(tensors.values()), workspace, handle=handle, tensor_uids=planned.uids)
        else:
            planned.graph.execute({_UIDS[name]: t for name, t in tensors.items()}, workspace, handle=handle)
    return True


def _handle(device: torch.device) -> Any:
    """This thread's cuDNN handle for the current device, on torch's current stream; handles are not thread-safe."""
    import cudnn

    handles = _per_thread.__dict__.setdefault("handles", {})
    handle, its_stream = handles.get(device) or (cudnn.create_handle(), None)
    stream = stream_of(device)
    if stream != its_stream:
        cudnn.set_stream(handle=handle, stream=stream)
        handles[device] = handle, stream
    return handle


@lru_cache(maxsize=_GRAPHS_KEPT)
def _planned(tensors: tuple[tuple[str, Signature], ...], mask: MaskFacts, scale: float) -> _Planned | None:
    import cudnn

    with _PLANNING:
        graph = declare_graph(dict(tensors), mask, scale, handle=_handle(dict(tensors)["q"][3]))
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, NotImplementedError, ValueError, RuntimeError) as declined:
            say_once(f"cuDNN has no attention forward for one of the problems, and another one runs: {declined}")
            return None
        ordered = "tensor_uids" in inspect.signature(graph.execute).parameters
        uids = tuple(_UIDS[name] for name, _ in tensors) if ordered else None
        return _Planned(graph, graph.get_workspace_size(), uids)


def declare_graph(tensors: dict[str, Signature], mask: MaskFacts, scale: float, handle: Any = None) -> Any:
    """The ``cudnn.pygraph`` of the forward, not yet validated; tensors have the uids of this module."""
    import cudnn

    kinds = {
        torch.float16: cudnn.data_type.HALF,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float32: cudnn.data_type.FLOAT,
        torch.int32: cudnn.data_type.INT32,
    }
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=kinds[tensors["q"][2]],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    inputs = {
        _PORTS.get(name, name): graph.tensor(
            name=name, uid=_UIDS[name], dim=list(shape), stride=list(stride), data_type=kinds[dtype]
        )
        for name, (shape, stride, dtype, _) in tensors.items()
        if name not in ("out", "lse")
    }
    bounds = {"diagonal_band_left_bound": mask.left_bound, "diagonal_band_right_bound": mask.right_bound}
    alignment = cudnn.diagonal_alignment.BOTTOM_RIGHT if mask.bottom_right else cudnn.diagonal_alignment.TOP_LEFT
    results = graph.sdpa(
        **inputs,
        generate_stats=True,
        attn_scale=scale,
        use_padding_mask=mask.padding,
        diagonal_alignment=alignment,
        **{name: bound for name, bound in bounds.items() if bound is not None},
        name="attention",
    )
    for name, result in zip(("out", "lse"), results, strict=True):
        shape, stride, dtype, _ = tensors[name]
        result.set_output(True).set_uid(_UIDS[name]).set_data_type(kinds[dtype])
        result.set_dim(list(shape)).set_stride(list(stride))
    return graph

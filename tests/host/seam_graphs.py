"""Builds ``cudnn.pygraph`` graphs for the tests of the seam, and the GPU that they are planned for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cudnn
import pytest

BF16, FP16, FP32 = cudnn.data_type.BFLOAT16, cudnn.data_type.HALF, cudnn.data_type.FLOAT
INT32 = cudnn.data_type.INT32


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (12, 0), sm_count: int = 188, name: str = "a board"
) -> None:
    """What cudnn-frontend says of the device, whatever its ordinal."""
    info = SimpleNamespace(compute_capability=capability, sm_count=sm_count, device_name=name)
    monkeypatch.setattr("cudnn._device.device_info", lambda ordinal: info)


def bshd(b: int, h: int, s: int, d: int) -> list[int]:
    """Strides of (b, h, s, d) dims whose memory order is batch, sequence, head, head dim."""
    return [h * s * d, d, h * d, 1]


def make_graph(
    *,
    b: int = 2,
    hq: int = 4,
    hk: int = 2,
    hv: int | None = None,
    sq: int = 128,
    sk: int = 128,
    d: int = 64,
    dv: int | None = None,
    dtype: Any = BF16,
    stats_dtype: Any = FP32,
    strides: dict[str, list[int]] | None = None,
    outputs: tuple[str, ...] = ("dQ", "dK", "dV"),
    graph: dict[str, Any] | None = None,
    extra: Any = None,
    **attributes: Any,
) -> Any:
    """A graph of one sdpa_backward node. ``extra(graph)`` returns further keyword arguments of the op, made of the
    graph's own tensors; ``strides`` replaces the strides of tensors by name."""
    made = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=FP32, compute_data_type=FP32, **(graph or {}))
    hv, dv, strides = hv or hk, dv or d, strides or {}

    def tensor(name: str, *dim: int) -> Any:
        return made.tensor(name=name, dim=list(dim), stride=strides.get(name, bshd(*dim)), data_type=dtype)

    q, k, v = tensor("q", b, hq, sq, d), tensor("k", b, hk, sk, d), tensor("v", b, hv, sk, dv)
    o, do = tensor("o", b, hq, sq, dv), tensor("do", b, hq, sq, dv)
    stats = made.tensor(
        name="stats", dim=[b, hq, sq, 1], stride=strides.get("stats", [hq * sq, sq, 1, 1]), data_type=stats_dtype
    )
    attributes = {"attn_scale": 0.125, **attributes, **(extra(made) if extra is not None else {})}
    results = made.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=stats, **attributes)
    for name, result, like in zip(("dQ", "dK", "dV"), results, (q, k, v), strict=True):
        result.set_output(name in outputs).set_data_type(dtype)
        result.set_dim(like.get_dim()).set_stride(strides.get(name, like.get_stride()))
    return made


def scalars(graph: Any, *names: str) -> dict[str, Any]:
    """One-element fp32 tensors by name."""
    return {n: graph.tensor(name=n, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=FP32) for n in names}


def lengths(b: int = 2, dtype: Any = INT32) -> Any:
    """``extra`` that adds seq_len_q and seq_len_kv."""
    return lambda graph: {
        name: graph.tensor(name=name, dim=[b, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype)
        for name in ("seq_len_q", "seq_len_kv")
    }


def dropout(*entries: Any) -> Any:
    """``extra`` that adds dropout; a string is the name of a one-element tensor."""

    def extra(graph: Any) -> dict[str, Any]:
        tensors = scalars(graph, *[entry for entry in entries if isinstance(entry, str)])
        return {"dropout": tuple(tensors.get(entry, entry) for entry in entries)}

    return extra


def declined_graph(**attributes: Any) -> Any:
    """A well-formed graph that our engine does not serve and is not going to: it has dropout."""
    return make_graph(extra=dropout(0.1, "seed", "offset"), **attributes)


def plan(graph: Any) -> Any:
    """Validate and plan ``graph``."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    return graph


def fp8_graph() -> Any:
    """An sdpa_fp8_backward graph."""
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, intermediate_data_type=FP32, compute_data_type=FP32)
    dim, stride = [2, 4, 128, 64], bshd(2, 4, 128, 64)
    ports = {n: graph.tensor(name=n, dim=dim, stride=stride) for n in ("q", "k", "v", "o", "dO")}
    ports["stats"] = graph.tensor(name="stats", dim=[2, 4, 128, 1], stride=[512, 128, 1, 1], data_type=FP32)
    names = "descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP".split()
    names += "scale_s scale_dQ scale_dK scale_dV scale_dP".split()
    results = graph.sdpa_fp8_backward(**ports, **scalars(graph, *names), left_bound=7, right_bound=0)
    for result in results[:4]:
        result.set_output(True)
    return graph


def mxfp8_graph() -> Any:
    """An sdpa_mxfp8_backward graph."""
    fp8, scale_type = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP8_E8M0
    graph = cudnn.pygraph(io_data_type=BF16, intermediate_data_type=FP32, compute_data_type=FP32)
    dim, stride = [2, 4, 128, 128], bshd(2, 4, 128, 128)
    payloads = ("q", "q_T", "k", "k_T", "v", "dO", "dO_T")
    ports = {n: graph.tensor(name=n, dim=dim, stride=stride, data_type=fp8) for n in payloads}
    ports.update({n: graph.tensor(name=n, dim=dim, stride=stride) for n in ("o_f16", "dO_f16")})
    ports["stats"] = graph.tensor(name="stats", dim=[2, 4, 128, 1], stride=[512, 128, 1, 1], data_type=FP32)
    for name in payloads:
        ports[f"descale_{name}"] = graph.tensor(
            name=f"descale_{name}",
            dim=[2, 4, 128, 4],
            stride=[2048, 512, 4, 1],
            data_type=scale_type,
            reordering_type=cudnn.tensor_reordering.F8_128x4,
        )
    results = graph.sdpa_mxfp8_backward(**ports, use_causal_mask=True)
    for result in results[:3]:
        result.set_output(True).set_dim(dim).set_stride(stride)
    for amax in results[3:]:
        amax.set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
    return graph

"""What a plan is made for: the graph's device_property, else a named target, else the current device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

TARGET_ENV = "CUDNN_FROST_SM120_TARGET"  # a name below: plan and compile for it with no device at all
DS_BUDGET_ENV = "CUDNN_FROST_SM120_DS_BUDGET"  # bytes of workspace that a plan may store dS in
STAND_IN_ENV = "CUDNN_FROST_SM120_STAND_IN"  # 1 admits sm_90, for tests of correctness on a Hopper GPU

DS_BUDGET = 4 << 30
"""What a plan may store dS in where the environment does not say: 4 GiB, two heads of S 32768, which fill a GPU."""


@dataclass(frozen=True)
class Target:
    """One GPU line. ``device`` is a CUDA ordinal, or None when planning with no device at all."""

    name: str  # "sm_120" | "sm_121" | "sm_90"
    arch: str  # what the compiler is asked for: "sm_120a" | "sm_121a" | "sm_90a"
    device: int | None
    sm_count: int
    half_tensor_rate: bool = False  # GeForce: products with fp32 sums at half the rate of an SM
    ds_budget: int = DS_BUDGET  # kept with the target, so that the variable is read once for a graph


_NAMED = {
    # The SM counts are those of the largest board that has the architecture.
    "sm_120": Target("sm_120", "sm_120a", None, 188),  # RTX PRO 6000 Blackwell
    "sm_121": Target("sm_121", "sm_121a", None, 48),  # GB10, the chip of DGX Spark
    "sm_90": Target("sm_90", "sm_90a", None, 132),  # H100, H200: the stand-in
}
_NAME_OF_CAPABILITY = {(12, 0): "sm_120", (12, 1): "sm_121", (9, 0): "sm_90"}
_SERVED = "SM120 (RTX 50, RTX PRO Blackwell) and SM121 (DGX Spark) are served"


def resolve(graph: Any = None) -> Target:
    """The target of ``graph``: of its device_property, of the environment, or of the device it would run on.

    Raises NotImplementedError, in one sentence, where there is no target or none that is served.
    """
    described = _device_property(graph)
    if described is not None:
        return _from_device_property(described)
    name = os.environ.get(TARGET_ENV, "").strip().lower()
    if name:
        if name not in _NAMED:
            raise NotImplementedError(f"{TARGET_ENV}={name!r} names no target; it takes one of {', '.join(_NAMED)}")
        return _on_device(_admitted(named(name), f"{TARGET_ENV}={name}"), graph)
    return for_device(_current_device(graph))


def named(name: str) -> Target:
    """The target of a name, with no device. Raises KeyError for an unknown one."""
    return replace(_NAMED[name], ds_budget=_ds_budget())


def _ds_budget() -> int:
    text = os.environ.get(DS_BUDGET_ENV, "").strip()
    if text and not text.isdecimal():
        raise NotImplementedError(f"{DS_BUDGET_ENV}={text!r} must be a number of bytes")
    return int(text) if text else DS_BUDGET


def for_device(device: int) -> Target:
    """The target of one CUDA ordinal. Raises NotImplementedError if that GPU is not served."""
    from cudnn._device import device_info

    info = device_info(device)
    found = _from_capability(info.compute_capability, device, info.sm_count, f"cuda:{device}")
    return replace(found, half_tensor_rate=found.name == "sm_120" and "GeForce" in info.device_name)


def _on_device(target: Target, graph: Any) -> Target:
    """A named target with the current device in it, where that is such a GPU: the plan can then run here too."""
    try:
        here = for_device(_current_device(graph))
    except NotImplementedError:
        return target
    return here if here.name == target.name else target


def _admitted(target: Target, where: str) -> Target:
    if target.name == "sm_90" and os.environ.get(STAND_IN_ENV, "").strip() != "1":
        raise NotImplementedError(f"{where} is SM90, which is a stand-in for tests, with {STAND_IN_ENV}=1; {_SERVED}")
    return target


def _from_capability(capability: tuple[int, int], device: int | None, sm_count: int, where: str) -> Target:
    name = _NAME_OF_CAPABILITY.get(capability)
    if name is None:
        raise NotImplementedError(f"{where} is SM{capability[0]}{capability[1]}; {_SERVED}")
    return _admitted(replace(named(name), device=device, sm_count=sm_count), where)


def _device_property(graph: Any) -> Any:
    return getattr(graph, "_cpp_graph_kwargs", {}).get("device_property")


def _from_device_property(described: Any) -> Target:
    """From cuDNN's own descriptor, which serializes to JSON: deviceVer is 1200 for SM12.0."""
    try:
        properties = json.loads(described.serialize())
        version, sm_count = int(properties["deviceVer"]), int(properties["multiProcessorCount"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"the graph's device_property does not say which GPU it describes ({error})"
        ) from error
    return _from_capability((version // 100, version % 100 // 10), None, sm_count, "the graph's device_property")


def _current_device(graph: Any) -> int:
    handle = getattr(graph, "_handle", None)
    try:
        if handle is not None:
            return int(handle.device.ordinal)
        from cudnn.frost.device import current_device

        return int(current_device())
    except Exception as error:  # no driver, no device, no cuda-python: each says so in its own type
        raise NotImplementedError(
            f"there is no CUDA device to plan for; set {TARGET_ENV}=sm_120 to plan without one ({error})"
        ) from error

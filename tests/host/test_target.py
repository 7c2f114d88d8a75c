"""Which target a plan is made for: device_property, then the environment, then the device."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from seam_graphs import make_graph, on_gpu

from cudnn_frost_sm120 import target as targets
from cudnn_frost_sm120.target import DS_BUDGET, DS_BUDGET_ENV, STAND_IN_ENV, TARGET_ENV, Target, for_device, resolve

pytestmark = pytest.mark.planning


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET_ENV, raising=False)
    monkeypatch.delenv(STAND_IN_ENV, raising=False)
    monkeypatch.delenv(DS_BUDGET_ENV, raising=False)


def described(version: int, sm_count: int = 84) -> Any:
    """A graph with a device_property as cuDNN serializes it; making a real one needs the cuDNN library."""
    properties = {"deviceVer": version, "multiProcessorCount": sm_count}
    return SimpleNamespace(
        _cpp_graph_kwargs={"device_property": SimpleNamespace(serialize=lambda: json.dumps(properties))}
    )


def on_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], current: int = 0, name: str = "a board"
) -> None:
    on_gpu(monkeypatch, capability, 100, name)
    monkeypatch.setattr("cudnn.frost.device.current_device", lambda: current)


def test_device_property_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET_ENV, "sm_120")
    assert resolve(described(1210)) == Target("sm_121", "sm_121a", None, 84)
    assert resolve(described(1200, 70)) == Target("sm_120", "sm_120a", None, 70)
    with pytest.raises(NotImplementedError, match="SM100"):
        resolve(described(1000))
    unreadable = SimpleNamespace(_cpp_graph_kwargs={"device_property": object()})
    with pytest.raises(NotImplementedError, match="does not say"):
        resolve(unreadable)


def test_environment_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sm_120", "sm_121"):
        monkeypatch.setenv(TARGET_ENV, name)
        target = resolve(make_graph())
        assert (target.name, target.arch, target.device) == (name, f"{name}a", None)
    monkeypatch.setenv(TARGET_ENV, "sm_100")
    with pytest.raises(NotImplementedError, match="takes one of sm_120, sm_121, sm_90"):
        resolve()


def test_environment_takes_a_device_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET_ENV, "sm_120")
    on_device(monkeypatch, (12, 0), current=1)
    assert resolve() == Target("sm_120", "sm_120a", 1, 100)
    for other in ((12, 1), (9, 0), (8, 0)):
        on_device(monkeypatch, other)
        assert resolve().device is None


def test_the_budget_for_dS_comes_with_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, (12, 0))
    assert (
        resolve(described(1200)).ds_budget == for_device(0).ds_budget == targets.named("sm_120").ds_budget == DS_BUDGET
    )
    monkeypatch.setenv(DS_BUDGET_ENV, " 12345 ")
    assert resolve(described(1200)).ds_budget == for_device(0).ds_budget == targets.named("sm_120").ds_budget == 12345
    monkeypatch.setenv(TARGET_ENV, "sm_121")
    assert resolve().ds_budget == 12345
    for text in ("1 GiB", "-1", "1e9"):
        monkeypatch.setenv(DS_BUDGET_ENV, text)
        with pytest.raises(NotImplementedError, match="must be a number of bytes"):
            resolve()


def test_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET_ENV, "sm_90")
    with pytest.raises(NotImplementedError, match=STAND_IN_ENV):
        resolve()
    monkeypatch.setenv(STAND_IN_ENV, "1")
    assert resolve().arch == "sm_90a"
    monkeypatch.delenv(TARGET_ENV)
    on_device(monkeypatch, (9, 0))
    assert resolve() == Target("sm_90", "sm_90a", 0, 100)


def test_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, (12, 0), current=3)
    assert resolve() == Target("sm_120", "sm_120a", 3, 100)
    graph = SimpleNamespace(_handle=SimpleNamespace(device=SimpleNamespace(ordinal=1)))
    assert resolve(graph).device == 1
    assert for_device(2) == Target("sm_120", "sm_120a", 2, 100)


def test_boards_with_half_the_tensor_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, half in (("NVIDIA GeForce RTX 5090", True), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", False)):
        on_device(monkeypatch, (12, 0), name=name)
        assert for_device(0).half_tensor_rate is half
    assert not targets.named("sm_120").half_tensor_rate


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 9), (12, 5)])
def test_other_devices_are_declined(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    on_device(monkeypatch, capability)
    with pytest.raises(NotImplementedError, match=r"and SM121 .DGX Spark. are served"):
        resolve()


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr("cudnn.frost.device.current_device", absent)
    with pytest.raises(NotImplementedError, match=f"set {TARGET_ENV}=sm_120 to plan without one"):
        resolve(make_graph())


def test_named_targets_are_the_served_ones() -> None:
    from cudnn_frost_sm120.support import TARGETS

    assert tuple(targets._NAMED) == TARGETS

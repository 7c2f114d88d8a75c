"""What a plan is made for: the graph's device_property, a named target, or the current device."""

from __future__ import annotations

from dataclasses import dataclass

TARGET_ENV = "CUDNN_FROST_SM120_TARGET"
STAND_IN_ENV = "CUDNN_FROST_SM120_STAND_IN"


@dataclass(frozen=True)
class Target:
    """One GPU line. ``device`` is a CUDA ordinal, or None when planning with no device at all."""

    name: str  # "sm_120" | "sm_121" | "sm_90"
    arch: str  # what the compiler is asked for: "sm_120a" | "sm_121a" | "sm_90a"
    device: int | None
    sm_count: int


def resolve(graph=None) -> Target:
    """The target of ``graph``. Raises NotImplementedError, one sentence, where there is none that we serve."""
    raise NotImplementedError("target resolution is not written yet")

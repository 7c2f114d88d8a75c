"""The tuning axes of a plan, and their public spelling ``{cudnn.knob_type: int}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ReductionMode(IntEnum):
    """How dQ is summed over key blocks. A value once shipped keeps its meaning for ever: recorded plans hold it."""

    ATOMIC = 0  # fp32 atomic adds into workspace, in whatever order they come
    RELAY = 1  # the same adds in a fixed order of key tiles: deterministic
    DS_STORE = 2  # no adds: dS goes to workspace, and a GEMM behind the main kernel multiplies it by K: deterministic
    RECOMPUTE = 3  # no adds: a kernel of its own recomputes the scores of each query tile: deterministic

    @property
    def dq_in_main(self) -> bool:
        """The main kernel adds dQ up in fp32; else a kernel of its own sums it, and writes it once."""
        return self in (ReductionMode.ATOMIC, ReductionMode.RELAY)


PUBLIC_NAMES = {
    "tile_m": "TILE_M",
    "tile_n": "TILE_N",
    "stages": "STAGES",
    "heads_per_cta": "PACK_GQA",
    "reduction_mode": "REDUCTION_MODE",
}
"""Field of BwdKnobs -> member of cudnn.knob_type."""
_ALL = ", ".join(PUBLIC_NAMES.values())


@dataclass(frozen=True)
class BwdKnobs:
    """One complete assignment: every field is always set, so a recorded plan pins the kernel."""

    tile_m: int  # query rows of a tile
    tile_n: int  # key rows of a tile
    stages: int  # Q buffers in flight
    heads_per_cta: int = 1  # query heads of a group whose dK and dV one CTA sums; a divisor of the group's size
    reduction_mode: ReductionMode = ReductionMode.ATOMIC

    def __str__(self) -> str:
        return ", ".join(f"{name}={int(getattr(self, field))}" for field, name in PUBLIC_NAMES.items())

    def to_public(self) -> dict[Any, int]:
        """``{cudnn.knob_type: int}``, what graph.plans shows and an autotuner records."""
        import cudnn

        return {getattr(cudnn.knob_type, name): int(getattr(self, field)) for field, name in PUBLIC_NAMES.items()}

    @classmethod
    def from_public(cls, public: Mapping[Any, int]) -> BwdKnobs:
        """The inverse of to_public; keys may be ints. Raises ValueError for a missing, foreign or unknown one."""
        import cudnn

        field_of = {int(getattr(cudnn.knob_type, name).value): field for field, name in PUBLIC_NAMES.items()}
        values: dict[str, int] = {}
        for knob, value in public.items():
            field = field_of.get(int(getattr(knob, "value", knob)))
            if field is None:
                raise ValueError(f"knob {getattr(knob, 'name', knob)} is not one of this engine's, which are {_ALL}")
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"knob {PUBLIC_NAMES[field]} takes an int, not {value!r}")
            if field in values:
                raise ValueError(f"knob {PUBLIC_NAMES[field]} is given twice")
            values[field] = value
        missing = [name for field, name in PUBLIC_NAMES.items() if field not in values]
        if missing:
            raise ValueError(f"knobs {', '.join(missing)} are missing; a plan is recorded with all of {_ALL}")
        mode = values.pop("reduction_mode")
        if mode not in list(ReductionMode):
            served = ", ".join(f"{known.value} ({known.name})" for known in ReductionMode)
            raise ValueError(f"knob REDUCTION_MODE has no value {mode}; it takes {served}")
        return cls(**values, reduction_mode=ReductionMode(mode))

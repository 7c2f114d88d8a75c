"""The tuning axes of a plan, and their public spelling ``{cudnn.knob_type: int}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ReductionMode(IntEnum):
    """How dQ is summed over key blocks. A value once shipped keeps its meaning for ever: recorded plans hold it."""

    ATOMIC = 0  # fp32 atomic adds into workspace


@dataclass(frozen=True)
class BwdKnobs:
    """One complete assignment: every field is always set, so a recorded plan pins the kernel."""

    tile_m: int  # query rows of a tile
    tile_n: int  # key rows of a tile
    stages: int  # Q buffers in flight
    reduction_mode: ReductionMode = ReductionMode.ATOMIC

    def to_public(self) -> dict[Any, int]:
        """``{cudnn.knob_type: int}``, what graph.plans shows and an autotuner records."""
        import cudnn

        return {getattr(cudnn.knob_type, name): int(getattr(self, field)) for field, name in PUBLIC_NAMES.items()}

    @classmethod
    def from_public(cls, public: Mapping[Any, int]) -> BwdKnobs:
        """The inverse of to_public. Raises ValueError for a missing, unknown or out-of-domain knob."""
        import cudnn

        field_of = {int(getattr(cudnn.knob_type, name).value): field for field, name in PUBLIC_NAMES.items()}
        values: dict[str, int] = {}
        for knob, value in public.items():
            number = int(getattr(knob, "value", knob))
            if number not in field_of:
                raise ValueError(
                    f"knob {getattr(knob, 'name', knob)} is not one of this engine's; it has {', '.join(PUBLIC_NAMES.values())}"
                )
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"knob {PUBLIC_NAMES[field_of[number]]} must be an int, got {value!r}")
            values[field_of[number]] = value
        missing = [PUBLIC_NAMES[field] for field in PUBLIC_NAMES if field not in values]
        if missing:
            raise ValueError(
                f"knobs {', '.join(missing)} are missing; a recorded plan holds all of {', '.join(PUBLIC_NAMES.values())}"
            )
        mode = values.pop("reduction_mode")
        if mode not in list(ReductionMode):
            served = ", ".join(f"{m.value} ({m.name})" for m in ReductionMode)
            raise ValueError(f"knob REDUCTION_MODE has no value {mode}; served are {served}")
        return cls(**values, reduction_mode=ReductionMode(mode))


PUBLIC_NAMES: dict[str, str] = {
    "tile_m": "TILE_M",
    "tile_n": "TILE_N",
    "stages": "STAGES",
    "reduction_mode": "REDUCTION_MODE",
}
"""Field of BwdKnobs -> member of cudnn.knob_type."""

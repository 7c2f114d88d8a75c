"""Knobs and their public spelling."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import cudnn
import pytest

from cudnn_frost_sm120.knobs import PUBLIC_NAMES, BwdKnobs, ReductionMode

pytestmark = pytest.mark.planning

KNOBS = BwdKnobs(64, 128, 2)
KT = cudnn.knob_type


def test_round_trip() -> None:
    public = KNOBS.to_public()
    assert {KT.TILE_M: 64, KT.TILE_N: 128, KT.STAGES: 2, KT.REDUCTION_MODE: 0}.items() <= public.items()
    assert len(public) == len(fields(BwdKnobs))
    assert BwdKnobs.from_public(public) == KNOBS
    assert BwdKnobs.from_public({int(k.value): v for k, v in public.items()}) == KNOBS
    assert str(KNOBS).startswith("TILE_M=64, TILE_N=128, STAGES=2, ")


def test_recorded_values_never_change() -> None:
    assert ReductionMode(0) is ReductionMode.ATOMIC
    assert ReductionMode(2) is ReductionMode.DS_STORE
    stored = BwdKnobs(64, 128, 2, 1, ReductionMode.DS_STORE)
    assert stored.to_public()[KT.REDUCTION_MODE] == 2
    assert BwdKnobs.from_public(stored.to_public()) == stored
    assert set(PUBLIC_NAMES) == {field.name for field in fields(BwdKnobs)}
    assert {"tile_m": "TILE_M", "tile_n": "TILE_N", "stages": "STAGES"}.items() <= PUBLIC_NAMES.items()


def test_every_knob_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "graph-api.md").read_text(encoding="utf-8")
    for name in PUBLIC_NAMES.values():
        assert f"| `{name}` |" in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({KT.TILE_M: None}, "TILE_M are missing"),
        ({KT.SPLIT_KV: 2}, "SPLIT_KV is not one"),
        ({KT.TILE_N: "128"}, "takes an int"),
        ({KT.STAGES: True}, "takes an int"),
        ({KT.REDUCTION_MODE: 77}, "no value 77"),
        ({int(KT.TILE_M.value): 32}, "given twice"),
    ],
)
def test_refused(change: dict[Any, Any], says: str) -> None:
    public = {**KNOBS.to_public(), **change}
    with pytest.raises(ValueError, match=says):
        BwdKnobs.from_public({knob: value for knob, value in public.items() if value is not None})

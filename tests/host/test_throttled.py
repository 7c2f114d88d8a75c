"""The throttled build: twice the matrix products, and nothing left on disk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cudnn_frost_sm120 import compile as compiling
from cudnn_frost_sm120.config.tiles import TileConfig, configs_for
from cudnn_frost_sm120.cubin import compile_cubin
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.sass import Body, main_loops
from cudnn_frost_sm120.sm120_model.engines import plain_key
from cudnn_frost_sm120.sm120_model.loops import count, query_tile
from cudnn_frost_sm120.target import named
from tests.gpu.cases import Case, facts_of

SM90 = named("sm_90")


def test_no_plan_is_throttled() -> None:
    facts = facts_of(Case(64))
    assert not any(make_plan(facts, knobs, SM90).key.throttled for knobs in ranked_knobs(facts, SM90))


def test_it_is_never_put_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn.frost import compiled_cache

    asked: list[Any] = []

    def compile_cached(*_: Any, cache_key: str | None, **__: Any) -> Any:
        asked.append(cache_key)
        return SimpleNamespace()

    monkeypatch.setattr(compiled_cache, "compile_cached", compile_cached)
    monkeypatch.setattr(compiling, "_CHAINS", {})
    key = plain_key(configs_for(64, 64)[0])
    for throttled in (False, True):
        compiling.compile_chain(replace(key, throttled=throttled), SM90)
    assert asked[0] is not None
    assert asked[1] is None
    assert len({key.name, replace(key, throttled=True).name}) == 2


@pytest.mark.compile
@pytest.mark.parametrize("tile", [configs_for(d, d)[0] for d in (64, 128, 256)], ids=lambda tile: str(tile.headdim_qk))
def test_every_product_has_an_idle_one(tile: TileConfig) -> None:
    loops, idle_loops = (
        main_loops(compile_cubin(replace(plain_key(tile), throttled=on), SM90).kernel_sass("main"))
        for on in (False, True)
    )
    assert 2 * _products(loops) == _products(idle_loops)
    assert count(loops, query_tile(tile)).hmma == _products(loops)


def _products(loops: list[Body]) -> int:
    return sum(opcode.startswith("HMMA") for body in loops for opcode, _ in body)

"""Registration with cudnn-frontend's engine table: idempotent, thread-safe, undoable, and clear where it is unknown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import cudnn
import pytest
from cudnn import engines
from cudnn.engines import manifest

import cudnn_frost_sm120
from cudnn_frost_sm120.register import ENGINE_ID, ENGINE_NAME, FAMILY_NAME, is_registered, register, unregister

pytestmark = pytest.mark.planning


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    unregister()
    before = manifest.MANIFEST
    yield
    unregister()
    assert manifest.MANIFEST == before
    assert engines.MANIFEST == before
    register()


def family() -> Any:
    return next(row for row in manifest.MANIFEST if row.name == FAMILY_NAME)


def test_register_and_undo() -> None:
    original = family()
    others = [row for row in manifest.MANIFEST if row is not original]
    register()
    ours = family()
    assert engines.MANIFEST is manifest.MANIFEST
    assert [row for row in manifest.MANIFEST if row is not ours] == others
    assert list(ours.slots)[:-1] == list(original.slots)
    assert list(ours.slots)[-1] == ENGINE_NAME
    slot = ours.slots[ENGINE_NAME]
    assert (slot.slot, slot.opt_in, ours.engine_id + slot.slot) == (90, True, ENGINE_ID)
    assert (ours.engine_id, ours.name, ours.factory) == (original.engine_id, original.name, original.factory)
    unregister()
    assert family() is original
    assert not is_registered()


def test_twice_is_once() -> None:
    register()
    table = manifest.MANIFEST
    cudnn_frost_sm120.register()
    assert manifest.MANIFEST is table
    unregister()
    unregister()


def test_threads() -> None:
    barrier = threading.Barrier(16)
    failures: list[Exception] = []

    def go() -> None:
        barrier.wait()
        try:
            register()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=go) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(ENGINE_NAME in row.slots for row in manifest.MANIFEST) == 1
    assert len(family().slots) == len(set(family().slots))


def test_the_flag_decides_what_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.delenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", raising=False)
    assert ENGINE_NAME not in family().offered_ids()
    assert manifest.engine_for_id(ENGINE_ID) is None
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")
    assert family().offered_ids()[ENGINE_NAME] == ENGINE_ID
    assert manifest.engine_for_id(ENGINE_ID).name == ENGINE_NAME


def test_engines_made_while_registered_do_not_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")
    before = manifest.instantiate(family(), family().offered_ids())
    register()
    made = manifest.instantiate(family(), family().offered_ids())
    assert [engine.name for engine in made] == [*(engine.name for engine in before), ENGINE_NAME]
    unregister()
    assert not any(ENGINE_NAME in dict(ids) for _, ids in manifest._INSTANCES)
    assert manifest.engine_for_id(ENGINE_ID) is None
    assert manifest.instantiate(family(), family().offered_ids()) == before


def test_the_factory_keeps_its_name() -> None:
    original = family().factory
    register()
    engines.__dict__.pop(original, None)
    assert [engine.name for engine in getattr(engines, original)({ENGINE_NAME: ENGINE_ID})] == [ENGINE_NAME]
    engines.__dict__.pop(original, None)


def test_no_name_is_part_of_another() -> None:
    register()
    names = [name for row in manifest.MANIFEST for name in row.slots]
    assert not [name for name in names if name != ENGINE_NAME and (name in ENGINE_NAME or ENGINE_NAME in name)]


@dataclass(frozen=True)
class OddSlot:
    number: int


@dataclass(frozen=True)
class OddFamily:
    name: str
    slots: dict[str, Any]


def rows(change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(change(row) if row.name == FAMILY_NAME else row for row in manifest.MANIFEST)


DOCTORED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "list": (lambda m: m.setattr(manifest, "MANIFEST", list(manifest.MANIFEST)), "not a filled tuple"),
    "empty": (lambda m: m.setattr(manifest, "MANIFEST", ()), "not a filled tuple"),
    "gone": (lambda m: m.delattr(manifest, "MANIFEST"), "not a filled tuple"),
    "no instances": (lambda m: m.setattr(manifest, "_INSTANCES", None), "_INSTANCES is not a dict"),
    "no slot type": (lambda m: m.delattr(manifest, "EngineSlot"), "EngineSlot is missing"),
    "slot type": (lambda m: m.setattr(manifest, "EngineSlot", OddSlot), "EngineSlot has other fields"),
    "family type": (
        lambda m: m.setattr(manifest, "MANIFEST", (*manifest.MANIFEST, OddFamily("x", {}))),
        "EngineFamily has other fields",
    ),
    "slots": (
        lambda m: m.setattr(manifest, "MANIFEST", rows(lambda row: replace(row, slots=("a",)))),
        "are not a mapping",
    ),
    "no family": (
        lambda m: m.setattr(manifest, "MANIFEST", rows(lambda row: replace(row, name="frost_attention"))),
        "0 families named frost_sdpa_bwd",
    ),
    "two families": (
        lambda m: m.setattr(manifest, "MANIFEST", (*manifest.MANIFEST, family())),
        "2 families named frost_sdpa_bwd",
    ),
    "moved ids": (
        lambda m: m.setattr(manifest, "MANIFEST", rows(lambda row: replace(row, engine_id=30_000))),
        "starts at id 30000",
    ),
    "slot taken": (
        lambda m: m.setattr(
            manifest,
            "MANIFEST",
            rows(lambda row: replace(row, slots={**row.slots, "another": manifest.EngineSlot(90)})),
        ),
        "slot 90 belongs to another",
    ),
    "name inside": (
        lambda m: m.setattr(
            manifest,
            "MANIFEST",
            rows(lambda row: replace(row, slots={**row.slots, "frost_sm120": manifest.EngineSlot(91)})),
        ),
        "an engine named frost_sm120",
    ),
    "hook": (
        lambda m: m.setattr(manifest, "MANIFEST", rows(lambda row: replace(row, analyzer=len))),
        r"analyzer of frost_sdpa_bwd is not a \(module, name\) pair",
    ),
    **{
        f"version {version}": (
            lambda m, version=version: m.setattr(cudnn, "__version__", version),  # type: ignore[misc]
            "version is not among those",
        )
        for version in ("1.33.0", "2.30.0", "1.29.3", "unknown")
    },
}


@pytest.mark.parametrize("name", list(DOCTORED))
def test_an_unknown_table_is_a_clear_error(name: str) -> None:
    doctor, says = DOCTORED[name]
    with pytest.MonkeyPatch.context() as patch:
        doctor(patch)
        table = getattr(manifest, "MANIFEST", None)
        with pytest.raises(RuntimeError, match=says) as raised:
            register()
        assert not is_registered()
        assert getattr(manifest, "MANIFEST", None) is table
        assert f"cudnn_frost_sm120 {cudnn_frost_sm120.__version__}" in str(raised.value)
        assert f"this is cudnn-frontend {cudnn.__version__}" in str(raised.value)


@pytest.mark.parametrize("version", ["1.30.0", "1.31.2", "1.32.0.dev7"])
def test_known_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "__version__", version)
    register()
    assert is_registered()

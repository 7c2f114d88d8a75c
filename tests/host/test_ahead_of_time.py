"""Kernels compiled with no GPU reach the compiled cache of a machine that has one, and a serialized plan.

The machine with the GPU is this one, with a device and an environment that are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seam_graphs import declined_graph, make_graph, on_gpu, plan

from cudnn_frost_sm120 import ahead_of_time, compile, explain
from cudnn_frost_sm120.__main__ import main

pytestmark = [pytest.mark.usefixtures("opted_in"), pytest.mark.compile]

compiled_cache = pytest.importorskip("cudnn.frost.compiled_cache")
clear_memo = getattr(compiled_cache, "clear_memo", lambda: None)  # from 1.31 on there is one
needs_seeding = pytest.mark.skipif(
    not hasattr(compiled_cache, "seed_entry"), reason="cudnn-frontend before 1.32 takes no kernels from elsewhere"
)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the kernels of one graph, compiled by the command."""
    folder = tmp_path_factory.mktemp("warm")
    explain.save(make_graph(use_causal_mask=True), folder / "graph.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ahead_of_time.KERNELS_ENV, str(folder / "store"))
        patch.setenv("CUDNN_FROST_SM120_TARGET", "sm_120")
        assert main(["warm", "--target", "sm_120", "--first", "--jobs", "1", str(folder / "graph.json")]) == 0
    return folder / "store"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warmed: Path) -> Callable[[str], None]:
    """``machine(name)``: from now on this is another machine with a GPU, and has nothing but the store."""
    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(warmed))
    monkeypatch.delenv("CUDNN_FROST_SM120_TARGET")
    monkeypatch.setattr("cudnn_frost_sm120.target._current_device", lambda graph: 0)
    on_gpu(monkeypatch, name="Test GPU")
    manifest = {**compiled_cache.environment_manifest(), "device_name": "Test GPU"}
    known = {name: "1" if value == "unknown" else value for name, value in manifest.items()}
    monkeypatch.setattr(compiled_cache, "environment_manifest", lambda device=None: known)
    monkeypatch.setattr("cudnn.frost.device.ambient_device", lambda: 0)

    def become(name: str) -> None:
        monkeypatch.setattr(compile, "_CHAINS", {})
        clear_memo()
        compiled_cache.set_cache_dir(tmp_path / name)

    yield become
    compiled_cache.set_cache_dir(None)
    clear_memo()


def build(graph: Any) -> tuple[Any, int]:
    """The built graph, and how many kernels that compiled."""
    before = sum(compile.compile_count().values())
    plan(graph).select_plan(0).build_plans()
    return graph, sum(compile.compile_count().values()) - before


def test_what_the_store_holds(warmed: Path) -> None:
    (entry,) = warmed.iterdir()
    record = json.loads((entry / "entry.json").read_text())
    assert (entry / "kernel.o").stat().st_size > 10_000
    assert record["symbol"].startswith("sdpa_bwd_bf16_d64x64")
    assert "sm_120a" in record["options"]


@needs_seeding
def test_a_machine_with_a_gpu_compiles_nothing(machine: Any) -> None:
    machine("first")
    graph, compiles = build(make_graph(use_causal_mask=True))
    assert compiles == 0
    assert callable(graph._compiled_plans[0]._declared._launcher._chain)
    _, compiles = build(make_graph(b=3, sq=777, sk=555, use_causal_mask=True))
    assert compiles == 0


def test_what_was_not_warmed_is_compiled(machine: Any) -> None:
    machine("first")
    assert build(make_graph())[1] == 1  # without the causal mask


@needs_seeding
def test_a_serialized_plan_carries_the_kernels(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import cudnn

    machine("first")
    blob = build(make_graph(use_causal_mask=True))[0].serialize(as_bytes=True)
    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(tmp_path / "empty"))
    machine("second")
    loaded = cudnn.pygraph()
    loaded.deserialize(blob, enforce_precompiled=True)
    assert loaded.get_workspace_size() > 0


@pytest.mark.parametrize("damage", ["object", "record", "truncated"])
def test_a_damaged_entry_is_compiled_again(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warmed: Path, caplog: Any, damage: str
) -> None:
    if not hasattr(compiled_cache, "seed_entry"):
        pytest.skip("the store is not read")
    (entry,) = warmed.iterdir()
    copy = tmp_path / "copy" / entry.name
    copy.mkdir(parents=True)
    contents, record = (entry / "kernel.o").read_bytes(), (entry / "entry.json").read_text()
    contents = {"object": contents[:-1] + b"x", "truncated": contents[:1000]}.get(damage, contents)
    (copy / "kernel.o").write_bytes(contents)
    (copy / "entry.json").write_text(record[:50] if damage == "record" else record)
    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(tmp_path / "copy"))
    machine("first")
    assert build(make_graph(use_causal_mask=True))[1] == 1
    assert "is ignored" in caplog.text


def test_other_sources_versions_and_options_are_other_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(tmp_path))
    arguments = ("key", "symbol", "options")
    seen = {ahead_of_time.entry_path(*arguments)}
    for place in range(3):
        changed = [f"{argument}2" if i == place else argument for i, argument in enumerate(arguments)]
        seen.add(ahead_of_time.entry_path(*changed))
    monkeypatch.setattr(ahead_of_time, "version", lambda package: "0")
    seen.add(ahead_of_time.entry_path(*arguments))
    monkeypatch.setattr("platform.machine", lambda: "other")
    seen.add(ahead_of_time.entry_path(*arguments))
    assert len(seen) == 6


def test_a_second_warm_compiles_nothing(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn_frost_sm120 import target, warm
    from cudnn_frost_sm120.engine import analyze
    from cudnn_frost_sm120.plan import make_plan

    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(warmed))
    request = analyze(make_graph(use_causal_mask=True))
    assert request.facts is not None
    chain = make_plan(request.facts, request.knobs()[0], target.named("sm_120")).key
    monkeypatch.setattr("cudnn_frost_sm120.compile.build_chain", lambda key: pytest.fail("compiled again"))
    assert warm.compile_one(chain, target.named("sm_120")).parent == warmed


def test_the_command_says_what_it_cannot_do(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ahead_of_time.KERNELS_ENV, str(tmp_path / "store"))
    assert main(["warm", "--target", "sm_120"]) == 2
    assert "name a GRAPH.json" in capsys.readouterr().err
    assert main(["warm", "--target", "sm_120", str(tmp_path / "none.json")]) == 2
    explain.save(declined_graph(), tmp_path / "graph.json")
    assert main(["warm", "--target", "sm_120", str(tmp_path / "graph.json")]) == 1
    assert "dropout" in capsys.readouterr().err

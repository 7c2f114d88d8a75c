"""Kernels compiled with no GPU, or by another process, are loaded on a machine with a GPU, and reach serialized plans.

The machine with the GPU is this one, with a device and an environment that are made up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seam_graphs import declined_graph, make_graph, on_gpu, plan

from cudnn_frost_sm120 import compile, explain, kernel_store
from cudnn_frost_sm120.__main__ import main

pytestmark = [pytest.mark.usefixtures("opted_in"), pytest.mark.compile]

compiled_cache = pytest.importorskip("cudnn.frost.compiled_cache")
clear_memo = getattr(compiled_cache, "clear_memo", lambda: None)  # from 1.31 on there is one
needs_linker = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to link with")
needs_seeding = pytest.mark.skipif(
    not hasattr(compiled_cache, "seed_entry"), reason="cudnn-frontend before 1.32 takes no kernels from elsewhere"
)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the kernels of one graph, compiled by the command."""
    folder = tmp_path_factory.mktemp("warm")
    explain.save(make_graph(use_causal_mask=True), folder / "graph.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernel_store.KERNELS_ENV, str(folder / "store"))
        patch.setenv("CUDNN_FROST_SM120_TARGET", "sm_120")
        assert main(["warm", "--target", "sm_120", "--first", "--jobs", "1", str(folder / "graph.json")]) == 0
    return folder / "store"


@pytest.fixture
def store(tmp_path: Path, warmed: Path) -> Path:
    """A copy of the warmed store."""
    return Path(shutil.copytree(warmed, tmp_path / "store"))


def calling_convention(compiled: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a compiled kernel says of its arguments where a GPU can run it."""
    names = list(compiled.execution_args.get_kwargs_wrapper_spec(()).arg_names)
    return {"arg_names": names, "arg_defaults": [], "kwonly_names": [], "kwonly_defaults": {}}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path) -> Iterator[Callable[[str], None]]:
    """``machine(name)``: from now on this is another machine with a GPU, and has nothing but the store."""
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(store))
    monkeypatch.delenv("CUDNN_FROST_SM120_TARGET")
    monkeypatch.setattr("cudnn_frost_sm120.target._current_device", lambda graph: 0)
    on_gpu(monkeypatch, name="Test GPU")
    manifest = {**compiled_cache.environment_manifest(), "device_name": "Test GPU"}
    known = {name: "1" if value == "unknown" else value for name, value in manifest.items()}
    monkeypatch.setattr(compiled_cache, "environment_manifest", lambda device=None: known)
    monkeypatch.setattr("cudnn.frost.device.ambient_device", lambda: 0)
    monkeypatch.setattr(compiled_cache, "_wrapper_spec_of", calling_convention)

    def become(name: str) -> None:
        monkeypatch.setattr(compile, "_CHAINS", {})
        clear_memo()
        compiled_cache.set_cache_dir(tmp_path / name)

    yield become
    compiled_cache.set_cache_dir(None)
    clear_memo()


@pytest.fixture
def unlinked(store: Path) -> Path:
    """The store as a machine without a linker leaves it."""
    (library,) = store.glob("*/*.so")
    library.unlink()
    return store


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


@needs_linker
def test_a_new_process_needs_no_compiler(store: Path) -> None:
    """cutlass, whose import takes most of a second, stays out of a process whose kernels are stored."""
    script = """
import json, pathlib, sys
from cudnn_frost_sm120 import kernel_store
(entry,) = pathlib.Path(sys.argv[1]).iterdir()
record = json.loads((entry / "entry.json").read_text())
name = kernel_store.KernelName(*(record[field] for field in kernel_store.KernelName._fields))
assert callable(kernel_store.load(name))
assert "cutlass" not in sys.modules
"""
    environment = {**os.environ, kernel_store.KERNELS_ENV: str(store)}
    done = subprocess.run([sys.executable, "-c", script, str(store)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def no_compiled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_cache, "compile_cached", asked_for)


def asked_for(*args: Any, **kwargs: Any) -> Any:
    pytest.fail("the compiled cache was asked for a kernel")


@needs_linker
@pytest.mark.usefixtures("no_compiled_cache")
def test_linked_kernels_are_loaded_from_the_store(machine: Any) -> None:
    machine("first")
    graph, compiles = build(make_graph(use_causal_mask=True))
    assert compiles == 0
    assert callable(graph._compiled_plans[0]._declared._launcher._chain)
    assert build(make_graph(b=3, sq=777, sk=555, use_causal_mask=True))[1] == 0


@needs_seeding
def test_unlinked_kernels_are_loaded_by_the_compiled_cache(machine: Any, unlinked: Path) -> None:
    machine("first")
    before = compiled_cache.stats()["hits"]
    graph, compiles = build(make_graph(use_causal_mask=True))
    assert compiles == 0
    assert compiled_cache.stats()["hits"] == before + 1
    assert callable(graph._compiled_plans[0]._declared._launcher._chain)


@needs_linker
@needs_seeding
def test_unlinked_kernels_are_linked_where_they_are_used(machine: Any, unlinked: Path) -> None:
    machine("first")
    build(make_graph(use_causal_mask=True))
    assert len(list(unlinked.glob("*/*.so"))) == 1


@needs_seeding
def test_no_linker(machine: Any, unlinked: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    caplog.set_level("INFO", "cudnn_frost_sm120")
    machine("first")
    assert build(make_graph(use_causal_mask=True))[1] == 0
    assert not list(unlinked.glob("*/*.so"))
    assert "is not linked" in caplog.text


def test_what_was_not_warmed_is_compiled_and_stored(machine: Any, store: Path) -> None:
    machine("first")
    assert build(make_graph())[1] == 1  # without the causal mask
    assert len(list(store.iterdir())) == 2
    if shutil.which("cc") or hasattr(compiled_cache, "seed_entry"):
        machine("second")
        assert build(make_graph())[1] == 0


def test_a_store_that_cannot_be_written(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "a file"))
    machine("first")
    assert build(make_graph(use_causal_mask=True))[1] == 1


@pytest.mark.usefixtures("no_compiled_cache")
def test_a_cache_that_is_off_stays_off(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDNN_FRONTEND_DISABLE_COMPILED_CACHE means that nothing is taken from disk."""
    monkeypatch.setenv("CUDNN_FRONTEND_DISABLE_COMPILED_CACHE", "1")
    machine("first")
    with pytest.raises(pytest.fail.Exception, match="asked for a kernel"):
        build(make_graph(use_causal_mask=True))


@needs_seeding
@pytest.mark.parametrize("graphs", [1, 2])
def test_a_serialized_plan_carries_the_kernels(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graphs: int
) -> None:
    """Of the first graph that uses them, and of one that finds them in memory."""
    import cudnn

    machine("first")
    for _ in range(graphs):
        graph = build(make_graph(use_causal_mask=True))[0]
    blob = graph.serialize(as_bytes=True)
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "empty"))
    machine("second")
    loaded = cudnn.pygraph()
    loaded.deserialize(blob, enforce_precompiled=True)
    assert loaded.get_workspace_size() > 0


@needs_seeding
def test_a_serialized_plan_carries_compiled_kernels(machine: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import cudnn

    machine("first")
    for _ in range(2):  # compiled, then found in memory
        blob = build(make_graph())[0].serialize(as_bytes=True)
        assert len(blob) > 50_000
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "empty"))
    machine("second")
    cudnn.pygraph().deserialize(blob, enforce_precompiled=True)


@pytest.mark.parametrize("damage", ["object", "record", "truncated"])
def test_a_damaged_entry_is_compiled_again(machine: Any, unlinked: Path, caplog: Any, damage: str) -> None:
    if not hasattr(compiled_cache, "seed_entry"):
        pytest.skip("objects are not read")
    (entry,) = unlinked.iterdir()
    contents, record = (entry / "kernel.o").read_bytes(), (entry / "entry.json").read_text()
    damaged = {"object": contents[:-1] + b"x", "truncated": contents[:1000]}.get(damage, contents)
    (entry / "kernel.o").write_bytes(damaged)
    (entry / "entry.json").write_text(record[:50] if damage == "record" else record)
    machine("first")
    assert build(make_graph(use_causal_mask=True))[1] == 1
    assert "is ignored" in caplog.text
    machine("second")  # which finds it mended
    assert build(make_graph(use_causal_mask=True))[1] == 0
    assert (entry / "kernel.o").read_bytes() != damaged or damage == "record"


@needs_linker
@needs_seeding
@pytest.mark.parametrize("damage", ["flipped", "truncated", "not a library"])
def test_a_damaged_library_is_linked_again(machine: Any, store: Path, damage: str, monkeypatch: Any) -> None:
    (library,) = store.glob("*/*.so")
    contents = library.read_bytes()
    if damage == "not a library":  # of which the name is right
        library.unlink()
        library = library.with_name(f"kernel-{hashlib.sha256(b'nothing').hexdigest()[:24]}.so")
        library.write_bytes(b"nothing")
    else:
        half = len(contents) // 2
        flipped = contents[:half] + bytes([contents[half] ^ 1]) + contents[half + 1 :]
        library.write_bytes(flipped if damage == "flipped" else contents[:half])
    before = compiled_cache.stats()["hits"]
    machine("first")
    assert build(make_graph(use_causal_mask=True))[1] == 0
    assert compiled_cache.stats()["hits"] == before + 1
    machine("second")
    monkeypatch.setattr(compiled_cache, "compile_cached", asked_for)
    assert build(make_graph(use_causal_mask=True))[1] == 0


def test_other_sources_versions_and_options_are_other_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path))
    arguments = kernel_store.KernelName("key", "symbol", "options")
    seen = {kernel_store.entry_path(arguments)}
    for place in range(3):
        changed = [f"{argument}2" if i == place else argument for i, argument in enumerate(arguments)]
        seen.add(kernel_store.entry_path(kernel_store.KernelName(*changed)))
    monkeypatch.setattr(kernel_store, "version", lambda package: "0")
    seen.add(kernel_store.entry_path(arguments))
    monkeypatch.setattr("platform.machine", lambda: "other")
    seen.add(kernel_store.entry_path(arguments))
    monkeypatch.setattr("cudnn_frost_sm120.driver.cuda_major", lambda: 1)  # a driver that takes no toolkit of ours
    seen.add(kernel_store.entry_path(arguments))
    assert len(seen) == 7


def test_a_second_warm_compiles_nothing(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn_frost_sm120 import target, warm
    from cudnn_frost_sm120.engine import analyze
    from cudnn_frost_sm120.plan import make_plan

    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(warmed))
    request = analyze(make_graph(use_causal_mask=True))
    assert request.facts is not None
    chain = make_plan(request.facts, request.knobs()[0], target.named("sm_120")).key
    monkeypatch.setattr("cudnn_frost_sm120.compile.build_chain", lambda key: pytest.fail("compiled again"))
    assert warm.compile_one(chain, target.named("sm_120")).parent == warmed


def test_the_command_says_what_it_cannot_do(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "store"))
    assert main(["warm", "--target", "sm_120"]) == 2
    assert "name a GRAPH.json" in capsys.readouterr().err
    assert main(["warm", "--target", "sm_120", str(tmp_path / "none.json")]) == 2
    explain.save(declined_graph(), tmp_path / "graph.json")
    assert main(["warm", "--target", "sm_120", str(tmp_path / "graph.json")]) == 1
    assert "dropout" in capsys.readouterr().err

"""Tuning and kernels from elsewhere, on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

import cudnn_frost_sm120
from cudnn_frost_sm120 import compile, explain, kernel_store, target, tuning_file

from . import harness
from .cases import CAUSAL, Case

GROUPED = Case(128, batch=1, heads_q=8, heads_k=2, seqlen_q=500, mask=CAUSAL)


def test_tune(judge, tmp_path, monkeypatch):
    """Every plan is timed, the winner is selected, runs, and ranks first at the next planning"""
    monkeypatch.setenv(tuning_file.PATH_ENV, str(tmp_path / "tuning.json"))
    problem = harness.Problem(GROUPED)
    graph, buffers = harness.build_graph(problem)
    result = cudnn_frost_sm120.tune(graph, buffers, rounds=3, progress=False)
    names = {graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())}
    assert {*result.milliseconds, *result.skipped} == names
    assert len(result.milliseconds) > 1
    assert result.milliseconds[result.name] == min(result.milliseconds.values())
    problem.wipe_outputs()
    workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
    graph.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    judge(problem, problem.outputs)
    again, _ = harness.build_graph(problem)
    harness.plan_graph(again)
    if graph._engine_for(graph.plans[result.index]) is not None:  # the library's own order is not ours to change
        assert again.get_plan_name_at_index(0) == result.name


@pytest.mark.skipif(
    not hasattr(pytest.importorskip("cudnn.frost.compiled_cache"), "seed_entry"), reason="needs cudnn-frontend 1.32"
)
def test_kernels_compiled_elsewhere(judge, tmp_path, monkeypatch):
    """A process that sees no GPU compiles; this one, with an empty cache, takes the kernel up and compiles nothing"""
    from cudnn.frost import compiled_cache

    problem = harness.Problem(GROUPED)
    graph, buffers = harness.build_graph(problem)
    explain.save(graph, tmp_path / "graph.json")
    name = target.for_device(torch.cuda.current_device()).name
    command = [sys.executable, "-m", "cudnn_frost_sm120", "warm", "--target", name, "--output", str(tmp_path / "store")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(tmp_path / "graph.json")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "store"))
    monkeypatch.setattr(compile, "_CHAINS", {})
    compiled_cache.clear_memo()
    compiled_cache.set_cache_dir(tmp_path / "cache")
    try:
        with compiled_cache.refuse_compiles():
            harness.select_ours(graph)
        blob = graph.serialize(as_bytes=True)
        workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
        graph.execute(buffers, workspace.view)
        torch.cuda.synchronize()
        judge(problem, problem.outputs)
        _deserialized(problem, buffers, blob, tmp_path, monkeypatch, judge)
    finally:
        compiled_cache.set_cache_dir(None)


def _deserialized(problem, buffers, blob, tmp_path, monkeypatch, judge):
    """The serialized plan runs where neither the store nor the cache has its kernels."""
    import cudnn
    from cudnn.frost import compiled_cache

    monkeypatch.setenv(kernel_store.KERNELS_ENV, str(tmp_path / "nothing"))
    monkeypatch.setattr(compile, "_CHAINS", {})
    compiled_cache.clear_memo()
    compiled_cache.set_cache_dir(tmp_path / "another cache")
    loaded = cudnn.pygraph()
    loaded.deserialize(blob, enforce_precompiled=True)
    problem.wipe_outputs()
    workspace = harness.Workspace.create(loaded.get_workspace_size(), "cuda")
    loaded.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    judge(problem, problem.outputs)

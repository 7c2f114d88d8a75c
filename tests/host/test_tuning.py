"""Tuning: what is timed and kept, how the file survives, and what planning makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cudnn
import pytest
from seam_graphs import make_graph, plan

import cudnn_frost_sm120
from cudnn_frost_sm120 import family, tuner, tuning_file
from cudnn_frost_sm120.engine import BACKEND, PlanConfig, analyze
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.family import FamilyFacts
from cudnn_frost_sm120.register import ENGINE_ID, ENGINE_NAME
from cudnn_frost_sm120.tuning_file import BACKEND_NAME, Winner, bucket_of, path_for, store, winner_for
from tests.gpu.cases import Case, facts_of

pytestmark = pytest.mark.usefixtures("opted_in")

GPU = "Test GPU 5000"
OURS = Winner(ENGINE_NAME, ENGINE_ID, {"TILE_M": 64}, {"a": 1.0, "b": 2.0}, "2026-11-30")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tuning file of a GPU that is there."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning_file.PATH_ENV, str(path))
    monkeypatch.setattr(tuning_file, "gpu_of", lambda target: GPU)
    monkeypatch.setattr(tuner, "gpu_of", lambda target: GPU)
    return path


def grouped() -> Any:
    """A graph with more than one plan of ours."""
    return make_graph(b=1, hq=64, hk=8, sq=512, sk=512, d=128, use_causal_mask=True)


def tuned(monkeypatch: pytest.MonkeyPatch, graph: Any, fastest: int, **options: Any) -> tuner.Tuned:
    """A tune of ``graph`` whose plan ``fastest`` takes 1 ms and all others 2."""

    def prepare(graph: Any, pack: Any, handle: Any, names: list[str], progress: bool) -> Any:
        calls = {index: (lambda index=index: index) for index in range(len(names))}
        return calls, {}

    monkeypatch.setattr(tuner, "_prepare", prepare)
    monkeypatch.setattr(tuner, "_time", lambda call, count: 1.0 if call() == fastest else 2.0)
    monkeypatch.setattr(type(graph), "build_plan_at_index", lambda self, index: self.select_plan(index))
    return tuner.tune(graph, {}, progress=False, **options)


def test_the_fastest_plan_is_selected_stored_and_first_next_time(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    graph = plan(grouped())
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    last = len(names) - 1
    assert last > 0
    result = tuned(monkeypatch, graph, fastest=last)
    assert (result.name, result.index, result.path) == (names[last], last, path)
    assert list(result.milliseconds.items()) == [(names[last], 1.0), *((name, 2.0) for name in names[:last])]
    assert graph._plan_index == last
    again = plan(grouped())
    assert [again.get_plan_name_at_index(i) for i in range(last + 1)] == [names[last], *names[:last]]
    assert json.loads(path.read_text())["winners"].keys() == {result.bucket}


def test_a_graph_is_planned_where_it_is_not_yet(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    assert tuned(monkeypatch, grouped(), fastest=0).index == 0
    assert path.exists()


def test_an_explicit_path(monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "deeper" / "still" / "mine.json"
    assert tuned(monkeypatch, grouped(), fastest=0, path=elsewhere).path == elsewhere
    assert elsewhere.exists()
    assert not path.exists()


def test_what_cannot_be_tuned() -> None:
    with pytest.raises(NotImplementedError, match="planned for none"):
        tuner.tune(make_graph(), {})
    with pytest.raises(ValueError, match="no sdpa_backward node"):
        tuner.tune(cudnn.pygraph(), {})


def test_a_plan_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built and run once, each; one raises"""
    monkeypatch.setattr(tuner, "_synchronize", lambda: None)
    ran: list[int] = []

    class Graph:
        def build_plan_at_index(self, index: int) -> None:
            if index == 1:
                raise RuntimeError("no kernel\nand more")

        def get_workspace_size_plan_at_index(self, index: int) -> int:
            return 64

        def execute_plan_at_index(self, pack: Any, workspace: Any, index: int, handle: Any) -> None:
            assert workspace.numel() == 64
            ran.append(index)

    monkeypatch.setattr(tuner, "_device_of", lambda pack: "cpu")
    calls, skipped = tuner._prepare(Graph(), {}, None, ["a", "b", "c"], progress=False)
    assert (list(calls), ran) == ([0, 2], [0, 2])
    assert skipped == {"b": "RuntimeError: no kernel"}


def test_short_plans_are_called_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(tuner, "_time", lambda call, count: counts.append(count) or call())
    tuner._take_turns({0: lambda: 0.05, 1: lambda: 50.0, 2: lambda: 0.001}, 1, progress=False)
    assert counts[-3:] == [40, 1, 100]


def test_random_buffers_fit_the_declarations() -> None:
    facts = facts_of(Case(64, len_q=(3, 4), len_k=(5, 6), sink=True, bias=(1, 1, 1, 1), dbias=True, layouts=("gaps",)))
    numbered = [replace(t, uid=i) for i, t in enumerate((*facts.inputs(), *facts.outputs()))]
    buffers = tuner.random_buffers(replace(facts, **{t.name: t for t in numbered}), device="cpu")
    for tensor in numbered:
        assert tuple(buffers[tensor.uid or 0].shape) == tensor.dim
        assert buffers[tensor.uid or 0].stride() == tensor.stride
        assert buffers[tensor.uid or 0].isfinite().all()


# Buckets.


def test_buckets() -> None:
    case = Case(128, heads_q=8, heads_k=2, seqlen_q=1000, mask=MaskFacts(right_bound=0))
    assert bucket_of(facts_of(case)) == "bf16 d128/128 group 4 causal heads 16 sq 1024 sk 1024"
    same = [replace(case, seqlen_q=600), replace(case, layouts=("bhsd",)), replace(case, scale=0.5)]
    assert {bucket_of(facts_of(other)) for other in same} == {bucket_of(facts_of(case))}
    different = [
        replace(case, seqlen_q=512),
        replace(case, dtype="fp16"),
        replace(case, batch=8),
        replace(case, deterministic=True),
        replace(case, mask=MaskFacts()),
        replace(case, mask=MaskFacts(right_bound=0, left_bound=128)),
        replace(case, mask=MaskFacts(right_bound=0, left_bound=1024)),
        replace(case, mask=MaskFacts(right_bound=0, bottom_right=True)),
        replace(case, len_q=(3, 4)),
        replace(case, sink=True),
        replace(case, bias=(1, 1, 1, 1)),
        replace(case, bias=(1, 1, 1, 1), dbias=True),
    ]
    buckets = {bucket_of(facts_of(other)) for other in different}
    assert len(buckets) == len(different)
    assert bucket_of(facts_of(case)) not in buckets


# The file.


def stored() -> Winner | None:
    request = analyze(make_graph())
    assert request.facts is not None
    assert request.target is not None
    return winner_for(request.facts, request.target)


def fill(path: Path, winner: Winner = OURS) -> None:
    request = analyze(make_graph())
    assert request.facts is not None
    store(path, GPU, bucket_of(request.facts), winner)


def test_the_file_says_what_its_page_says(path: Path) -> None:
    fill(path)
    content = json.loads(path.read_text())
    assert set(content) == {"format", "gpu", "versions", "winners"}
    assert content["versions"] == {
        "cudnn_frost_sm120": cudnn_frost_sm120.__version__,
        "cudnn_frontend": cudnn.__version__,
    }
    (entry,) = content["winners"].values()
    assert entry == {
        "engine": ENGINE_NAME,
        "engine_id": ENGINE_ID,
        "knobs": {"TILE_M": 64},
        "milliseconds": {"a": 1.0, "b": 2.0},
        "tuned": "2026-11-30",
    }
    assert stored() == OURS
    assert {file.name for file in path.parent.iterdir()} <= {"tuning.json", "tuning.json.lock"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"format": 1}',
        lambda text: text.replace('"engine_id": 20690', '"engine_id": "x"'),
        lambda text: text.replace('"knobs": {', '"nobs": {'),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace(GPU, "Another GPU"),
        lambda text: text.replace(cudnn_frost_sm120.__version__, "0.0.9"),
    ],
)
def test_a_file_of_no_use_is_ignored_with_a_warning(path: Path, damage: Any, caplog: Any) -> None:
    fill(path)
    path.write_text(damage(path.read_text()))
    graph = plan(make_graph())
    assert graph.plans[0].engine_id == ENGINE_ID
    assert str(path) in caplog.text
    assert "is ignored" in caplog.text
    fill(path)  # a tuner starts it anew
    assert stored() == OURS


def test_no_file_is_no_warning(path: Path, caplog: Any) -> None:
    assert stored() is None
    assert "tuning" not in caplog.text


def test_the_path_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tuning_file.PATH_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert path_for("NVIDIA RTX PRO 6000 (X)") == tmp_path / "cudnn_frost_sm120/tuning-NVIDIA-RTX-PRO-6000-X.json"


STORE = """
import sys
from pathlib import Path
from cudnn_frost_sm120 import tuning_file
from cudnn_frost_sm120.tuning_file import Winner, store
{before}
for step in range({count}):
    winner = Winner("engine", 1, dict(TILE_M=64), dict(a=1.0), "2026-11-30")
    store(Path(sys.argv[1]), "{gpu}", f"bucket {{sys.argv[2]}} {{step}}", winner)
"""


def start(path: Path, name: str, count: int, before: str = "") -> subprocess.Popen[bytes]:
    code = STORE.format(before=before, count=count, gpu=GPU)
    return subprocess.Popen([sys.executable, "-c", code, str(path), name], env=dict(os.environ))


def test_many_processes_lose_nothing(path: Path) -> None:
    running = [start(path, str(worker), 20) for worker in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(tuning_file._winners(path, GPU)) == 60


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_killed_tuner_leaves_a_readable_file(path: Path, where: str) -> None:
    fill(path)
    kill = f"import os, signal\nos.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    assert start(path, "killed", 1, kill).wait() == -signal.SIGKILL
    assert stored() == OURS
    assert start(path, "later", 1).wait() == 0  # the lock went with the process
    assert len(tuning_file._winners(path, GPU)) == 2


# What planning makes of it.


def test_knobs_that_do_not_serve_this_graph_of_the_bucket(path: Path) -> None:
    alone = plan(make_graph()).plans
    for knobs in ({"TILE_M": 64}, {"NO_SUCH_KNOB": 1}, {"TILE_M": 48, "TILE_N": 128, "STAGES": 2, "PACK_GQA": 1}):
        fill(path, replace(OURS, knobs=knobs))
        assert plan(make_graph()).plans == alone


@pytest.mark.parametrize(
    ("winner", "order"),
    [
        (None, "ours ours them other backend"),
        (ENGINE_NAME, "ours ours them other backend"),
        ("them", "them ours ours other backend"),
        ("other", "them other ours ours backend"),
        (BACKEND_NAME, "backend ours ours them other"),
        ("gone", "ours ours them other backend"),
    ],
)
def test_ours_stand_behind_a_measured_winner(winner: str | None, order: str) -> None:
    ours = [PlanConfig(ENGINE_ID, 1), PlanConfig(ENGINE_ID, 2)]
    theirs = [PlanConfig(7), PlanConfig(8), BACKEND]
    names = {ENGINE_ID: "ours", 7: "them", 8: "other", BACKEND.engine_id: "backend"}
    placed = family._placed(ours, theirs, winner, {"them": 7, "other": 8})
    assert [names[config.engine_id] for config in placed] == order.split()


def test_the_family_hook_asks_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [PlanConfig(20_600, "theirs")]
    monkeypatch.setattr(family, "original_hook", lambda kind: lambda kind, facts, offered: theirs)
    record = FamilyFacts("their facts", analyze(make_graph()))
    offered = {"sdpa_bwd_sm120": 20_600, ENGINE_NAME: ENGINE_ID}
    assert family.heuristics("A", record, offered)[-1] == theirs[0]
    fill(path, replace(OURS, engine="sdpa_bwd_sm120", engine_id=20_600))
    assert family.heuristics("A", record, offered)[0] == theirs[0]
    fill(path, replace(OURS, engine=BACKEND_NAME, engine_id=1))
    assert family.heuristics("A", record, offered)[0] == BACKEND


def test_the_command_needs_a_gpu(capsys: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert tuner.run(SimpleNamespace(graphs=[], grid=None, dtype=["bf16"], rounds=1, file=None)) == 2
    assert "CUDA device" in capsys.readouterr().err

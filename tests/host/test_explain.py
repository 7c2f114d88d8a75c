"""explain: the report on a graph, the JSON form of a graph, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cudnn
import pytest
from seam_graphs import FP32, declined_graph, dropout, fp8_graph, lengths, make_graph, mxfp8_graph, plan, scalars

import cudnn_frost_sm120
from cudnn_frost_sm120 import explain, graph_json, tuning_file
from cudnn_frost_sm120.__main__ import main
from cudnn_frost_sm120.admission import RULES
from cudnn_frost_sm120.facts import facts_from_graph
from cudnn_frost_sm120.register import ENGINE_NAME

pytestmark = [pytest.mark.planning, pytest.mark.usefixtures("opted_in")]


def ragged() -> Any:
    graph = make_graph(use_padding_mask=True, extra=lengths(), max_total_seq_len_q=100)
    offsets = graph.tensor(name="offsets", dim=[3, 1, 1, 1], data_type=cudnn.data_type.INT32)
    for name in ("q", "o"):
        graph.find_tensor(name).set_ragged_offset(offsets).set_ragged_offset_multiplier(64)
    return graph


def side(graph: Any) -> dict[str, Any]:
    dims = {
        "bias": [1, 4, 128, 128],
        "dBias": [1, 4, 128, 128],
        "sink_token": [1, 4, 1, 1],
        "dSink_token": [1, 4, 1, 1],
    }
    return {name: graph.tensor(name=name, dim=dim, data_type=FP32) for name, dim in dims.items()}


GRAPHS: dict[str, Any] = {
    "plain": make_graph,
    "masks": lambda: make_graph(
        use_causal_mask=True, sliding_window_length=9, diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT
    ),
    "strides": lambda: make_graph(
        strides={"q": [65536, 128, 512, 1], "dQ": [65536, 64, 256, 1], "stats": [1, 2, 8, 1]}
    ),
    "options": lambda: make_graph(graph={"name": "mine", "is_override_shape_enabled": True, "sm_count": 7}),
    "side tensors": lambda: make_graph(extra=side, use_deterministic_algorithm=True),
    "scale tensor": lambda: make_graph(attn_scale=None, extra=lambda g: scalars(g, "attn_scale")),
    "precision": lambda: make_graph(softmax_precision=cudnn.data_type.HALF),
    "virtual": lambda: make_graph(outputs=("dQ",)),
    "ragged": ragged,
    "philox": declined_graph,
    "dropout mask": lambda: make_graph(extra=dropout("mask", "scale", "scale_inv")),
    "fp8": fp8_graph,
    "mxfp8": mxfp8_graph,
}


def without_uids(facts: Any) -> str:
    return re.sub(r"uid=\d+", "uid", repr(facts))


@pytest.mark.parametrize("name", list(GRAPHS))
def test_save_and_load(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    explain.save(graph, tmp_path / "graph.json")
    loaded = explain.load(tmp_path / "graph.json")
    assert without_uids(facts_from_graph(loaded)) == without_uids(facts_from_graph(graph))
    assert graph_json.to_dict(loaded) == graph_json.to_dict(graph) == json.loads((tmp_path / "graph.json").read_text())


def test_a_planned_graph_saves_the_same() -> None:
    graph = make_graph(use_causal_mask=True)
    before = graph_json.to_dict(graph)
    assert graph_json.to_dict(plan(graph)) == before


def test_assigned_uids_survive() -> None:
    graph = make_graph()
    graph.find_tensor("q").set_uid(77)
    assert facts_from_graph(graph_json.from_dict(graph_json.to_dict(graph))).q.uid == 77


def test_embedded_scalar() -> None:
    kind = cudnn.scalar_type.COMPILE_TIME_CONST
    graph = make_graph(attn_scale=None, extra=lambda g: {"attn_scale": g.tensor_scalar(0.5, kind, name="scale")})
    assert facts_from_graph(graph_json.from_dict(graph_json.to_dict(graph))).scale == 0.5


def test_written_by_hand() -> None:
    dims = {"q": [1, 2, 64, 32], "stats": [1, 2, 64, 1]}
    tensors = {name: {"dim": dims.get(name, dims["q"])} for name in ("q", "k", "v", "o", "dO", "stats")}
    tensors["stats"]["data_type"] = "FLOAT"  # type: ignore[assignment]
    graph = graph_json.from_dict(
        {
            "format": 1,
            "graph": {"io_data_type": "HALF"},
            "tensors": tensors,
            "node": {"op": "sdpa_backward", "inputs": {name: name for name in tensors}},
        }
    )
    facts = facts_from_graph(graph)
    assert facts.q.stride == (4096, 2048, 32, 1)
    assert (facts.dtype, facts.stats.dtype, facts.scale) == ("fp16", "fp32", 1.0)


def test_the_documented_example_is_served() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "graph-api.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    graph = graph_json.from_dict(json.loads(example))
    assert plan(graph).get_plan_name_at_index(0).startswith(ENGINE_NAME)


def described(**changes: Any) -> Any:
    return {**graph_json.to_dict(make_graph()), **changes}


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ([], "not a graph description"),
        ({}, "'format' is missing"),
        (described(format=2), "its format is 2"),
        (described(graph={"io_data_type": "HALFF"}), "io_data_type has no value HALFF"),
        (described(node={"op": "matmul"}), "its op is matmul"),
        (described(node={"op": "sdpa_backward", "inputs": {"q": "nobody"}}), "'nobody' is missing"),
        (described(tensors={}), "'q' is missing"),
    ],
)
def test_bad_descriptions(description: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        graph_json.from_dict(description)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score_mod is a function"):
        explain.save(make_graph(score_mod=lambda graph, scores: scores), tmp_path / "graph.json")
    graph = make_graph()
    graph.relu(graph.find_tensor("q")).set_output(True)
    with pytest.raises(ValueError, match="SDPA_BWD, POINTWISE"):
        graph_json.to_dict(graph)
    assert not list(tmp_path.iterdir())


def test_report_on_a_served_graph() -> None:
    graph = make_graph(use_causal_mask=True)
    before = explain.explain(graph)
    assert before.served
    assert not before.planned
    assert not graph.plans, "explain must leave the graph as it is"
    graph.find_tensor("q").set_name("query")  # and unfrozen
    report = explain.explain(plan(make_graph(use_causal_mask=True)))
    assert report.planned
    assert report.served
    assert report.reason == ""
    assert report.plans[0].name.startswith(ENGINE_NAME)
    assert report.plans[0].workspace_bytes
    assert [rule.name for rule in report.rules] == [rule.name for rule in RULES]
    assert "sdpa_bwd_sm120" in report.others
    assert ENGINE_NAME not in report.others
    text = str(report)
    for part in ("sm_120a", "(2, 4, 128, 64)", "causal, top-left", "workspace", "admits the graph", "sdpa_bwd_sm120 "):
        assert part in text


def test_report_on_a_declined_graph() -> None:
    report = explain.explain(declined_graph(d=300))
    assert not report.served
    assert "dropout" in report.reason
    assert report.plans == ()
    verdicts = [rule.verdict for rule in report.rules]
    assert verdicts.count("declines") == 1
    assert verdicts[verdicts.index("declines") + 1 :] == ["not reached"] * (
        len(verdicts) - verdicts.index("declines") - 1
    )
    assert "declines: the graph asks for dropout" in str(report)


def test_the_table_says_what_would_have_to_change() -> None:
    lines = str(explain.explain(declined_graph())).splitlines()
    rows = {line.split()[0]: line.strip().partition(" ")[2].strip() for line in lines if line.startswith("  ")}
    for rule in RULES:
        assert rule.change, rule.name
        assert rule.name in rows
    assert rows["dropout"] == "declines     leave out dropout"
    assert rows["dtype"] == "not reached  use fp16 or bf16"
    assert rows["shapes"] == "pass"
    assert rows["sdpa_bwd_sm120"].startswith("declines")


def test_the_report_names_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning_file.PATH_ENV, str(tmp_path / "tuning.json"))
    monkeypatch.setattr(tuning_file, "gpu_of", lambda target: "Test GPU")
    winner = tuning_file.Winner("sdpa_bwd_sm120", 20_600, {}, {"sdpa_bwd_sm120[X=1]": 0.5}, "2026-11-30")
    facts = facts_from_graph(make_graph())
    tuning_file.store(tmp_path / "tuning.json", "Test GPU", tuning_file.bucket_of(facts), winner)
    assert "measured fastest for such graphs on 2026-11-30: sdpa_bwd_sm120[X=1]" in str(explain.explain(make_graph()))


def test_report_without_a_target_or_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_FROST_SM120_TARGET", "sm_75")
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "0")
    report = explain.explain(make_graph())
    assert report.target is None
    assert "names no target" in report.reason
    assert {rule.verdict for rule in report.rules} == {"not reached"}
    assert "is not set" in report.notes[0]
    with pytest.raises(ValueError, match="no sdpa_backward node"):
        explain.explain(cudnn.pygraph())


@pytest.mark.parametrize("name", list(GRAPHS))
def test_every_graph_has_a_report(name: str) -> None:
    report = explain.explain(GRAPHS[name]())
    assert json.loads(report.to_json())["served"] == report.served
    assert str(report)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES")
    path = tmp_path / "graph.json"
    explain.save(make_graph(), path)
    assert main(["explain", str(path), "--target", "sm_121"]) == 0
    out = capsys.readouterr().out
    assert "sm_121a" in out
    assert f"[0] {ENGINE_NAME}[" in out

    explain.save(declined_graph(), path)
    assert main(["explain", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["served"] is False

    assert main(["explain", str(tmp_path / "absent.json")]) == 2
    path.write_text("{", encoding="utf-8")
    assert main(["explain", str(path)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == cudnn_frost_sm120.__version__
    with pytest.raises(SystemExit):
        main([])

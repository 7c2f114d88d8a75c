"""Through the ordinary cudnn.pygraph API, with no device: what is listed, in which order, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cudnn
import pytest
from cudnn.engines import PlanConfig, manifest
from cudnn.engines.heuristics import BACKEND
from seam_graphs import FP32, declined_graph, fp8_graph, make_graph, mxfp8_graph, plan

from cudnn_frost_sm120 import family
from cudnn_frost_sm120.admission import decline_reason
from cudnn_frost_sm120.engine import Sm120BwdEngine, analyze
from cudnn_frost_sm120.family import FamilyFacts
from cudnn_frost_sm120.knobs import BwdKnobs, ReductionMode
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.register import ENGINE_ID, ENGINE_NAME, original_hook, unregister

pytestmark = [pytest.mark.planning, pytest.mark.usefixtures("opted_in")]

FLAG, TARGET = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "CUDNN_FROST_SM120_TARGET"
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


def ours(graph: Any) -> list[int]:
    return [index for index, config in enumerate(graph.plans) if config.engine_id == ENGINE_ID]


def planned_by_us(graph: Any) -> list[int]:
    """Our plans of a graph that need not have any; other engines have some where there is a device."""
    try:
        return ours(plan(graph))
    except NOT_SUPPORTED:
        return []


def test_our_plan_is_first() -> None:
    graph = plan(make_graph(use_causal_mask=True))
    assert ours(graph)[0] == 0
    assert graph.selected_engine.name == ENGINE_NAME
    assert graph.get_plan_name_at_index(0).startswith(f"{ENGINE_NAME}[")
    engine_id, knobs = graph.get_engine_and_knobs_at_index(0)
    assert engine_id == ENGINE_ID
    assert all(isinstance(knob, cudnn.knob_type) and type(value) is int for knob, value in knobs.items())
    assert BwdKnobs.from_public(knobs) == graph.plans[0].knobs
    assert graph.get_behavior_notes_for_plan_at_index(0) == [cudnn.behavior_note.RUNTIME_COMPILATION]
    graph.check_support()


@pytest.mark.parametrize("modes", [[cudnn.heur_mode.A], [cudnn.heur_mode.FALLBACK], [cudnn.heur_mode.OPENSOURCE]])
def test_every_mode_has_ours_once(modes: list[Any]) -> None:
    graph = make_graph()
    graph.validate()
    graph.create_execution_plans(modes)
    listed = [graph.get_plan_name_at_index(index) for index in range(len(graph.plans))]
    assert ours(graph)
    assert len(listed) == len(set(listed))


def test_planning_loads_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys, cudnn_frost_sm120; from seam_graphs import make_graph, plan; plan(make_graph());"
        "print([name for name in ('torch', 'cutlass') if name in sys.modules])"
    )
    here = Path(__file__).parent
    paths = [*sys.path, str(here), str(here.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("value", [None, "0", "off"])
def test_without_the_flag_nothing_of_ours_is_planned(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    def outcome() -> str:
        graph = make_graph()
        try:
            plan(graph)
        except (NOT_SUPPORTED, RuntimeError) as refused:  # no device, so no engine has a plan
            return str(refused)
        return str([graph.get_plan_name_at_index(index) for index in range(len(graph.plans))])

    monkeypatch.delenv(FLAG) if value is None else monkeypatch.setenv(FLAG, value)
    registered = outcome()
    unregister()
    assert registered == outcome()
    assert ENGINE_NAME not in registered


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (declined_graph, "dropout"),
        (lambda: make_graph(use_alibi_mask=True, use_causal_mask=True), "ALiBi"),
        (lambda: make_graph(d=512), "head dims up to 256"),
        (lambda: make_graph(softmax_precision=cudnn.data_type.HALF), "softmax_precision"),
        (mxfp8_graph, "sdpa_mxfp8_backward"),
    ],
)
def test_a_declined_graph_says_why(graph: Any, says: str) -> None:
    built = graph()
    built.validate()
    engine = Sm120BwdEngine(ENGINE_ID)
    with pytest.raises(NotImplementedError, match=says) as declined:
        engine.check_support(built)
    assert str(declined.value).startswith(f"{ENGINE_NAME}: ")
    assert not planned_by_us(built)


def test_fp8_graphs_are_declined_or_not_ours() -> None:
    """A graph that another family or the classic path takes never meets our engine."""
    graph = fp8_graph()
    with pytest.raises(NotImplementedError, match="sdpa_fp8_backward"):
        Sm120BwdEngine(ENGINE_ID).check_support(graph)


def test_forward_graphs_are_untouched() -> None:
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)
    q, k, v = (graph.tensor(name=n, dim=[1, 2, 64, 64]) for n in "qkv")
    o, _ = graph.sdpa(q=q, k=k, v=v, is_inference=True)
    o.set_output(True)
    assert ENGINE_NAME not in [engine.name for engine in manifest.engines_for(graph)]
    assert analyze(graph).declined == "the graph has no sdpa_backward node"


def test_no_device_is_a_typed_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET)
    with pytest.raises(NotImplementedError, match="no CUDA device to plan for"):
        Sm120BwdEngine(ENGINE_ID).check_support(make_graph())


def test_a_missing_compiler_is_a_typed_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_frost_sm120.engine._COMPILER_PACKAGES", ("cudnn", "no_such_package"))
    with pytest.raises(NotImplementedError, match="no_such_package cannot be imported"):
        Sm120BwdEngine(ENGINE_ID).check_support(make_graph())
    assert not planned_by_us(make_graph())


def test_the_target_is_fixed_at_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = plan(make_graph())
    monkeypatch.setenv(TARGET, "sm_121")
    assert graph._facts_for(analyze).target.name == "sm_120"
    assert plan(make_graph())._facts_for(analyze).target.name == "sm_121"


# The validator.

REFUSED_UPSTREAM: list[dict[str, Any]] = [
    {"sq": 1, "sk": 1},
    {"sliding_window_length": 7, "sq": 130, "sk": 64},
    {"use_causal_mask_bottom_right": True, "sq": 130, "sk": 64},
    {
        "use_causal_mask_bottom_right": True,
        "extra": lambda graph: {"bias": graph.tensor(name="bias", dim=[1, 4, 128, 128], data_type=FP32)},
    },
]


@pytest.mark.parametrize("attributes", REFUSED_UPSTREAM, ids=["one", "window", "bottom right", "bias"])
def test_validation_lets_through_what_we_serve(monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any]) -> None:
    with pytest.raises(NOT_SUPPORTED):
        original_hook("validator")(make_graph(**attributes))
    assert ours(plan(make_graph(**attributes)))[0] == 0

    with pytest.raises(NOT_SUPPORTED):  # declined by us, so upstream's refusal stands
        make_graph(**attributes, unfuse_fma=True).validate()
    monkeypatch.setenv(FLAG, "0")
    assert family.validator is not None
    with pytest.raises(NOT_SUPPORTED):
        family.validator(make_graph(**attributes))


def test_validation_still_refuses_malformed_graphs() -> None:
    for attributes in ({"sliding_window_length": 0}, {"diagonal_band_right_bound": -1}, {"use_padding_mask": True}):
        with pytest.raises(ValueError, match=r"\w+"):
            make_graph(**attributes).validate()


# The family's heuristics.


def test_original_proposals_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    theirs = [PlanConfig(20_601), BACKEND, PlanConfig(20_600, "knobs")]

    def recommend(kind: str, facts: Any, offered: dict[str, int]) -> list[PlanConfig]:
        seen.append((kind, facts, offered))
        return theirs

    monkeypatch.setattr(family, "original_hook", lambda kind: recommend)
    record = FamilyFacts("their facts", analyze(make_graph()))
    listed = family.heuristics("A", record, {"sdpa_bwd_sm120": 20_600, ENGINE_NAME: ENGINE_ID, "x": 20_601})
    assert seen == [("A", "their facts", {"sdpa_bwd_sm120": 20_600, "x": 20_601})]
    assert listed[-3:] == theirs
    assert {config.engine_id for config in listed[:-3]} == {ENGINE_ID}
    assert family.heuristics("A", record, {"x": 20_601}) == theirs  # we declined
    declined = FamilyFacts("their facts", analyze(declined_graph()))
    assert family.heuristics("A", declined, {ENGINE_NAME: ENGINE_ID}) == theirs
    no_facts = FamilyFacts(None, analyze(make_graph()))
    assert {config.engine_id for config in family.heuristics("A", no_facts, {ENGINE_NAME: ENGINE_ID})} == {ENGINE_ID}
    monkeypatch.setattr(family, "original_hook", lambda kind: None)
    assert family.heuristics("A", record, {"x": 20_601})[-1] == PlanConfig(20_601, None)


def test_original_engines_share_their_facts() -> None:
    """The original's engines ask for the original analyzer's record; ours must have stored it under that key."""
    graph = plan(make_graph())
    original = original_hook("analyzer")
    assert original is not None
    record = graph._facts_for(family.analyzer)
    assert record.original is graph._facts_for(original)
    assert record.ours is graph._facts_for(analyze)


def test_the_original_guard_decides_about_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    record = FamilyFacts("their facts", None)
    assert family.backend_guard(None, record) is None  # no release has one for this family
    monkeypatch.setattr(family, "original_hook", lambda kind: lambda graph, facts: f"{graph} {facts}")
    assert family.backend_guard("graph", record) == "graph their facts"
    assert family.backend_guard("graph", FamilyFacts(None, None)) is None


def test_an_original_that_cannot_load_leaves_ours(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def unavailable() -> Any:
        raise ImportError("no such thing")

    monkeypatch.setattr(family, "_original_factory", unavailable)
    ids = {"sdpa_bwd_sm120": 20_600, ENGINE_NAME: ENGINE_ID}
    assert [engine.name for engine in family._make_engines(ids)] == [ENGINE_NAME]

    def broken() -> Any:
        raise KeyError("a bug of theirs")

    monkeypatch.setattr(family, "_original_factory", broken)
    assert [engine.name for engine in family._make_engines(ids)] == [ENGINE_NAME]
    assert "failed to load" in caplog.text


# Pins and replays.


def test_deselect_engines_takes_ours_by_name() -> None:
    graph = plan(make_graph())
    graph.deselect_engines(["sdpa_bwd_sm120"])
    assert not graph._barred_indices()
    graph.deselect_engines([ENGINE_NAME])
    assert graph._barred_indices() == set(ours(graph))
    with pytest.raises(ValueError, match="excluded by deselect_engines"):
        graph.select_plan(0).build_plans()


def test_a_workspace_limit_passes_over_plans_that_store_dS(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudnn-frontend asks every plan that it builds for its workspace, and goes on to the next that is within."""
    monkeypatch.setattr("cudnn_frost_sm120.compile.compile_chain", lambda key, target: None)
    problem = {"sq": 1024, "sk": 1024, "use_deterministic_algorithm": True}
    planned = plan(make_graph(**problem))
    by_mode = {planned.plans[i].knobs.reduction_mode: planned.plans[i].knobs for i in ours(planned)}
    for limit, served in ((None, ReductionMode.DS_STORE), (8 << 20, ReductionMode.RELAY)):  # dS takes 16 MiB
        graph = make_graph(**problem)
        for mode in (ReductionMode.DS_STORE, ReductionMode.RELAY):
            graph.create_execution_plan(ENGINE_ID, by_mode[mode].to_public())
        if limit is not None:
            graph.deselect_workspace_greater_than(limit)
        graph.build_plans()
        _, knobs = graph.get_engine_and_knobs_at_index(graph._plan_index)
        assert knobs[cudnn.knob_type.REDUCTION_MODE] == served
        assert limit is None or graph.get_workspace_size() <= limit


def test_the_budget_for_dS_is_fixed_at_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_frost_sm120.compile.compile_chain", lambda key, target: None)
    graph = plan(make_graph())
    stored = [i for i in ours(graph) if graph.plans[i].knobs.reduction_mode is ReductionMode.DS_STORE]
    assert stored
    monkeypatch.setenv("CUDNN_FROST_SM120_DS_BUDGET", "0")
    graph.select_plan(stored[0]).build_plans()
    without = plan(make_graph())
    assert ReductionMode.DS_STORE not in {without.plans[i].knobs.reduction_mode for i in ours(without)}
    _, recorded = graph.get_engine_and_knobs_at_index(stored[0])
    without.create_execution_plan(ENGINE_ID, recorded)
    with pytest.raises(NotImplementedError, match="REDUCTION_MODE=2"):
        without.select_plan(len(without.plans) - 1).build_plans()


def test_a_recorded_plan_of_a_declined_graph_never_runs() -> None:
    _, recorded = plan(make_graph()).get_engine_and_knobs_at_index(0)
    graph = declined_graph()
    graph.create_execution_plan(ENGINE_ID, recorded)
    graph.select_plan(0)
    with pytest.raises(NotImplementedError, match="dropout"):
        graph.build_plans()


def test_a_recorded_plan_keeps_its_knobs() -> None:
    _, recorded = plan(make_graph()).get_engine_and_knobs_at_index(0)
    graph = make_graph()
    graph.create_execution_plan(ENGINE_ID, recorded)
    assert graph.get_engine_and_knobs_at_index(0) == (ENGINE_ID, recorded)
    with pytest.raises(ValueError, match="are missing"):
        make_graph().create_execution_plan(ENGINE_ID, {cudnn.knob_type.TILE_M: 64})


def test_knobs_of_no_kernel_are_declined_not_replaced() -> None:
    _, recorded = plan(make_graph()).get_engine_and_knobs_at_index(0)
    graph = make_graph()
    graph.create_execution_plan(ENGINE_ID, {**recorded, cudnn.knob_type.TILE_M: 48})
    graph.select_plan(0)
    with pytest.raises(NotImplementedError, match="TILE_M=48"):
        graph.build_plans()
    for knobs in ({cudnn.knob_type.TILE_M: 64}, "fast"):
        with pytest.raises(NotImplementedError, match=ENGINE_NAME):
            Sm120BwdEngine(ENGINE_ID).build_plan(graph, PlanConfig(ENGINE_ID, knobs))


def test_a_recorded_atomic_plan_is_not_deterministic() -> None:
    planned = plan(make_graph())
    atomic = next(i for i in ours(planned) if planned.plans[i].knobs.reduction_mode is ReductionMode.ATOMIC)
    _, recorded = planned.get_engine_and_knobs_at_index(atomic)
    graph = make_graph(use_deterministic_algorithm=True)
    graph.create_execution_plan(ENGINE_ID, recorded)
    with pytest.raises(NotImplementedError, match="REDUCTION_MODE=0"):
        graph.select_plan(0).build_plans()


def test_public_knobs_of_the_engine() -> None:
    engine = Sm120BwdEngine(ENGINE_ID)
    knobs = plan(make_graph()).plans[0].knobs
    assert engine.knobs_from_public(engine.knobs_to_public(knobs)) == knobs
    assert engine.knobs_to_public(None) == {}
    assert engine.knobs_from_public({}) is None
    assert engine.knobs_to_public({cudnn.knob_type.TILE_M: 1}) == {cudnn.knob_type.TILE_M: 1}


def test_a_record_from_another_gpu_is_honoured() -> None:
    """Knobs that a kernel has are served, whether or not this GPU's ranking offers them"""
    graph = make_graph(hq=16, hk=2)
    _, recorded = plan(make_graph(hq=16, hk=2)).get_engine_and_knobs_at_index(0)
    offered = {config.knobs.heads_per_cta for config in plan(graph).plans}
    (walk, *_) = {1, 2, 4, 8} - offered
    request = analyze(make_graph(hq=16, hk=2))
    assert request.facts is not None
    assert request.target is not None
    elsewhere = BwdKnobs.from_public({**recorded, cudnn.knob_type.PACK_GQA: walk})
    assert decline_reason(request.facts, request.target, elsewhere) is None
    contradictory = BwdKnobs.from_public({**recorded, cudnn.knob_type.PACK_GQA: 3})
    reason = decline_reason(request.facts, request.target, contradictory)
    assert reason is not None
    assert "PACK_GQA=3" in reason
    assert reason.endswith("[knobs]")


REPLAY = """
import json, sys
from seam_graphs import make_graph
import cudnn_frost_sm120, cudnn
cudnn_frost_sm120.register()
engine_id, knobs = json.loads(sys.argv[1])
graph = make_graph(hq=16, hk=2, use_causal_mask=True)
graph.create_execution_plan(engine_id, {cudnn.knob_type(int(k)): v for k, v in knobs.items()})
graph.select_plan(0).build_plans()
print(graph.get_plan_name_at_index(0), graph._compiled_plans[0].plan.key.name)
"""


@pytest.mark.compile
def test_a_record_replays_in_a_fresh_process() -> None:
    graph = plan(make_graph(hq=16, hk=2, use_causal_mask=True))
    index = graph.get_execution_plan_count() - 1
    engine_id, knobs = graph.get_engine_and_knobs_at_index(index)
    record = json.dumps([engine_id, {int(knob.value): value for knob, value in knobs.items()}])
    folder = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder.parents[1]), str(folder)])}
    done = subprocess.run([sys.executable, "-c", REPLAY, record], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    request = graph._facts_for(analyze)
    chain = make_plan(request.facts, graph.plans[index].knobs, request.target).key
    assert done.stdout.strip() == f"{graph.get_plan_name_at_index(index)} {chain.name}"

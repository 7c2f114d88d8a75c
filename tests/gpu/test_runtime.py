"""Streams, threads, CUDA graphs, and what a caller may get wrong."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from cudnn_frost_sm120.compile import compile_count
from cudnn_frost_sm120.launch import Launcher

from . import harness
from .cases import CAUSAL, Case, each, facts_of

PADDED = {"batch": 2, "len_q": (200, 30), "len_k": (140, 200)}


@each([Case(64, mask=CAUSAL), Case(128, heads_q=4, heads_k=2, **PADDED), Case(256, mask=CAUSAL)])
def test_another_stream(judge, case):
    """A stream that is not the default one, with inputs that arrive late on it"""
    problem = harness.Problem(case)
    _, _, run = harness.make_launch(problem)
    late = {name: problem.tensors[name].clone() for name in ("q", "v", "do")}
    for name in late:
        problem.tensors[name].fill_(0.5)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for name, contents in late.items():
            problem.tensors[name].copy_(contents)
        run()
    stream.synchronize()
    judge(problem, problem.outputs)


@each([Case(64, mask=CAUSAL), Case(128, heads_q=4, heads_k=2, **PADDED), Case(256)])
def test_cuda_graph(judge, case):
    """Captured once and replayed with new contents, for every offered plan"""
    problem = harness.Problem(case)
    for knobs in harness.offered(problem):
        _, workspace, run = harness.make_launch(problem, knobs)
        run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        for seed in (1, 2):
            problem.refill(seed)
            workspace.view.fill_(0xFF)
            captured.replay()
            torch.cuda.synchronize()
            judge(problem, problem.outputs)


@each([Case(64, mask=CAUSAL)])
def test_cuda_graph_of_a_graph_execute(judge, case):
    """graph.execute captured into a CUDA graph and replayed with new contents"""
    problem = harness.Problem(case)
    graph, buffers = harness.build_graph(problem)
    harness.select_ours(graph)
    workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
    graph.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute(buffers, workspace.view)
    problem.refill(7)
    captured.replay()
    torch.cuda.synchronize()
    judge(problem, problem.outputs)


@each([Case(64, mask=CAUSAL), Case(64, seqlen_q=333), Case(128, mask=CAUSAL), Case(64, mask=CAUSAL, seqlen_q=77)])
def test_one_plan_of_many_executes(judge, case):
    """One plan on several sets of buffers in turn"""
    plan, _, _ = harness.make_launch(harness.Problem(case))
    for seed in range(3):
        problem = harness.Problem(case)
        problem.refill(100 + seed)
        again, _, run = harness.make_launch(problem)
        assert again.key == plan.key
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)


def test_four_threads(judge):
    """Four threads, each with its own problem, stream and plan, 20 runs each"""
    cases = [Case(64, mask=CAUSAL), Case(64, seqlen_q=333), Case(128, mask=CAUSAL), Case(64, heads_q=4, heads_k=2)]
    problems = [harness.Problem(case) for case in cases]
    start = threading.Barrier(len(cases))

    def work(problem):
        start.wait()
        _, _, run = harness.make_launch(problem)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                problem.wipe_outputs()
                run()
        stream.synchronize()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(problems)) as threads:
        list(threads.map(work, problems))  # raises what a thread raised
    for problem in problems:
        judge(problem, problem.outputs)


def test_eight_threads_on_one_graph(judge):
    """One built graph, eight threads, each with its own buffers, workspace and stream, 50 executes each"""
    problems = []
    for seed in range(8):
        problems.append(harness.Problem(Case(64, mask=CAUSAL)))
        problems[-1].refill(seed)
    graph, uids = harness.declare_graph(problems[0].facts)
    harness.select_ours(graph)
    nbytes = graph.get_workspace_size()
    start = threading.Barrier(len(problems))

    def work(problem):
        workspace = harness.Workspace.create(nbytes, "cuda")
        buffers = {uid: problem.tensors[name] for name, uid in uids.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        start.wait()
        with torch.cuda.stream(stream):
            for _ in range(50):
                problem.wipe_outputs()
                graph.execute(buffers, workspace.view)
        stream.synchronize()
        assert workspace.intact

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(problems)) as threads:
        list(threads.map(work, problems))  # raises what a thread raised
    for problem in problems:
        judge(problem, problem.outputs)


@each([Case(64, mask=CAUSAL), Case(64, mask=CAUSAL, deterministic=True), Case(64, **PADDED)])
def test_launches_that_come_again(judge, case):
    """The second launch on the same buffers is recorded; it and those after it work on the contents of their time"""
    problem = harness.Problem(case)
    graph, buffers = harness.build_graph(problem)
    harness.select_ours(graph)
    workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
    side = torch.cuda.Stream()
    for seed in range(5):
        problem.refill(seed)
        workspace.view.fill_(0xFF)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if seed % 2 else torch.cuda.current_stream()):
            graph.execute(buffers, workspace.view)
        torch.cuda.synchronize()
        judge(problem, problem.outputs)
    assert workspace.intact


def test_capture_of_launches_that_were_recorded(judge):
    """A capture after the launches on these buffers were recorded holds the kernels, and replays with new contents"""
    problem = harness.Problem(Case(64, mask=CAUSAL))
    graph, buffers = harness.build_graph(problem)
    harness.select_ours(graph)
    workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
    for _ in range(3):
        graph.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute(buffers, workspace.view)
    del graph  # and outlives the plan's own recording
    for seed in (11, 12):
        problem.refill(seed)
        captured.replay()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)


def test_recording_while_another_thread_captures(judge):
    """A capture that is under way in another thread neither fails nor gains nodes when launches are recorded here"""
    problem, other = harness.Problem(Case(64, mask=CAUSAL)), harness.Problem(Case(64, seqlen_q=333))
    graph, buffers = harness.build_graph(problem)
    harness.select_ours(graph)
    workspace = harness.Workspace.create(graph.get_workspace_size(), "cuda")
    _, _, run = harness.make_launch(other)
    run()
    graph.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    started, done = threading.Event(), threading.Event()
    captured, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    failures: list[BaseException] = []

    def capture():
        try:
            with torch.cuda.graph(captured, capture_error_mode="global"):
                started.set()
                assert done.wait(60)
                run()
        except BaseException as error:
            failures.append(error)
            started.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert started.wait(60)
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                graph.execute(buffers, workspace.view)
    finally:
        done.set()
        thread.join()
    assert not failures, failures
    torch.cuda.synchronize()
    judge(problem, problem.outputs)
    other.refill(3)
    captured.replay()
    torch.cuda.synchronize()
    judge(other, other.outputs)


@each([Case(64, mask=CAUSAL), Case(128, heads_q=4, heads_k=2, batch=2), Case(64, mask=CAUSAL, deterministic=True)])
def test_overrides(judge, case):
    """One plan of S 4096, executed at other lengths and batches down to 64, in the workspace of each"""
    declared = facts_of(replace(case, seqlen_q=4096))
    graph, uids = harness.declare_graph(declared, {"is_override_shape_enabled": True})
    harness.select_ours(graph)
    compiles = compile_count()
    largest = graph.get_workspace_size()
    for batch, length in ((2, 4096), (2, 1024), (1, 1000), (3, 200), (2, 64), (2, 4096)):
        problem = harness.Problem(replace(case, batch=batch, seqlen_q=length))
        records = {record.name: record for record in (*problem.facts.inputs(), *problem.facts.outputs())}
        names = list(records)
        overrides = {
            "override_uids": [uids[name] for name in names],
            "override_shapes": [list(records[name].dim) for name in names],
            "override_strides": [list(records[name].stride) for name in names],
        }
        nbytes = graph.get_workspace_size(**overrides)
        assert nbytes <= largest or batch > case.batch
        workspace = harness.Workspace.create(nbytes, "cuda")
        graph.execute({uids[name]: problem.tensors[name] for name in names}, workspace.view, **overrides)
        torch.cuda.synchronize()
        assert workspace.intact
        judge(problem, problem.outputs)
    assert compile_count() == compiles


def test_a_thread_that_never_touched_cuda(judge):
    """The wrapper from a fresh thread, as autograd calls it"""
    problem = harness.Problem(Case(64, mask=CAUSAL))
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(harness.run_wrapper(problem)))
    thread.start()
    thread.join()
    judge(problem, results[0])


def test_bad_launches_touch_nothing():
    """Missing or misaligned buffers and workspaces: ValueError, outputs untouched"""
    problem = harness.Problem(Case(64, **PADDED))
    plan, workspace, run = harness.make_launch(problem)
    run()  # the chain is loaded; what follows must not reach it
    torch.cuda.synchronize()
    problem.wipe_outputs()
    launcher = Launcher(plan, lambda *_: pytest.fail("the chain was called"))
    good, base = problem.addresses(), workspace.view.data_ptr()
    bad = [
        (good, 0, plan.workspace_bytes, "workspace"),
        (good, base, plan.workspace_bytes - 1, "workspace"),
        (good, base, 0, "workspace"),
        (good, base + 8, plan.workspace_bytes, "aligned"),
        *(({**good, name: 0}, base, plan.workspace_bytes, name) for name in good),
        *(({n: a for n, a in good.items() if n != name}, base, None, name) for name in good),
        *(({**good, name: good[name] + 2}, base, None, name) for name in good),
    ]
    for addresses, address, nbytes, word in bad:
        with pytest.raises(ValueError, match=word):
            launcher.run(addresses, address, nbytes, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for name, tensor in problem.outputs.items():
        assert harness.storage_of(tensor).isnan().all(), name


def test_bad_executes_touch_nothing():
    """graph.execute with a buffer or workspace that is missing, too small, elsewhere or doubly used: ValueError"""
    problem = harness.Problem(Case(64, mask=CAUSAL))
    graph, buffers = harness.build_graph(problem)
    harness.select_ours(graph)
    nbytes = graph.get_workspace_size()
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    name_of = {
        uid: name for uid, buffer in buffers.items() for name in problem.tensors if buffer is problem.tensors[name]
    }
    uid_of = {name: uid for uid, name in name_of.items()}
    attempts = [
        (buffers, workspace[: nbytes - 1]),
        (buffers, torch.empty(nbytes, dtype=torch.uint8)),
        ({**buffers, uid_of["dq"]: problem.tensors["q"]}, workspace),
        ({**buffers, uid_of["dk"]: problem.tensors["dv"]}, workspace),
        ({**buffers, uid_of["q"]: problem.tensors["q"][:1]}, workspace),
        ({**buffers, uid_of["q"]: problem.tensors["q"].cpu()}, workspace),
        ({**buffers, uid_of["stats"]: problem.tensors["stats"].bfloat16()}, workspace),
        *(({uid: b for uid, b in buffers.items() if name_of[uid] != gone}, workspace) for gone in ("q", "stats", "dv")),
    ]
    for given, space in attempts:
        with pytest.raises(Exception) as raised:  # cudnn-frontend's own checks may come first
            graph.execute(given, space)
        assert isinstance(raised.value, (ValueError, TypeError, RuntimeError, KeyError)), repr(raised.value)
    torch.cuda.synchronize()
    for name, tensor in problem.outputs.items():
        assert harness.storage_of(tensor).isnan().all(), name
    graph.execute(buffers, workspace)  # and it still runs
    torch.cuda.synchronize()
    assert not problem.outputs["dq"].isnan().any()


def test_selection_is_strict():
    """A graph that we decline lists no plan of ours, and a recorded plan of ours fails on it instead of running"""
    import cudnn

    from cudnn_frost_sm120.register import ENGINE_ID

    served, _ = harness.build_graph(harness.Problem(Case(64, mask=CAUSAL)))
    ours = harness.plan_graph(served)
    _, recorded = served.get_engine_and_knobs_at_index(ours[0])
    problem = harness.Problem(Case(64, mask=CAUSAL))
    graph, _ = harness.build_graph(problem, use_alibi_mask=True)
    try:
        assert harness.plan_graph(graph) == []
    except cudnn.cudnnGraphNotSupportedError:
        pass  # nobody else serves it either

    graph, buffers = harness.build_graph(problem, use_alibi_mask=True)
    graph.create_execution_plan(ENGINE_ID, recorded)
    graph.select_plan(0)
    with pytest.raises(NotImplementedError, match="ALiBi"):
        graph.build_plans()
    with pytest.raises(NotImplementedError, match="ALiBi"):
        graph.execute(buffers, torch.empty(2**24, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    for name, tensor in problem.outputs.items():
        assert harness.storage_of(tensor).isnan().all(), name

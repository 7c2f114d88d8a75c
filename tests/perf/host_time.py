"""Host time per call, layer by layer, on a launch-bound graph: B1 H2 S256 D64 causal, with and without determinism.

    python -m tests.perf.host_time [--calls 100] [--repeats 15] [--json FILE]

Candidates take turns (A B C A B C); a turn is a burst of calls into an empty queue, timed without the wait for the GPU
and short enough that the queue never fills. Shown are the median and the least of all turns, in microseconds of one
call, and the GPU's time per call when the queue is full. The baseline takes part where ``.gpu/baseline.py`` is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from cudnn_frost_sm120 import driver
from cudnn_frost_sm120.register import ENGINE_NAME
from tests.gpu import harness
from tests.gpu.cases import CAUSAL, Case

Call = Callable[[], None]


def baseline_is_here() -> bool:
    sys.path.insert(0, ".gpu")
    try:
        import baseline
    except ImportError:
        return False
    baseline.enable()
    return True


def candidates(deterministic: bool) -> dict[str, Call]:
    """What is timed, by name, in the order of layers."""
    problem = harness.Problem(
        Case(64, batch=1, heads_q=2, seqlen_q=256, mask=CAUSAL, layouts=("bhsd",), deterministic=deterministic)
    )
    graph, buffers = harness.build_graph(problem)
    harness.plan_graph(graph)
    calls: dict[str, Call] = {}
    first_plans = _first_plans(graph)
    for label, index in first_plans.items():
        print(f"{label}: {graph.get_plan_name_at_index(index)}")
        try:
            calls[f"{label}: graph.execute"] = _selected(problem, index)
        except Exception as error:  # a peer that is listed and then does not build must not end the measurement
            print(f"{label} is left out: {type(error).__name__}: {error}")
    ours = first_plans["ours"]
    calls["ours: graph.execute_plan_at_index"] = _through_graph(graph, ours, buffers)
    plain, same_buffers = harness.build_graph(problem)
    harness.plan_graph(plain)
    call = _through_graph(plain, ours, same_buffers)
    declared = plain._compiled_plans[ours]._declared
    declared._launcher.bind = declared._launcher.plain
    calls["ours: the same, launches not recorded"] = call
    return calls | _lower_layers(problem, graph, buffers, ours)


def _first_plans(graph) -> dict[str, int]:
    """The first plan of each contender."""
    found: dict[str, int] = {}
    for index in range(graph.get_execution_plan_count()):
        name = graph.get_plan_name_at_index(index)
        labels = {ENGINE_NAME: "ours", "sdpa_bwd_sm120": "baseline"}
        label = next((label for start, label in labels.items() if name.startswith(start)), None)
        if label is None and graph._engine_for(graph.plans[index]) is None:
            label = "native"
        if label is not None:
            found.setdefault(label, index)
    return {label: found[label] for label in ("ours", "baseline", "native") if label in found}


def _selected(problem: harness.Problem, index: int) -> Call:
    """`graph.execute` on a graph of its own, whose selected plan is the one of that index."""
    graph, buffers = harness.build_graph(problem)
    harness.plan_graph(graph)
    graph.select_plan(index).build_plans()
    return _on_a_workspace(graph.execute, graph.get_workspace_size(), buffers)


def _through_graph(graph, index: int, buffers, **options) -> Call:
    graph.build_plan_at_index(index)
    size = graph.get_workspace_size_plan_at_index(index)
    return _on_a_workspace(graph.execute_plan_at_index, size, buffers, index=index, **options)


def _on_a_workspace(execute: Callable[..., None], size: int, buffers, **options) -> Call:
    """`execute` on a workspace of so many bytes, called once already."""
    workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")

    def call() -> None:
        execute(buffers, workspace, **options)

    call()
    return call


def _lower_layers(problem: harness.Problem, graph, buffers, index: int) -> dict[str, Call]:
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    workspace = torch.empty(graph.get_workspace_size_plan_at_index(index), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    compiled = graph._compiled_plans[index]
    pack = graph._normalize(dict(buffers), workspace)
    context = SimpleNamespace(handle=None, stream=None, workspace=workspace)
    launcher = compiled._declared._launcher
    where = problem.addresses(), workspace.data_ptr(), workspace.numel()
    recorded, plain = launcher.bind(*where), launcher.plain(*where)
    chain = driver.record_graph(plain)
    uids, tensors = tuple(buffers), tuple(buffers.values())
    return {
        "ours: the same, with a handle": _through_graph(graph, index, buffers, handle=handle),
        "ours: the same, operands in order": _through_graph(graph, index, tensors, tensor_uids=uids),
        "ours: plan.execute": lambda: compiled.execute(graph, pack, context),
        "ours: Launcher.run": lambda: launcher.run(*where, stream),
        "ours: a bound launch, recorded": lambda: recorded(stream),
        "ours: a bound launch, plain": lambda: plain(stream),
        "driver: cuGraphLaunch of the chain": lambda: driver.launch_graph(chain, stream),
        "driver: cuStreamIsCapturing": lambda: driver.is_capturing(stream),
        "driver: cuCtxGetDevice": lambda: driver.current_device(),
        "frontend: graph._normalize": lambda: graph._normalize(buffers, workspace),
    }


def host_times(calls: dict[str, Call], count: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds per call of each turn."""
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            turns[name].append((time.perf_counter() - start) / count * 1e6)
            torch.cuda.synchronize()
    return turns


def gpu_time(call: Call, count: int = 200) -> float:
    """Microseconds of GPU time per call, when the GPU never waits for the host; 0 where a call launches nothing."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    results = []
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        results.append(start.elapsed_time(end) / count * 1e3)
    return statistics.median(results)


def capture_of_a_recorded_launch() -> str:
    """Whether a recorded graph may itself be launched on a stream that is being captured; for information."""
    sink = torch.zeros(1, device="cuda")
    inner, outer = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(inner):
        sink += 1
    try:
        with torch.cuda.graph(outer):
            inner.replay()
        sink.zero_()
        outer.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    return f"yes, and it ran {int(sink.item())} time(s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls of a turn; times 4 launches must fit the queue")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = baseline_is_here()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, baseline {'here' if found else 'not here'}")
    report: dict[str, dict[str, dict[str, float]]] = {}
    for mode in ("default", "deterministic"):
        print(f"\n{mode}")
        calls = candidates(mode == "deterministic")
        turns = host_times(calls, options.calls, options.repeats)
        print(f"{'':52} median    least    GPU    (us per call)")
        report[mode] = {}
        for name, call in calls.items():
            row = {"median": statistics.median(turns[name]), "least": min(turns[name]), "gpu": gpu_time(call)}
            report[mode][name] = row
            print(f"{name:50} {row['median']:8.2f} {row['least']:8.2f} {row['gpu']:7.2f}")
    print(f"\na graph launch inside a capture: {capture_of_a_recorded_launch()}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

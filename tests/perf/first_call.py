"""Time to the first plan: of a new shape in a warm process, and of a new process with a warm disk.

    python -m tests.perf.first_call [--target sm_120] [--shapes 40]

With a GPU, each new process also launches once. Without one, name a target: planning is measured, and the kernels come
from a compile, as there is no disk cache then. Times are in milliseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

STAGES = "import torch, import cudnn, import cudnn_frost_sm120, graph to plans, plans to built plan, first launch"
CHILD = """
import json, sys, time
times = []
def stage(start): times.append((time.perf_counter() - start) * 1e3); return time.perf_counter()
at = time.perf_counter()
import torch
at = stage(at)
import cudnn
at = stage(at)
import cudnn_frost_sm120
at = stage(at)
from tests.perf.first_call import planned, launched
graph = planned(1000)
at = stage(at)
graph.select_plan(0).build_plans()
at = stage(at)
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    at = time.perf_counter()
    launched(graph)
    at = stage(at)
from cudnn.frost import compiled_cache
modules = sorted({name.split(".")[0] for name in sys.modules} & {"cutlass", "tvm_ffi"})
print(json.dumps({"times": times, "modules": modules, "cache": compiled_cache.stats()}))
"""


def planned(length: int):
    """A planned graph of B 2, H 8/2, D 128, causal, S as given."""
    from cudnn_frost_sm120.bench.cell_graph import graph_of
    from cudnn_frost_sm120.bench.cells import Cell

    graph = graph_of(Cell(128, 128, 2, 8, 2, length), "bf16")
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    return graph


def launched(graph) -> None:
    import torch

    from cudnn_frost_sm120.engine import analyze
    from cudnn_frost_sm120.tuner import random_buffers

    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(random_buffers(graph._facts_for(analyze).facts), workspace)
    torch.cuda.synchronize()


def new_shapes(count: int) -> dict[str, list[float]]:
    """Milliseconds of planning and building, for shapes that this process has not seen."""
    times: dict[str, list[float]] = {"graph to plans": [], "plans to built plan": [], "of that, ours": []}
    for step in range(count + 3):  # the first compile, load and import are not counted
        start = time.perf_counter()
        graph = planned(1000 + 8 * step)
        middle = time.perf_counter()
        graph.select_plan(0).build_plans()
        end = time.perf_counter()
        ours = our_share(graph)
        for name, value in zip(times, (middle - start, end - middle, ours), strict=True):
            times[name].append(value * 1e3)
    return {name: values[3:] for name, values in times.items()}


def our_share(graph) -> float:
    """Seconds of what this package does for a plan: facts, rules, ranking, plan and launcher, done once more."""
    from cudnn_frost_sm120.compile import compile_chain
    from cudnn_frost_sm120.engine import analyze
    from cudnn_frost_sm120.heuristics import ranked_knobs
    from cudnn_frost_sm120.launch import Launcher
    from cudnn_frost_sm120.plan import make_plan

    ranked_knobs.cache_clear()
    start = time.perf_counter()
    request = analyze(graph)
    plan = make_plan(request.facts, request.knobs()[0], request.target)
    Launcher(plan, compile_chain(plan.key, request.target))
    return time.perf_counter() - start


def new_processes(count: int) -> list[dict]:
    results = []
    for _ in range(count):
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="plan for it with no device")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    os.environ["CUDNN_FRONTEND_ENABLE_FROST_ENGINES"] = "1"
    if options.target:
        os.environ["CUDNN_FROST_SM120_TARGET"] = options.target
    import cudnn_frost_sm120

    cudnn_frost_sm120.register()
    print(f"a new shape in a warm process ({options.shapes} shapes)")
    for name, values in new_shapes(options.shapes).items():
        print(f"  {name:24} {statistics.median(values):9.2f}   worst {max(values):9.2f}")
    results = new_processes(options.processes)
    print(f"a new process ({options.processes}, after one that filled the disk cache where it can be filled)")
    for number, name in enumerate(STAGES.split(", ")):
        values = [result["times"][number] for result in results if number < len(result["times"])]
        if values:
            print(f"  {name:24} {statistics.median(values):9.2f}   worst {max(values):9.2f}")
    print(f"  loaded: {', '.join(results[-1]['modules']) or 'no DSL'}; cache {results[-1]['cache']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from typing import Any

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
at = time.perf_counter()
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
LIBRARY_CHILD = """
import json, time
import torch, cudnn
from tests.perf.first_call import planned
start = time.perf_counter()
planned(1000)
print(json.dumps((time.perf_counter() - start) * 1e3))
"""
"""The same planning where cudnn-frontend has the cuDNN library alone to ask."""
FROST_ENV = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"


def planned(length: int):
    """A planned graph of B 2, H 8/2, D 128, causal, S as given; made by cudnn-frontend alone."""
    import cudnn

    batch, heads_q, heads_k, headdim = 2, 8, 2, 128
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, compute_data_type=cudnn.data_type.FLOAT)

    def tensor(name: str, heads: int):
        stride = [length * heads * headdim, headdim, heads * headdim, 1]
        return graph.tensor(name=name, dim=[batch, heads, length, headdim], stride=stride)

    q, o, do = (tensor(name, heads_q) for name in ("q", "o", "do"))
    k, v = (tensor(name, heads_k) for name in ("k", "v"))
    rows, row_stride = [batch, heads_q, length, 1], [heads_q * length, length, 1, 1]
    stats = graph.tensor(name="stats", dim=rows, stride=row_stride, data_type=cudnn.data_type.FLOAT)
    gradients = graph.sdpa_backward(
        q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=headdim**-0.5, use_causal_mask=True
    )
    for gradient, like in zip(gradients, (q, k, v), strict=True):
        gradient.set_output(True).set_dim(like.get_dim()).set_stride(like.get_stride())
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


def new_processes(count: int, code: str, **environment: str) -> list[Any]:
    results = []
    for _ in range(count):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="plan for it with no device")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    os.environ[FROST_ENV] = "1"
    if options.target:
        os.environ["CUDNN_FROST_SM120_TARGET"] = options.target
    import cudnn_frost_sm120

    cudnn_frost_sm120.register()
    print(f"a new shape in a warm process ({options.shapes} shapes)")
    for name, values in new_shapes(options.shapes).items():
        print(f"  {name:24} {statistics.median(values):9.2f}   worst {max(values):9.2f}")
    results = new_processes(options.processes, CHILD)
    print(f"a new process ({options.processes}, after one that filled the disk cache where it can be filled)")
    for number, name in enumerate(STAGES.split(", ")):
        values = [result["times"][number] for result in results if number < len(result["times"])]
        if values:
            print(f"  {name:24} {statistics.median(values):9.2f}   worst {max(values):9.2f}")
    if not options.target:  # with no GPU the library does not start
        alone = new_processes(options.processes, LIBRARY_CHILD, **{FROST_ENV: "0"})
        print(f"  {'graph to plans, no frost':24} {statistics.median(alone):9.2f}   worst {max(alone):9.2f}")
    print(f"  loaded: {', '.join(results[-1]['modules']) or 'no DSL'}; cache {results[-1]['cache']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

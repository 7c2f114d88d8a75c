"""Time every plan of a graph, ours and others', and keep the fastest for the next planning.

    result = cudnn_frost_sm120.tune(graph, {q: q_tensor, ...})
    python -m cudnn_frost_sm120 tune GRAPH.json --grid headline

What is kept, and where, is in tuning_file.py.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import configurations
from .facts import BwdFacts, TensorFacts
from .log import logger
from .tuning_file import Winner, bucket_of, gpu_of, path_for, store

_LOG = logger(__name__)
_TURN_SECONDS = 2e-3  # least length of a turn: many calls of a short plan, one of a long one
_MOST_CALLS = 100  # of a turn: more would fill the launch queue, and then the host waits for the GPU


@dataclass(frozen=True)
class Tuned:
    """What ``tune`` found. The winner is the graph's selected plan."""

    name: str  # of the winner, as graph.get_plan_name_at_index says
    index: int
    milliseconds: dict[str, float]  # median time of a call, by plan name, fastest first
    skipped: dict[str, str]  # plan name -> why it could not be timed
    bucket: str
    path: Path

    def __str__(self) -> str:
        lines = [f"{self.bucket}", *(f"  {ms:9.4f} ms  {name}" for name, ms in self.milliseconds.items())]
        return "\n".join([*lines, *(f"  not timed: {name}: {why}" for name, why in self.skipped.items())])


def tune(
    graph: Any,
    variant_pack: dict[Any, Any],
    *,
    handle: Any = None,
    rounds: int = 7,
    path: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Time every plan of ``graph``, select the fastest on it, and store that one for graphs of the same bucket.

    ``graph``: a ``cudnn.pygraph`` with an sdpa_backward node; it is planned here if it is not yet. ``variant_pack``: as
    for ``graph.execute``; its outputs are overwritten. Plans take turns, ``rounds`` of them, on the stream of
    ``handle``, else the current one; a time is the median wall time of a call, its submission included. Workspace is
    allocated here. ``path``: the tuning file, by default the one that planning reads.

    Raises ValueError for a graph with no sdpa_backward node, NotImplementedError where there is no GPU that is served
    or no plan can be timed, and OSError where the file cannot be written.
    """
    from .engine import analyze, engine_name

    request = graph._facts_for(analyze)
    if request.facts is None:
        raise ValueError(request.declined)
    gpu = gpu_of(request.target) if request.target is not None else None
    if gpu is None:
        raise NotImplementedError(request.declined or "plans are timed on a GPU, and this graph was planned for none")
    if not graph.plans:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans()
    count = graph.get_execution_plan_count()
    names = [graph.get_plan_name_at_index(index) for index in range(count)]
    calls, skipped = _prepare(graph, variant_pack, handle, names, progress)
    turns = _take_turns(calls, rounds, progress)
    medians = {index: statistics.median(times) for index, times in turns.items()}
    if not medians:
        raise NotImplementedError(f"no plan could be timed: {'; '.join(skipped.values())}")
    ranked = sorted(medians, key=lambda index: medians[index])
    best = ranked[0]
    graph.build_plan_at_index(best)  # which selects it
    result = Tuned(
        name=names[best],
        index=best,
        milliseconds={names[index]: medians[index] for index in ranked},
        skipped=skipped,
        bucket=bucket_of(request.facts),
        path=Path(path) if path is not None else path_for(gpu),
    )
    engine_id, knobs = _record(graph, best)
    winner = Winner(engine_name(graph, best), engine_id, knobs, result.milliseconds, datetime.date.today().isoformat())
    store(result.path, gpu, result.bucket, winner)
    _LOG.info("%s: %s is the fastest of %d", result.bucket, result.name, len(medians))
    return result


def _record(graph: Any, index: int) -> tuple[int, dict[str, int]]:
    """(engine id, knobs by name), as create_execution_plan takes them."""
    try:
        engine_id, knobs = graph.get_engine_and_knobs_at_index(index)
    except NotImplementedError:  # the library's own choice among plans that it does not list
        return int(graph.plans[index].engine_id), {}
    return int(engine_id), {str(getattr(knob, "name", knob)): int(value) for knob, value in knobs.items()}


def _prepare(
    graph: Any, variant_pack: dict[Any, Any], handle: Any, names: list[str], progress: bool
) -> tuple[dict[int, Callable[[], None]], dict[str, str]]:
    """(call by plan index, why by the name of a plan that cannot run): every plan is built, and runs once."""
    import torch
    from tqdm import tqdm

    calls: dict[int, Callable[[], None]] = {}
    skipped: dict[str, str] = {}
    for index in tqdm(range(len(names)), desc="building", unit="plan", disable=not progress, leave=False):
        try:
            graph.build_plan_at_index(index)
            nbytes = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(16, nbytes), dtype=torch.uint8, device=_device_of(variant_pack))
            call = _call(graph, variant_pack, workspace, index, handle)
            call()
            _synchronize()
        except Exception as error:  # whatever keeps one plan from running must not keep the others from being timed
            skipped[names[index]] = f"{type(error).__name__}: {error}".splitlines()[0]
            _LOG.info("not timed: %s: %s", names[index], skipped[names[index]])
            continue
        calls[index] = call
    return calls, skipped


def _call(graph: Any, variant_pack: dict[Any, Any], workspace: Any, index: int, handle: Any) -> Callable[[], None]:
    return lambda: graph.execute_plan_at_index(variant_pack, workspace, index, handle)


def _device_of(variant_pack: dict[Any, Any]) -> Any:
    devices = (getattr(buffer, "device", None) for buffer in variant_pack.values())
    return next((device for device in devices if getattr(device, "type", None) == "cuda"), "cuda")


def _take_turns(calls: dict[int, Callable[[], None]], rounds: int, progress: bool) -> dict[int, list[float]]:
    """Milliseconds of a call in each turn, by plan."""
    from tqdm import tqdm

    lengths = {index: _calls_of_a_turn(call) for index, call in calls.items()}
    times: dict[int, list[float]] = {index: [] for index in calls}
    with tqdm(total=rounds * len(calls), desc="timing", unit="turn", disable=not progress, leave=False) as bar:
        for _ in range(rounds):
            for index, call in calls.items():
                times[index].append(_time(call, lengths[index]))
                bar.update()
    return times


def _calls_of_a_turn(call: Callable[[], None]) -> int:
    milliseconds = min(_time(call, 1) for _ in range(3))
    return max(1, min(_MOST_CALLS, math.ceil(_TURN_SECONDS * 1e3 / milliseconds)))


def _time(call: Callable[[], None], count: int) -> float:
    """Milliseconds of a call, from an idle GPU to an idle GPU."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize()
    return (time.perf_counter() - start) / count * 1e3


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configurations.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every plan")
    parser.add_argument("--file", type=Path, help="the tuning file; by default the one that planning reads")


def run(options: argparse.Namespace) -> int:
    """0 if every graph was tuned, 1 if one could not be, 2 if there is none or no GPU."""
    import torch

    from . import register

    os.environ["CUDNN_FRONTEND_ENABLE_FROST_ENGINES"] = "1"
    if not torch.cuda.is_available():
        print("tune needs a CUDA device", file=sys.stderr)
        return 2
    register()
    status = 2
    try:
        for name, graph in configurations.graphs_of(options):
            status = max(status % 2, _tune_one(name, graph, options))
    except (OSError, ValueError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if status == 2:
        print("tune: name a GRAPH.json or a --grid", file=sys.stderr)
    return status


def _tune_one(name: str, graph: Any, options: argparse.Namespace) -> int:
    from .engine import analyze

    facts = graph._facts_for(analyze).facts
    progress = sys.stderr.isatty()
    try:
        result = tune(graph, random_buffers(facts), rounds=options.rounds, path=options.file, progress=progress)
    except NotImplementedError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(f"{name}\n{result}\n  stored in {result.path}")
    return 0


def random_buffers(facts: BwdFacts, device: str = "cuda") -> dict[int, Any]:
    """Buffers by uid for every operand: normal values, full lengths, an LSE like theirs. Raises ValueError for a dtype
    that no served graph has."""
    import torch

    generator = torch.Generator().manual_seed(0)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}
    fills = {
        "seq_len_q": facts.seqlen_q,
        "seq_len_kv": facts.seqlen_k,
        "stats": math.log(facts.seqlen_k) + 0.5,  # of normal scores
        "scale_tensor": 1 / math.sqrt(facts.headdim_qk),
    }

    def buffer(tensor: TensorFacts) -> Any:
        if tensor.dtype not in dtypes:
            raise ValueError(f"{tensor.name} is {tensor.dtype}; only {', '.join(dtypes)} are filled")
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.dim, tensor.stride, strict=True))
        where = "cpu" if tensor.by_value else device
        if tensor.name in fills:
            storage = torch.full((count,), fills[tensor.name], dtype=dtypes[tensor.dtype], device=where)
        else:
            storage = torch.randn(count, generator=generator).to(where, dtypes[tensor.dtype])
        return storage.as_strided(tensor.dim, tensor.stride)

    return {int(t.uid or 0): buffer(t) for t in (*facts.inputs(), *facts.outputs())}

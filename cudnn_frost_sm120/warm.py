"""Compile kernels ahead of time, for a machine that has a GPU, on one that may have none (a container build).

    python -m cudnn_frost_sm120 warm --target sm_120 --grid headline --dtype bf16 fp16
    python -m cudnn_frost_sm120 warm --target sm_120 GRAPH.json ...

Lengths, batch, strides and scales are no part of a kernel: a graph stands for all of its kind. Where the kernels go,
and how a later process takes them up, is in kernel_store.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import configurations, kernel_store
from . import target as targets
from .plan import ChainKey, make_plan
from .support import TARGETS
from .target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configurations.add_arguments(parser)
    parser.add_argument("--target", required=True, choices=TARGETS, help="what to compile for")
    parser.add_argument("--first", action="store_true", help="only the plan that ranks first, not every plan offered")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiles at a time")
    parser.add_argument("--output", type=Path, help=f"the store; by default ${kernel_store.KERNELS_ENV}")


def run(options: argparse.Namespace) -> int:
    """0 if all kernels are there now, 1 if a graph is not served or a compile failed, 2 if no graph was named."""
    os.environ[targets.TARGET_ENV] = options.target
    if options.output is not None:
        os.environ[kernel_store.KERNELS_ENV] = str(options.output)
    try:
        chains, declined = chains_of(options)
    except (OSError, ValueError) as error:
        print(f"warm: {error}", file=sys.stderr)
        return 2
    for name, reason in declined.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if not chains and not declined:
        print("warm: name a GRAPH.json or a --grid", file=sys.stderr)
        return 2
    failed = compile_all(chains, targets.named(options.target), options.jobs, progress=sys.stderr.isatty())
    for key, why in failed.items():
        print(f"{key.name}: {why}", file=sys.stderr)
    print(f"{len(chains) - len(failed)} of {len(chains)} kernels for {options.target} in {kernel_store.store_path()}")
    return 1 if failed or declined else 0


def chains_of(options: argparse.Namespace) -> tuple[list[ChainKey], dict[str, str]]:
    """(chains, each once; reason by the name of a graph that is not served)."""
    from .engine import analyze

    chains: dict[ChainKey, None] = {}
    declined: dict[str, str] = {}
    target = targets.named(options.target)
    for name, graph in configurations.graphs_of(options):
        request = analyze(graph)
        if request.declined is not None or request.facts is None:
            declined[name] = request.declined or "no sdpa_backward node"
            continue
        for knobs in request.knobs()[: 1 if options.first else None]:
            chains[make_plan(request.facts, knobs, target).key] = None
    return list(chains), declined


def compile_all(chains: list[ChainKey], target: Target, jobs: int, progress: bool) -> dict[ChainKey, str]:
    """Compile what the store does not have yet; why, by the chain that did not compile."""
    from tqdm import tqdm

    failed: dict[ChainKey, str] = {}
    context = multiprocessing.get_context("spawn")  # the compiler does not survive a fork
    with (
        ProcessPoolExecutor(min(jobs, max(1, len(chains))), mp_context=context) as pool,
        tqdm(total=len(chains), desc="compiling", unit="kernel", disable=not progress) as bar,
    ):
        running = {pool.submit(compile_one, key, target): key for key in chains}
        for done in as_completed(running):
            error = done.exception()
            if error is not None:
                failed[running[done]] = f"{type(error).__name__}: {error}"
            bar.update()
    return failed


def compile_one(key: ChainKey, target: Target) -> Any:
    """Compile a chain into the store, unless it is there; returns its entry."""
    from .compile import build_chain, fake_arguments, kernel_name

    name = kernel_name(key, target)
    found = kernel_store.present(name)
    if found is not None:
        return found
    import cutlass.cute as cute

    compiled = cute.compile(build_chain(key), *fake_arguments(key), options=name.options)
    arguments = compiled.execution_args.get_kwargs_wrapper_spec(()).arg_names
    return kernel_store.put(name, arguments, lambda path: compiled.export_to_c(str(path), function_name=name.symbol))

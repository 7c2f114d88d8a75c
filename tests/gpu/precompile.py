"""Compile many chains at once, in processes beside this one; they meet in cudnn-frontend's cache on disk.

Or, where there is no GPU, in the store of `kernel_store`, for a machine that has one and whose time is dear.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from cudnn_frost_sm120 import target
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import ChainKey, make_plan
from cudnn_frost_sm120.target import Target

from .cases import Case, facts_of

WORKERS = max(1, min(16, (os.cpu_count() or 2) - 1))


def keys_of(cases: Iterable[Case], resolved: Target, every_lane: bool = False) -> list[ChainKey]:
    """The chains that these cases run, each once. A case that cannot be planned has none; its test will say so.

    `every_lane`: with the builds that race checkers get.
    """
    keys: dict[ChainKey, None] = {}
    for case in cases:
        facts = facts_of(case)
        try:
            keys |= dict.fromkeys(make_plan(facts, knobs, resolved).key for knobs in ranked_knobs(facts, resolved))
        except NotImplementedError:
            continue
    return [*keys, *(replace(key, every_lane_arrives=True) for key in keys if every_lane)]


def precompile(keys: list[ChainKey], resolved: Target) -> None:
    """Fill the cache. What fails here fails again, and is reported, where it is used."""
    if len(keys) < 3:
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(WORKERS, len(keys)), mp_context=spawn) as pool:
        for future in [pool.submit(_compile, key, resolved) for key in keys]:
            future.exception()


def fill_store(keys: list[ChainKey], named: Target) -> tuple[str, int]:
    """Compile for a named target into the store: (what was done, how many chains did not compile)."""
    from cudnn_frost_sm120.kernel_store import store_path
    from cudnn_frost_sm120.warm import compile_all

    failed = compile_all(keys, named, os.cpu_count() or 1, progress=sys.stderr.isatty())
    why = "".join(f"\n{key.name}: {reason}" for key, reason in failed.items())
    return f"{len(keys) - len(failed)} of {len(keys)} chains for {named.name} are in {store_path()}{why}", len(failed)


def _compile(key: ChainKey, resolved: Target) -> None:
    import torch

    from cudnn_frost_sm120.compile import compile_chain

    torch.cuda.set_device(resolved.device or 0)
    compile_chain(key, resolved)


def usable_target() -> Target:
    """The target of the current GPU. Raises NotImplementedError, in one sentence, where tests cannot run."""
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("there is no CUDA device")
    return target.for_device(torch.cuda.current_device())

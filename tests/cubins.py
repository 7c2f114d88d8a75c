"""Every chain there is, compiled for sm_120a and checked: the whole of what test_cubin.py samples.

    python -m tests.cubins [--headdim 256] [--dtype bf16 fp16] [--jobs 8]

No GPU is needed; some 400 chains a dtype, one to three seconds each and core.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor

from cudnn_frost_sm120.config.tiles import TABLE
from cudnn_frost_sm120.facts import MaskFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import ChainKey, make_plan
from cudnn_frost_sm120.target import Target
from tests.gpu.cases import CAUSAL, FULL, Case, facts_of

SM120 = Target("sm_120", "sm_120a", None, 188)
MASKS = (FULL, CAUSAL, MaskFacts(left_bound=50, right_bound=3), MaskFacts(left_bound=50))


def every_chain(dtypes: list[str], headdims: list[int]) -> list[ChainKey]:
    pairs = dict.fromkeys((row.headdim_qk, row.headdim_v) for row in TABLE)
    keys: dict[ChainKey, None] = {}
    axes = itertools.product(pairs, dtypes, MASKS, (1, 2), (None, (3, 4)), (None, (0, 1, 1, 1)), (False, True))
    for pair, dtype, mask, group, lengths, bias, deterministic in axes:
        if headdims and pair[0] not in headdims:
            continue
        more = {"heads_q": 4, "heads_k": 4 // group, "len_q": lengths, "len_k": lengths, "bias": bias}
        facts = facts_of(Case(*pair, dtype, mask=mask, deterministic=deterministic, **more))
        keys |= {make_plan(facts, knobs, SM120).key: None for knobs in ranked_knobs(facts, SM120)}
    return list(keys)


def faults(key: ChainKey) -> tuple[str, list[str]]:
    """The chain's name, and what is wrong with its kernels."""
    from cudnn_frost_sm120 import cubin

    warnings.simplefilter("ignore")
    built = cubin.compile_cubin(key, SM120)
    stacks = [f"{row.kernel} has a stack of {row.stack_bytes}" for row in built.report() if row.stack_bytes]
    early = [f"TMA may overwrite what is still read: {line}" for line in built.early_frees()[:1]]
    return key.name, stacks + ([] if stacks else built.forbidden_instructions()[:1]) + early


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cubins", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=["bf16", "fp16"])
    parser.add_argument("--headdim", nargs="+", type=int, default=[], help="native d_qk; all if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    keys = every_chain(options.dtype, options.headdim)
    bad = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, wrong in pool.map(faults, keys):
            bad += bool(wrong)
            if wrong:
                print(f"{name}: {'; '.join(wrong)}", flush=True)
    print(f"{len(keys)} chains, {bad} with spills, forbidden instructions or stages freed too early")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random graphs on a GPU: what is admitted must match the oracle, the rest must be declined in words.

    python -m tests.gpu.fuzz 2000               # `make fuzz N=2000`
    python -m tests.gpu.fuzz --only 1234        # one seed again

One graph in four goes through cudnn.pygraph, the others through facts, rules and launcher, every offered plan.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")

HANG_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=2000, help="graphs to draw")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", type=int, help="this seed alone, and say what it is")
    parser.add_argument("--append", type=Path, metavar="FILE", help="append the result to FILE as Markdown")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count) if options.only is None else [options.only]
    return run(seeds, options.append, verbose=options.only is not None)


def run(seeds: Any, append: Path | None, verbose: bool) -> int:
    import logging

    from cudnn_frost_sm120.admission import decline_reason
    from cudnn_frost_sm120.heuristics import ranked_knobs
    from cudnn_frost_sm120.plan import make_plan

    from .draw import draw
    from .precompile import precompile, usable_target

    logging.getLogger("cudnn").setLevel(logging.CRITICAL)
    try:
        resolved = usable_target()
    except NotImplementedError as error:
        print(f"nothing to do: {error}")
        return 2
    drawn = [draw(seed) for seed in seeds]
    reasons = [decline_reason(d.facts, resolved) for d in drawn]
    served = [d.facts for d, reason in zip(drawn, reasons, strict=True) if reason is None]
    keys = {make_plan(facts, knobs, resolved).key: None for facts in served for knobs in ranked_knobs(facts, resolved)}
    started = time.monotonic()
    precompile(list(keys), resolved)
    print(f"{len(drawn)} graphs, {len(served)} admitted, {len(keys)} chains in {time.monotonic() - started:.0f} s")

    counts: Counter[str] = Counter()
    worst: dict[str, float] = {}
    failures: list[int] = []
    watch = Watchdog()
    started = time.monotonic()
    for d, reason in progress(list(zip(drawn, reasons, strict=True))):
        watch.at(d.seed)
        if verbose:
            print(f"{d.case}\n{d.facts}\noddities {d.oddities}, attributes {d.attributes}\n{reason or 'admitted'}")
        try:
            if reason is None and not d.attributes:
                for outcome in compare(d):
                    counts["compared"] += 1
                    for name, error in outcome.errors.items():
                        kind = f"{outcome.case.dtype} {name}"
                        worst[kind] = max(error, worst.get(kind, 0.0))
            else:
                counts["declined"] += 1
                expect_decline(d, reason)
        except Exception as error:
            failures.append(d.seed)
            print(f"\nFAILED seed {d.seed}: {type(error).__name__}: {error}\n  {d.case.id}; {d.oddities}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error).lower():
                break  # the context is gone
    watch.stop()

    seconds = time.monotonic() - started
    errors = ", ".join(f"{name} {error:.1e}" for name, error in sorted(worst.items()))
    outcome = f"{len(failures)} failed" + (f" (seeds {', '.join(map(str, failures[:20]))})" if failures else "")
    line = f"{len(drawn)} random graphs: {counts['compared']} runs compared, {counts['declined']} declined, {outcome}"
    print(f"{line}; {len(drawn) / seconds:.0f} graphs/s; worst: {errors}")
    if append is not None:
        with append.open("a", encoding="utf-8") as file:
            file.write(f"\n## Random graphs\n\n    make fuzz N={len(drawn)}\n\n{line}. Worst errors: {errors}.\n")
    return 1 if failures else 0


def compare(d: Any) -> Iterator[Any]:
    """Run an admitted problem and compare; one in four through a graph."""
    from . import harness

    problem = harness.Problem(d.case, facts=d.facts)
    for got in (harness.run_graph if d.seed % 4 == 0 else harness.run_launcher)(problem):
        yield harness.judge(problem, got)


def expect_decline(d: Any, reason: str | None) -> None:
    """A decline is one line that names its rule; through a graph, no plan of ours may be listed.

    cudnn-frontend describes attributes to us that its own binding of sdpa_backward does not take. It then fails with a
    TypeError of that binding when it asks the cuDNN library, which is a decline where our rules decline the graph too.
    """
    if reason is not None:
        assert "\n" not in reason, f"a reason of several lines: {reason}"
        assert reason.endswith("]"), f"a reason without its rule: {reason}"
    if d.seed % 4 and reason is not None:
        return
    import cudnn

    from cudnn_frost_sm120.admission import decline_reason
    from cudnn_frost_sm120.facts import facts_from_graph

    from . import harness
    from .precompile import usable_target

    graph = None
    try:
        graph, _ = harness.declare_graph(d.facts, **d.attributes)
        ours = harness.plan_graph(graph)
    except (cudnn.cudnnGraphNotSupportedError, NotImplementedError, ValueError, RuntimeError):
        return
    except TypeError as error:
        of_the_binding = str(error).startswith("sdpa_backward(): incompatible function arguments")
        if graph is None or not of_the_binding or decline_reason(facts_from_graph(graph), usable_target()) is None:
            raise
        return
    assert not ours, f"our plan is listed for a graph that the rules decline: {reason}"


class Watchdog:
    """Ends the process, naming the seed, when one takes too long: a kernel that hangs cannot be interrupted."""

    def __init__(self) -> None:
        self._seed, self._since, self._done = -1, time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def at(self, seed: int) -> None:
        self._seed, self._since = seed, time.monotonic()

    def stop(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            if time.monotonic() - self._since > HANG_SECONDS:
                print(f"\nHANGS: seed {self._seed}, {HANG_SECONDS} s", flush=True)
                os._exit(3)


def progress(items: list[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, unit="graph", disable=not sys.stderr.isatty() or len(items) < 2)


if __name__ == "__main__":
    sys.exit(main())

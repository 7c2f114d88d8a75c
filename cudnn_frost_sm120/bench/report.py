"""What a run prints and writes: Markdown tables, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from . import environment
from .ceiling import Ceiling
from .result import ATOMIC, OURS, THROTTLED, Result
from .targets import verdicts


def line(result: Result) -> str:
    """One cell, as soon as it is measured."""
    times = ", ".join(f"{who} {result.tflops(who):.0f}" for who in result.timings) or "not measured"
    gone = "".join(f"; no {who}: {why}" for who, why in result.missing.items())
    return f"{result.cell.name}: {times}{gone}"


def markdown(results: Sequence[Result], made: str) -> str:
    """Every table of a run that has something in it."""
    peers = _peers(results)
    parts = [[made], table(results, peers), verdict_table(results), plans_table(results), stages_table(results)]
    parts.append(missing_lines(results))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def table(results: Iterable[Result], peers: Sequence[str]) -> Iterator[str]:
    """A row for each cell: our first plan, the peers, ratios, the share of the ceiling, bytes, host time, error."""
    results = list(results)
    throttled, ordered = (any(who in result.timings for result in results) for who in (THROTTLED, ATOMIC))
    columns = ["cell", "ours, ms", "ours, TFLOP/s", "spread", *(f"{peer}, TFLOP/s" for peer in peers)]
    columns += [*(f"ours / {peer}" for peer in peers), "of the ceiling"]
    columns += ["of the throttled ceiling"] if throttled else []
    columns += ["over atomic adds"] if ordered else []
    columns += ["MB outside main", "host, µs", *(f"{peer} host, µs" for peer in peers), "worst error"]
    yield from _table(
        columns, (_row(result, peers, throttled, ordered) for result in results if OURS in result.timings)
    )


def _row(result: Result, peers: Sequence[str], throttled: bool, ordered: bool) -> list[str]:
    ours = result.timings[OURS]
    row = [result.cell.name, f"{ours.median:.3f}", f"{result.tflops(OURS):.0f}", f"{ours.spread:.1%}"]
    row += [f"{result.tflops(peer):.0f}" if peer in result.timings else "-" for peer in peers]
    row += [_number(result.ratio(peer), ".2f") for peer in peers]
    row += [_number(result.share(OURS), ".0%")] + ([_number(result.share(THROTTLED), ".0%")] if throttled else [])
    row += [_number(result.over_atomic(), ".2f")] if ordered else []
    row += [f"{result.outside_bytes / 1e6:.1f}", f"{ours.host_us:.0f}"]
    row += [f"{result.timings[peer].host_us:.0f}" if peer in result.timings else "-" for peer in peers]
    return [*row, f"{max(result.errors[OURS].values()):.1e}"]


def verdict_table(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for v in verdicts(results):
        target, met = v.target, f"{v.cells - v.missed} of {v.cells}"
        numbers = [f"{target.goal:.2f}", f"{v.lowest:.2f}"]
        rows.append([target.regime, target.what, *numbers, v.cell, met, "met" if v.met else "missed"])
    yield from _table(["target", "measure", "at least", "lowest", "in", "cells that meet it", ""], rows)


def plans_table(results: Iterable[Result]) -> Iterator[str]:
    """Where several plans of ours were measured: what the first one leaves to the best."""
    rows = []
    for result in results:
        mine = {
            who: t.median
            for who, t in result.timings.items()
            if who.startswith(OURS) and who not in (THROTTLED, ATOMIC)
        }
        if len(mine) > 1 and OURS in mine:
            best = min(mine, key=lambda who: mine[who])
            others = ", ".join(f"{who.removeprefix(OURS + ', ')}: {ms:.3f}" for who, ms in mine.items() if who != OURS)
            lost = mine[OURS] / mine[best] - 1
            rows.append([result.cell.name, str(result.knobs[OURS]), f"{mine[OURS]:.3f}", others, best, f"{lost:.1%}"])
    yield from _table(["cell", "first plan", "ms", "others, ms", "best", "first behind best"], rows)


def stages_table(results: Iterable[Result]) -> Iterator[str]:
    """Microseconds of every kernel, from where the one before it ended."""
    rows = []
    for result in results:
        for who, kernels in result.stages.items():
            each = ", ".join(f"{kernel} {spent:.1f}" for kernel, spent in kernels.items())
            chain = 1e3 * result.timings[who].median
            rows.append([result.cell.name, who, each, f"{sum(kernels.values()):.1f}", f"{chain:.1f}"])
    yield from _table(["cell", "who", "kernels, µs", "their sum", "chain, µs"], rows)


def missing_lines(results: Iterable[Result]) -> Iterator[str]:
    """Each reason for which a candidate is missing, once, with where."""
    where: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for who, why in result.missing.items():
            where.setdefault((who, why), []).append(result.cell.name)
    for (who, why), cells in where.items():
        yield f"- no {who} in {len(cells)} cell{'s' * (len(cells) > 1)} ({cells[0]}, ...): {why}"


def header(ceilings: str) -> str:
    """The line above every table."""
    made = f"{environment.gpu()}, {environment.day()}, {environment.driver()}, {environment.packages()}"
    return f"{made}; bf16, (B, S, H, D), medians of whole chains; mma.sync ceiling {ceilings}"


def write(folder: Path, name: str, results: Sequence[Result], made: str, ceilings: dict[str, Ceiling]) -> None:
    """`name`.json and `name`.md."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [result.as_json() for result in results]
    about = {"environment": made, "ceilings": {who: asdict(found) for who, found in ceilings.items()}}
    text = json.dumps({**about, "results": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(results, made) + "\n", encoding="utf-8")


def plot(results: Sequence[Result], path: Path) -> str | None:
    """Bars by cell and candidate. Returns why there is no plot, or None."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [OURS, *_peers(results)]
    figure, axes = pyplot.subplots(figsize=(9, 0.2 * len(shown) * len(results) + 1.5))
    for offset, who in enumerate(shown):
        at = [i + offset * 0.8 / len(shown) for i, r in enumerate(results) if who in r.timings]
        axes.barh(at, [r.tflops(who) for r in results if who in r.timings], height=0.8 / len(shown), label=who)
    ceilings = {result.ceilings[OURS] for result in results if OURS in result.ceilings}
    for ceiling in ceilings:
        axes.axvline(ceiling, color="grey", linestyle=":", label="mma.sync ceiling")
    axes.set_yticks([i + 0.3 for i in range(len(results))], [r.cell.name for r in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s, whole chain")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def _peers(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(who for r in results for who in r.timings if not who.startswith(OURS)))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Nothing where there are no rows."""
    started = False
    for row in rows:
        if not started:
            yield "| " + " | ".join(columns) + " |"
            yield "|" + " --- |" * len(columns)
            started = True
        yield "| " + " | ".join(row) + " |"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)

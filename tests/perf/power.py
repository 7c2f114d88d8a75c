"""Clock and power under sustained load: whether the GPU's power limit holds a cell back, for each contender.

    python -m tests.perf.power [--grid main] [--cells REGEX] [--against baseline,fa2] [--seconds 2]

Each contender runs alone for some seconds while nvidia-smi is read ten times a second. Shown are the time of a chain,
the median SM clock and power of the second half, the share of it in which the power limit held the clock down, and
the chain's time in clock cycles, over that of ours too: the ratio that would be left at equal clocks.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cudnn_frost_sm120.bench.candidates import Candidate, Declined, Lineup, baseline_on_stand_in
from cudnn_frost_sm120.bench.cells import GRIDS, Cell
from cudnn_frost_sm120.bench.problem import Problem

QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"
BURST_MS = 50.0  # of work between two looks at the clock on the wall


@dataclass(frozen=True)
class Sustained:
    milliseconds: float  # of a chain
    clock_mhz: float
    watts: float
    capped: float  # share of the samples in which the power limit held the clock down

    @property
    def megacycles(self) -> float:
        return self.milliseconds * self.clock_mhz / 1e3


def sustained(run: Callable[[], None], seconds: float) -> Sustained:
    """`run` again and again for so many seconds; what is reported is of the second half."""
    run()
    each = timed(run, 3)
    count = max(1, round(BURST_MS / each))
    command = ["nvidia-smi", "-i", str(torch.cuda.current_device()), f"--query-gpu={QUERY}"]
    command += ["--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        times, start = [], time.perf_counter()
        while time.perf_counter() - start < seconds:
            times.append(timed(run, count))
        reader.terminate()
        samples = [line.split(", ") for line in reader.communicate()[0].splitlines() if line.count(",") == 2]
    half = samples[len(samples) // 2 :]
    clock, watts = (statistics.median(float(sample[i]) for sample in half) for i in (0, 1))
    capped = sum(sample[2].strip() == "Active" for sample in half) / len(half)
    return Sustained(statistics.median(times[len(times) // 2 :]), clock, watts, capped)


def timed(run: Callable[[], None], count: int) -> float:
    """Milliseconds of a call, the mean of a burst."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def contenders(cell: Cell, peers: list[str]) -> list[Candidate]:
    """Ours first."""
    lineup = Lineup(Problem(cell))
    found = []
    for _, build in (*lineup.ours(every_plan=False), *(entry for peer in peers for entry in lineup.peer(peer))):
        try:
            found.append(build())
        except Declined:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="main")
    parser.add_argument("--cells", metavar="REGEX", default="")
    parser.add_argument("--against", default="baseline,fa2")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| cell | who | ms | SM clock, MHz | power, W | held by the power limit | Mcycles | over ours |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with baseline_on_stand_in():
        for cell in (cell for cell in GRIDS[options.grid] if re.search(options.cells, cell.name)):
            ours = 0.0
            for candidate in contenders(cell, [peer for peer in options.against.split(",") if peer]):
                s = sustained(candidate.run, options.seconds)
                ours = ours or s.megacycles
                print(
                    f"| {cell.name} | {candidate.name} | {s.milliseconds:.3f} | {s.clock_mhz:.0f} | {s.watts:.0f} | "
                    f"{s.capped:.0%} | {s.megacycles:.2f} | {s.megacycles / ours:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""compute-sanitizer over one small case of each feature.

    python -m tests.gpu.sanitize                                  # all tools, all features
    python -m tests.gpu.sanitize --tools racecheck --features lengths
    python -m tests.gpu.sanitize --append docs/verification.md
    python -m tests.gpu.sanitize --warm sm_90                     # compile ahead, where there is no GPU

Kernels are compiled first, without a sanitizer, into cudnn-frontend's cache on disk. Every tool then runs one process
for all features; its report is split at the marks that the process prints between them. racecheck gets builds in which
every lane arrives at the mbarriers for itself: it does not see that a warp barrier orders the lanes before lane 0 does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MARK = "@@ feature "
SECONDS_PER_TOOL = 240


def cases():
    """Feature -> case. Small, but with several tiles either way and a tail."""
    from cudnn_frost_sm120.facts import MaskFacts

    from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, MIXED, Case, unserved

    sizes = {"batch": 1, "heads_q": 2, "seqlen_q": 200, "seqlen_k": 270}
    grouped = {**sizes, "heads_q": 4, "heads_k": 2}
    lengths = {"batch": 2, "len_q": (200, 70), "len_k": (130, 270)}
    all_cases = {
        "d 32, no mask": Case(32, **sizes),
        "d 64, causal": Case(64, mask=CAUSAL, **sizes),
        "d 128, causal bottom-right, fp16": Case(128, dtype="fp16", mask=CAUSAL_BOTTOM_RIGHT, **sizes),
        "d 192/128, no mask": Case(192, 128, **sizes),
        "d 192, causal": Case(192, mask=CAUSAL, **sizes),
        "d 256, causal": Case(256, mask=CAUSAL, **sizes),
        "d 40/72, mixed layouts": Case(40, 72, layouts=MIXED, **sizes),
        "window": Case(64, mask=MaskFacts(left_bound=70, right_bound=10), **sizes),
        "groups": Case(128, mask=CAUSAL, **grouped),
        "lengths": Case(64, mask=CAUSAL, **{**sizes, **lengths}),
        "lengths, groups, d 256": Case(256, mask=CAUSAL, **{**grouped, **lengths}),
        "sinks": Case(64, sink=True, **{**grouped, **lengths}),
        "bias": Case(64, bias=(0, 1, 1, 1), **sizes),
        "bias, dBias, lengths, groups": Case(64, bias=(1, 1, 1, 1), dbias=True, **{**grouped, **lengths}),
        "dBias of a row": Case(128, bias=(0, 1, 0, 1), bias_dtype="io", dbias=True, mask=CAUSAL, **sizes),
        "deterministic": Case(64, deterministic=True, mask=CAUSAL, **grouped),
        "dS stored, window, lengths": Case(
            128, deterministic=True, mask=MaskFacts(left_bound=70, right_bound=10), **{**grouped, **lengths}
        ),
        "scale in device memory": Case(64, scale_tensor=True, bias=(1, 1, 1, 1), dbias=True, mask=CAUSAL, **grouped),
    }
    return {name: case for name, case in all_cases.items() if not unserved(case)}


def run_features(names: list[str], dirty: bool, every_lane: bool) -> None:
    """In the child: every offered plan of every feature, marked, the gradients checked.

    Operands are made on the CPU and copied, so that hardly any kernel but ours runs. `dirty` fills the workspace; for
    initcheck it stays as cudaMalloc gives it.
    """
    import torch

    from . import harness

    for name in names:
        problem = harness.Problem(cases()[name], "cpu")
        tensors = {}
        for port, tensor in problem.tensors.items():
            whole = harness.storage_of(tensor).to("cuda")
            tensors[port] = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        expected, problem.tensors, problem.device = problem.expected, tensors, "cuda"
        for knobs in harness.offered(problem):
            nbytes = harness.make_launch(problem, knobs)[0].workspace_bytes
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            if dirty:
                buffer.fill_(0xFF)
            _, _, run = harness.make_launch(problem, knobs, harness.Workspace(buffer, nbytes, 0), every_lane)
            torch.cuda.synchronize()
            print(f"{MARK}{name}", flush=True)
            run()
            torch.cuda.synchronize()
            print(f"{MARK}-", flush=True)
            errors = expected.errors({port: tensor.cpu() for port, tensor in problem.outputs.items()})
            assert max(errors.values()) < harness.TOLERANCE[problem.facts.dtype], f"{name}: {errors}"
    print(f"{MARK}end", flush=True)


COMPLAINT = re.compile(r"=+ (?:Invalid|Uninit|Error|Warning|Barrier error|Divergent|Misaligned|Program hit)")
"""First line of a complaint; its details are indented further."""


def errors_by_feature(report: str) -> dict[str, list[str]]:
    """Complaints of a tool between the marks; those of nobody in particular are under "elsewhere"."""
    found: dict[str, list[str]] = {}
    feature = "-"
    for line in report.splitlines():
        if MARK in line:
            feature = line.split(MARK, 1)[1].strip()
            if feature not in ("-", "end"):
                found.setdefault(feature, [])
        elif COMPLAINT.match(line):
            found.setdefault("elsewhere" if feature in ("-", "end") else feature, []).append(line.lstrip("= "))
    return found


def run_tool(tool: str, checked: str, names: list[str], log: Path) -> tuple[dict[str, list[str]], str]:
    """(complaints by feature, how the run ended) of one tool over the features."""
    command = [tool, "--tool", checked, "--print-limit", "200", *EXTRA.get(checked, []), sys.executable]
    command += ["-m", "tests.gpu.sanitize", "--child", checked, "--features", *names]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor its own allocation
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=SECONDS_PER_TOOL
            )
            status = f"exit {ended.returncode}"
        except subprocess.TimeoutExpired:
            status = "out of time"
    report = log.read_text(encoding="utf-8", errors="replace")
    complete = "complete" if f"{MARK}end" in report else "NOT COMPLETE: " + report[-400:]
    return errors_by_feature(report), f"{status}, {time.monotonic() - started:.0f} s, {complete}"


EXTRA = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "analysis"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--features", nargs="+", help="features by name, or parts of names")
    parser.add_argument("--append", type=Path, metavar="FILE", help="append a Markdown table to FILE")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"), help="folder for the tools' full reports")
    parser.add_argument(
        "--warm", metavar="TARGET", help="compile what all this needs into the kernel store; no GPU needed"
    )
    parser.add_argument("--child", metavar="TOOL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [n for n in cases() if not options.features or any(part in n for part in options.features)]
    if options.child:
        run_features(names, dirty=options.child != "initcheck", every_lane=options.child == "racecheck")
        return 0

    from cudnn_frost_sm120 import target

    from .precompile import fill_store, keys_of, precompile, usable_target

    chosen = [cases()[name] for name in names]
    if options.warm:
        resolved = target.named(options.warm)
        said, failed = fill_store(keys_of(chosen, resolved, every_lane=True), resolved)
        print(said)
        return 1 if failed else 0
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return 2
    try:
        resolved = usable_target()
    except NotImplementedError as error:
        print(f"nothing to do: {error}")
        return 2
    precompile(keys_of(chosen, resolved, every_lane=True), resolved)
    options.logs.mkdir(parents=True, exist_ok=True)
    counts: dict[tuple[str, str], str] = {}
    complaints: list[str] = []
    for checked in options.tools:
        found, ended = run_tool(tool, checked, names, options.logs / f"{checked}.txt")
        print(f"{checked}: {ended}", flush=True)
        for name in names:
            counts[checked, name] = str(len(found[name])) if name in found else "not run"
        complaints += [f"{checked}, {name}: {line}" for name, lines in found.items() for line in lines[:3]]
    table = ["| feature | " + " | ".join(options.tools) + " |", "| --- |" + " --- |" * len(options.tools)]
    table += [f"| {name} | " + " | ".join(counts[checked, name] for checked in options.tools) + " |" for name in names]
    print("\n".join([*table, "", *complaints]))
    if options.append is not None:
        title = ["", "## compute-sanitizer: complaints by tool", "", "    python -m tests.gpu.sanitize", "", *table, ""]
        with options.append.open("a", encoding="utf-8") as file:
            file.write("\n".join(title))
    return 1 if complaints or any(count != "0" for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

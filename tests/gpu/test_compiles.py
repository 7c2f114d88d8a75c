"""How often kernels are compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cudnn_frost_sm120.kernel_store import KERNELS_ENV
from cudnn_frost_sm120.knobs import ReductionMode

ROOT = Path(__file__).resolve().parents[2]


def test_fifty_lengths_compile_once_per_machine(tmp_path):
    """50 lengths (batches and heads too) in one process: one compile of each route taken; a second process: none, and
    it does without the compiler's packages"""
    environment = {**os.environ, "CUDNN_FRONTEND_COMPILED_CACHE": str(tmp_path / "cache")}
    environment[KERNELS_ENV] = str(tmp_path / "kernels")  # a store that is full would leave nothing to compile
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    reports = []
    for _ in range(2):
        command = [sys.executable, "-m", "tests.gpu.fifty_lengths"]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=140)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        reports.append(json.loads(ran.stdout.splitlines()[-1]))
    first, second = (report["compiles"] for report in reports)
    assert set(first.values()) == {1}, first
    assert len(first) < len(ReductionMode), first  # lengths choose between tiles and routes, nothing else
    assert second == {}, second
    assert reports[0]["cutlass"]
    assert not reports[1]["cutlass"] or shutil.which("cc") is None

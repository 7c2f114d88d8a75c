"""The demo: sample 01, one attention layer on real text through the graph API."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

SAMPLE = "01_graph_api.py"


def sample_path() -> Path:
    """The sample of a checkout, or the copy that a wheel carries. Raises FileNotFoundError if there is neither."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "samples", package / "_samples"):
        if (folder / SAMPLE).is_file():
            return folder / SAMPLE
    raise FileNotFoundError(f"{SAMPLE} is neither beside the package nor in it; reinstall cudnn-frost-sm120")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the sample, run by its path, has options of its own."""


def run(options: argparse.Namespace) -> int:
    """The demo's exit status: 0 where every gradient was within its limit."""
    importable = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(importable)}  # a checkout need not be installed
    return subprocess.run([sys.executable, str(sample_path())], env=environment).returncode

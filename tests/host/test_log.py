"""Logging under ``cudnn_frost_sm120``: quiet until the application asks for it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "cudnn_frost_sm120"
DAMAGED = """
import pathlib, sys
{before}
from cudnn_frost_sm120 import tuning_file
pathlib.Path(sys.argv[1]).write_text("damaged")
assert tuning_file._winners(pathlib.Path(sys.argv[1]), "GPU") == {{}}
"""


def stderr_of(path: Path, before: str = "") -> str:
    code = [sys.executable, "-c", DAMAGED.format(before=before), str(path)]
    return subprocess.run(code, capture_output=True, text=True, check=True, env=dict(os.environ)).stderr


def test_a_warning_is_heard_only_where_logging_is_set_up(tmp_path: Path) -> None:
    assert "ignored" not in stderr_of(tmp_path / "file")
    heard = stderr_of(tmp_path / "file", "import logging; logging.basicConfig()")
    assert "WARNING:cudnn_frost_sm120.tuning_file:the tuning file" in heard


def test_every_logger_is_below_ours() -> None:
    """Modules take their logger from log.py; _autoload.py, which must stay light, does once it has something to say"""
    for path in PACKAGE.rglob("*.py"):
        imported = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert "logging" not in imported or path.name in ("log.py", "_autoload.py"), path

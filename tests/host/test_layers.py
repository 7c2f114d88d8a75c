"""Who may import what: the seam stays one narrow place, and planning stays light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "cudnn_frost_sm120"
HEAVY = ("torch", "cutlass", "tvm_ffi", "cuda")
LIGHT = "_autoload register __init__ facts graph_facts graph_json knobs target admission support heuristics".split()
LIGHT += "engine family validator explain __main__ plan workspace launch".split()
LIGHT += "compile kernel_store shared_library frontend_cache".split()


def imports(path: Path, *, top_level: bool) -> Iterator[str]:
    """Absolute names of what a module imports, anywhere or at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from (f"{'.' * node.level}{base}.{alias.name}" for alias in node.names)


def test_only_the_seam_touches_the_engine_tables() -> None:
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("cudnn.engines") for name in imports(path, top_level=False))
    }
    assert found <= {"register.py", "engine.py"}
    assert "cudnn.engines.manifest" in (PACKAGE / "register.py").read_text(encoding="utf-8")


def test_planning_modules_are_light() -> None:
    for name in LIGHT:
        heavy = [n for n in imports(PACKAGE / f"{name}.py", top_level=True) if n.split(".")[0] in HEAVY]
        assert not heavy, f"{name}.py imports {heavy}"


def test_records_need_no_frontend() -> None:
    for name in ("facts", "knobs", "target", "admission", "support", "heuristics", "plan", "workspace", "launch"):
        imported = [n for n in imports(PACKAGE / f"{name}.py", top_level=True) if n.split(".")[0] == "cudnn"]
        assert not imported, f"{name}.py imports {imported}"


def test_dependencies_point_down() -> None:
    above = {
        "config": ("device", "kernels", "plan", "compile", "launch", "admission", "engine", "heuristics"),
        "device": ("kernels", "plan", "compile", "launch", "admission", "engine", "heuristics"),
        "kernels": ("plan", "compile", "launch", "admission", "engine", "heuristics"),
    }
    for folder, forbidden in above.items():
        for path in (PACKAGE / folder).glob("*.py"):
            for name in imports(path, top_level=False):
                relative = name.startswith("..") and name.lstrip(".").split(".")[0] in forbidden
                absolute = any(name.startswith(f"cudnn_frost_sm120.{module}") for module in forbidden)
                assert not relative, f"{folder}/{path.name} imports {name}"
                assert not absolute, f"{folder}/{path.name} imports {name}"
    for path in (PACKAGE / "facts.py", PACKAGE / "knobs.py", PACKAGE / "target.py"):
        assert not [n for n in imports(path, top_level=True) if n.startswith(".")], path.name

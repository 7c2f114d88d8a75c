"""The package states its version once, and a wheel carries what the checkout has."""

import importlib
import os
import re
import zipfile
from pathlib import Path

import pytest

import cudnn_frost_sm120

ROOT = Path(__file__).resolve().parents[2]


def built(kind: str, folder: Path) -> dict[str, bytes]:
    """Files of a wheel, by name; kind is wheel or editable. Built in this interpreter: no network, no environment."""
    backend = pytest.importorskip("hatchling.build")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        name = getattr(backend, f"build_{kind}")(str(folder))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(folder / name) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def test_wheel(tmp_path):
    files = built("wheel", tmp_path)
    hook = files["cudnn_frost_sm120.pth"]
    assert hook == (ROOT / "cudnn_frost_sm120.pth").read_bytes()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "cudnn_frost_sm120").rglob("*.py")}
    assert modules <= set(files)
    assert "cudnn_frost_sm120/_samples/01_graph_api.py" in files
    assert "cudnn_frost_sm120/_samples/alice.txt" in files
    assert not [name for name in files if "__pycache__" in name or name.startswith("tests")]
    metadata = next(text.decode() for name, text in files.items() if name.endswith("METADATA"))
    assert f"\nVersion: {cudnn_frost_sm120.__version__}\n" in metadata
    assert "Requires-Dist: nvidia-cudnn-frontend<1.33,>=1.30" in metadata
    licences = [text for name, text in files.items() if name.endswith("licenses/LICENSE")]
    assert [b"Apache License" in text for text in licences] == [True]


def test_editable_install_has_the_hook_too(tmp_path):
    assert built("editable", tmp_path)["cudnn_frost_sm120.pth"] == (ROOT / "cudnn_frost_sm120.pth").read_bytes()


def test_version_is_stated_once():
    version = re.escape(cudnn_frost_sm120.__version__)
    stated = re.compile(rf"""^\s*(__version__|version)\s*=\s*["']{version}["']""", re.MULTILINE)
    sources = [ROOT / "pyproject.toml", *(ROOT / "cudnn_frost_sm120").rglob("*.py")]
    assert [path.name for path in sources if stated.search(path.read_text())] == ["__init__.py"]


def test_import_is_light():
    """`import cudnn_frost_sm120` loads neither torch, nor cudnn, nor the DSL: that is left to first use."""
    import subprocess
    import sys

    code = "import sys, cudnn_frost_sm120; print(sorted({'torch', 'cudnn', 'cutlass'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDNN_F")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", cudnn_frost_sm120.__all__)
def test_public_names_exist(name):
    assert getattr(cudnn_frost_sm120, name) is not None
    assert importlib.import_module("cudnn_frost_sm120").__version__.count(".") == 2


def test_constraints_pin_every_direct_dependency():
    project = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'^    "([a-z][a-z0-9-]*)[><=]', project, re.MULTILINE))
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted - pinned == set()


def test_makefile_installs_the_pinned_torch():
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"torch=={pinned[1]}\n" in (ROOT / "Makefile").read_text()

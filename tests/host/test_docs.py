"""The documentation: links lead somewhere, Python blocks run, every page is listed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
# A comment of this form before a block says why it cannot be run here.
BLOCK = re.compile(r"(<!-- only parsed: [^>\n]+ -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks(page: Path, *, run: bool) -> list[str]:
    """The Python blocks of a page: all of them, or those that can be run."""
    return [code for only_parsed, code in BLOCK.findall(page.read_text()) if not (run and only_parsed)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.split("#")[0] for link in links if "://" not in link]
    assert [link for link in local if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left(page):
    """What a script was to fill in: {NAME}, outside code"""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"\{[A-Z_]+\}", prose) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_parse(page):
    for block in blocks(page, run=False):
        ast.parse(block)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, run=True)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    """From top to bottom, in one process, without a GPU."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDNN_F")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    program = tmp_path / "blocks.py"
    program.write_text("\n".join(blocks(page, run=True)))
    done = subprocess.run([sys.executable, str(program)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_that_run_are_found():
    """The pages that promise to run do, so that the test above cannot pass for want of blocks."""
    running = {page.name for page in PAGES if blocks(page, run=True)}
    assert {"README.md", "first-steps.md", "torch.md", "tuning.md", "determinism.md"} <= running


def test_every_page_is_listed():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    index = (ROOT / "docs" / "index.md").read_text()
    assert {page for page in pages - {"index.md"} if f"({page})" not in index} == set()
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)} == set()


def test_the_samples_are_listed():
    page = (ROOT / "docs" / "first-steps.md").read_text()
    samples = {path.name for path in (ROOT / "samples").glob("[0-9]*.py")}
    assert {name for name in samples if f"`{name}`" not in page} == set()

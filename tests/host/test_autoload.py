"""The opt-in by the .pth file and by a plain import, each in a fresh interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.planning

REPOSITORY = Path(__file__).resolve().parents[2]
PTH = REPOSITORY / "cudnn_frost_sm120.pth"
FLAG = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
OURS = "[name for name in sys.modules if name.startswith('cudnn_frost_sm120')]"
TABLE = "[name for row in cudnn.engines.MANIFEST for name in row.slots]"


def run(code: str, tmp_path: Path, *, flag: str | None = None, pth: bool = True) -> str:
    """stdout of ``code`` in a new interpreter that has processed the .pth as site does at start, with no stderr."""
    done = start(code, tmp_path, flag=flag, pth=pth)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def start(
    code: str, tmp_path: Path, *, flag: str | None, pth: bool = True, package: bool = True
) -> subprocess.CompletedProcess[str]:
    """Without ``package``, nothing but the standard library is importable."""
    site_dir = tmp_path / "site"
    site_dir.mkdir(exist_ok=True)
    if pth:
        shutil.copy(PTH, site_dir)
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(REPOSITORY)]
    environment = {name: value for name, value in os.environ.items() if name not in (FLAG, "PYTHONPATH")}
    environment |= {"CUDNN_FROST_SM120_TARGET": "sm_120"}
    if package:
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if flag is not None:
        environment[FLAG] = flag
    prelude = f"import site, sys; site.addsitedir({str(site_dir)!r})\n"
    return subprocess.run(
        [sys.executable, *([] if package else ["-S"]), "-c", prelude + textwrap.dedent(code)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_flag_unset_costs_nothing(tmp_path: Path) -> None:
    out = run(
        f"""
        print({OURS}, sys.meta_path[0].__class__.__name__)
        import cudnn
        print({OURS}, 'frost_sm120_sdpa_bwd' in {TABLE})
        """,
        tmp_path,
    )
    assert "cudnn_frost" not in out
    assert "_Finder" not in out
    assert out.endswith("[] False")


@pytest.mark.parametrize("flag", ["0", "", "no", "off"])
def test_flag_off(tmp_path: Path, flag: str) -> None:
    assert run(f"print({OURS})", tmp_path, flag=flag) == "[]"


def test_flag_unset_takes_microseconds() -> None:
    line = PTH.read_text(encoding="utf-8")
    assert line.startswith("import ")
    assert line.count("\n") == 1
    code = f"import timeit, os; os.environ.pop({FLAG!r}, None); print(min(timeit.repeat({line!r}, number=100)) / 100)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 50e-6


@pytest.mark.parametrize("flag", ["1", "true", "YES", " on "])
def test_flag_set_registers_after_the_first_import_of_cudnn(tmp_path: Path, flag: str) -> None:
    out = run(
        f"""
        print([name for name in ('cudnn', 'torch', 'cutlass') if name in sys.modules])
        import cudnn
        import cudnn.engines
        print('frost_sm120_sdpa_bwd' in {TABLE}, 'torch' in sys.modules, 'cutlass' in sys.modules)
        print(type(cudnn.__spec__.loader).__name__, type(cudnn.__loader__).__name__)
        print([finder for finder in sys.meta_path if 'frost' in type(finder).__module__])
        """,
        tmp_path,
        flag=flag,
    )
    assert out.splitlines() == ["[]", "True False False", "SourceFileLoader SourceFileLoader", "[]"]


def test_flag_set_and_code_unchanged_lists_ours_first(tmp_path: Path) -> None:
    done = start(
        f"""
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from seam_graphs import make_graph, plan
        print(plan(make_graph(use_causal_mask=True)).get_plan_name_at_index(0))
        """,
        tmp_path,
        flag="1",
    )
    assert done.stdout.startswith("frost_sm120_sdpa_bwd["), done.stderr


def test_plain_import_in_either_order(tmp_path: Path) -> None:
    for order in ("import cudnn_frost_sm120, cudnn", "import cudnn, cudnn_frost_sm120"):
        out = run(f"{order}; print('frost_sm120_sdpa_bwd' in {TABLE})", tmp_path, pth=False)
        assert out == "True"


def test_plain_import_is_light(tmp_path: Path) -> None:
    out = run(
        "before = set(sys.modules); import cudnn_frost_sm120; print(sorted(set(sys.modules) - before))",
        tmp_path,
        pth=False,
    )
    assert "torch" not in out
    assert "'cudnn'" not in out
    assert "cutlass" not in out


def test_plain_import_takes_few_modules() -> None:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); before = set(sys.modules); import cudnn_frost_sm120"
    code += "; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "cudnn_frost_sm120.register" in done.stdout
    for costly in ("typing", "dataclasses", "logging", "enum", "re", "inspect"):
        assert f"'{costly}'" not in done.stdout


def test_looking_for_cudnn_does_not_register(tmp_path: Path) -> None:
    out = run(
        """
        import importlib.util
        spec = importlib.util.find_spec("cudnn")
        print(spec.origin.endswith("__init__.py"), spec.loader.is_package("cudnn"), "cudnn" in sys.modules)
        import cudnn, cudnn_frost_sm120
        print(cudnn_frost_sm120.is_registered())
        """,
        tmp_path,
        flag="1",
    )
    assert out.splitlines() == ["True True False", "True"]


def fake_cudnn(tmp_path: Path, source: str) -> str:
    package = tmp_path / "fake" / "cudnn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source, encoding="utf-8")
    return f"sys.path.insert(0, {str(package.parent)!r})\n"


def test_a_failed_import_of_cudnn_keeps_the_hook(tmp_path: Path) -> None:
    broken = fake_cudnn(tmp_path, "raise ImportError('no libcudnn')\n")
    out = run(
        broken
        + textwrap.dedent(
            """
            try:
                import cudnn
            except ImportError as error:
                print(error)
            sys.path.pop(0); sys.path_importer_cache.clear()
            import cudnn, cudnn_frost_sm120
            print(cudnn_frost_sm120.is_registered())
            """
        ),
        tmp_path,
        flag="1",
    )
    assert out.splitlines() == ["no libcudnn", "True"]


def test_an_unknown_cudnn_is_one_warning(tmp_path: Path) -> None:
    source = fake_cudnn(tmp_path, "__version__ = '1.40.0'\n")
    (tmp_path / "fake" / "cudnn" / "engines").mkdir()
    (tmp_path / "fake" / "cudnn" / "engines" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "fake" / "cudnn" / "engines" / "manifest.py").write_text("MANIFEST = ()\n", encoding="utf-8")
    done = start(source + "import cudnn; print('works', cudnn.__version__)", tmp_path, flag="1")
    assert done.returncode == 0
    assert done.stdout.strip() == "works 1.40.0"
    assert done.stderr.count("the engine is not registered") == 1
    assert "cudnn-frontend 1.40.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cudnn_without_engines_is_one_warning(tmp_path: Path) -> None:
    source = fake_cudnn(tmp_path, "__version__ = '1.10.0'\n")
    done = start(source + "import cudnn; print('works')", tmp_path, flag="1")
    assert (done.returncode, done.stdout.strip()) == (0, "works")
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    done = start("print('works')", tmp_path, flag="1", package=False)
    assert (done.returncode, done.stdout.strip()) == (0, "works")
    assert done.stderr.count("\n") == 1
    assert "cudnn_frost_sm120 is not loaded" in done.stderr


def test_threads_that_import_cudnn_at_once(tmp_path: Path) -> None:
    out = run(
        """
        import threading
        def go():
            import cudnn
        threads = [threading.Thread(target=go) for _ in range(8)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        import cudnn_frost_sm120
        print(cudnn_frost_sm120.is_registered())
        """,
        tmp_path,
        flag="1",
    )
    assert out == "True"


def test_unregister_before_the_import_of_cudnn(tmp_path: Path) -> None:
    out = run(
        f"""
        import cudnn_frost_sm120
        cudnn_frost_sm120.unregister()
        import cudnn, cudnn.engines
        print('frost_sm120_sdpa_bwd' in {TABLE}, cudnn_frost_sm120.is_registered())
        """,
        tmp_path,
        flag="1",
    )
    assert out == "False False"

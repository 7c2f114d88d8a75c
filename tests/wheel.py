"""Build the wheel, install it into an empty environment, and run the samples that it carries.

    python -m tests.wheel

Its dependencies are some gigabytes, so they are not installed again: a .pth in the new environment puts this
interpreter's site-packages on the path, behind its own. The .pth files in there are copied, for the dependencies that
need theirs, but for those of an editable install of this checkout, so that the wheel is what is tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from .samples import TOY

ROOT = Path(__file__).resolve().parents[1]
FLAG = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
REGISTERED = """
import sys
assert "cudnn_frost_sm120" in sys.modules, "the hook in site-packages has not run"
import cudnn, cudnn_frost_sm120
assert cudnn_frost_sm120.is_registered()
print(cudnn_frost_sm120.__version__, cudnn_frost_sm120.__file__)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # Without isolation: the build backend is the pinned one, and nothing is downloaded.
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = (place / "dist").glob("*.whl")
        venv.create(place / "venv", with_pip=False)
        python = str(place / "venv" / "bin" / "python")
        (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
        dependencies = Path(sysconfig.get_path("purelib"))
        (packages / "dependencies.pth").write_text(f"{dependencies}\n")
        for hook in dependencies.glob("*.pth"):
            if "cudnn_frost" not in hook.name and str(ROOT) not in hook.read_text():
                shutil.copy(hook, packages)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)

        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDNN_F", "PYTHONP"))}
        environment["CUDA_VISIBLE_DEVICES"] = ""

        def run(title: str, *arguments: str, **more: str) -> str:
            done = subprocess.run(
                [python, *arguments], env=environment | more, cwd=place, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{title} failed:\n{done.stdout}{done.stderr}")
            print(f"{title}: ok")
            return done.stdout

        installed = run("the opt-in hook", "-c", REGISTERED, **{FLAG: "1"}).split()[-1]
        if not Path(installed).is_relative_to(packages):
            sys.exit(f"this tested {installed}, not what the wheel installed")
        for sample in sorted((packages / "cudnn_frost_sm120" / "_samples").glob("[0-9]*.py")):
            run(sample.name, str(sample), *TOY.get(sample.name, ()))
        run("python -m cudnn_frost_sm120", "-m", "cudnn_frost_sm120", "--version")


if __name__ == "__main__":
    main()

"""What a measurement was made on: for reports of benchmarks and of tests."""

from __future__ import annotations

import datetime
import subprocess
from importlib.metadata import PackageNotFoundError, version

MODULES = {"nvidia-cudnn-frontend": "cudnn", "nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
"""Package -> a module that may know its version where the package's metadata is not installed."""


def gpu() -> str:
    """The current GPU's name and compute capability; says so where it is only the stand-in."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    stand_in = "" if major == 12 else ", Hopper stand-in, not SM120"
    return f"{torch.cuda.get_device_name()} (SM{major}{minor}{stand_in})"


def day() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"


def driver() -> str:
    """Versions of the driver and of CUDA."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found = "unknown"
    return f"driver {found}, CUDA {torch.version.cuda}"


def packages() -> str:
    import torch

    found = ", ".join(f"{package} {_version(package)}" for package in MODULES)
    return f"torch {torch.__version__}, {found}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(__import__(MODULES[package]), "__version__", "unknown")

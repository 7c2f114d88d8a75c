"""Compiled kernels on disk, for processes that do not compile.

An entry of the store is a directory named by a digest of all that its object depends on, which is no driver and no one
GPU. It appears in one step, with ``kernel.o``, ``entry.json`` and, where there was a linker, a shared library
(shared_library.py). `warm` fills the store where there is no GPU, and a process that compiled adds to it.

The store is ``$CUDNN_FROST_SM120_KERNELS``, else ``cudnn_frost_sm120`` in the directory of the compiled cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from . import driver, shared_library
from .log import logger

KERNELS_ENV = "CUDNN_FROST_SM120_KERNELS"
_LOG = logger(__name__)
_OBJECT, _ENTRY = "kernel.o", "entry.json"


class KernelName(NamedTuple):
    """What cudnn-frontend's compiled cache and this store know a compile by."""

    key: str
    symbol: str
    options: str


class StoredObject(NamedTuple):
    contents: bytes
    arguments: list[str]  # names, in order


def store_path() -> Path:
    from cudnn.frost import compiled_cache

    named = os.environ.get(KERNELS_ENV)
    return Path(named) if named else compiled_cache.get_cache_dir() / "cudnn_frost_sm120"


def entry_path(name: KernelName) -> Path:
    """Where the kernel is, or would be."""
    identity = [*name, platform.machine(), *_built_with()]
    return store_path() / hashlib.sha256("|".join(identity).encode()).hexdigest()[:24]


def present(name: KernelName) -> Path | None:
    """The entry of a kernel that is stored whole, linked now if it was not; None where there is none."""
    entry = entry_path(name)
    with suppress(FileNotFoundError, ValueError, KeyError):
        _stored(entry)
        shared_library.link(entry / _OBJECT)
        return entry
    return None


def put(name: KernelName, arguments: Sequence[str], write: Callable[[Path], Any]) -> Path:
    """Store what ``write`` writes to a path, linked where it can be, unless it is there; returns the entry. Raises
    OSError where the store cannot be written."""
    found = present(name)
    if found is not None:
        return found
    entry = entry_path(name)
    entry.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(entry, ignore_errors=True)  # a damaged one
    temporary = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        write(temporary / _OBJECT)
        shared_library.link(temporary / _OBJECT)
        record = {
            **name._asdict(),
            "built_with": _built_with(),
            "arguments": list(arguments),
            "sha256": hashlib.sha256((temporary / _OBJECT).read_bytes()).hexdigest(),
        }
        (temporary / _ENTRY).write_text(json.dumps(record, indent=1), encoding="utf-8")
        temporary.chmod(0o755)
        with suppress(OSError):  # another process was first, with the same object
            os.rename(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entry


def load(name: KernelName) -> Callable[..., None] | None:
    """The kernel's positional entry, without the compiler's packages; None where no entry has a library that loads."""
    entry = entry_path(name)
    return shared_library.load(entry / _OBJECT, name.symbol) if (entry / _ENTRY).is_file() else None


def read(name: KernelName) -> StoredObject | None:
    """The stored object; None where there is none, or none that is whole."""
    entry = entry_path(name)
    try:
        return _stored(entry)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        _LOG.warning("the kernel stored in %s is ignored: %s", entry, error)
        return None


def _stored(entry: Path) -> StoredObject:
    """Raises FileNotFoundError where there is none, another OSError, ValueError or KeyError where it is damaged."""
    record = json.loads((entry / _ENTRY).read_text(encoding="utf-8"))
    contents = (entry / _OBJECT).read_bytes()
    if hashlib.sha256(contents).hexdigest() != record["sha256"]:
        raise ValueError("the object is not the one that was stored")
    return StoredObject(contents, record["arguments"])


def _built_with() -> list[str]:
    """Versions of what makes and runs an object."""
    found = [_toolkit()]
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} unknown")
    return found


def _toolkit() -> str:
    """The CUDA toolkit that cutlass compiles with: of those installed with it, the newest that the driver takes."""
    package = find_spec("nvidia_cutlass_dsl")
    roots = (package.submodule_search_locations if package is not None else None) or ()
    newest = driver.cuda_major()
    installed = [int(path.name[2:]) for root in roots for path in Path(root).glob("cu[0-9]*")]
    return f"cu{max((major for major in installed if newest is None or major <= newest), default='?')}"

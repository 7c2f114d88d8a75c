"""Kernels compiled where there is no GPU, for machines that have one.

cudnn-frontend's compiled cache keys its entries by the device and driver they were compiled under, and stores nothing
where there are none. Ours depend on neither, so an object that was compiled for a target's architecture is installed as
an entry of the machine that it is first needed on. From then on it is that cache's: loaded by later processes, carried
by ``graph.serialize()``.

The store is ``$CUDNN_FROST_SM120_KERNELS``, else ``cudnn_frost_sm120`` in the directory of the compiled cache. An entry
is a directory named by a digest of everything that the object depends on, with ``kernel.o`` and ``entry.json``; it
appears in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .log import logger

KERNELS_ENV = "CUDNN_FROST_SM120_KERNELS"
_LOG = logger(__name__)
_OBJECT, _ENTRY = "kernel.o", "entry.json"
_BUILT_WITH = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


def store_path() -> Path:
    from cudnn.frost import compiled_cache

    named = os.environ.get(KERNELS_ENV)
    return Path(named) if named else compiled_cache.get_cache_dir() / "cudnn_frost_sm120"


def entry_path(cache_key: str, symbol: str, options: str) -> Path:
    """Where the object of a compile is, or would be."""
    identity = [cache_key, symbol, options, platform.machine(), *_versions()]
    return store_path() / hashlib.sha256("|".join(identity).encode()).hexdigest()[:24]


def export(compiled: Any, cache_key: str, symbol: str, options: str) -> Path:
    """Store a compiled chain; returns its entry. Raises OSError where the store cannot be written."""
    entry = entry_path(cache_key, symbol, options)
    if (entry / _ENTRY).is_file():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        compiled.export_to_c(str(temporary / _OBJECT), function_name=symbol)
        names = compiled.execution_args.get_kwargs_wrapper_spec(()).arg_names
        record = {
            "key": cache_key,
            "symbol": symbol,
            "options": options,
            "built_with": _versions(),
            "arguments": list(names),
            "sha256": _digest(temporary / _OBJECT),
        }
        (temporary / _ENTRY).write_text(json.dumps(record, indent=1), encoding="utf-8")
        temporary.chmod(0o755)
        with suppress(OSError):  # another process was first, with the same object
            os.rename(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entry


def install(cache_key: str, symbol: str, options: str, device: int | None) -> bool:
    """Put the stored object of a compile, if there is one, into the compiled cache of the machine of ``device``.

    False where there is none, none that is whole, or a cudnn-frontend whose cache takes none (before 1.32).
    """
    from cudnn.frost import compiled_cache

    seed = getattr(compiled_cache, "seed_entry", None)
    entry = entry_path(cache_key, symbol, options)
    if device is None or seed is None or not (entry / _ENTRY).is_file():
        return False
    try:
        record = json.loads((entry / _ENTRY).read_text(encoding="utf-8"))
        contents = (entry / _OBJECT).read_bytes()
        if hashlib.sha256(contents).hexdigest() != record["sha256"]:
            raise ValueError("the object is not the one that was stored")
        described = {
            "environment": compiled_cache.environment_manifest(device),
            # The cache finds an entry by this digest and then compares its whole key: a wrong one is a miss.
            "entry": hashlib.sha256(f"{cache_key}|{symbol}|{options}".encode()).hexdigest()[:24],
            "record": {
                "schema": compiled_cache._SCHEMA,
                "key": cache_key,
                "symbol": symbol,
                "wrapper": {
                    "arg_names": record["arguments"],
                    "arg_defaults": [],
                    "kwonly_names": [],
                    "kwonly_defaults": {},
                },
            },
        }
        return bool(seed(described, contents, device=device))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        _LOG.warning("the kernel stored in %s is ignored: %s", entry, error)
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _versions() -> list[str]:
    found = []
    for package in _BUILT_WITH:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} unknown")
    return found

"""What cudnn-frontend's compiled cache is told of kernels that come from the store, and the store of those it compiled.

That cache keys its entries by the device and driver that they were compiled under, and ``graph.serialize()`` carries
entries of it. To name the environment it imports cutlass, so it is asked only when it must be.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from . import kernel_store
from .kernel_store import KernelName
from .log import logger

_LOG = logger(__name__)


def install(name: KernelName, device: int | None) -> Path | None:
    """Put a stored kernel into the compiled cache of the machine of ``device``; returns the cache's entry.

    None where nothing is stored, there is no device, or a cudnn-frontend whose cache takes none (before 1.32).
    """
    from cudnn.frost import compiled_cache

    seed = getattr(compiled_cache, "seed_entry", None)
    stored = kernel_store.read(name) if device is not None and seed is not None else None
    if stored is None or seed is None:
        return None
    try:
        environment = compiled_cache.environment_manifest(device)
        entry: Path = compiled_cache._entry_dir(compiled_cache.get_cache_dir(), environment, "|".join(name))
        described = {
            "environment": environment,
            "entry": entry.name,
            "record": {
                "schema": compiled_cache._SCHEMA,
                "key": name.key,
                "symbol": name.symbol,
                "wrapper": {
                    "arg_names": stored.arguments,
                    "arg_defaults": [],
                    "kwonly_names": [],
                    "kwonly_defaults": {},
                },
            },
        }
        return entry if seed(described, stored.contents, device=device) else None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        _LOG.warning("the compiled cache does not take %s: %s", name.symbol, error)
        return None


def keep(compiled: Any, name: KernelName) -> None:
    """Store what ``compile_cached`` returned, for processes that will load it without cutlass."""
    cached = getattr(compiled, "_compiled_cache_entry", None)
    if cached is None:  # nothing was persisted
        return
    try:
        record = json.loads((Path(cached) / "entry.json").read_text(encoding="utf-8"))
        contents = (Path(cached) / "kernel.o").read_bytes()
        kernel_store.put(name, record["wrapper"]["arg_names"], lambda path: path.write_bytes(contents))
    except (OSError, ValueError, KeyError) as error:
        _LOG.info("%s is not stored: %s", name.symbol, error)


def offer(name: KernelName, device: int | None) -> None:
    """Tell a plan that is being built of a kernel that it uses, so that ``graph.serialize()`` carries it (1.32)."""
    from cudnn.frost import compiled_cache

    recording = getattr(getattr(compiled_cache, "_RECORDING", None), "stack", None)
    if recording and device is not None:
        recording[-1].append(_PromisedEntry(name, device))


class _PromisedEntry:
    """The path of a kernel's entry in the compiled cache, which is put there when it is first read."""

    def __init__(self, name: KernelName, device: int) -> None:
        self._name, self._device = name, device

    @cached_property
    def _path(self) -> Path:
        return install(self._name, self._device) or Path(os.devnull)

    @property
    def parent(self) -> Path:
        return self._path.parent

    @property
    def name(self) -> str:
        return self._path.name

    def __truediv__(self, part: str) -> Path:
        return self._path / part

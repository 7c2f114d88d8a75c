"""Puts our engine into cudnn-frontend's table, and takes it out again; the only file that touches that table.

cudnn-frontend finds its Python engines in ``cudnn.engines.manifest.MANIFEST``, a tuple of frozen families, and has no
registration call. ``register`` swaps the ``frost_sdpa_bwd`` family for a copy whose slots gain our engine and whose
hooks are those of ``family.py``, which ask the original's hooks for all that concerns the engines already there.
"""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False  # as in __init__.py
if TYPE_CHECKING:
    from typing import Any

ENGINE_NAME = "frost_sm120_sdpa_bwd"
ENGINE_SLOT = 90  # of the family's block of ids; with ENGINE_ID fixed for ever, since autotuners record it
ENGINE_ID = 20_690
FAMILY_NAME = "frost_sdpa_bwd"
KNOWN_FRONTENDS = ((1, 30), (1, 31), (1, 32))
HOOKS_MODULE = f"{__package__}.family"

_HOOKS = ("analyzer", "heuristics", "validator", "backend_guard")  # backend_guard: from 1.31 on
_LOCK = threading.RLock()
_original: Any = None  # the family as cudnn-frontend made it; kept after unregister for hooks still in flight


def register() -> None:
    """Put the engine into the table. Does nothing if it is there; thread-safe.

    Raises RuntimeError, naming both versions, if the table is not one that this version knows; the table is then as
    it was. Imports cudnn if it is not loaded.
    """
    global _original
    import importlib

    manifest = importlib.import_module("cudnn.engines.manifest")
    with _LOCK:
        if is_registered():
            return
        family = _checked_family(manifest)
        ours = _with_our_engine(manifest, family)
        _original = family
        _swap(manifest, family, ours)


def unregister() -> None:
    """Undo ``register``, and stop waiting for the first import of cudnn if it has not happened."""
    from . import _autoload

    _autoload.disarm()
    manifest = sys.modules.get("cudnn.engines.manifest")
    with _LOCK:
        if manifest is None or not is_registered():
            return
        ours = next(family for family in manifest.MANIFEST if ENGINE_NAME in family.slots)
        _swap(manifest, ours, _original)


def is_registered() -> bool:
    """Whether the table holds our engine now."""
    manifest = sys.modules.get("cudnn.engines.manifest")
    return any(ENGINE_NAME in getattr(family, "slots", ()) for family in getattr(manifest, "MANIFEST", ()))


def is_offered() -> bool:
    """Whether plans of ours may be made now: registered, and cudnn-frontend's opt-in flag is set."""
    manifest = sys.modules.get("cudnn.engines.manifest")
    return is_registered() and manifest is not None and bool(manifest.opt_in_engines_enabled())


def original_family() -> Any:
    """The family that ours replaced. Raises RuntimeError before the first ``register``."""
    if _original is None:
        raise RuntimeError("cudnn_frost_sm120 is not registered with cudnn-frontend")
    return _original


def original_hook(kind: str) -> Any:
    """The callable that the replaced family names for one of its hooks, or None.

    None also where its module cannot be imported, which cudnn-frontend itself takes for an absent hook.
    """
    import importlib

    reference = getattr(original_family(), kind, None)
    if reference is None:
        return None
    module, attribute = reference
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return None


def _swap(manifest: Any, old: Any, new: Any) -> None:
    table = tuple(new if family is old else family for family in manifest.MANIFEST)
    # Engines made for a set of ids that has ours in it belong to one side of the swap only.
    for key in [key for key in list(manifest._INSTANCES) if ENGINE_NAME in dict(key[1])]:
        manifest._INSTANCES.pop(key, None)
    manifest.MANIFEST = table
    engines: Any = sys.modules.get("cudnn.engines")
    if engines is not None and hasattr(engines, "MANIFEST"):
        engines.MANIFEST = table  # its re-export


def _with_our_engine(manifest: Any, family: Any) -> Any:
    import dataclasses

    hooks = {
        kind: (HOOKS_MODULE, kind)
        for kind in _HOOKS
        # analyzer and heuristics are ours in any case; the others only wrap what is there.
        if kind in ("analyzer", "heuristics") or getattr(family, kind, None) is not None
    }
    slots = {**family.slots, ENGINE_NAME: manifest.EngineSlot(ENGINE_SLOT, opt_in=True)}
    # The factory keeps its name: cudnn.engines resolves engine factories by it.
    return dataclasses.replace(family, slots=slots, module=HOOKS_MODULE, **hooks)


def _checked_family(manifest: Any) -> Any:
    """The family to extend. Raises RuntimeError for the first assumption of this file that does not hold."""
    _require(_frontend_release() in KNOWN_FRONTENDS, "its version is not among those")
    table = getattr(manifest, "MANIFEST", None)
    _require(isinstance(table, tuple) and len(table) > 0, "cudnn.engines.manifest.MANIFEST is not a filled tuple")
    _require(isinstance(getattr(manifest, "_INSTANCES", None), dict), "cudnn.engines.manifest._INSTANCES is not a dict")
    for name in ("EngineFamily", "EngineSlot", "opt_in_engines_enabled"):
        _require(callable(getattr(manifest, name, None)), f"cudnn.engines.manifest.{name} is missing")
    _require(_has_fields(manifest.EngineSlot, ("slot", "opt_in")), "EngineSlot has other fields")
    wanted = ("engine_id", "name", "module", "factory", "slots", "analyzer", "heuristics", "validator")
    assert table is not None
    for family in table:
        _require(_has_fields(type(family), wanted), "EngineFamily has other fields")
        _require(hasattr(family.slots, "items"), f"the slots of family {family.name} are not a mapping")
    found = [family for family in table if family.name == FAMILY_NAME]
    _require(len(found) == 1, f"it has {len(found)} families named {FAMILY_NAME}")
    family = found[0]
    _require(family.engine_id + ENGINE_SLOT == ENGINE_ID, f"{FAMILY_NAME} starts at id {family.engine_id}")
    taken = {slot.slot: name for name, slot in family.slots.items()}
    _require(ENGINE_SLOT not in taken, f"slot {ENGINE_SLOT} belongs to {taken.get(ENGINE_SLOT)}")
    for kind in ("analyzer", "heuristics", "validator", "backend_guard"):
        reference = getattr(family, kind, None)
        pair = isinstance(reference, tuple) and len(reference) == 2 and all(isinstance(part, str) for part in reference)
        _require(reference is None or pair, f"the {kind} of {FAMILY_NAME} is not a (module, name) pair")
    for other in (name for family in table for name in family.slots):
        # deselect_engines() matches substrings of plan names, so neither name may hold the other.
        _require(other not in ENGINE_NAME and ENGINE_NAME not in other, f"it has an engine named {other}")
    return family


def _has_fields(cls: Any, names: tuple[str, ...]) -> bool:
    return set(names) <= set(getattr(cls, "__dataclass_fields__", ()))


def _frontend_version() -> str:
    return str(getattr(sys.modules.get("cudnn"), "__version__", "of unknown version"))


def _frontend_release() -> tuple[int, ...]:
    parts = _frontend_version().split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _require(condition: bool, what: str) -> None:
    if condition:
        return
    from . import __version__

    known = ", ".join(".".join(map(str, release)) for release in KNOWN_FRONTENDS)
    raise RuntimeError(
        f"cudnn_frost_sm120 {__version__} knows the engine table of cudnn-frontend {known}; "
        f"this is cudnn-frontend {_frontend_version()}, and {what}. Install matching versions of the two."
    )

"""Registers the engine right after the first import of ``cudnn``, whoever imports it.

``arm`` runs when this package is imported: by hand, or from ``cudnn_frost_sm120.pth`` in site-packages, which does so
at interpreter start if ``CUDNN_FRONTEND_ENABLE_FROST_ENGINES`` is set. It must never break or slow a process, so next
to nothing is imported here, and every failure ends in one logged warning.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in __init__.py
if TYPE_CHECKING:
    from typing import Any

_HOST = "cudnn"


class _Loader:
    """The host's own loader, with ``register`` after a successful import; everything else is passed through."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # From here on the module shows its own loader: nothing that looks at it can tell that it was hooked.
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.remove()
        register_quietly()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder:
    """A ``sys.meta_path`` entry that lets the others find the host and wraps the loader they name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _HOST:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def arm() -> None:
    """Register now if cudnn is loaded, else when it is. Calling it again changes nothing."""
    if _HOST in sys.modules:
        register_quietly()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def disarm() -> None:
    """Take the import hook away, if it is there."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        finder.remove()


def register_quietly() -> None:
    """``register``, with any failure logged as one warning: the host must work as if we were not installed."""
    try:
        from .register import register

        register()
    except Exception as error:
        import logging

        logging.getLogger("cudnn_frost_sm120").warning("the engine is not registered: %s", error)

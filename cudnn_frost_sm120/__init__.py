"""Attention backward on the SM120 line, as a plug-in engine for cudnn-frontend's planner.

Importing this package registers the engine with ``cudnn.engines``: at once where cudnn is loaded already, else right
after its first import. Its plans are on offer while ``CUDNN_FRONTEND_ENABLE_FROST_ENGINES=1``, the switch that
cudnn-frontend reads for every opt-in engine. The import itself loads neither cudnn, nor torch, nor the CuTe DSL.
"""

from __future__ import annotations

# Bound here, and not on first use, because the submodule `register` would otherwise take the function's name.
from . import _autoload
from .register import is_registered, register, unregister

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for True; `import typing` would be most of what this import costs
if TYPE_CHECKING:
    from typing import Any

    import cudnn_frost_sm120.explain as explain

    from .tuner import tune
    from .wrapper import sdpa_bwd_wrapper_dsl_sm120

__all__ = [
    "__version__",
    "explain",
    "is_registered",
    "register",
    "sdpa_bwd_wrapper_dsl_sm120",
    "tune",
    "unregister",
]

_LAZY = {"sdpa_bwd_wrapper_dsl_sm120": "wrapper", "explain": "explain", "tune": "tuner"}
"""Public name -> the submodule that is imported when it is first asked for."""
_MODULES = ("explain",)  # whose public name is the module itself


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_autoload.arm()

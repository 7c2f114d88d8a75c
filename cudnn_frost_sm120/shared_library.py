"""A kernel's object linked into a shared library, which tvm-ffi loads alone.

An object is loaded by the compiler's packages, whose import takes most of a second; a library needs only their run-time
library, which it finds by its path. Its name holds the digest of its contents, so that a damaged one is not loaded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .log import logger

_LOG = logger(__name__)
_LINK_SECONDS = 60


def link(obj: Path) -> Path | None:
    """Link ``obj`` beside itself, by ``$CC``, else ``cc``; returns the library, None where it could not be made.

    Imports cutlass, to learn where its run-time library is.
    """
    found = _library_of(obj)
    if found is not None:
        return found
    from cutlass.cute.runtime import find_runtime_libraries

    libraries = [Path(path).absolute() for path in find_runtime_libraries(enable_tvm_ffi=True)]
    try:
        with tempfile.TemporaryDirectory(dir=obj.parent, prefix=".link.") as folder:
            made = Path(folder) / "library"
            command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-o", str(made), str(obj)]
            for library in libraries:
                command += [str(library), "-Xlinker", "-rpath", "-Xlinker", str(library.parent)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LINK_SECONDS)
            return made.replace(obj.parent / _name(made))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.info("%s is not linked: %s", obj, getattr(error, "stderr", None) or error)
        return None


def load(obj: Path, symbol: str) -> Callable[..., None] | None:
    """The function ``symbol`` of the library that was linked from ``obj``; None where there is none that loads."""
    library = _library_of(obj)
    if library is None:
        return None
    import tvm_ffi

    try:
        function: Callable[..., None] = tvm_ffi.load_module(str(library)).get_function(symbol)
        return function
    except (AttributeError, OSError, RuntimeError) as error:  # the packages it was linked with have moved, say
        _LOG.info("%s is not loaded: %s", library, error)
        with suppress(OSError):  # so that it is linked anew
            library.unlink()
        return None


def _library_of(obj: Path) -> Path | None:
    with suppress(OSError):
        return next((path for path in obj.parent.glob("*.so") if path.name == _name(path)), None)
    return None


def _name(library: Path) -> str:
    return f"kernel-{hashlib.sha256(library.read_bytes()).hexdigest()[:24]}.so"

"""The few CUDA driver calls that this package makes itself, by ctypes: a call costs well under a microsecond.

Each that enqueues, records or frees releases the GIL while it is in the driver. ``available()`` is False where there
is no driver library.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from functools import lru_cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: no call of this thread, or of another, spoils the capture
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@lru_cache(maxsize=1)
def _library() -> Any:
    """libcuda, or None."""
    library = _opened(ctypes.CDLL)
    if library is not None:
        library.cuGraphLaunch.argtypes = (c_void_p, c_void_p)
    return library


@lru_cache(maxsize=1)
def _queries() -> Any:
    """libcuda for the calls that only read a value: they keep the GIL, which takes longer to give up and win back."""
    library = _opened(ctypes.PyDLL)
    if library is not None:
        library.cuCtxGetDevice.argtypes = (c_void_p,)
        library.cuStreamIsCapturing.argtypes = (c_void_p, c_void_p)
    return library


def _opened(kind: Callable[[str], Any]) -> Any:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            return kind(name)
    return None


class _Answer(threading.local):
    """A thread's own place for an int that the driver answers with."""

    def __init__(self) -> None:
        self.held = c_int()
        self.address = ctypes.addressof(self.held)


_ANSWER = _Answer()


def available() -> bool:
    return _library() is not None


def cuda_major() -> int | None:
    """Of the newest CUDA that the driver takes; None where there is no driver."""
    version = c_int()
    if _library() is None or _library().cuDriverGetVersion(byref(version)):
        return None
    return version.value // 1000


def current_device() -> int | None:
    """Ordinal of the calling thread's context; None where there is no driver or no context."""
    queries, answer = _queries(), _ANSWER
    if queries is None or queries.cuCtxGetDevice(answer.address):
        return None
    return answer.held.value


def is_capturing(stream: int) -> bool:
    """Whether work on ``stream`` is being captured into a CUDA graph now, or is refused because of a capture."""
    answer = _ANSWER
    return bool(_queries().cuStreamIsCapturing(stream, answer.address) or answer.held.value)


def launch_graph(executable: int, stream: int) -> None:
    """Enqueue an executable graph. One thread at a time may launch the same one."""
    _check(_library().cuGraphLaunch(executable, stream), "cuGraphLaunch")


def destroy_graph(executable: int) -> None:
    """Free an executable graph; a launch of it that is under way runs to its end."""
    with _captures_undisturbed():
        _library().cuGraphExecDestroy(c_void_p(executable))


def record_graph(enqueue: Callable[[int], None]) -> int:
    """The executable graph of what ``enqueue(stream)`` launches, captured on a stream of its own; nothing runs.

    Raises RuntimeError where the driver does not do it.
    """
    library = _library()
    stream, graph, executable = c_void_p(), c_void_p(), c_void_p()
    with _captures_undisturbed():
        _check(library.cuStreamCreate(byref(stream), c_uint(_NON_BLOCKING)), "cuStreamCreate")
        try:
            _check(library.cuStreamBeginCapture_v2(stream, c_int(_RELAXED)), "cuStreamBeginCapture")
            try:
                enqueue(stream.value or 0)
            finally:
                status = library.cuStreamEndCapture(stream, byref(graph))
            _check(status, "cuStreamEndCapture")
            status = library.cuGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0))
            library.cuGraphDestroy(graph)
            _check(status, "cuGraphInstantiate")
        finally:
            library.cuStreamDestroy_v2(stream)
    return executable.value or 0


@contextmanager
def _captures_undisturbed() -> Iterator[None]:
    """What this thread calls in the block does not spoil a capture that another thread has under way."""
    mode = c_int(_RELAXED)
    exchange = _library().cuThreadExchangeStreamCaptureMode
    _check(exchange(byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        exchange(byref(mode))


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: CUDA driver error {status}")

"""Launches that come again: the chain on one set of addresses, recorded as a CUDA graph.

A chain costs the host a driver call for every kernel and descriptor, a recorded one a single call. The first launch on
a set of addresses is an ordinary one, so that addresses that never come again record nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from weakref import ref

from . import driver
from .log import logger

_LOG = logger(__name__)
_KEPT = 512  # recorded graphs of a process; the first recorded is the first to go
_PATIENCE = 100  # ordinary launches before what went is recorded again: a set that does not fit must not thrash
_recorded: deque[ref[Replay]] = deque()


class Replay:
    """``replay(stream)`` does what ``enqueue(stream)`` does, from the second call on by launching a recorded graph.

    Safe from any thread. On a stream that is being captured it is ``enqueue``, so that the caller's graph holds the
    kernels themselves.
    """

    def __init__(self, enqueue: Callable[[int], None]) -> None:
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._launches_to_record = 1
        self._executable = 0

    def __call__(self, stream: int) -> None:
        if not driver.is_capturing(stream):
            with self._lock:
                if self._executable or self._record():
                    driver.launch_graph(self._executable, stream)
                    return
        self._enqueue(stream)

    def __del__(self) -> None:
        if getattr(self, "_executable", 0):
            driver.destroy_graph(self._executable)

    def _record(self) -> bool:
        """Whether there is a recorded graph, made now if enough launches came before."""
        self._launches_to_record -= 1
        if self._launches_to_record != -1:
            return False
        try:
            self._executable = driver.record_graph(self._enqueue)
        except RuntimeError as error:  # it then stays with ordinary launches
            _LOG.info("launches are not recorded as CUDA graphs: %s", error)
            return False
        _recorded.append(ref(self))
        while len(_recorded) > _KEPT:
            oldest = _recorded.popleft()()
            if oldest is not None and not oldest._forget():
                _recorded.append(ref(oldest))
                break
        return True

    def _forget(self) -> bool:
        """Give the recorded graph up; False where a thread is launching it just now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            executable, self._executable, self._launches_to_record = self._executable, 0, _PATIENCE
        finally:
            self._lock.release()
        driver.destroy_graph(executable)
        return True

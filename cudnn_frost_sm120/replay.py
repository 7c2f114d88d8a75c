"""Launches that come again: the chain on one set of addresses, recorded as a CUDA graph.

A chain costs the host a driver call for every kernel and descriptor, a recorded one a single call. The first launch on
a set of addresses is an ordinary one, so that addresses that never come again record nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from . import driver

_LOG = logging.getLogger(__name__)


class Replay:
    """``replay(stream)`` does what ``enqueue(stream)`` does, from the third call on by launching a recorded graph.

    Safe from any thread. On a stream that is being captured it is ``enqueue``, so that the caller's graph holds the
    kernels themselves.
    """

    def __init__(self, enqueue: Callable[[int], None]) -> None:
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._calls = 0
        self._executable = 0

    def __call__(self, stream: int) -> None:
        if driver.is_capturing(stream):
            self._enqueue(stream)
            return
        if not self._executable and not self._record():
            self._enqueue(stream)
            return
        with self._lock:
            driver.launch_graph(self._executable, stream)

    def __del__(self) -> None:
        if getattr(self, "_executable", 0):
            driver.destroy_graph(self._executable)

    def _record(self) -> bool:
        """Whether there is a recorded graph, made now if this is the call for it."""
        with self._lock:
            self._calls += 1
            if self._calls == 2:
                try:
                    self._executable = driver.record_graph(self._enqueue)
                except RuntimeError as error:
                    _LOG.info("launches are not recorded as CUDA graphs: %s", error)
            return bool(self._executable)

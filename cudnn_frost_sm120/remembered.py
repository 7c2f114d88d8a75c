"""A dict that forgets."""

from __future__ import annotations

import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(dict[K, V]):
    """A dict of at most ``most`` entries: the first to come is the first to go. ``keep`` is safe from any thread."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.Lock()

    def keep(self, key: K, value: V) -> None:
        with self._lock:
            while key not in self and len(self) >= self._most:
                del self[next(iter(self))]
            self[key] = value

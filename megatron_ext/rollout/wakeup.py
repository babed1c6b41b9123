"""Wakes a process that waits on connections, from any of its threads."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """Readable (``fileno``) from ``set`` until ``clear``; ``set`` never blocks, and does nothing after ``close``."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._lock = threading.Lock()
        self._is_set = False
        self._closed = False

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._closed:
                os.write(self._writer, b"x")
                self._is_set = True

    def clear(self) -> bool:
        """Whether it was set."""
        with self._lock:
            if not self._is_set or self._closed:
                return False
            os.read(self._reader, 1)
            self._is_set = False
            return True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)

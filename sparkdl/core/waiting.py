"""A condition variable that measures how long each thread waits, to separate waiting from work."""

from __future__ import annotations

import threading
import time


class _Waited(threading.local):
    seconds = 0.0


_waited = _Waited()


class Condition(threading.Condition):
    """A condition that counts the time of its waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; return False after ``timeout`` seconds."""
        began = time.perf_counter()
        try:
            return super().wait(timeout)
        finally:
            _waited.seconds += time.perf_counter() - began


def waited_seconds() -> float:
    """Return the seconds that this thread has waited for conditions so far."""
    return _waited.seconds

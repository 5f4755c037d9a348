"""Memory for the bodies of messages, which is reused from one message to the next.

Without it, the C library would get fresh pages from the system for each large array, and the system would
zero each page at its first use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sparkdl.core.vectors import Array, aligned

SMALL = 1 << 20  # bytes; the C library keeps smaller memory and reuses it itself
SPARE = 2  # maximum number of unused pieces of memory that ``borrow`` keeps


class BufferPool:
    """A pool of memory, from which several threads may borrow.

    Memory is returned by itself, once no array, view or memoryview refers to it any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Pieces of memory, each with a function that returns the array that was lent; None: it is gone.
        self._known: list[tuple[NDArray[np.uint8], Callable[[], object]]] = []

    def borrow(self, size: int) -> NDArray[np.uint8]:
        """Return uninitialized, aligned memory of ``size`` bytes (see ``vectors.aligned``)."""
        if size < SMALL:
            return aligned(size)
        with self._lock:
            free = [memory for memory, user in self._known if user() is None]
            self._known = [(memory, user) for memory, user in self._known if user() is not None]
            fitting = [memory for memory in free if len(memory) == size]
            memory = fitting.pop() if fitting else aligned(size)
            lent = np.frombuffer(memory.data, np.uint8)  # its views refer to it, not to ``memory``
            self._known.append((memory, weakref.ref(lent)))
            self._known += [(spare, _ended) for spare in fitting[:SPARE]]
            return lent

    def borrow_like(self, array: Array) -> Array:
        """Return an uninitialized array of the shape and dtype of another one."""
        return self.borrow(array.nbytes).view(array.dtype).reshape(array.shape)


def _ended() -> None:
    """Return None, like a weak reference to an array that has ended."""

"""The state of a run that all parts of its coordinator share: the lock, the generation and the failure."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from sparkdl.errors import DataError, RefusedError, SparkDLError, WorkerLostError

COUNTED = "exchanges", "retries", "duplicates", "refused", "superseded", "not_finite", "lost", "returned"


class RunState:
    """The lock of a run, and whether the run goes on.

    Args:
        lock: the lock of the run's aggregation.

    Attributes:
        changed: the condition that guards the coordinator and its parts.
        clock: returns the seconds of a monotonic clock.
        generation: the number of the present start of the worker group.
        closed: whether the run is over.
        failure: the error that ends the present generation.
        log: messages of workers and of the endpoint for the driver to log.
        counters: events of the run by name.
    """

    def __init__(self, lock: Any) -> None:
        self.changed = threading.Condition(lock)
        self.clock: Callable[[], float] = time.monotonic
        self.generation = 1
        self.closed = False
        self.failure: SparkDLError | None = None
        self.log: deque[dict[str, Any]] = deque(maxlen=1000)
        self.counters = dict.fromkeys(COUNTED, 0)

    def check_open(self, generation: int) -> None:
        """Check that a request is of the present generation of a run that is not over.

        Raises:
            RefusedError: it is not.
        """
        if self.closed:
            raise RefusedError(410, "The run is over.")
        if generation != self.generation:
            raise RefusedError(409, f"Generation {generation} is over; the run is at {self.generation}.")

    def is_over(self, generation: int) -> bool:
        """Return whether a generation has ended, or the run."""
        return self.closed or generation != self.generation

    def fail(self, generation: int, error: SparkDLError) -> None:
        """Record why a generation cannot go on. The first error counts, but for those of lost workers."""
        with self.changed:
            lost = isinstance(self.failure, WorkerLostError) and not isinstance(error, WorkerLostError)
            if generation == self.generation and (self.failure is None or lost):
                self.failure = error
                self.changed.notify_all()

    def refuse_rows(self, message: str) -> NoReturn:
        """Refuse a request and fail the run, whose rows are not those that it began with.

        Raises:
            RefusedError: always.
        """
        self.failure = self.failure or DataError(message)
        self.changed.notify_all()
        raise RefusedError(422, message)

    def tell(self, level: int, message: str) -> None:
        """Add a message of the endpoint to the log of the driver."""
        self.log.append({"name": "store", "level": level, "message": message})

    def warn(self, message: str) -> None:
        """Add a warning of the endpoint to the log of the driver."""
        self.tell(logging.WARNING, message)

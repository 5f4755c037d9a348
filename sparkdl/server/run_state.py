"""State shared by all parts of a run's coordinator: the lock, the generation and the failure."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from sparkdl.core.waiting import Condition
from sparkdl.errors import DataError, RefusedError, SparkDLError, WorkerLostError
from sparkdl.transport.log_lines import LINES_OF_ALL, LogLines
from sparkdl.transport.messages import Interval

MOST_INTERVALS = 200_000  # maximum number of intervals that are kept
COUNTED = "exchanges", "retries", "duplicates", "refused", "superseded", "not_finite", "lost", "returned"


class RunState:
    """The state that all parts of a coordinator share.

    Args:
        lock: lock of the run's aggregation.

    Attributes:
        changed: condition that guards the coordinator and its parts.
        clock: function that returns the seconds of a monotonic clock.
        generation: number of the current start of the worker group.
        closed: True if the run is over.
        failure: error that ends the current generation.
        log: messages of workers and of the endpoint for the driver to log.
        counters: numbers of events of the run, by name.
        intervals: intervals of traced batches, each with its worker and attempt, on the attempt's clock.
        ahead: seconds by which this process's clock is ahead of an attempt's, by worker and attempt.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.changed = Condition(lock)
        self.clock: Callable[[], float] = time.monotonic
        self.generation = 1
        self.closed = False
        self.failure: SparkDLError | None = None
        self.log = LogLines(LINES_OF_ALL, "the driver takes from all workers together")
        self.counters = dict.fromkeys(COUNTED, 0)
        self.intervals: deque[tuple[tuple[int, int], Interval]] = deque(maxlen=MOST_INTERVALS)
        self.ahead: dict[tuple[int, int], float] = {}

    def check_open(self, generation: int) -> None:
        """Refuse a request of an old generation, or of a run that is over.

        Raises:
            RefusedError: the generation is old, or the run is over.
        """
        if self.closed:
            raise RefusedError(410, "The run is over.")
        if generation != self.generation:
            raise RefusedError(409, f"Generation {generation} is over; the current one is {self.generation}.")

    def is_over(self, generation: int) -> bool:
        """Return True if a generation or the run has ended."""
        return self.closed or generation != self.generation

    def fail(self, generation: int, error: SparkDLError) -> None:
        """Record the first error of a generation, which ends it. Another kind replaces a WorkerLostError."""
        with self.changed:
            lost = isinstance(self.failure, WorkerLostError) and not isinstance(error, WorkerLostError)
            if generation == self.generation and (self.failure is None or lost):
                self.failure = error
                self.changed.notify_all()

    def refuse_rows(self, message: str) -> NoReturn:
        """Refuse a request and fail the run, because its rows have changed, or because it has none.

        Raises:
            RefusedError: always.
        """
        self.fail(self.generation, DataError(message))
        raise RefusedError(422, message)

    def tell(self, level: int, message: str) -> None:
        """Add a message of the endpoint to the log of the driver."""
        self.log.insist({"name": "coordinator", "level": level, "message": message})

    def warn(self, message: str) -> None:
        """Add a warning of the endpoint to the log of the driver."""
        self.tell(logging.WARNING, message)

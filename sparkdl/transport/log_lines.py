"""Log lines of workers on their way to the driver: each names its worker, and their number is bounded.

A worker that logs a line per batch must not fill the memory of the endpoint, or bury what the driver logs. So
each worker sends a limited number of lines per minute, and the driver takes a limited number from all workers
together. A line states how many were left out, for warnings and for other lines.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from sparkdl.transport.messages import LogEntry

PERIOD_SECONDS = 60.0
# Maximum number of lines per period at WARNING or above. Lines below have a limit of their own, of the same
# size, so that they leave room for warnings.
LINES_OF_WORKER = 100
LINES_OF_ALL = 1000
MESSAGE_CHARACTERS = 4000  # maximum length of a message


class LogLines:
    """The log lines that wait for the driver.

    Lines beyond the maximum of a period are left out, unless ``insist`` adds them. If more than twice the
    maximum wait, the oldest are left out. The caller has to hold a lock.

    Args:
        most: maximum number of lines per period at WARNING or above; the same maximum applies separately to
            lines below.
        who: the beginning of the sentence that states this limit, such as "a worker sends".
        clock: a function that returns the seconds of a monotonic clock.
    """

    def __init__(self, most: int, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.who, self.clock = most, who, clock
        self._lines: deque[LogEntry] = deque()
        self._began = clock()
        # Numbers of lines, by whether they are at WARNING or above.
        self._added, self._left_out, self._stated = Counter[bool](), Counter[bool](), Counter[bool]()
        self._due = False  # whether the next lines that are taken state what was left out

    def __len__(self) -> int:
        return len(self._lines) + (len(self._left_out) if self._due else 0)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._lines)

    def add(self, entry: LogEntry) -> None:
        """Add a line, unless the period has its maximum number of them."""
        self._renew()
        severe = _is_severe(entry)
        if self._added[severe] >= self.most:
            self._left_out[severe] += 1
            return
        self._added[severe] += 1
        self.insist(entry)

    def insist(self, entry: LogEntry) -> None:
        """Add a line regardless of the period's limit."""
        self._lines.append(entry)
        self._drop_oldest()

    def take(self, size: float = inf) -> list[LogEntry]:
        """Remove and return the oldest lines; at least one, if there is one.

        Once a period has ended and no other lines wait, the last ones state how many were left out.

        Args:
            size: maximum number of characters of these lines as JSON.
        """
        self._renew()
        self._stated = Counter()
        taken: list[LogEntry] = []
        while self._lines:
            size -= len(json.dumps(self._lines[0]))
            if size < 0 and taken:
                return taken
            taken.append(self._lines.popleft())
        if self._due:
            self._stated, self._left_out, self._due = self._left_out, Counter(), False
            taken += [self._statement(*counted) for counted in sorted(self._stated.items())]
        return taken

    def put_back(self, taken: list[LogEntry]) -> None:
        """Put back the lines that were taken last. If there is no room for all, the oldest are left out."""
        self._due = self._due or bool(self._stated)
        self._left_out += self._stated
        self._lines.extendleft(reversed(taken[: len(taken) - len(self._stated)]))
        self._stated = Counter()
        self._drop_oldest()

    def end_period(self) -> None:
        """Begin a new period."""
        self._began, self._added = self.clock(), Counter()
        self._due = bool(self._left_out)

    def _renew(self) -> None:
        if self.clock() - self._began >= PERIOD_SECONDS:
            self.end_period()

    def _drop_oldest(self) -> None:
        while len(self._lines) > 2 * self.most:
            self._left_out[_is_severe(self._lines.popleft())] += 1

    def _statement(self, severe: bool, count: int) -> LogEntry:
        """Return the line that states how many lines were left out."""
        which = "at WARNING or above" if severe else "below WARNING"
        return {
            "name": __name__,
            "level": logging.WARNING if severe else logging.INFO,
            "message": f"Left out {count:,} log line{'' if count == 1 else 's'} {which}: {self.who} at most "
            f"{self.most:,} of them per minute.",
        }


def _is_severe(entry: LogEntry) -> bool:
    return entry["level"] >= logging.WARNING


class LogBuffer(logging.Handler):
    """A handler that keeps log records until a heartbeat takes them to the driver.

    Attributes:
        lines: the records, as plain values.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines = LogLines(LINES_OF_WORKER, "a worker sends")

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record. The handler's lock is held."""
        message = record.getMessage()[:MESSAGE_CHARACTERS]
        self.lines.add({"name": record.name, "level": record.levelno, "message": message})

    def take(self, size: int) -> list[LogEntry]:
        """Remove and return the oldest records, of at most ``size`` characters as JSON."""
        with _held(self):
            return self.lines.take(size)

    def put_back(self, taken: list[LogEntry]) -> None:
        """Put back the records that were taken last."""
        with _held(self):
            self.lines.put_back(taken)

    def end(self) -> None:
        """Let the next records that are taken state how many were left out."""
        with _held(self):
            self.lines.end_period()


@contextmanager
def _held(handler: logging.Handler) -> Iterator[None]:
    """Hold a handler's lock in a ``with`` block."""
    handler.acquire()
    try:
        yield
    finally:
        handler.release()


def named(worker: int, message: str) -> str:
    """Return a worker's message, preceded by the worker's name unless it begins with that name."""
    name = f"worker {worker}"
    return message if re.match(rf"{name}\b", message, re.IGNORECASE) else f"{name}: {message}"

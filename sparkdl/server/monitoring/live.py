"""The base class of the records that live pages show.

A record has a state and events. The driver's threads write it. The threads of the page read it, wait until it
changes, and add the viewers' requests to stop. A reader's first read returns all values. Later reads return
only the values that are new since the reader's *cursor*.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from math import isfinite
from typing import Any, Literal, NamedTuple, TypedDict

MOST_EVENTS = 300  # maximum number of events that are kept
TICK_SECONDS = 1.0  # least time between two samples of the workers, and between two messages to a browser

State = Literal["starting", "training", "running", "finished", "stopped", "failed", "continued"]
StopRequest = Literal["now", "epoch"]
ENDED = "finished", "stopped", "failed", "continued"


def no_event(text: str, level: str) -> None:
    """Record no event."""


class Event(TypedDict):
    """An event of a run.

    Attributes:
        at: seconds since the record began.
        level: a level of ``logging``, in lower case.
        text: one sentence.
    """

    at: float
    level: str
    text: str


class Cursor(NamedTuple):
    """A reader's position in a record.

    Attributes:
        thinned: the number of times that every second point of the curves within epochs was dropped; a
            change invalidates the cursor.
        epochs: the number of epochs read.
        points: the number of points read of the curves within epochs.
        events: the number of events read, including those that were dropped.
    """

    thinned: int = -1
    epochs: int = 0
    points: int = 0
    events: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor with this text; if the text is not a cursor, the initial cursor."""
        parts = text.split(".")
        if len(parts) != len(cls._fields) or not all(part.isdecimal() and len(part) < 16 for part in parts):
            return cls()
        return cls(*map(int, parts))


class LiveRecord(ABC):
    """Base class of the records that live pages show.

    Args:
        state: the first state.

    Attributes:
        page: the kind of its page: "run" or "overview".
        stops: the words that follow "Training stops" in a message if a viewer requests "epoch", such as
            "after this epoch"; empty: viewers cannot stop the training.
        stop_request: "now" or "epoch", once a viewer of the page has requested that training stop.
        version: a number that grows with each change that readers should see.
    """

    page = "run"
    stops = "after this epoch"

    def __init__(self, state: State) -> None:
        self.stop_request: StopRequest | None = None
        self.version = 0
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._state = state
        self._reason = ""
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._num_events = 0

    @abstractmethod
    def changes(self, cursor: Cursor) -> tuple[dict[str, object], Cursor]:
        """Return the values that are new since a cursor, for JSON, and the next cursor.

        The values have ``whole`` set if the reader has to forget what it has read before.
        """

    def add_event(self, text: str, level: str) -> None:
        """Record an event.

        Args:
            text: one sentence.
            level: a level of ``logging``, in lower case.
        """
        with self._changed:
            at = round(time.monotonic() - self._began, 1)
            self._events.append({"at": at, "level": level, "text": text[:1000]})
            self._num_events += 1
            self._publish()

    def finish(self, state: State, reason: str = "") -> None:
        """Record the end, and the error that ended it, if any."""
        with self._changed:
            self._state, self._reason = state, reason[:2000]
            self._publish()

    def wait(self, version: int, seconds: float) -> bool:
        """Wait until the record is newer than a version; return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version > version, seconds)

    def wait_for_end(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in ENDED, seconds)

    def values(self) -> dict[str, object]:
        """Return all values, for JSON."""
        return self.changes(Cursor())[0]

    def _publish(self) -> None:
        self.version += 1
        self._changed.notify_all()

    def _common(self, cursor: Cursor) -> dict[str, object]:
        """Return the state, and the events since a cursor. The caller holds the lock."""
        new_events = min(self._num_events - cursor.events, len(self._events))
        return {
            "state": self._state,
            "reason": self._reason,
            "stop_request": self.stop_request,
            "seconds": round(time.monotonic() - self._began, 1),
            "events": list(self._events)[len(self._events) - new_events :],
        }


def finite(value: Any) -> Any:
    """Return a number or nested lists of numbers with None for NaN and Inf, which JSON does not have."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return value if isfinite(value) else None

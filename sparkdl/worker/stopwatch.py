"""The time of a worker by activity, and the trace of chosen batches."""

from __future__ import annotations

import threading
import time
from collections import deque

from sparkdl.transport.messages import ACTIVITIES, Interval, Reply

INTERVALS_PER_BEAT = 500  # maximum number of intervals in one heartbeat


class _Activity:
    """A context manager of one activity, which can be entered again and again."""

    __slots__ = ("_activity", "_watch")

    def __init__(self, watch: Stopwatch, activity: str) -> None:
        self._watch, self._activity = watch, activity

    def __enter__(self) -> None:
        self._watch.enter(self._activity)

    def __exit__(self, *exception: object) -> None:
        self._watch.leave()


class Stopwatch:
    """The time of a worker by activity. An inner activity interrupts the outer one, so they never overlap.

    Args:
        traced: the batches to trace, counted from 1 since the worker started.

    Attributes:
        seconds: total seconds by activity.
    """

    def __init__(self, traced: range = range(0)) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._managers = {activity: _Activity(self, activity) for activity in ACTIVITIES}
        self._traced, self._batches = traced, 0
        self._activities: list[str] = []
        self._since = 0.0
        self._intervals: deque[Interval] = deque()
        self._lock = threading.Lock()  # ``divide`` and a heartbeat may remove the same interval
        self._last_exchange: tuple[float, float] | None = None

    def time(self, activity: str) -> _Activity:
        """Return a context manager that counts the time of its block as that of an activity."""
        return self._managers[activity]

    def begin_batch(self) -> None:
        """Begin the next batch. The time until now belongs to the batch before it."""
        if (self._batches in self._traced) != (self._batches + 1 in self._traced):
            self._lap()
        self._batches += 1

    def divide(self, reply: Reply) -> None:
        """Divide the time of the last exchange: the endpoint states how long it waited and merged."""
        if not self._last_exchange:
            return
        start, seconds = self._last_exchange
        wait = min(reply.waited, seconds)
        merge = min(reply.merged, seconds - wait)
        self.seconds["exchange"] -= wait + merge
        self.seconds["wait"] += wait
        self.seconds["merge"] += merge
        with self._lock:
            if self._intervals and self._intervals[-1] == ("exchange", start, seconds):
                self._intervals.pop()
                way = (seconds - wait - merge) / 2  # half before the wait, half after the merge
                parts = ("exchange", way), ("wait", wait), ("merge", merge), ("exchange", way)
                for activity, length in parts:
                    self._intervals.append(Interval(activity, start, length))
                    start += length
        self._last_exchange = None

    @property
    def num_intervals(self) -> int:
        """Number of intervals that have not been taken yet."""
        return len(self._intervals)

    def take_intervals(self) -> list[Interval]:
        """Remove and return the oldest intervals, as many as one heartbeat may carry.

        The thread that sends heartbeats calls this.
        """
        taken: list[Interval] = []
        with self._lock:
            kept = self._batches in self._traced  # the last interval may still be divided
            while len(self._intervals) > kept and len(taken) < INTERVALS_PER_BEAT:
                taken.append(self._intervals.popleft())
        return taken

    def enter(self, activity: str) -> None:
        """Begin an activity, which interrupts the current one."""
        self._lap()
        self._activities.append(activity)

    def leave(self) -> None:
        """End the current activity."""
        self._lap()
        self._activities.pop()

    def _lap(self) -> None:
        now = time.perf_counter()
        if self._activities:
            activity, seconds = self._activities[-1], now - self._since
            self.seconds[activity] += seconds
            if self._batches in self._traced:
                self._intervals.append(Interval(activity, self._since, seconds))
            if activity == "exchange":
                self._last_exchange = self._since, seconds
        self._since = now

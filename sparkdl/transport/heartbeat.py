"""The heartbeat of a worker: a thread that reports its progress and its log to the endpoint."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

from sparkdl.errors import RefusedError, TransportError
from sparkdl.transport.client import BEAT_SECONDS, Connection, HttpExchange
from sparkdl.transport.log_lines import LogBuffer
from sparkdl.transport.messages import ACTIVITIES, Interval, Running

# Maximum size of a heartbeat's log records, as JSON. With its metric states, a heartbeat stays
# below the endpoint's limit (1 MiB).
LOG_BYTES = 256 << 10


def _plain(running: Running | None) -> list[int | str]:
    """Return metric states as values that JSON can hold."""
    return [running.epoch, running.rows, base64.b64encode(running.metrics).decode()] if running else []


class RunningLoop(Protocol):
    """A training loop, as a heartbeat sees it: it reports a position and can be stopped."""

    def position(self) -> tuple[int, int]:
        """Return the epoch in training and the number of its rows used so far."""

    def running(self) -> Running | None:
        """Return metric states that were not returned before, if any, and request the next ones."""

    def seconds(self) -> list[float]:
        """Return the seconds of each of ``messages.ACTIVITIES`` so far."""

    def intervals(self) -> list[Interval]:
        """Return the next intervals of traced batches, as many as one heartbeat may carry."""

    def num_intervals(self) -> int:
        """Return the number of traced intervals that were not returned yet."""

    def stop(self) -> None:
        """Stop soon."""


class Heartbeat:
    """A thread that reports a worker's progress to the endpoint, also during long computations.

    Args:
        exchange: the worker's exchange.
        log: log records to send along.
        fail: reports the worker's failure if the heartbeat fails while the worker trains. Otherwise the
            worker would count as lost, and the reason would remain unknown.
    """

    def __init__(self, exchange: HttpExchange, log: LogBuffer, fail: Callable[[Exception], object]) -> None:
        self._exchange, self._log, self._fail = exchange, log, fail
        self._loop: RunningLoop | None = None
        self._connection = Connection(exchange.endpoint, retries=0)
        self._done = threading.Event()
        self._intervals: list[Interval] = []  # taken from the loop and not delivered yet
        self._thread = threading.Thread(target=self._run, name="sparkdl-heartbeat", daemon=True)
        # Seconds by which the endpoint's clock is ahead, as measured in the shortest round trip so far; and
        # the seconds of that round trip.
        self._ahead, self._shortest = 0.0, inf

    def follow(self, loop: RunningLoop) -> None:
        """Report the progress of this loop from now on, and stop it when the endpoint's reply says so."""
        self._loop = loop

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._connection.retries = 1  # no later heartbeat can resend these records
        self._done.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            self._beat_on()
        except Exception as error:  # noqa: BLE001 - otherwise the thread would end silently
            if not self._done.is_set():
                self._fail(error)

    def _beat_on(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            if not self._beat():
                return
        self._log.end()
        left = self._left() + 1
        while self._left() < left:
            left = self._left()
            if not self._beat() or not self._left():
                return

    def _left(self) -> int:
        """Return the number of log records and intervals to deliver."""
        return len(self._log.lines) + len(self._intervals) + (self._loop.num_intervals() if self._loop else 0)

    def _beat(self) -> bool:
        """Send a heartbeat; return True if more may follow.

        Log records and intervals may arrive twice: they are sent again if a heartbeat gets no response
        or is refused.
        """
        epoch, rows = self._loop.position() if self._loop else (0, 0)
        running = self._loop.running() if self._loop else None
        log = self._log.take(LOG_BYTES)
        if self._loop and not self._intervals:
            self._intervals = self._loop.intervals()
        began = time.perf_counter()
        try:
            _, answer = self._connection.call(
                "/v1/heartbeat",
                **self._exchange.identity,
                epoch=epoch,
                rows=rows,
                retries=self._exchange.retried,
                log=log,
                running=_plain(running),
                seconds=self._loop.seconds() if self._loop else [],
                intervals=[
                    (ACTIVITIES.index(each.activity), each.start, each.seconds) for each in self._intervals
                ],
                ahead=self._ahead,
            )
        except TransportError:
            self._log.put_back(log)
            return True  # If the outage lasts, the exchange's own retries report it.
        except RefusedError as error:
            self._log.put_back(log)
            # An old attempt, or a run that is over: the loop learns this at its next exchange.
            return error.status not in (409, 410)
        self._intervals = []
        self._set_clock(began, time.perf_counter(), answer["clock"])
        if answer["stop"] and self._loop:
            self._loop.stop()
        return True

    def _set_clock(self, began: float, ended: float, clock: float) -> None:
        """Compare this process's clock with the endpoint's, which was read between these two times."""
        if ended - began < self._shortest:
            self._shortest = ended - began
            self._ahead = clock - (began + ended) / 2

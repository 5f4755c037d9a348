"""Coordination of a worker group: membership, failures and exchanges, for any kind of run."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.errors import ClusterError, RefusedError, SparkDLError, WireError
from sparkdl.process.reasons import reason_of
from sparkdl.server.aggregation import Aggregation, Read
from sparkdl.server.membership import Membership
from sparkdl.server.run_state import RunState
from sparkdl.server.state import GroupSpec, Member
from sparkdl.transport.arrivals import ArrivalError
from sparkdl.transport.exchange import Begin, Notes
from sparkdl.transport.log_lines import LogLines, named
from sparkdl.transport.messages import Interval, Kind, LogEntry, Reply, Running, Sections, Update

Summary = dict[str, int | dict[int, int]]  # the counts of a run, by name
# Kinds of update that wait for room in ``Aggregation.board``: they are frequent, and each reply
# takes memory of its own.
BOARDING = Kind.DELTA, Kind.CENTER


class GroupCoordinator(ABC):
    """Coordinator of the requests common to all kinds of run. Many threads call it. It knows nothing of HTTP.

    Args:
        shape: settings of the worker group.
        aggregation: the way updates are merged.

    Attributes:
        state: state shared by the parts of the coordinator.
        membership: the workers that take part.
        restarts: number of restarts of the worker group after a worker was lost; the driver counts them.
    """

    restarts = 0

    def __init__(self, shape: GroupSpec, aggregation: Aggregation) -> None:
        self.shape, self.aggregation = shape, aggregation
        self.state = RunState(aggregation.lock)
        self.membership = Membership(self.state, shape)
        aggregation.generation = self.state.generation

    @property
    def changed(self) -> threading.Condition:
        """The condition that guards the coordinator."""
        return self.state.changed

    @property
    def generation(self) -> int:
        """The number of the current start of the worker group."""
        return self.state.generation

    @property
    def closed(self) -> bool:
        """True if the run is over."""
        return self.state.closed

    @property
    def failure(self) -> SparkDLError | None:
        """The error that ends the current generation."""
        return self.state.failure

    @property
    def log(self) -> LogLines:
        """Messages of workers and of the endpoint for the driver to log."""
        return self.state.log

    def take_log(self, *, last: bool = False) -> list[LogEntry]:
        """Remove and return the messages for the driver to log.

        Args:
            last: whether to state now how many messages were left out, as no more are expected soon.
        """
        with self.changed:
            if last:
                self.log.end_period()
            return self.log.take()

    @property
    def staleness(self) -> Sequence[int]:
        """The number of merged updates with each staleness; the last entry also counts all larger values."""
        return self.aggregation.staleness

    @property
    def latest_staleness(self) -> Mapping[int, int]:
        """The staleness of each worker's last merged update, if there are no rounds."""
        return self.aggregation.latest_staleness

    @property
    def intervals(self) -> Sequence[tuple[int, Interval]]:
        """Intervals of traced batches, each with its worker, on the clock of this process."""
        ahead = self.state.ahead
        return [
            (who[0], interval._replace(start=interval.start + ahead[who]))
            for who, interval in tuple(self.state.intervals)
        ]

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of events of the run, by name."""
        return self.state.counters

    @property
    def members(self) -> dict[int, Member]:
        """The current attempt of each worker."""
        return self.membership.members

    @property
    def lost(self) -> set[int]:
        """The lost workers without which the run continues."""
        return self.aggregation.lost

    @property
    def snapshot(self) -> object:
        """The point from which the run is restarted, as named in messages."""
        return "the beginning"

    @property
    def restart_point(self) -> str:
        """The point that the workers continue from after a restart, in words."""
        if not self.aggregation.has_rounds:
            return "after each worker's last counted update"
        return f"from the snapshot at {self.snapshot}"

    @property
    def broken(self) -> bool:
        """True if a merge failed half-way, so that neither the center nor the ledger can be used."""
        return self.aggregation.broken

    def join(self, worker: int, generation: int, attempt: int, host: str, pid: int) -> bool:
        """Add a worker's attempt to the group; return False while an older attempt is active.

        Spark starts a second attempt while a slow one still runs (speculation), or after a failed one.

        Raises:
            RefusedError: the generation or the run is over, the worker is unknown, a newer attempt has
                joined, this attempt was lost, or the worker group has to restart.
        """
        with self.changed:
            older = self.membership.older_attempt(worker, generation, attempt)
            if older is not None:
                if self.membership.is_at_work(older):
                    return False
                self.state.counters["superseded"] += 1
                self.aggregation.leave(worker)
                self._lose_replica(worker, older)
            self.membership.add(worker, attempt, host, pid)
            self.aggregation.attempts[worker] = attempt
            self.membership.hear(worker, generation, attempt)
            self.changed.notify_all()
            return True

    def _lose_replica(self, worker: int, member: Member) -> None:
        """With rounds, count a restarted worker as lost; refuse it if the group has to restart."""
        if not self.membership.agreed or not self.aggregation.has_rounds or worker in self.lost:
            return
        self.lose(worker, f"Worker {worker} on {member.host} (process {member.pid}) was restarted.")
        if worker not in self.lost:
            raise RefusedError(409, f"Worker {worker} cannot rejoin; the run restarts from its snapshot.")

    @abstractmethod
    def lose(self, worker: int, reason: str) -> None:
        """Continue without a worker, or end the generation."""

    @abstractmethod
    def ready(
        self,
        worker: int,
        generation: int,
        attempt: int,
        rows: int,
        validation_rows: int,
        notes: Notes,
        fingerprint: Fingerprint = NOTHING,
    ) -> Begin | None:
        """Record a worker's rows, and wait until it may begin; return its starting point.

        None: the wait timed out, and the worker should repeat the request.
        """

    def heartbeat(
        self,
        worker: int,
        generation: int,
        attempt: int,
        epoch: int,
        rows: int,
        retries: int,
        log: list[LogEntry],
    ) -> dict[str, Any]:
        """Record a worker's progress, retries and log entries; reply with the stop flag and the clock."""
        with self.changed:
            self.membership.hear(worker, generation, attempt)
            self.membership.note_progress(worker, epoch=epoch, rows=rows, retries=retries)
            for entry in log:
                entry["message"] = named(worker, entry["message"])
                self.log.add(entry)
            return {"stop": self._is_stopping(), "clock": time.perf_counter()}

    def _is_stopping(self) -> bool:
        """Return True if workers should end."""
        return False

    def note_times(
        self,
        worker: int,
        generation: int,
        attempt: int,
        *,
        seconds: Sequence[float],
        intervals: Sequence[Interval],
        ahead: float,
    ) -> None:
        """Record the times of a worker.

        Args:
            worker: the worker's number.
            generation: start of the worker group that it belongs to.
            attempt: the worker's attempt.
            seconds: the seconds of each of ``messages.ACTIVITIES`` so far.
            intervals: new intervals of traced batches, on the worker's clock.
            ahead: seconds by which this process's clock is ahead of the worker's, as estimated by the worker.
        """
        with self.changed:
            member = self.membership.hear(worker, generation, attempt)
            member.seconds = list(seconds) or member.seconds
            self.state.ahead[worker, attempt] = ahead
            self.state.intervals.extend(((worker, attempt), interval) for interval in intervals)

    def note_running(self, worker: int, generation: int, attempt: int, running: Running) -> None:
        """Record a worker's metric states within an epoch.

        Raises:
            RefusedError: the worker is not a member, or the states belong to another model.
        """
        with self.changed:
            member = self.membership.hear(worker, generation, attempt)
            if len(running.metrics) not in (0, self.shape.metrics):
                size = len(running.metrics)
                raise RefusedError(413, f"A heartbeat cannot have {size} bytes of metric states.")
            self.membership.note_running(member, running)

    def fail_of(self, worker: int, generation: int, attempt: int, error: SparkDLError) -> None:
        """End the generation with the failure of a task, unless its attempt was lost or replaced.

        Args:
            worker: its worker, or the partition that it deals.
            generation: start of the worker group that it belongs to.
            attempt: the worker's attempt; -1: the task deals rows and belongs to no worker.
            error: the failure.

        Raises:
            RefusedError: the generation or the run is over, the attempt was lost, or another one is active.
        """
        with self.changed:
            self.membership.check_failed(worker, generation, attempt)
            self.fail(generation, error)

    def break_down(self, error: BaseException) -> None:
        """Fail the run for an error of the endpoint itself: an update may have been counted in part."""
        failure = ClusterError(
            f"The parameter endpoint failed: {reason_of(error)}. The run cannot continue. Check the disk, "
            "the memory and the number of open files of its process."
        )
        failure.cause = error
        self.fail(self.generation, failure)

    def fail(self, generation: int, error: SparkDLError) -> None:
        """Record the error that ends a generation. The driver raises it or restarts the worker group."""
        self.state.fail(generation, error)

    def admit(self, update: Update, lengths: Sections) -> None:
        """Check an update by its header alone, before any of its sections are read.

        Raises:
            RefusedError: the run, generation, attempt, layout or length of a section does not match, or the
                update cannot be merged now.
        """
        try:
            self._check_header(update, lengths)
        except RefusedError:
            with self.changed:
                self.state.counters["refused"] += 1
            raise

    @abstractmethod
    def _check_header(self, update: Update, lengths: Sections) -> None:
        """Check an update's header."""

    def exchange(self, update: Update, read: Read) -> Reply:
        """Reply to an update of any kind, whose sections ``read`` returns.

        The caller calls ``sent`` after it has sent the reply. If this method raises, the caller does not.
        """
        if update.kind in BOARDING:
            self.aggregation.board(update)
        self.membership.asking.add(update.worker)
        try:
            return self._answer(update, read)
        except BaseException as error:
            self.sent(update)
            if not isinstance(error, RefusedError | WireError | ArrivalError):
                self.break_down(error)
            raise
        finally:
            self.membership.asking.discard(update.worker)

    @abstractmethod
    def _answer(self, update: Update, read: Read) -> Reply:
        """Return the reply to an admitted update."""

    def sent(self, update: Update, *, delivered: bool = True) -> None:
        """Record the end of a reply, which was sent if ``delivered``."""
        if update.kind in BOARDING:
            self.aggregation.sent()

    def restart(self) -> int:
        """Fence off the current generation and return the number of the next one."""
        with self.changed:
            self.state.generation += 1
            for worker in tuple(self.members):
                self.aggregation.leave(worker)
            self.membership.clear()
            self.lost.clear()
            self.aggregation.generation = self.generation
            self.aggregation.attempts.clear()
            self._restart()
            self.state.failure = self.failure if self.broken else None
            self.aggregation.wake()
            self.changed.notify_all()
            return self.generation

    @abstractmethod
    def _restart(self) -> None:
        """Restore the state that a new generation begins with."""

    def close(self) -> None:
        """Refuse every request from now on, including those that wait."""
        with self.changed:
            self.state.closed = True
            self.aggregation.generation = -1
            self.changed.notify_all()
        self.aggregation.wake()

    def missing(self) -> list[int]:
        """Return the workers that have not joined."""
        with self.changed:
            return self.membership.missing()

    def summary(self) -> Summary:
        """Return the counts of the run, and the number of dropped updates by worker."""
        with self.changed:
            dropped = self.aggregation.dropped
            return {
                "version": self.aggregation.version,
                "late_dropped": dropped.total() + self.aggregation.late,
                "late_merged": self.aggregation.merged_late,
                "dropped": dict(dropped),
                "slices": self.aggregation.slices,
                **self.counters,
            }

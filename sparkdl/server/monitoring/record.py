"""The record of a run for observers: progress, results, workers and events, of bounded size.

A reader gets all values once. Later it gets only the epochs, points and events since its cursor, and the
present state. The table of the workers is computed about once per second, regardless of the number of
readers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.server.monitoring.live import TICK_SECONDS, Cursor, LiveRecord, finite
from sparkdl.server.state import Member

MOST_POINTS = 1000  # maximum number of epochs, and of points within epochs, that are kept
SNAPSHOT_SECONDS = 60.0  # minimum time between two events about snapshots within an epoch
# The counts of a summary that the page shows, if they are not 0.
COUNTS = (
    "exchanges",
    "retries",
    "late_dropped",
    "late_merged",
    "not_finite",
    "lost",
    "returned",
)
SMOOTHING = 0.5  # weight of the newest sample in a worker's speed


class Run(Protocol):
    """A run, as its record sees it: a coordinator."""

    @property
    def members(self) -> Mapping[int, Member]:
        """The current attempt of each worker."""

    @property
    def snapshot(self) -> object:
        """The point from which the run is restored, as named in messages."""

    @property
    def plans(self) -> Sequence[BatchPlan]:
        """The plan of each worker, once all have reported their number of rows."""

    @property
    def staleness(self) -> Sequence[int]:
        """The number of merged updates with each staleness; the last entry also counts all larger values."""

    def summary(self) -> Mapping[str, Any]:
        """Return counts of the run, and the number of dropped updates by worker."""

    @property
    def latest_staleness(self) -> Mapping[int, int]:
        """The staleness of each worker's last merged update; empty in rounds."""


class ByteCounts(Protocol):
    """Counts of the bytes of each worker's updates and replies."""

    def of_worker(self, worker: int) -> tuple[int, int]:
        """Return the bytes received from a worker and sent to it."""


class Progress(TypedDict):
    """The progress of an epoch: its index, its rows so far, all its rows, and its seconds."""

    epoch: int
    rows: int
    total: int
    seconds: NotRequired[float]
    snapshot: NotRequired[str]
    waiting: NotRequired[str]


class WorkerSample(TypedDict):
    """A worker at the newest sample.

    Attributes:
        rows: its training rows per epoch; ``seen`` are those it has trained on in ``epoch``, counted from 1.
        speed: training rows per second.
        received: bytes received from the worker; ``sent`` are those sent to it.
        heard: seconds since its last message.
        times: seconds of each of ``messages.ACTIVITIES``.
        staleness: that of its last merged update; None in rounds.
        dropped: number of its updates that were dropped.
    """

    worker: int
    host: str
    device: str
    rows: int
    epoch: int
    seen: int
    speed: float
    received: int
    sent: int
    heard: float
    retries: int
    lost: bool
    times: list[float]
    staleness: int | None
    dropped: int


Point = dict[str, object]  # the results of an epoch or within one, and its place


class Series:
    """Points in order. When there are more than ``MOST_POINTS``, every second point is dropped."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thinned = 0
        self._seen = 0

    def add(self, point: Point) -> None:
        """Add a point, or skip it: a series that was thinned out n times keeps every 2**n-th point."""
        if self._seen % (1 << self.thinned) == 0:
            self.points.append(point)
        self._seen += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.thinned += 1


class RunRecord(LiveRecord):
    """The record of one run.

    Args:
        about: facts about the run that do not change, by name.

    """

    def __init__(self, about: Mapping[str, object]) -> None:
        super().__init__("starting")
        started = datetime.now(UTC)  # noqa: TID251 - shown on the page
        self.about = {**about, "started": started.isoformat(timespec="seconds")}
        self._epochs, self._points = Series(), Series()
        self._progress: Progress = {"epoch": 0, "rows": 0, "total": 0}
        self._epoch_began = self._began
        self._first_epoch = int(str(about.get("first_epoch", 0)))
        self._ended = self._first_epoch - 1  # the last epoch that has ended
        self._trained = 0.0  # seconds of the epochs that have ended
        self._settled = False  # whether the workers have left
        self._ticked = 0.0
        self._workers: list[WorkerSample] = []
        self._staleness: list[int] = []
        self._counts: dict[str, int] = {}
        self._earlier_counts: dict[str, int] = {}  # those of the run that this one continues
        self._positions: dict[int, tuple[float, int]] = {}
        self._speeds: dict[int, float] = {}
        self._late: Mapping[int, int] = {}  # updates dropped until the last event about them, by worker
        self._late_merged = 0  # the same for late updates that were merged
        self._snapshot = ""  # the snapshot of the last sample
        self._snapshot_told = -inf  # time of the last event about a snapshot

    # The driver's thread.

    def begin_epoch(self, epoch: int, total: int) -> None:
        """Begin an epoch of ``total`` rows (0 if not known yet)."""
        with self._changed:
            self._state = "training" if total else self._state
            self._progress = {"epoch": epoch, "rows": 0, "total": total}
            self._epoch_began = time.monotonic()
            self._publish()

    def wait_for_workers(self, reason: str) -> None:
        """Record why no worker trains yet, at most once per second."""
        now = time.monotonic()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            with self._changed:
                self._progress["waiting"] = reason
                self._publish()

    def advance(
        self, rows: int, total: int, results: Mapping[str, object], run: Run, sizes: ByteCounts
    ) -> None:
        """Record the progress of the epoch, at most once per second."""
        now = time.monotonic()
        if now - self._ticked < TICK_SECONDS:
            return
        self._ticked = now
        with self._changed:
            self._progress |= {"rows": rows, "total": total, "seconds": now - self._epoch_began}
            if results and total:
                at = round(self._progress["epoch"] + rows / total, 4)
                self._points.add({"at": at, "logs": _plain(results)})
            self._sample(run, sizes)
            self._publish()

    def end_epoch(
        self, epoch: int, rows: int, logs: Mapping[str, object], run: Run, sizes: ByteCounts
    ) -> None:
        """Record the results of an epoch."""
        with self._changed:
            seconds, self._state = time.monotonic() - self._epoch_began, "training"
            self._ended, self._trained = epoch, self._trained + seconds
            self._epochs.add({"epoch": epoch + 1, "seconds": seconds, "rows": rows, "logs": _plain(logs)})
            self._progress |= {"rows": rows, "seconds": seconds}
            self._sample(run, sizes)
            self._tell_of_late_updates()
            self._publish()

    def settle(self, run: Run, sizes: ByteCounts) -> None:
        """Record the last heartbeat of each worker, once the workers have left or the run has failed.

        The speed of a worker is then its mean over the run. Rows of an epoch that the run did not begin are
        left out: asynchronous workers may train them while the driver stops the run.
        """
        with self._changed:
            if self._progress["epoch"] > self._ended:  # the run ends within an epoch
                self._trained += time.monotonic() - self._epoch_began
            self._settled = True
            self._sample(run, sizes)
            self._tell_of_late_updates()
            self._publish()

    def resume(self, **about: object) -> None:
        """Record that another run continues the fit, with new workers and these facts."""
        with self._changed:
            self.about |= about
            self._settled, self._state, self._reason = False, "starting", ""
            self._positions, self._late, self._earlier_counts = {}, {}, self._counts
            self._publish()

    def _sample(self, run: Run, sizes: ByteCounts) -> None:
        self._staleness = list(run.staleness)
        counts = run.summary()
        earlier = self._earlier_counts
        counted = {name: counts.get(name, 0) + earlier.get(name, 0) for name in COUNTS}
        self._counts = {name: count for name, count in counted.items() if count}
        self._tell_of_snapshot(run.snapshot)
        dropped = {int(worker): count for worker, count in counts.get("dropped", {}).items()}
        self._workers = [
            self._worker(worker, member, sizes.of_worker(worker), run, dropped.get(worker, 0))
            for worker, member in sorted(run.members.items())
        ]

    def _tell_of_snapshot(self, snapshot: object) -> None:
        """Record a new snapshot, and an event about it if it was made within an epoch."""
        before, self._snapshot = self._snapshot, str(snapshot)
        self._progress["snapshot"] = self._snapshot
        within = bool(before) and getattr(snapshot, "place", 0) > 0  # rounds since its epoch began
        now = time.monotonic()
        if within and self._snapshot != before and now - self._snapshot_told >= SNAPSHOT_SECONDS:
            self._snapshot_told = now
            self.add_event(f"Snapshot at {self._snapshot}.", "info")

    def _tell_of_late_updates(self) -> None:
        """Record an event about the late updates of an epoch, if there were any."""
        before, self._late = self._late, {each["worker"]: each["dropped"] for each in self._workers}
        new = {worker: count - before.get(worker, 0) for worker, count in self._late.items()}
        merged = self._counts.get("late_merged", 0) - self._late_merged
        self._late_merged += merged
        epoch = self._progress["epoch"] + 1
        if any(new.values()):
            workers = ", ".join(f"worker {worker}: {count}" for worker, count in new.items() if count)
            self.add_event(f"Late updates of epoch {epoch} were not merged ({workers}).", "warning")
        if merged:
            self.add_event(f"Late updates of epoch {epoch} were merged in later rounds ({merged}).", "info")

    def _worker(
        self, worker: int, member: Member, sizes: tuple[int, int], run: Run, dropped: int
    ) -> WorkerSample:
        rows = run.plans[worker].epoch_rows if run.plans else 0
        epoch, seen = member.epoch, member.seen_rows
        if self._settled and epoch > self._ended == self._progress["epoch"]:
            epoch, seen = self._ended, rows
        return {
            "worker": worker,
            "host": member.host,
            "device": ", ".join(member.notes.get("gpus", ())) or "CPU",
            "rows": rows,
            "epoch": epoch + 1,
            "seen": seen,
            "speed": self._mean(epoch, seen, rows) if self._settled else self._speed(worker, member, rows),
            "received": sizes[0],
            "sent": sizes[1],
            "heard": round(max(0.0, time.monotonic() - member.heard), 1),
            "retries": member.retries,
            "lost": member.lost,
            "times": member.seconds,
            "staleness": run.latest_staleness.get(worker),
            "dropped": dropped,
        }

    def _speed(self, worker: int, member: Member, rows: int) -> float:
        """Return the smoothed training rows per second of a worker."""
        position = member.epoch * rows + member.seen_rows
        then, before = self._positions.get(worker, (member.heard, position))
        seconds = member.heard - then
        if worker not in self._positions or position < before:
            self._positions[worker] = member.heard, position
        elif seconds > max(0.0, TICK_SECONDS / 2):  # the end of an epoch may follow a sample at once
            newest = (position - before) / seconds
            known = self._speeds.get(worker, newest)
            self._speeds[worker] = known + SMOOTHING * (newest - known)
            self._positions[worker] = member.heard, position
        return round(self._speeds.get(worker, 0.0), 1)

    def _mean(self, epoch: int, seen: int, rows: int) -> float:
        """Return the mean training rows per second of a worker that has left."""
        trained = (epoch - self._first_epoch) * rows + seen
        return round(trained / self._trained, 1) if self._trained else 0.0

    def changes(self, cursor: Cursor) -> tuple[dict[str, object], Cursor]:
        """Return the values that are new since a cursor, for JSON, and the next cursor."""
        with self._changed:
            thinned = self._epochs.thinned + self._points.thinned
            whole = (
                cursor.thinned != thinned
                or cursor.events > self._num_events
                or cursor.epochs > len(self._epochs.points)
                or cursor.points > len(self._points.points)
            )
            if whole:
                cursor = Cursor(thinned)
            values: dict[str, object] = (
                self._common(cursor)
                | {
                    "whole": whole,
                    "progress": self._progress.copy(),  # it is encoded after the lock is released
                    "workers": self._workers,
                    "staleness": self._staleness,
                    "counts": self._counts,
                    "epochs": self._epochs.points[cursor.epochs :],
                    "points": self._points.points[cursor.points :],
                }
            )
            if whole:
                values["about"] = self.about
            end = Cursor(thinned, len(self._epochs.points), len(self._points.points), self._num_events)
            return values, end

    def workers(self) -> list[WorkerSample]:
        """Return the newest sample of each worker."""
        with self._changed:
            return list(self._workers)


def _plain(results: Mapping[str, object]) -> dict[str, object]:
    """Return results as numbers and lists; None in place of NaN and Inf, which JSON does not have."""
    return {name: finite(np.asarray(value).tolist()) for name, value in results.items()}

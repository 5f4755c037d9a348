"""Snapshots: the points from which a run is restored, made of the reports of all workers.

If updates are merged in rounds, a snapshot within an epoch is made between two rounds, once every present
worker has reported its state. A restart rolls back the rounds after it. Without rounds, a snapshot can be
made at any moment, with each worker's last reported state. A restart then keeps the center and restores only
the workers' states; a driver that resumes from a checkpoint restores the snapshot's center too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from mmap import mmap

from sparkdl.core.vectors import Vector
from sparkdl.server.aggregation import Aggregation
from sparkdl.server.schedule import EpochSchedule
from sparkdl.server.state import CarriedState, EpochReports, RunSpec, Snapshot, in_file, kept
from sparkdl.transport.messages import Flag, Update

Reports = dict[int, EpochReports]  # by epoch


class Snapshots(ABC):
    """Snapshots of a run. The lock of the coordinator guards them.

    Args:
        shape: settings of the run.
        aggregation: the aggregation, which holds the center.
        schedule: progress of the workers.
        carried: state that an earlier run leaves to this one.

    Attributes:
        committed: snapshot that the run is restored from.
        newest: newest snapshot, which may not be committed yet.
    """

    def __init__(
        self, shape: RunSpec, aggregation: Aggregation, schedule: EpochSchedule, carried: CarriedState | None
    ) -> None:
        self.shape, self.aggregation, self.schedule = shape, aggregation, schedule
        states, rule = carried or CarriedState({}, aggregation.state)
        aggregation.state = rule
        self.newest = self.committed = Snapshot(
            epoch=shape.plan.first_epoch,
            parameters=kept(aggregation.parameters),
            statistics=aggregation.statistics,
            version=aggregation.version,
            progress=shape.first_step,
            states=states,
            rule=rule,
        )
        aggregation.reach(self.committed.parameters)

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of an earlier run."""
        self.restore(snapshot)
        self.newest = snapshot
        self.aggregation.restore_ledger(snapshot.ledger)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore center and progress from a snapshot, which becomes the committed one."""
        self.committed = snapshot
        self.aggregation.restore(snapshot.parameters, snapshot.statistics, snapshot.version, snapshot.rule)
        self.schedule.progress, self.aggregation.losses = snapshot.progress, list(snapshot.losses)

    def restore_epoch(self) -> None:
        """Return to the beginning of the epoch under way, if the snapshot is within it."""
        if self.committed.before is not None:
            self.restore(self.committed.before)
            self.newest = self.committed

    def commit(self, snapshot: Snapshot) -> None:
        """Set the snapshot from which the run is restored."""
        self.committed = self.newest = snapshot
        self.aggregation.reach(snapshot.parameters)

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take the weights that a callback set on the driver as the new center."""
        self.aggregation.replace(parameters, statistics)
        self.committed = self.newest = replace(
            self.committed, parameters=parameters, statistics=statistics, version=self.aggregation.version
        )

    def present(self) -> Snapshot:
        """Return the committed snapshot with the current center and progress in it."""
        parameters, statistics, version = self.aggregation.snapshot()
        rule = self.aggregation.state
        center = {"parameters": parameters, "statistics": statistics, "version": version, "rule": rule}
        return replace(self.committed, progress=self.schedule.progress, **center)

    def check_rule(self, update: Update) -> None:
        """Refuse a report with an invalid state of the rule, before the report is counted.

        Raises:
            RefusedError: the bytes after the worker's own state are not a state of the rule.
        """
        if record := update.state[self.shape.whole_state :]:
            self.aggregation.read_rule(record)

    def stopped(self, report: Update) -> Snapshot:
        """Return the committed snapshot with the weights that a stopped replica has reported."""
        snapshot = replace(self.committed, parameters=report.parameters, statistics=report.statistics)
        if self.shape.plan.joint:
            # The state stays in memory: a full disk may be the reason for the end.
            states: dict[int, bytes | mmap] = {report.worker: bytes(report.state)}
            return replace(snapshot, states=states, progress=self.schedule.progress)
        return replace(snapshot, rule=self.aggregation.read_rule(report.state[self.shape.whole_state :]))

    def of_reports(self, epoch: int, report: EpochReports, reports: Reports) -> Snapshot:
        """Return the snapshot of the point at which every worker has reported its state.

        Without rounds, it also holds the last reported state of each lost worker.

        Args:
            epoch: epoch that begins there or is under way.
            report: the reports of all workers for this snapshot.
            reports: the reports on each uncommitted epoch, by epoch.
        """
        parameters, statistics = report.weights or (
            kept(self.aggregation.parameters),
            self.aggregation.statistics,
        )
        return Snapshot(
            epoch=epoch,
            parameters=parameters,
            statistics=statistics,
            version=self.aggregation.version,
            progress=self.schedule.progress,
            states=self._states_before(reports) | report.states,
            rule=self.aggregation.read_rule(report.rule) if report.rule else self.aggregation.state,
        )

    @abstractmethod
    def _states_before(self, reports: Reports) -> dict[int, bytes | mmap]:
        """Return the states to include for workers that sent no report for a snapshot."""

    def states(self, reports: Reports) -> dict[int, bytes | mmap]:
        """Return the last reported state of each worker."""
        states = dict(self.committed.states)
        for _, report in sorted(reports.items()):
            states |= report.states
        return states

    def substitute(self) -> int | None:
        """Return the worker that reports the shared weights if worker 0 is lost, else None."""
        if not self.aggregation.has_replicas or 0 not in self.aggregation.lost:
            return None
        return min(k for k in range(self.shape.num_workers) if k not in self.aggregation.lost)

    def lacks_weights(self, report: EpochReports) -> bool:
        """Return True if worker 0 is lost, and no worker has reported the shared weights yet."""
        return self.substitute() is not None and report.weights is None

    @abstractmethod
    def request(self, reports: Reports, *, ends: bool = False) -> None:
        """Make a snapshot now, or as soon as rounds allow; see ``Coordinator.request_snapshot``."""

    @abstractmethod
    def take_state(self, update: Update, *, current: bool) -> bool:
        """Take the state of a worker within an epoch; return True if this completed a snapshot.

        Args:
            update: message of the worker.
            current: True if the worker has sent no later update.
        """

    @abstractmethod
    def finish(self) -> bool:
        """Make the snapshot under way if all present workers have reported; return True if it was made."""

    def begin(self) -> None:
        """Open the first round after the snapshot, if there are rounds."""

    def end_round(self) -> Flag:
        """Return ``Flag.SEND_STATE`` if the workers should report their state after the round that closes."""
        return Flag.NONE

    def end_update(self, reports: Reports) -> None:
        """Make a snapshot after an update that was merged on its own, if one is due."""

    def is_awaited(self, update: Update) -> bool:
        """Return True if a worker should report its state after this update."""
        return False

    def forget_state(self, worker: int) -> None:
        """Forget the state that a worker reported within an epoch, once it has ended that epoch."""


class RoundSnapshots(Snapshots):
    """Snapshots between two rounds.

    While a snapshot is made, the open round waits for all workers, and no worker sends its update
    before it has reported its state. So no round closes until all have reported.

    Attributes:
        wanted: True if a snapshot should be made as soon as rounds allow.
        gathering: reports of workers for the snapshot under way.
    """

    wanted = False
    gathering: EpochReports | None = None

    def commit(self, snapshot: Snapshot) -> None:
        """Set the snapshot from which the run is restored, and cancel any requested snapshot."""
        super().commit(snapshot)
        self.wanted = False
        if self.schedule.plans:
            self._gather(self.gathering)

    def begin(self) -> None:
        """Open the first round after the snapshot."""
        self.aggregation.begin(self.schedule.plans[0].sequence(self.committed.epoch) + self.committed.place)
        self._gather(None)

    def request(self, reports: Reports, *, ends: bool = False) -> None:
        """Make a snapshot as soon as rounds allow."""
        self.wanted = self.aggregation.whole = bool(self.schedule.plans)

    def end_round(self) -> Flag:
        """Return ``Flag.SEND_STATE`` if the workers should report their state after the round that closes."""
        due = self._is_due(self.aggregation.round)
        self.wanted = self.wanted and not due
        self._gather(EpochReports() if due else None, self.aggregation.round + 1)
        return Flag.SEND_STATE if due else Flag.NONE

    def _is_due(self, sequence: int) -> bool:
        """Return True if a snapshot is due after a round. The end of an epoch has its own snapshot."""
        windows = self.schedule.plans[0].windows
        place = sequence % windows + 1
        return place < windows and (
            self.wanted or any(not place % every for every in self.shape.snapshot_intervals)
        )

    def _gather(self, gathering: EpochReports | None, sequence: int | None = None) -> None:
        """Begin or end a snapshot.

        The round before a snapshot waits for all workers. The round after it stays open until all
        have reported.
        """
        self.gathering = gathering
        sequence = self.aggregation.round if sequence is None else sequence
        self.aggregation.whole = gathering is not None or self._is_due(sequence)

    def take_state(self, update: Update, *, current: bool) -> bool:
        """Take the state of a worker after the round that closed last."""
        if self.gathering is None or update.sequence != self.aggregation.round:
            return False
        self.gathering.take(update, self.shape.whole_state)
        return self.finish()

    def finish(self) -> bool:
        """Make the snapshot once all present workers have reported; return True if it was made.

        If the shared weights are missing, request another snapshot instead.
        """
        report = self.gathering
        if report is None or not self.aggregation.all_of(report.metrics):
            return False
        self._gather(None)
        if self.lacks_weights(report):
            self.request({})
            return False
        self.committed = self.newest = replace(
            self.of_reports(self.committed.epoch, report, {}),
            place=self.aggregation.round % self.schedule.plans[0].windows,
            metrics=report.metrics,
            losses=list(self.aggregation.losses),
            before=self.committed.before or self.committed,
        )
        self.aggregation.reach(self.committed.parameters)
        return True

    def _states_before(self, reports: Reports) -> dict[int, bytes | mmap]:
        return {}


class UpdateSnapshots(Snapshots):
    """Snapshots between two updates, with each worker's last reported state.

    Attributes:
        awaited: workers that still have to report their state for the next snapshot.
        reported: states that workers reported within an epoch, by worker, until they end that epoch.
    """

    def __init__(
        self, shape: RunSpec, aggregation: Aggregation, schedule: EpochSchedule, carried: CarriedState | None
    ) -> None:
        super().__init__(shape, aggregation, schedule, carried)
        self.awaited: set[int] = set()
        self.reported: dict[int, bytes | mmap] = {}

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of an earlier run, and from the states of workers in it."""
        super().resume(snapshot)
        self.reported = dict(snapshot.states)

    def request(self, reports: Reports, *, ends: bool = False) -> None:
        """Make a snapshot now.

        Args:
            reports: reports of the workers, by epoch.
            ends: True if an epoch ends, so that all workers have just reported their state.
        """
        self.aggregation.settle()
        if not ends:
            self.awaited = set(range(self.shape.num_workers))
        self.newest = replace(
            self.committed,
            states=self.states(reports),
            parameters=kept(self.aggregation.parameters),
            statistics=self.aggregation.statistics,
            version=self.aggregation.version,
            progress=self.schedule.progress,
            rule=self.aggregation.state,
            losses=list(self.aggregation.losses),
            ledger=self.aggregation.ledger(),
            reports={epoch: report.without_results() for epoch, report in reports.items()},
        )

    def end_update(self, reports: Reports) -> None:
        """Make a snapshot if the center's version is a multiple of one of ``snapshot_intervals``."""
        if any(not self.aggregation.version % every for every in self.shape.snapshot_intervals):
            self.request(reports)

    def is_awaited(self, update: Update) -> bool:
        """Return True if a worker should report its state. At an epoch's end it does so anyway."""
        if update.worker not in self.awaited:
            return False
        return bool((update.sequence + 1) % self.schedule.plans[0].windows)

    def take_state(self, update: Update, *, current: bool) -> bool:
        """Store the state of a worker, unless it has trained on after it sent the state."""
        if current:
            self.reported[update.worker] = in_file(update.state)
            self.awaited.discard(update.worker)
        return False

    def finish(self) -> bool:
        """Return False. Snapshots are made at once; a state that arrives later goes into the next one."""
        return False

    def forget_state(self, worker: int) -> None:
        """Forget the state that a worker reported within an epoch, once it has ended that epoch."""
        self.reported.pop(worker, None)

    def states(self, reports: Reports) -> dict[int, bytes | mmap]:
        """Return the last reported state of each worker."""
        return super().states(reports) | self.reported

    def _states_before(self, reports: Reports) -> dict[int, bytes | mmap]:
        return self.states(reports)


def snapshots_of(
    shape: RunSpec, aggregation: Aggregation, schedule: EpochSchedule, carried: CarriedState | None
) -> Snapshots:
    """Return the snapshots of a run, with or without rounds."""
    kind = RoundSnapshots if aggregation.has_rounds else UpdateSnapshots
    return kind(shape, aggregation, schedule, carried)

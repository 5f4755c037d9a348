"""The ends of epochs: reports of workers, completion, evaluation, and replies with weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkdl.core.vectors import Vector
from sparkdl.errors import RefusedError
from sparkdl.server.aggregation import Aggregation, limits
from sparkdl.server.run_state import RunState
from sparkdl.server.schedule import EpochSchedule
from sparkdl.server.snapshots import Reports, Snapshots
from sparkdl.server.state import EpochReports, EpochResult, RunSpec, Snapshot
from sparkdl.transport.messages import Answer, Flag, Reply, Update


class Epochs:
    """The epochs that workers have reported and that are not committed yet.

    Args:
        state: state of the run.
        shape: settings of the run.
        schedule: epochs that the workers may train.
        snapshots: snapshots of the run.
        aggregation: the aggregation, which holds the center.

    Attributes:
        reports: reports of the workers, by epoch.
        stopped: reports of workers that were stopped within an epoch.
        evaluation_weights: by epoch, the weights to evaluate, once the driver's callbacks have decided on
            them; None: the snapshot's weights.
        last_losses: a list with the last loss of the newest complete epoch; empty until an epoch is complete.
    """

    def __init__(
        self,
        state: RunState,
        shape: RunSpec,
        schedule: EpochSchedule,
        snapshots: Snapshots,
        aggregation: Aggregation,
    ) -> None:
        self.state, self.shape, self.schedule = state, shape, schedule
        self.snapshots, self.aggregation = snapshots, aggregation
        self.reports: Reports = {}
        self.stopped: dict[int, Update] = {}
        self.evaluation_weights: dict[int, tuple[Vector, Vector] | None] = {}
        self.last_losses: list[float] = []

    def resume(self, reports: Reports) -> None:
        """Continue with the reports of an earlier run."""
        self.reports = {epoch: report.without_results() for epoch, report in reports.items()}
        for epoch, report in self.reports.items():
            if len(report.metrics) == self.shape.num_workers:
                report.snapshot = self.snapshots.of_reports(epoch + 1, report, self.reports)

    def next_epoch(self, worker: int) -> int:
        """Return the first epoch that a worker has not reported and that has not ended without it."""
        epoch = self.snapshots.committed.epoch
        while (report := self.reports.get(epoch)) is not None and (
            worker in report.metrics or report.snapshot
        ):
            epoch += 1
        return epoch

    def is_new(self, update: Update) -> bool:
        """Return True if a report, or a part of it, has not been accepted yet."""
        return self.next_epoch(update.worker) <= update.epoch or self.lacks_weights_of(update)

    def lacks_weights_of(self, update: Update) -> bool:
        """Return True if a worker must report the shared weights, because worker 0 was lost before it did."""
        report = self.reports.get(update.epoch)
        if report is None or report.snapshot is not None or not self.snapshots.lacks_weights(report):
            return False
        return self.aggregation.all_of(report.metrics) and update.worker == self.snapshots.substitute()

    def take_report(self, update: Update) -> bool:
        """Take the report of a worker; return False if the worker was stopped within the epoch.

        An epoch that is cut short for all workers ends like any other, so the reports on it are taken.
        """
        if Flag.STOP in update.flags and update.epoch != self.schedule.short:
            self.stopped[update.worker] = update
            return False
        self.reports.setdefault(update.epoch, EpochReports()).take(update, self.shape.whole_state)
        self.snapshots.forget_state(update.worker)
        return True

    def take_validation(self, update: Update) -> None:
        """Take a worker's metric states over its validation rows."""
        report = self.reports.get(update.epoch)
        if report is not None:
            report.validation[update.worker] = update.metrics
            self.state.changed.notify_all()

    def end_complete(self) -> list[tuple[int, EpochReports]]:
        """Make the snapshot of each epoch that all workers except lost ones have reported.

        Returns:
            These epochs and the reports on them.
        """
        ended = []
        for epoch, report in sorted(self.reports.items()):
            complete = self.aggregation.all_of(report.metrics) and not self.snapshots.lacks_weights(report)
            if report.snapshot is None and complete:
                report.snapshot = self.snapshots.of_reports(epoch + 1, report, self.reports)
                ended.append((epoch, report))
        return ended

    def is_last(self, epoch: int) -> bool:
        """Return True if this is the last epoch."""
        return epoch + 1 >= self.shape.epochs

    def wait_at_end(self, update: Update) -> bool:
        """Hold a worker at an epoch's end. Return False if it still has to wait."""
        # In rounds, a worker waits until the next epoch is released. Without rounds, it begins the next epoch
        # at once, and waits only after the last one.
        waits = self.aggregation.has_rounds or self.is_last(update.epoch)
        released = update.epoch + (2 if waits else 1)

        def may_go_on() -> bool:
            return (
                self.state.is_over(update.generation)
                or self.to_evaluate(update.worker) >= 0
                or self.lacks_weights_of(update)
                or update.worker in self.aggregation.lost
                or self.schedule.stopping
                or self._is_released(update.worker, released)
            )

        if not may_go_on():
            self.aggregation.leave(update.worker)
        return self.state.changed.wait_for(may_go_on, limits.PATIENCE)

    def owes_short(self, worker: int) -> bool:
        """Return True if a worker still has to report the epoch that is cut short."""
        return self.schedule.ending and self.next_epoch(worker) <= self.schedule.short

    def reply(self, worker: int) -> Reply:
        """Return the reply to a worker that has ended an epoch.

        While an epoch is being cut short, a worker that has not reported it yet is not asked to stop, unless
        training stops at once.
        """
        return self.schedule.reply_at_once() if self.owes_short(worker) else self.schedule.reply()

    def _is_released(self, worker: int, released: int) -> bool:
        """Return True if the driver has released this number of epochs, or the epoch cut short is over.

        A worker that has not reported the epoch that is cut short continues, so that it can report it.
        """
        if not self.schedule.ending:
            return self.schedule.released >= released
        if self.owes_short(worker):
            return True
        report = self.reports.get(self.schedule.short)
        ended = report is not None and report.snapshot is not None
        return ended and self.awaiting_evaluation(self.schedule.short) is None

    def to_evaluate(self, worker: int) -> int:
        """Return the first epoch whose snapshot this worker still has to evaluate, or -1."""
        waiting = (
            epoch
            for epoch, report in self.reports.items()
            if epoch in self.shape.evaluated and report.snapshot and worker not in report.validation
            if epoch in self.evaluation_weights or not self.shape.evaluation_waits
        )
        return min(waiting, default=-1)

    def weights_to_evaluate(self, epoch: int) -> tuple[Vector, Vector, int, bool]:
        """Return the weights that workers evaluate at the end of an epoch.

        Returns:
            Parameters, statistics, the snapshot's version, and True if the weights are the snapshot's own.
        """
        report = self.reports.get(epoch)
        snapshot = report.snapshot if report is not None else None
        snapshot = snapshot or self.snapshots.committed
        weights = self.evaluation_weights.get(epoch)
        return *(weights or (snapshot.parameters, snapshot.statistics)), snapshot.version, weights is None

    def is_complete(self, epoch: int) -> bool:
        """Return True if all workers except lost ones have reported and, if required, evaluated an epoch."""
        report = self.reports.get(epoch)
        # A resumed run has reports before it has plans.
        if report is None or report.snapshot is None or not self.schedule.plans:
            return False
        return epoch not in self.shape.evaluated or self.aggregation.all_of(report.validation)

    def concerns_driver(self, epoch: int) -> bool:
        """Return True if an epoch is complete or not released yet, or its evaluation waits for the driver."""
        unreleased = bool(self.schedule.plans) and self.schedule.released <= epoch
        return self.is_complete(epoch) or self.awaiting_evaluation(epoch) is not None or unreleased

    def result(self, epoch: int) -> EpochResult:
        """Return the reports of a complete epoch, and take the losses since the previous epoch with them."""
        report = self.reports[epoch]
        losses, self.aggregation.losses = self.aggregation.losses, []
        self.last_losses = losses[-1:] or self.last_losses
        return report.result(report.validation, losses)

    def awaiting_evaluation(self, epoch: int) -> EpochResult | None:
        """Return the reports of an epoch if its evaluation waits for the driver, else None."""
        report = self.reports.get(epoch)
        waits = (
            self.shape.evaluation_waits
            and epoch in self.shape.evaluated
            and epoch not in self.evaluation_weights
        )
        if not waits or report is None or report.snapshot is None or not self.schedule.plans:
            return None
        return report.result({}, list(self.aggregation.losses))

    def forget_before(self, epoch: int) -> None:
        """Forget the epochs before this one, which are committed."""
        for before in [before for before in self.reports if before < epoch]:
            del self.reports[before]
        self.evaluation_weights = {
            each: weights for each, weights in self.evaluation_weights.items() if each >= epoch
        }

    def roll_back(self) -> None:
        """Restore a run that merges in rounds from its last snapshot.

        An epoch that all workers have reported is not trained again, but it is evaluated again.
        """
        self.reports = {
            epoch: replace(report, validation={})
            for epoch, report in self.reports.items()
            if report.snapshot is not None
        }
        snapshot = self.snapshots.committed
        # At most one report is left: no worker begins the next epoch before this one is evaluated.
        for report in self.reports.values():
            if report.snapshot is not None:
                snapshot = replace(report.snapshot, losses=list(self.aggregation.losses))
        self.snapshots.restore(snapshot)
        if self.schedule.plans:
            self.snapshots.begin()

    def stopped_snapshot(self) -> Snapshot:
        """Return a copy of the committed snapshot that has the current weights, for a run that ends early.

        If workers have replicas and no stopped worker has reported its weights, return the snapshot of the
        last epoch that has ended.
        """
        if not self.aggregation.has_replicas:
            return self.snapshots.present()
        report = self.stopped_with_weights()
        return self._last_ended() if report is None else self.snapshots.stopped(report)

    def _last_ended(self) -> Snapshot:
        """Return the snapshot of the last epoch that has ended, committed or not."""
        ended = [report.snapshot for report in self.reports.values() if report.snapshot is not None]
        return max([self.snapshots.committed, *ended], key=lambda snapshot: snapshot.epoch)

    def stopped_with_weights(self) -> Update | None:
        """Return the last report of a replica that was stopped within an epoch, if any sent its weights."""
        reports = [report for report in self.stopped.values() if len(report.parameters)]
        return max(reports, key=lambda report: report.base_version, default=None)


class WeightReplies:
    """Replies to workers that request weights. The lock of the coordinator guards them.

    Args:
        epochs: epochs of the run.
    """

    def __init__(self, epochs: Epochs) -> None:
        self.epochs, self.shape, self.aggregation = epochs, epochs.shape, epochs.aggregation
        self.schedule, self.snapshots = epochs.schedule, epochs.snapshots

    def to_evaluate(self, update: Update) -> Reply:
        """Return a reply with the weights that a worker is to evaluate; without weights if it has them."""
        parameters, statistics, version, own = self.epochs.weights_to_evaluate(update.epoch)
        reply = replace(self.schedule.reply(), version=version)
        if own and version == update.base_version:
            return reply
        return replace(reply, kind=Answer.CENTER, parameters=parameters, statistics=statistics)

    def center(self, update: Update) -> Reply:
        """Return a reply with the current center; without weights if the worker has it."""
        return self.with_center(self.schedule.reply(), update)

    def with_center(self, reply: Reply, update: Update) -> Reply:
        """Add the current center to a reply, unless the worker has it."""
        if update.base_version == self.aggregation.version:
            return replace(reply, version=update.base_version)
        return self._with_weights(reply)

    def rule(self) -> tuple[Reply, Any]:
        """Return a reply, and the state of the merge rule, for workers that apply the rule themselves.

        Raises:
            RefusedError: workers do not apply the rule themselves, or it has no state.
        """
        if not self.aggregation.rule_bytes():
            raise RefusedError(400, "Workers do not need the state of the merge rule in this run.")
        return self.schedule.reply_at_once(), self.snapshots.committed.rule

    def to_begin(self, worker: int) -> Reply:
        """Return everything that a worker begins with: center, state and metric states."""
        state = bytes(self.snapshots.states(self.epochs.reports).get(worker, b""))
        snapshot = self.snapshots.committed
        if self.shape.plan.joint and len(state) <= self.shape.generators:
            # Replicas share one optimizer state, which one of them reports.
            state = snapshot.state(snapshot.speaker)[: self.shape.optimizer] + state
        # The reply does not stop the worker, which must first report or evaluate an epoch for the others.
        reply = self._with_weights(self.schedule.reply_at_once())
        return replace(reply, state=state, metrics=snapshot.metrics.get(worker, b""))

    def _with_weights(self, reply: Reply) -> Reply:
        parameters, statistics, version = self.aggregation.snapshot()
        return replace(
            reply, kind=Answer.CENTER, version=version, parameters=parameters, statistics=statistics
        )

"""Loss and return of workers in a run that continues without lost workers."""

from __future__ import annotations

import logging

from sparkdl.errors import WorkerLostError
from sparkdl.server.epochs import Epochs
from sparkdl.server.membership import Membership
from sparkdl.server.screening import Screening


class WorkerLoss:
    """Handling of lost workers: the run continues without them, and new attempts of them may rejoin it.

    Args:
        membership: the workers.
        epochs: the epochs of the run; an epoch ends without waiting for lost workers.
        screening: checks each completed epoch for divergence.
    """

    def __init__(self, membership: Membership, epochs: Epochs, screening: Screening) -> None:
        self.membership, self.epochs, self.screening = membership, epochs, screening
        self.state, self.shape, self.aggregation = epochs.state, epochs.shape, epochs.aggregation
        self.schedule, self.snapshots = epochs.schedule, epochs.snapshots

    def lose(self, worker: int, reason: str) -> None:
        """Continue without a worker; if the run may not, or would have no rows left, end the generation."""
        lost = self.aggregation.lost
        left = [k for k in range(self.shape.num_workers) if k != worker and k not in lost]
        may_go_on = self.shape.goes_on and self.membership.agreed
        if may_go_on and any(self.schedule.plans[0].rows[k] for k in left):
            self.state.counters["lost"] += 1
            self.state.warn(f"{reason} The run continues without this worker.")
            self.membership.members[worker].lost = True
            self.aggregation.leave(worker)
            self.aggregation.lose(worker)
            self.end_epochs()
            if self.snapshots.finish():
                self.readmit_waiting()
        else:
            self.state.failure = self.state.failure or WorkerLostError(reason)
        self.state.changed.notify_all()

    def end_epochs(self) -> None:
        """End each epoch that all present workers have reported, and check it for divergence."""
        for epoch, report in self.epochs.end_complete():
            self.screening.end_epoch(epoch, report)

    def readmit(self, worker: int) -> None:
        """Readmit a new attempt of a lost worker.

        In rounds, request a snapshot, at which the attempt is readmitted. Otherwise readmit it at once.
        """
        if self.aggregation.has_rounds:
            self.snapshots.request(self.epochs.reports)
        else:
            self.return_worker(worker)

    def readmit_waiting(self) -> None:
        """Readmit returning workers at a snapshot, except those already counted in the open round."""
        for worker in sorted(self.aggregation.lost):
            member = self.membership.members[worker]
            if member.lost or member.held is None or self._are_rounds_over():
                continue
            if self.aggregation.may_come_back(worker):
                self.return_worker(worker)
            else:
                self.snapshots.request(self.epochs.reports)
        self.state.changed.notify_all()

    def _are_rounds_over(self) -> bool:
        """Return True if no round follows: the last epoch has ended, or the run ends within an epoch."""
        last = self.aggregation.has_rounds and self.epochs.schedule.ending
        return last or self.snapshots.committed.epoch >= self.shape.epochs

    def return_worker(self, worker: int) -> None:
        """Readmit a lost worker now."""
        self.aggregation.come_back(worker)
        self.state.counters["returned"] += 1
        host = self.membership.members[worker].host
        self.state.tell(logging.INFO, f"Worker {worker} on {host} is back.")

    def enter_training(self, worker: int) -> None:
        """Include a worker in the staleness bound if it has rows to train on."""
        held = self.membership.members[worker].held
        if held is not None and held.rows:
            self.aggregation.enter(worker)

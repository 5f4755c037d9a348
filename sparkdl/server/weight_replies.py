"""Replies with weights: those of an epoch to evaluate, those of this moment, and those to begin with."""

from __future__ import annotations

from dataclasses import replace

from sparkdl.server.epochs import Epochs
from sparkdl.transport.messages import Answer, Reply, Update


class WeightReplies:
    """Answers workers that ask for weights. The lock of the coordinator guards it.

    Args:
        epochs: the epochs of the run.
    """

    def __init__(self, epochs: Epochs) -> None:
        self.epochs, self.shape, self.merging = epochs, epochs.shape, epochs.merging
        self.schedule, self.snapshots = epochs.schedule, epochs.snapshots

    def to_evaluate(self, update: Update) -> Reply:
        """Return the weights that a worker evaluates, unless it has them."""
        parameters, statistics, version, own = self.epochs.weights_to_evaluate(update.epoch)
        reply = replace(self.schedule.reply(), version=version)
        if own and version == update.base_version:
            return reply
        return replace(reply, kind=Answer.CENTER, parameters=parameters, statistics=statistics)

    def center(self, update: Update) -> Reply:
        """Return the center of this moment, unless the worker has it."""
        return self.with_center(self.schedule.reply(), update)

    def with_center(self, reply: Reply, update: Update) -> Reply:
        """Return a reply with the center of this moment in it, unless the worker has it."""
        if update.base_version == self.merging.version:
            return replace(reply, version=update.base_version)
        return self._with_weights(reply)

    def to_begin(self, worker: int) -> Reply:
        """Return all that a worker begins with: center, state and metric states."""
        state = bytes(self.snapshots.states(self.epochs.reports).get(worker, b""))
        snapshot = self.snapshots.committed
        if self.shape.plan.joint and len(state) <= self.shape.generators:
            # Replicas have one state of the optimizer, which one of them reports.
            state = snapshot.state(snapshot.speaker)[: self.shape.optimizer] + state
        reply = self._with_weights(self.schedule.reply())
        return replace(reply, state=state, metrics=snapshot.metrics.get(worker, b""))

    def _with_weights(self, reply: Reply) -> Reply:
        parameters, statistics, version = self.merging.snapshot()
        return replace(
            reply, kind=Answer.CENTER, version=version, parameters=parameters, statistics=statistics
        )

"""What a window of batches does to a worker's replica, and what is sent for it: a ``Strategy`` per mode.

Where all take one step together, a gradient goes out and the mean of all comes back; where workers step on
their own, what their weights have moved by, and they go on from the center, or from weights of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean

import numpy as np

from sparkdl.core.vectors import window_statistics
from sparkdl.data.batch import Batch
from sparkdl.data.batch_plan import Plan
from sparkdl.modeling import keras_variables, optimizers
from sparkdl.modeling.backends.base import Center, Mean, Reading, Replica
from sparkdl.rules import Choice, Rule
from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Update


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What a worker's loop has to know of a run.

    Attributes:
        plan: a plan whose row counts and worker are not known yet.
        epochs: the epoch at which training ends.
        rounds: whether updates are merged in rounds, which a worker without rows has to join too.
        validation_batch_size: rows per forward pass over validation rows.
        validation_rows: how many of all validation rows are evaluated, from the first on; None is all.
        rule: the rule, whose worker half decides what a worker sends and goes on from.
        power: the learning rate is multiplied by the number of workers with rows to this power.
        scale: what that makes, once it is known how many have: of a number or of a schedule.
        slices: how many words a gradient with slices may have; 0: gradients are dense.
    """

    plan: Plan
    epochs: int
    rounds: bool
    validation_batch_size: int
    rule: Rule
    power: float = 0.0
    scale: float = 1.0
    validation_rows: int | None = None
    slices: int = 0

    def bound(self, working: int) -> TrainSettings:
        """Return the settings for so many workers with rows."""
        rule, scale = Choice(self.rule, self.power).bound(working)
        return replace(self, rule=rule, scale=scale)


class Strategy(ABC):
    """What a window of batches does to a replica.

    Args:
        replica: the replica.
        settings: what is to be known of the run.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        self.replica, self.settings = replica, settings
        self.version, self.rows, self.steps = 0, 0, 0
        self.loss = (0.0, 0.0)
        self.first_losses: list[float] = []  # of windows' first batches, where there are others after them

    @abstractmethod
    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Do with this worker's share of a batch what there is to do before the exchange.

        Args:
            batch: the share, which may be empty.
            whole: the rows of the batch.
            last: whether it is the last of its window.
        """

    @abstractmethod
    def update(self) -> Update:
        """Return what to send at the end of a window."""

    @abstractmethod
    def adopt(self, reply: Reply) -> None:
        """Do with the reply what there is to do after the exchange."""

    @abstractmethod
    def settle(self) -> None:
        """Bring the replica up to the last reply."""

    def recover(self, reply: Reply) -> None:
        """Go on after an update that had NaN or Inf in it, of which nothing is of use."""
        self.load(reply)
        optimizers.reset_spoilt(self.replica.model)

    def own(self) -> bytes:
        """Return the weights that are this worker's own, for a cut; most have none."""
        return b""

    def sent(self, kind: Kind, reading: Reading | None) -> Update:
        """Return the update of the window that ends, empty where no rows were used; begin the next."""
        update = Update(kind=kind, base_version=self.version, rows=self.rows, steps=self.steps)
        if reading is not None:
            update.loss, self.loss = self._mean_loss(reading.loss), reading.loss
            update.parameters, update.statistics = reading.vector, reading.statistics
            update.normalizer = reading.denominator
            update.flags |= Flag.SLICES if reading.sliced else Flag.NONE
        self.rows, self.steps = 0, 0
        return update

    def end_epoch(self) -> float:
        """Return the mean loss of the windows' first batches, nan of none; begin the next epoch."""
        first, self.first_losses, self.loss = self.first_losses, [], (0.0, 0.0)
        return fmean(first) if first else nan

    def _mean_loss(self, sums: tuple[float, float]) -> float:
        """Return the mean loss since the window began, by what the loss metric has taken in by now."""
        weight = sums[1] - self.loss[1]
        return (sums[0] - self.loss[0]) / weight if weight else 0.0

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Go on from the center that a reply holds, or from this worker's own weights, if it has any."""
        self.replica.write(Center(reply.parameters, reply.statistics))
        self.version = reply.version


class GradientStrategy(Strategy):
    """All workers make each update together: send a gradient, apply the mean of all.

    The mean is applied in the same call that takes the next gradient, which saves a call per batch.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        super().__init__(replica, settings)
        self.mean: Mean | None = None
        replica.slices = settings.slices

    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Take the gradient of this worker's share of the batch."""
        if rows := batch.rows:
            scale = whole / rows if self.settings.plan.working > 1 else None
            self.gradient = self.replica.gradient(batch, self.mean, scale)
            self.mean = None
            self.rows = rows

    def settle(self) -> None:
        """Apply the mean gradient that is still to be applied."""
        if self.mean is not None:
            self.replica.apply(self.mean)
            self.mean = None

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Go on from the center that a reply holds."""
        self.mean = None
        super().load(reply)

    def update(self) -> Update:
        """Return the gradient, or nothing from a worker without rows in this batch."""
        self.settle()
        return self.sent(Kind.GRADIENT, self.gradient if self.rows else None)

    def recover(self, reply: Reply) -> None:
        """Take up the mean of the others, if there is one, and the common statistics."""
        self.replica.write(Center(self.replica.read().vector, reply.statistics))
        self.adopt(reply)

    def adopt(self, reply: Reply) -> None:
        """Take up the mean gradient."""
        if reply.kind is Answer.MEAN and len(reply.parameters):
            self.mean = Mean(reply.parameters, reply.statistics, bool(reply.flags & Flag.SLICES))
        self.version = reply.version


Pull = Callable[[int], Reply]  # asks for the center of this moment, if its version is another than this


class DeltaStrategy(Strategy):
    """Each worker trains on its own between exchanges: send the way it went, go on from the center.

    The center is set in the same call that takes the next step, and the outcome of a window read in the
    one that takes its last step.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        super().__init__(replica, settings)
        self.decays = keras_variables.decays(replica.model)
        self.before, self.statistics, *_ = replica.read()
        self.center: Center | None = None
        self.after: Reading | None = None

    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Take one step with the replica's own optimizer."""
        self.after = self.replica.step(batch, self.center, self.before if last else None)
        self.center = None
        if self.settings.plan.shuffle and not self.steps and not last:  # else they are always the same rows
            self.first_losses.append(self._mean_loss(self.replica.loss()))
        self.rows += batch.rows
        self.steps += 1

    def settle(self) -> None:
        """Set the center that is still to be set."""
        if self.center is not None:
            self.replica.write(self.center)
            self.center = None

    def update(self) -> Update:
        """Return weights after minus weights before the window."""
        after, self.after = self.after, None
        if after is None:
            return self.sent(Kind.DELTA, None)
        statistics = after.statistics
        if len(statistics):
            statistics = window_statistics(self.statistics, statistics, self.decays, self.steps)
        return self.sent(Kind.DELTA, after._replace(statistics=statistics))

    def adopt(self, reply: Reply) -> None:
        """Go on from the center."""
        if reply.kind is Answer.CENTER:
            self.load(reply)

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Go on from the center that a reply holds."""
        self.center = Center(reply.parameters, reply.statistics)
        self.before, self.version = self.center.parameters, reply.version
        if len(reply.statistics):
            self.statistics = reply.statistics
        if not self.replica.exact:  # a variable of lower precision does not hold quite what it is set to
            self.settle()
            self.before, self.statistics, *_ = self.replica.read()


class ElasticStrategy(DeltaStrategy):
    """Each worker keeps weights of its own: send how far a spring draws them, and go on from there.

    The spring is tied to the center of the moment: that of the last round, or one that is asked for.
    """

    def __init__(self, replica: Replica, settings: TrainSettings, pull: Pull) -> None:
        super().__init__(replica, settings)
        self.pull = pull
        self.anchor = self.local = self.before
        self.before = np.zeros_like(self.before)  # so that a window's outcome is the weights themselves

    def update(self) -> Update:
        """Return how far this worker's weights are drawn."""
        update = super().update()
        if update.rows:
            if not self.settings.rounds:
                self._tie(self.pull(self.version))
            local = update.parameters
            drawn = self.settings.rule.draw(local, self.anchor)
            update.parameters = np.ascontiguousarray(drawn, np.float32)
            self.local = local - update.parameters
        update.base_version = self.version
        return update

    def adopt(self, reply: Reply) -> None:
        """Go on from this worker's own weights, drawn as they were sent, and the common statistics."""
        if reply.kind is Answer.CENTER:
            self._tie(reply)
            self.center = Center(self.local, reply.statistics)

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Go on from weights of a cut, or from the center, as one that starts or whose driver set it."""
        self._tie(reply)
        self.local = np.frombuffer(own, np.float32) if own else reply.parameters
        self.center = Center(self.local, reply.statistics)

    def own(self) -> bytes:
        """Return this worker's weights, float32."""
        return self.local.tobytes()

    def _tie(self, reply: Reply) -> None:
        if reply.kind is Answer.CENTER:
            self.anchor, self.version = reply.parameters, reply.version
            if len(reply.statistics):
                self.statistics = reply.statistics

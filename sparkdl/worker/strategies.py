"""Strategies for one window of local training, and for the update that is sent for it.

* If all workers take one step together, each sends a gradient and receives the mean of all.
* If workers step independently, each sends the change of its weights, and continues from the center.
* With an elastic rule, each sends the rule's pull on its weights, and continues from its own weights.
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
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.modeling import keras_variables, optimizers
from sparkdl.modeling.backends.base import Center, Reading, Replica, RoundMeans
from sparkdl.rules import Choice, Rule
from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Update


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a run for a worker's loop.

    Attributes:
        plan: the plan, whose row counts and worker are not known yet.
        epochs: training ends before the epoch with this index, as in Keras's ``fit``.
        rounds: whether updates are merged in rounds, which a worker without rows has to join too.
        validation_batch_size: rows per forward pass over validation rows.
        validation_rows: number of validation rows to evaluate, all workers together, from the first on; None
            for all.
        rule: the merge rule. If it is elastic, its ``draw`` computes the update that is sent.
        power: the learning rate is multiplied by the number of workers with rows, at most
            ``rules.STUDIED``, to this power.
        scale: the resulting factor of the learning rate, once the number of workers is known.
        replicas: whether each worker updates its own copy of a center with deltas, and worker 0 reports it.
        slices: maximum length of a gradient with slices, in 32-bit words; 0: gradients are dense; None: they
            are dense, and slices that an optimizer does not simply add up are refused. See
            ``core.sparse_gradients``.
        profile: the batches of each worker to trace, counted from 1.
        advises: whether a worker may advise to exchange less often.
    """

    plan: BatchPlan
    epochs: int
    rounds: bool
    validation_batch_size: int
    rule: Rule
    power: float = 0.0
    scale: float = 1.0
    validation_rows: int | None = None
    replicas: bool = False
    slices: int | None = 0
    profile: range = range(0)
    advises: bool = True

    @property
    def choice(self) -> Choice:
        """The merge rule, and the scaling of the learning rate that goes with it."""
        return Choice(self.rule, self.power)

    def bound(self, working: int) -> TrainSettings:
        """Return the settings for this number of workers with rows."""
        rule, scale = self.choice.bound(working)
        return replace(self, rule=rule, scale=scale)


class Strategy(ABC):
    """The training of a replica on a window of batches.

    Args:
        replica: the replica.
        settings: the settings of the run.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        self.replica, self.settings = replica, settings
        self.version, self.rows, self.steps = 0, 0, 0
        self.loss = (0.0, 0.0)
        self.first_losses: list[float] = []  # of the first batch of each window with several batches

    @abstractmethod
    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Train on this worker's share of a batch.

        Args:
            batch: the share, which may be empty.
            whole: number of rows of the whole batch.
            last: whether it is the last batch of its window.
        """

    @abstractmethod
    def update(self) -> Update:
        """Return the update to send at the end of a window."""

    @abstractmethod
    def adopt(self, reply: Reply) -> None:
        """Process the reply to an update."""

    @abstractmethod
    def settle(self) -> None:
        """Bring the replica up to date with the last reply."""

    def recover(self, reply: Reply) -> None:
        """Continue after an update that was not merged, because it had NaN, Inf or huge values."""
        self.load(reply)
        optimizers.reset_not_finite(self.replica.model)

    def own(self) -> bytes:
        """Return this worker's own weights for a snapshot; empty for most strategies."""
        return b""

    def apart(self) -> Center | None:
        """Return the center if the replica trains weights of its own; otherwise None."""
        return None

    def sent(self, kind: Kind, reading: Reading | None) -> Update:
        """Return the update of the window that ends, empty if it used no rows; begin the next window."""
        update = Update(kind=kind, base_version=self.version, rows=self.rows, steps=self.steps)
        if reading is not None:
            update.loss, self.loss = self._mean_loss(reading.loss), reading.loss
            update.parameters, update.statistics = reading.vector, reading.statistics
            update.normalizer = reading.denominator
            update.flags |= Flag.SLICES if reading.sliced else Flag.NONE
        self.rows, self.steps = 0, 0
        return update

    def end_epoch(self) -> float:
        """Return the mean loss of the windows' first batches, NaN if there are none; begin the next epoch."""
        first, self.first_losses, self.loss = self.first_losses, [], (0.0, 0.0)
        return fmean(first) if first else nan

    def _mean_loss(self, sums: tuple[float, float]) -> float:
        """Return the mean loss since the window began, from the current sums of the loss metric."""
        weight = sums[1] - self.loss[1]
        return (sums[0] - self.loss[0]) / weight if weight else 0.0

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Continue from the center in a reply, or from this worker's own weights if it has any."""
        self.replica.write(Center(reply.parameters, reply.statistics))
        self.version = reply.version


class GradientStrategy(Strategy):
    """Joint updates of all workers: send a gradient, apply the mean of all.

    The mean is applied in the same call that computes the next gradient, which saves a call per batch.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        super().__init__(replica, settings)
        self.mean: RoundMeans | None = None
        replica.slices = settings.slices

    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Compute the gradient of this worker's share of the batch."""
        if rows := batch.rows:
            scale = whole / rows if self.settings.plan.working > 1 else None
            self.gradient = self.replica.gradient(batch, self.mean, scale)
            self.mean = None
            self.rows = rows

    def settle(self) -> None:
        """Apply the pending mean gradient, if any."""
        if self.mean is not None:
            self.replica.apply(self.mean)
            self.mean = None

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Continue from the center in a reply."""
        self.mean = None
        super().load(reply)

    def update(self) -> Update:
        """Return the gradient; an empty update if this worker has no rows in the batch."""
        self.settle()
        return self.sent(Kind.GRADIENT, self.gradient if self.rows else None)

    def recover(self, reply: Reply) -> None:
        """Adopt the mean of the other workers, if there is one, and the common statistics."""
        self.replica.write(Center(self.replica.read().vector, reply.statistics))
        self.adopt(reply)

    def adopt(self, reply: Reply) -> None:
        """Store the mean gradient, to be applied later."""
        if reply.kind is Answer.MEAN and len(reply.parameters):
            self.mean = RoundMeans(reply.parameters, reply.statistics, Flag.SLICES in reply.flags)
        self.version = reply.version


Pull = Callable[[int], Reply]  # requests the current center, if its version differs from the given one


class DeltaStrategy(Strategy):
    """Independent training between exchanges: send the delta, continue from the center.

    The center is set in the same call that takes the next step. The result of a window is read in the call
    that takes its last step.
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
        # Without a shuffle, the first batches would have the same rows in every epoch.
        if self.settings.plan.shuffle and not self.steps and not last:
            self.first_losses.append(self._mean_loss(self.replica.loss()))
        self.rows += batch.rows
        self.steps += 1

    def settle(self) -> None:
        """Set the pending center, if any."""
        if self.center is not None:
            self.replica.write(self.center)
            self.center = None

    def update(self) -> Update:
        """Return the delta: the weights after minus the weights before the window."""
        after, self.after = self.after, None
        if after is None:
            return self.sent(Kind.DELTA, None)
        statistics = after.statistics
        if len(statistics):
            statistics = window_statistics(self.statistics, statistics, self.decays, self.steps)
        return self.sent(Kind.DELTA, after._replace(statistics=statistics))

    def adopt(self, reply: Reply) -> None:
        """Continue from the center, if the reply has one."""
        if reply.kind is Answer.CENTER:
            self.load(reply)

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Continue from the center in a reply."""
        self.center = Center(reply.parameters, reply.statistics)
        self.before, self.version = self.center.parameters, reply.version
        if len(reply.statistics):
            self.statistics = reply.statistics
        if not self.replica.exact:  # variables of lower precision round the center
            self.settle()
            self.before, self.statistics, *_ = self.replica.read()


class ElasticStrategy(DeltaStrategy):
    """Separate weights of each worker, which a spring draws towards the center.

    A worker sends the spring's pull on its weights, and continues from the drawn weights. The spring is tied
    to the center. In rounds, this is the center of the last round. Without rounds, the worker requests the
    current center before it sends its update.
    """

    def __init__(self, replica: Replica, settings: TrainSettings, pull: Pull) -> None:
        super().__init__(replica, settings)
        self.pull = pull
        self.anchor = self.local = self.before
        self.before = np.zeros_like(self.before)  # so that a window's result is the weights themselves

    def update(self) -> Update:
        """Return the pull of the spring on this worker's weights."""
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
        """Continue from this worker's drawn weights and the common statistics."""
        if reply.kind is Answer.CENTER:
            self._tie(reply)
            self.center = Center(self.local, reply.statistics)

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Continue from this worker's own weights in a snapshot; without any, from the center.

        Own weights are given only when a worker resumes from a snapshot. After an update that was not
        merged, and after the driver has set the center, the worker continues from the center.
        """
        self._tie(reply)
        self.local = np.frombuffer(own, np.float32) if own else reply.parameters
        self.center = Center(self.local, reply.statistics)

    def own(self) -> bytes:
        """Return this worker's own weights, float32."""
        return self.local.tobytes()

    def apart(self) -> Center | None:
        """Return the center."""
        return Center(self.anchor, self.statistics)

    def _tie(self, reply: Reply) -> None:
        if reply.kind is Answer.CENTER:
            self.anchor, self.version = reply.parameters, reply.version
            if len(reply.statistics):
                self.statistics = reply.statistics

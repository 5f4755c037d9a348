"""Screening: updates with NaN, Inf or huge values are not merged, and a run that diverges ends."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

from sparkdl.core.vectors import EMPTY, is_finite
from sparkdl.errors import DivergedError
from sparkdl.server.aggregation import Aggregation
from sparkdl.server.divergence import FARTHEST, FIRST, DivergenceDetector
from sparkdl.server.membership import Membership
from sparkdl.server.run_state import RunState
from sparkdl.server.state import EpochReports, RunSpec
from sparkdl.transport.messages import Flag, Update


class Screening:
    """Screening of updates and of epoch losses. It fails a run that has diverged.

    Args:
        state: state of the run.
        shape: settings of the run.
        aggregation: the aggregation, which holds the center.
        membership: the workers.
    """

    def __init__(
        self, state: RunState, shape: RunSpec, aggregation: Aggregation, membership: Membership
    ) -> None:
        self.state, self.shape, self.aggregation, self.membership = state, shape, aggregation, membership
        merged = shape.num_workers > 1 and not shape.plan.joint
        together = shape.num_workers if aggregation.has_rounds else 1  # workers whose updates share one loss
        first = max(shape.num_workers // together, FIRST // (together * (shape.plan.window or FIRST)))
        self.detector = DivergenceDetector(aggregation.parameters, merged=merged, first=first)

    @property
    def useless(self) -> bool:
        """True if the run has diverged and the center cannot be used."""
        return self.detector.useless

    def has_refused(self, update: Update) -> bool:
        """Return True if this is the last update of its worker that ``screen`` rejected."""
        return self.detector.has_refused(update)

    def screen(self, update: Update) -> Update:
        """Return an update, decoded, or without its vectors if these cannot be merged.

        An update without vectors counts but contributes nothing. A gradient of a scaled loss is kept as it
        is: all replicas see NaN or Inf in their mean and skip the step.

        Raises:
            RefusedError: the generation or the run has ended, or the worker's attempt was superseded or lost.
            WireError: the parameters are not those of an update of this model.
        """
        update = self.aggregation.decoded(update)
        if not update.rows or self.aggregation.has_taken(update.worker, update.sequence):
            return update
        below = inf if self.shape.plan.joint else FARTHEST
        numbers = self.aggregation.numbers(update)
        finite = all(is_finite(part, below) for part in numbers) and is_finite(update.statistics)
        finite = finite and Flag.NOT_FINITE not in update.flags  # the worker found it in its parts for shards
        sound = self.shape.scaled or finite
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            if self.aggregation.has_taken(update.worker, update.sequence):
                return update  # it arrived twice at the same time
            try:
                strikes = self.detector.take(update, sound=sound)
            except DivergedError as error:
                strikes = 0
                self.state.fail(self.state.generation, error)
            if sound:
                return update
            self.state.counters["not_finite"] += 1
            self.aggregation.losses.append(nan)
            if strikes == 1:
                joint = self.shape.plan.joint
                next_step = (
                    "applies the mean gradient of the others" if joint else "continues from the center"
                )
                self.state.warn(
                    f"Worker {update.worker} sent an update with NaN, Inf or values that are too large in "
                    f"epoch {update.epoch + 1}. The update was not merged; the worker {next_step}.",
                )
        return replace(update, rows=0, steps=0, parameters=EMPTY, statistics=EMPTY)

    def end_epoch(self, epoch: int, report: EpochReports) -> None:
        """Check a completed epoch for divergence, from its losses and the center at its end."""
        if report.snapshot is None:
            return
        parameters, losses = report.snapshot.parameters, self.aggregation.losses
        try:
            self.detector.end_epoch(epoch, parameters, losses, report.first_losses.values())
        except DivergedError as error:
            self.state.fail(self.state.generation, error)

    def restart(self) -> None:
        """Reset the counts of rejected updates.

        In rounds, also forget the updates of the epoch under way, which is repeated.
        """
        self.detector.restart(rolled_back=self.aggregation.has_rounds)

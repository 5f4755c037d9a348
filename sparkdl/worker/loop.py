"""The training loop of a worker, for every mode and frequency.

``frequency`` is part of the plan, which sets the end of a window. ``mode`` is mostly handled by the endpoint,
behind the Exchange. A Strategy trains the replica on a window. This module knows neither Spark nor HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, nan

import numpy as np

from sparkdl.data.batch import Batch
from sparkdl.data.batch_plan import Order, Span, num_before
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.data.spill import Rows
from sparkdl.errors import DataError
from sparkdl.modeling import optimizers
from sparkdl.modeling.backends.base import Center, Replica
from sparkdl.modeling.keras_variables import Layouts, generators, layout_of, metric_variables, read, write
from sparkdl.modeling.signature import fixed_batch_size
from sparkdl.transport.exchange import Exchange, Notes
from sparkdl.transport.messages import Answer, Flag, Interval, Kind, Reply, Running, Update
from sparkdl.worker.stopwatch import Stopwatch
from sparkdl.worker.strategies import (
    DeltaStrategy,
    ElasticStrategy,
    GradientStrategy,
    Strategy,
    TrainSettings,
)

logger = logging.getLogger(__name__)
LONG_SECONDS = 5.0  # shortest total of an epoch's exchanges that is worth a warning
RUNNING_BYTES = 64 << 10  # larger metric states are sent only at the end of an epoch


class Loop:
    """The training loop of one worker.

    Args:
        settings: the settings of the run.
        worker: this worker's index.
        replica: the model, as the driver had it at the start of the run.
        rows: this worker's training rows.
        validation: this worker's validation rows.
        exchange: the connection to the endpoint.
        fingerprint: the fingerprint of these rows.

    Attributes:
        epoch: the epoch that is being trained.
        seen_rows: training rows used in this epoch.
        speaks: whether this worker reports the state that all replicas share, if they share one. Worker 0
            does at first.
    """

    def __init__(
        self,
        settings: TrainSettings,
        worker: int,
        *,
        replica: Replica,
        rows: Rows,
        validation: Rows,
        exchange: Exchange,
        fingerprint: Fingerprint = NOTHING,
    ) -> None:
        self.settings, self.worker, self.fingerprint = settings, worker, fingerprint
        self.replica, self.rows, self.validation = replica, rows, validation
        self.exchange = exchange
        self.stopped = False
        self.speaks = worker == 0
        self.epoch, self.seen_rows = 0, 0
        self.held_out = validation.count  # number of rows to evaluate
        self.requested: bool = False  # whether the next batch's metric states are requested
        self.states: Running | None = None
        self.order = -1, Order((0,), None)
        self.ahead: tuple[int, tuple[list[Span], list[Batch]]] = -1, ([], [])
        self.evaluated = -1
        self.judged = not settings.advises
        self.watch = Stopwatch(settings.profile)
        self.learning_rate = float("nan")
        self.strategy = self._strategy()
        self.followed = None if settings.plan.joint else optimizers.follow(replica.model)

    def _strategy(self) -> Strategy:
        if self.settings.rule.elastic:
            return ElasticStrategy(self.replica, self.settings, self._center)
        return (GradientStrategy if self.settings.plan.joint else DeltaStrategy)(self.replica, self.settings)

    def _center(self, version: int) -> Reply:
        """Return a reply with the current center, or without it if the center still has this version."""
        return self._ask(Update(kind=Kind.CENTER, epoch=self.epoch, base_version=version))

    def _ask(self, update: Update) -> Reply:
        """Send an update and return its reply."""
        with self.watch.time("exchange"):
            reply = self.exchange(update)
        self.watch.divide(reply)
        return reply

    def run(self, notes: Notes) -> None:
        """Train to the last epoch, or until the driver stops the run. ``notes`` are sent to the driver."""
        begin = self.exchange.ready(self.rows.count, self.validation.count, notes, self.fingerprint)
        self.plan = replace(self.settings.plan, rows=tuple(begin["rows"]), worker=self.worker)
        self.held_out = self._held_out(begin["validation_rows"])
        self.settings = replace(self.settings.bound(self.plan.working), plan=self.plan)
        self.strategy.settings = self.settings
        if self.followed is not None:
            self.followed.speed.assign(self.plan.speed)
            self.followed.scale.assign(self.settings.scale)
        resumed = begin["restore"] and self._restore()
        if begin["learning_rate"] is not None:
            optimizers.set_learning_rate(self.replica.model, self.settings.scale * begin["learning_rate"])
        self._follow(begin["progress"])
        self.stopped = begin["stop"]
        first = begin["epoch"]
        sequence = max(begin["sequence"], self.plan.sequence(first))
        if first > max(self.plan.first_epoch, self.evaluated + 1) and not self.stopped:
            self._settle(first - 1)
        for epoch in range(first, self.settings.epochs):
            if self.stopped:
                return
            self.epoch = epoch
            with self.watch.time("compute"):
                self._train_epoch(sequence, self._rows_before(sequence) if resumed else 0)
            sequence, resumed = self.plan.sequence(self.epoch + 1), False
        while not self.stopped:  # an evaluation may still follow
            self._settle(self.settings.epochs - 1)

    def _held_out(self, counts: Sequence[int]) -> int:
        """Return the number of this worker's validation rows to evaluate.

        Args:
            counts: the number of validation rows of each worker.
        """
        most = self.settings.validation_rows
        if most is None or len(counts) <= self.worker:
            return self.validation.count
        return num_before(tuple(counts), self.worker, most)

    def position(self) -> tuple[int, int]:
        """Return the epoch that is being trained, and the number of rows used in it."""
        return self.epoch, self.seen_rows

    def running(self) -> Running | None:
        """Return metric states that were not returned before, if any; request those of the next batch.

        The heartbeat's thread calls it. It reads no variable of the model: only the training thread may.
        """
        states, self.states, self.requested = self.states, None, True
        return states

    def _note_running(self) -> None:
        """Store the metric states over this worker's rows of the epoch so far."""
        self.requested = False
        states = b""
        if layout_of(metric_variables(self.replica.model)).nbytes <= RUNNING_BYTES:
            states = self._metric_states()
        self.states = Running(self.epoch, self.seen_rows, states)

    def seconds(self) -> list[float]:
        """Return the seconds of each of ``ACTIVITIES`` so far."""
        return list(self.watch.seconds.values())

    def intervals(self) -> list[Interval]:
        """Return the next intervals of traced batches, as many as one heartbeat may carry."""
        return self.watch.take_intervals()

    def num_intervals(self) -> int:
        """Return the number of traced intervals that were not returned yet."""
        return self.watch.num_intervals

    def stop(self) -> None:
        """Stop after the current batch. In rounds, the replies decide when to stop.

        With a copy of the center, a worker can stop at any time: no round closes without it.
        """
        self.stopped = self.stopped or self.settings.replicas or not self.settings.rounds

    def _rows_before(self, sequence: int) -> int:
        """Return the number of this epoch's rows that this worker used before the exchange ``sequence``."""
        first = self.plan.sequence(self.epoch)
        windows = (self.plan.spans(self.epoch, index) for index in range(sequence - first))
        return sum(span.stop - span.start for spans in windows for span in spans)

    def _train_epoch(self, sequence: int, seen_rows: int) -> None:
        self.seen_rows, before = seen_rows, self._seconds_exchanging()
        began = time.perf_counter()
        end = self.plan.sequence(self.epoch + 1)
        while sequence < end:
            spans, gathered = self._window(sequence)
            for span in spans:
                if self.stopped:
                    break
                self.watch.begin_batch()
                batch = gathered.pop() if gathered else self._gather(span)
                self.strategy.take(batch, span.rows, last=span is spans[-1])
                self.seen_rows += span.stop - span.start
                if self.requested and self.seen_rows:
                    self._note_running()
            goes = (self.strategy.rows or self.settings.rounds) and not self.stopped
            sequence = self._exchange(sequence) if goes else sequence + 1
            if self.stopped:
                self._finish(Flag.STOP)
                return
        self._judge_exchanges(self._seconds_exchanging() - before, time.perf_counter() - began)
        self._finish(Flag.NONE)

    def _seconds_exchanging(self) -> float:
        """Return the seconds of all exchanges so far, including the time that the endpoint waited."""
        return sum(self.watch.seconds[activity] for activity in ("exchange", "wait", "merge"))

    def _judge_exchanges(self, exchanging: float, seconds: float) -> None:
        """Warn once if exchanges took at least half of an epoch and LONG_SECONDS. Only worker 0 warns.

        Args:
            exchanging: the seconds of the epoch's exchanges.
            seconds: the seconds of the epoch.
        """
        # Other workers may still be starting in the first epoch.
        first = self.epoch == self.plan.first_epoch < self.settings.epochs - 1
        if self.worker or self.judged or self.plan.windows == 1 or first:
            return
        if exchanging < max(LONG_SECONDS, seconds / 2):
            return
        fewer = 16 if self.plan.window == 1 else "epoch"
        logger.warning(
            "Exchanging updates and waiting for other workers took %.0f of the %.0f s of epoch %d. "
            "frequency=%r exchanges less often, at the cost of some accuracy per epoch.",
            exchanging,
            seconds,
            self.epoch + 1,
            fewer,
        )
        self.judged = True

    def _window(self, sequence: int) -> tuple[list[Span], list[Batch]]:
        """Return this worker's shares of a window's batches, and a list with the rows of the first share."""
        (known, window), self.ahead = self.ahead, (-1, ([], []))
        if known == sequence:
            return window
        spans = list(self.plan.spans(self.epoch, sequence - self.plan.sequence(self.epoch)))
        return spans, [self._gather(span) for span in spans[:1]]

    def _gather(self, span: Span) -> Batch:
        with self.watch.time("data"):
            if self.order[0] != span.turn:
                self.order = span.turn, self.plan.order(span.turn, self.rows.buckets)
            batch = self.rows.batch(self.order[1][span.start : span.stop])
            self.rows.expect(self.order[1].upcoming)
            return batch

    def _exchange(self, sequence: int) -> int:
        """Exchange a window's update; return the number of the next exchange."""
        update = self.strategy.update()
        update.sequence, update.epoch = sequence, self.epoch
        with self.watch.time("exchange"):
            ticket = self.exchange.begin(update)
        self.replica.catch_up()  # while the reply is on its way
        if sequence + 1 < self.plan.sequence(self.epoch + 1):
            self.ahead = sequence + 1, self._window(sequence + 1)
        with self.watch.time("exchange"):
            reply = self.exchange.finish(ticket)
        self.watch.divide(reply)
        if Flag.NOT_FINITE in reply.flags:
            self.strategy.recover(reply)
        else:
            self.strategy.adopt(reply)
        self._obey(reply)
        if Flag.SEND_STATE in reply.flags:
            self._obey(self._ask(self._standing(Kind.STATE, sequence=sequence + 1)))
        return self._catch_up(sequence, reply)

    def _catch_up(self, sequence: int, reply: Reply) -> int:
        """Adopt the means of rounds that closed without this worker; return the next exchange's number."""
        while self.plan.joint and reply.round > sequence + 1:
            sequence += 1
            missed = Update(kind=Kind.GRADIENT, sequence=sequence, epoch=self.epoch)
            reply = self._ask(missed)
            self.strategy.settle()
            self.strategy.adopt(reply)
            self._obey(reply)
        return max(sequence + 1, reply.round)

    def _finish(self, flags: Flag) -> None:
        """Report the end of an epoch, or the position in a stopped one."""
        report = self._standing(Kind.REPORT, flags=flags, loss=self.strategy.end_epoch())
        self.replica.model.reset_metrics()
        reply = self._ask(report)
        if Flag.SPEAK in reply.flags:  # the worker that should report the shared state was lost
            self._obey(reply)
            reply = self._ask(self._standing(Kind.REPORT, flags=flags))
        self._settled(reply)

    def _standing(
        self, kind: Kind, *, flags: Flag = Flag.NONE, loss: float = nan, sequence: int = 0
    ) -> Update:
        """Return an update with the state of this worker, for a snapshot or a report."""
        self.strategy.settle()
        update = Update(
            kind=kind,
            epoch=self.epoch,
            rows=self.seen_rows,
            base_version=self.strategy.version,
            metrics=self._metric_states() if self.seen_rows else b"",
            state=self._state(),
            flags=flags,
            loss=loss,
            sequence=sequence,
        )
        shares = self.settings.replicas and (self.speaks or Flag.STOP in flags)
        if shares or (self.plan.joint and self.speaks):
            own = self.replica.read()
            update.parameters, update.statistics = own.vector, own.statistics
        return update

    def _settle(self, epoch: int) -> None:
        """Wait again at the end of an epoch that this worker, or an earlier attempt of it, has reported."""
        self._settled(
            self._ask(
                Update(kind=Kind.REPORT, flags=Flag.AWAIT, epoch=epoch, base_version=self.strategy.version)
            )
        )

    def _settled(self, reply: Reply) -> None:
        if reply.kind is Answer.CENTER:
            self.strategy.load(reply)
        self._obey(reply)

    def _obey(self, reply: Reply) -> None:
        """Follow the instructions in a reply."""
        self.stopped = self.stopped or Flag.STOP in reply.flags
        self.speaks = self.speaks or Flag.SPEAK in reply.flags
        if isfinite(reply.learning_rate) and reply.learning_rate != self.learning_rate:
            self.learning_rate = reply.learning_rate
            optimizers.set_learning_rate(self.replica.model, self.settings.scale * reply.learning_rate)
        self._follow(reply.progress)
        if reply.evaluate > self.evaluated:
            self.evaluated = reply.evaluate
            self._settled(self._ask(self._evaluate(reply.evaluate)))

    def _follow(self, progress: float) -> None:
        if self.followed is not None:
            self.followed.progress.assign(progress)
            self.followed.anchor.assign(int(optimizers.batches_seen(self.replica.model)))

    def _evaluate(self, epoch: int) -> Update:
        """Evaluate an epoch's final weights on this worker's validation rows."""
        self.strategy.settle()
        # Read replica.model anew after each operation: only then does JAX write its values to the variables.
        replica = self.replica
        kept = read(metric_variables(replica.model))
        reply = self._ask(Update(kind=Kind.PULL, epoch=epoch, base_version=self.strategy.version))
        sent = Center(reply.parameters, reply.statistics) if reply.kind is Answer.CENTER else None
        center = sent or self.strategy.apart()
        if center is not None:
            own = replica.read()
            replica.write(center)
        replica.model.reset_metrics()
        evaluate(replica, self.validation, self.settings.validation_batch_size, self.held_out)
        states = self._metric_states() if self.held_out else b""
        if center is not None:
            replica.write(Center(own.vector, own.statistics))
        variables = metric_variables(replica.model)
        if len(kept) == len(variables):
            write(variables, kept)
        else:
            replica.model.reset_metrics()
        return Update(
            kind=Kind.VALIDATION,
            epoch=epoch,
            metrics=states,
            rows=self.held_out,
            base_version=reply.version,
        )

    def _metric_states(self) -> bytes:
        variables = metric_variables(self.replica.model)
        return layout_of(variables).to_bytes(read(variables))

    def _state(self) -> bytes:
        """Return the worker's state: optimizer variables if it reports them, generators, and own weights."""
        model = self.replica.model
        parts = [generators(model)]
        if self.speaks or not self.plan.joint:
            parts.insert(0, optimizers.variables(model))
        state = b"".join(layout_of(part).to_bytes(read(part)) for part in parts)
        return state + self.strategy.own()

    def _restore(self) -> bool:
        """Resume from the last snapshot; return True if it was made in the middle of an epoch."""
        reply = self._ask(Update(kind=Kind.RESTORE, base_version=self.strategy.version))
        layouts = Layouts.of(self.replica.model)
        middle = layouts.optimizer.nbytes
        end = middle + layouts.generators.nbytes
        self.strategy.load(reply, reply.state[end:])
        model = self.replica.model
        if len(reply.state) >= middle:
            write(optimizers.variables(model), layouts.optimizer.from_bytes(reply.state[:middle]))
        if len(reply.state) >= end:  # a worker that was lost at the snapshot reported no state
            write(generators(model), layouts.generators.from_bytes(reply.state[middle:end]))
        if reply.metrics:
            self._restore_metrics(reply.metrics)
        self._obey(reply)
        return bool(reply.metrics)

    def _restore_metrics(self, states: bytes) -> None:
        """Set the metrics to their states over the rows of this epoch so far."""
        rows = fixed_batch_size(self.replica.model) or 1
        self.replica.test(self.rows.batch(np.arange(rows)))  # builds metrics that are not built yet
        variables = metric_variables(self.replica.model)
        write(variables, layout_of(variables).from_bytes(states))
        self.strategy.loss = self.replica.loss()


def evaluate(replica: Replica, rows: Rows, batch_size: int, count: int | None = None) -> None:
    """Update the replica's metrics with the first ``count`` rows, in batches; None for all rows.

    Raises:
        DataError: the model takes only batches of ``batch_size`` rows, and the last batch would be smaller.
    """
    end = rows.count if count is None else count
    if end % batch_size and fixed_batch_size(replica.model) == batch_size:
        raise DataError(
            f"The model takes only batches of {batch_size} rows; {end} rows evaluated in one task leave a "
            f"last batch of {end % batch_size}. Evaluate a multiple of {batch_size} rows per task: leave "
            "some rows out, or pass arrays or a single partition, which one task evaluates."
        )
    for start in range(0, end, batch_size):
        replica.test(rows.batch(np.arange(start, min(start + batch_size, end))))

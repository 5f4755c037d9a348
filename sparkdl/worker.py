"""The worker's side of a run: one training loop, for every mode and frequency, and the task around it.

``frequency`` is in the plan (where a window ends), ``mode`` behind the Exchange. What a window does to
the replica is a Stepper: ``JointSteps`` takes a gradient and applies the mean that comes back,
``LocalSteps`` trains on its own and sends how far it got. Nothing here knows Spark or HTTP.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from sparkdl import client, devices, feed, models, optimizers
from sparkdl.backends import distributed, has_gpu, make_replica, prepare_backend
from sparkdl.backends.base import Batch, Center, Mean, Reading, Replica
from sparkdl.batches import Integers, Plan, Span
from sparkdl.client import Heartbeat, HttpExchange, LogBuffer
from sparkdl.errors import DataError, RefusedError
from sparkdl.exchange import Endpoint, Exchange
from sparkdl.feed import Block, Rows
from sparkdl.rules import Choice, Rule
from sparkdl.schema import Schema
from sparkdl.weights import window_statistics
from sparkdl.wire import Answer, Flag, Kind, Reply, Update

logger = logging.getLogger(__name__)
LONG_SECONDS = 5.0  # how long an epoch's exchanges may take before it is worth a word


@dataclass(frozen=True)
class TrainSettings:
    """What a worker's loop has to know of a run.

    Attributes:
        plan: a plan whose row counts and worker are not known yet.
        epochs: the epoch at which training ends.
        rounds: whether updates are merged in rounds, which a worker without rows has to join too.
        validation_batch_size: rows per forward pass over validation rows.
        rule: the rule, whose worker half decides what a worker sends and goes on from.
        power: the learning rate is multiplied by the number of workers with rows to this power.
        scale: what that makes, once it is known how many have: of a number or of a schedule.
    """

    plan: Plan
    epochs: int
    rounds: bool
    validation_batch_size: int
    rule: Rule
    power: float = 0.0
    scale: float = 1.0

    def bound(self, working: int) -> TrainSettings:
        """Return the settings for so many workers with rows."""
        rule, scale = Choice(self.rule, self.power).bound(working)
        return replace(self, rule=rule, scale=scale)


class Stepper(ABC):
    """What a window of batches does to a replica.

    Args:
        replica: the replica.
        settings: what is to be known of the run.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        self.replica, self.settings = replica, settings
        self.version, self.rows, self.steps = 0, 0, 0
        self.loss = (0.0, 0.0)

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
            before, self.loss = self.loss, reading.loss
            weight = self.loss[1] - before[1]
            update.loss = (self.loss[0] - before[0]) / weight if weight else 0.0
            update.parameters, update.statistics = reading.vector, reading.statistics
            update.normalizer = reading.denominator
        self.rows, self.steps = 0, 0
        return update

    def load(self, reply: Reply, own: bytes = b"") -> None:
        """Go on from the center that a reply holds, or from this worker's own weights, if it has any."""
        self.replica.write(Center(reply.parameters, reply.statistics))
        self.version = reply.version


class JointSteps(Stepper):
    """All workers make each update together: send a gradient, apply the mean of all.

    The mean is applied in the same call that takes the next gradient, which saves a call per batch.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        super().__init__(replica, settings)
        self.mean: Mean | None = None

    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Take the gradient of this worker's share of the batch."""
        if rows := batch.rows:
            self.gradient = self.replica.gradient(batch, self.mean, whole / rows)
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
            self.mean = Mean(reply.parameters, reply.statistics)
        self.version = reply.version


Pull = Callable[[int], Reply]  # asks for the center of this moment, if its version is another than this


class LocalSteps(Stepper):
    """Each worker trains on its own between exchanges: send the way it went, go on from the center.

    The center is set in the same call that takes the next step, and the outcome of a window read in the
    one that takes its last step.
    """

    def __init__(self, replica: Replica, settings: TrainSettings) -> None:
        super().__init__(replica, settings)
        self.decays = models.decays(replica.model)
        self.before, self.statistics, _, _ = replica.read()
        self.center: Center | None = None
        self.after: Reading | None = None

    def take(self, batch: Batch, whole: int, *, last: bool) -> None:
        """Take one step with the replica's own optimizer."""
        self.after = self.replica.step(batch, self.center, self.before if last else None)
        self.center = None
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
            self.before, self.statistics, _, _ = self.replica.read()


class ElasticSteps(LocalSteps):
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


class Loop:
    """The training loop of one worker.

    Args:
        settings: what is to be known of the run.
        worker: this worker's index.
        replica: the model, as the driver had it when the run began.
        rows: this worker's training rows.
        validation: this worker's validation rows.
        exchange: where updates go.

    Attributes:
        epoch: the epoch that is being trained.
        seen_rows: training rows used in this epoch.
    """

    def __init__(
        self, settings: TrainSettings, worker: int, replica: Replica, rows: Rows, validation: Rows,
        exchange: Exchange,
    ) -> None:  # fmt: skip
        self.settings, self.worker = settings, worker
        self.replica, self.rows, self.validation = replica, rows, validation
        self.exchange = exchange
        self.stopped = False
        self.epoch, self.seen_rows = 0, 0
        self.order: tuple[int, Integers] = -1, np.zeros(0, np.int64)
        self.ahead: tuple[int, tuple[list[Span], list[Batch]]] = -1, ([], [])
        self.evaluated = -1
        self.waited, self.judged = 0.0, False
        self.learning_rate = float("nan")
        self.stepper = self._stepper()
        self.followed = None if settings.plan.joint else optimizers.follow(replica.model)

    def _stepper(self) -> Stepper:
        if self.settings.rule.elastic:
            return ElasticSteps(self.replica, self.settings, self._center)
        return (JointSteps if self.settings.plan.joint else LocalSteps)(self.replica, self.settings)

    def _center(self, version: int) -> Reply:
        """Return the center of this moment, or nothing if it is still the one of this version."""
        return self.exchange(Update(kind=Kind.CENTER, epoch=self.epoch, base_version=version))

    def run(self, notes: dict[str, Any]) -> None:
        """Train to the last epoch, or until the driver says stop; ``notes`` go to the driver."""
        begin = self.exchange.ready(self.rows.count, self.validation.count, notes)
        self.plan = replace(self.settings.plan, rows=tuple(begin["rows"]), worker=self.worker)
        self.settings = self.stepper.settings = self.settings.bound(self.plan.working)
        if self.followed is not None:
            self.followed.speed.assign(self.plan.speed)
            self.followed.scale.assign(self.settings.scale)
        if begin["restore"]:
            self._restore()
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
            self._train_epoch(sequence)
            sequence = self.plan.sequence(self.epoch + 1)
        while not self.stopped:  # an evaluation may still be to come
            self._settle(self.settings.epochs - 1)

    def position(self) -> tuple[int, int]:
        """Return the epoch that is being trained and the rows used in it."""
        return self.epoch, self.seen_rows

    def stop(self) -> None:
        """End after the batch under way; where there are rounds, their replies say when to end."""
        self.stopped = self.stopped or not self.settings.rounds

    def _train_epoch(self, sequence: int) -> None:
        self.seen_rows, self.waited = 0, 0.0
        began = time.perf_counter()
        end = self.plan.sequence(self.epoch + 1)
        while sequence < end:
            spans, gathered = self._window(sequence)
            for span in spans:
                if self.stopped:
                    break
                batch = gathered.pop() if gathered else self._gather(span)
                self.stepper.take(batch, span.rows, last=span is spans[-1])
                self.seen_rows += span.stop - span.start
            goes = (self.stepper.rows or self.settings.rounds) and not self.stopped
            sequence = self._exchange(sequence) if goes else sequence + 1
            if self.stopped:
                self._finish(Flag.STOP)
                return
        self._judge_exchanges(time.perf_counter() - began)
        self._finish(Flag.NONE)

    def _judge_exchanges(self, seconds: float) -> None:
        """Say once if most of an epoch went into exchanges; the driver shows what worker 0 logs."""
        first = self.epoch == self.plan.first_epoch < self.settings.epochs - 1  # others may still start
        if self.worker or self.judged or self.plan.windows == 1 or first:
            return
        if self.waited < max(LONG_SECONDS, seconds / 2):
            return
        fewer = 16 if self.plan.window == 1 else "epoch"
        logger.warning(
            "Exchanging updates, and waiting for other workers to, took %.0f of the %.0f s of epoch %d. "
            "frequency=%r exchanges less often, which costs some accuracy per epoch.",
            self.waited, seconds, self.epoch + 1, fewer,
        )  # fmt: skip
        self.judged = True

    def _window(self, sequence: int) -> tuple[list[Span], list[Batch]]:
        """Return this worker's shares of the batches before an exchange, and the first of them gathered."""
        (known, window), self.ahead = self.ahead, (-1, ([], []))
        if known == sequence:
            return window
        spans = list(self.plan.spans(self.epoch, sequence - self.plan.sequence(self.epoch)))
        return spans, [self._gather(span) for span in spans[:1]]

    def _gather(self, span: Span) -> Batch:
        return self.rows.batch(self._order(span.turn), span.start, span.stop)

    def _order(self, turn: int) -> Integers:
        """Return the order of a pass over the rows, which is drawn once."""
        if self.order[0] != turn:
            self.order = turn, self.plan.order(turn)
        return self.order[1]

    def _exchange(self, sequence: int) -> int:
        """Exchange a window's update; return the number of the next exchange."""
        update = self.stepper.update()
        update.sequence, update.epoch = sequence, self.epoch
        self.waited -= time.perf_counter()
        ticket = self.exchange.begin(update)
        self.waited += time.perf_counter()
        self.replica.catch_up()  # while the reply is on its way
        if sequence + 1 < self.plan.sequence(self.epoch + 1):
            self.ahead = sequence + 1, self._window(sequence + 1)
        self.waited -= time.perf_counter()
        reply = self.exchange.finish(ticket)
        self.waited += time.perf_counter()
        if reply.flags & Flag.NOT_FINITE:
            self.stepper.recover(reply)
        else:
            self.stepper.adopt(reply)
        self._obey(reply)
        return self._catch_up(sequence, reply)

    def _catch_up(self, sequence: int, reply: Reply) -> int:
        """Take up the mean gradients of rounds that closed without this worker; return the open round."""
        while self.plan.joint and reply.round > sequence + 1:
            sequence += 1
            missed = Update(kind=Kind.GRADIENT, sequence=sequence, epoch=self.epoch)
            reply = self.exchange(missed)
            self.stepper.settle()
            self.stepper.adopt(reply)
            self._obey(reply)
        return max(sequence + 1, reply.round)

    def _finish(self, flags: Flag) -> None:
        """Report the end of an epoch, or where a stopped one has got to."""
        self.stepper.settle()
        states = self._metric_states() if self.seen_rows else b""
        self.replica.model.reset_metrics()
        self.stepper.loss = (0.0, 0.0)
        report = Update(
            kind=Kind.REPORT, epoch=self.epoch, flags=flags, rows=self.seen_rows,
            base_version=self.stepper.version, metrics=states, state=self._state(),
        )  # fmt: skip
        if self.plan.joint and self.worker == 0:
            own = self.replica.read()
            report.parameters, report.statistics = own.vector, own.statistics
        self._settled(self.exchange(report))

    def _settle(self, epoch: int) -> None:
        """Ask again for the end of an epoch that an earlier attempt of this worker reported."""
        self._settled(
            self.exchange(
                Update(kind=Kind.REPORT, flags=Flag.AWAIT, epoch=epoch, base_version=self.stepper.version)
            )
        )

    def _settled(self, reply: Reply) -> None:
        if reply.kind is Answer.CENTER:
            self.stepper.load(reply)
        self._obey(reply)

    def _obey(self, reply: Reply) -> None:
        """Do what the control words of a reply say."""
        self.stopped = self.stopped or bool(reply.flags & Flag.STOP)
        if isfinite(reply.learning_rate) and reply.learning_rate != self.learning_rate:
            self.learning_rate = reply.learning_rate
            optimizers.set_learning_rate(self.replica.model, self.settings.scale * reply.learning_rate)
        self._follow(reply.progress)
        if reply.evaluate > self.evaluated:
            self.evaluated = reply.evaluate
            self._settled(self.exchange(self._evaluate(reply.evaluate)))

    def _follow(self, progress: float) -> None:
        if self.followed is not None:
            self.followed.progress.assign(progress)
            self.followed.anchor.assign(int(optimizers.batches_seen(self.replica.model)))

    def _evaluate(self, epoch: int) -> Update:
        """Evaluate the center as it was at an epoch's end over this worker's validation rows."""
        self.stepper.settle()
        replica = self.replica  # asked for its model anew after every move: JAX's values lie elsewhere
        kept = models.read(models.metric_variables(replica.model))
        center = self.exchange(Update(kind=Kind.PULL, epoch=epoch, base_version=self.stepper.version))
        if center.kind is Answer.CENTER:
            own = replica.read()
            replica.write(Center(center.parameters, center.statistics))
        replica.model.reset_metrics()
        evaluate(replica, self.validation, self.settings.validation_batch_size)
        states = self._metric_states() if self.validation.count else b""
        if center.kind is Answer.CENTER:
            replica.write(Center(own.vector, own.statistics))
        variables = models.metric_variables(replica.model)
        if len(kept) == len(variables):
            models.write(variables, kept)
        else:
            replica.model.reset_metrics()
        return Update(
            kind=Kind.VALIDATION, epoch=epoch, metrics=states, rows=self.validation.count,
            base_version=center.version,
        )  # fmt: skip

    def _metric_states(self) -> bytes:
        variables = models.metric_variables(self.replica.model)
        return models.layout_of(variables).to_bytes(models.read(variables))

    def _state(self) -> bytes:
        """Return the optimizer's variables, where they are this worker's to tell, and the generators."""
        model = self.replica.model
        parts = [models.generators(model)]
        if self.worker == 0 or not self.plan.joint:
            parts.insert(0, optimizers.variables(model))
        state = b"".join(models.layout_of(part).to_bytes(models.read(part)) for part in parts)
        return state + self.stepper.own()

    def _restore(self) -> None:
        reply = self.exchange(Update(kind=Kind.RESTORE, base_version=self.stepper.version))
        layouts = models.Layouts.of(self.replica.model)
        cut = layouts.optimizer.nbytes
        end = cut + layouts.generators.nbytes
        self.stepper.load(reply, reply.state[end:])
        if len(reply.state) >= end:
            optimizer, random = reply.state[:cut], reply.state[cut:end]
            model = self.replica.model
            models.write(optimizers.variables(model), layouts.optimizer.from_bytes(optimizer))
            models.write(models.generators(model), layouts.generators.from_bytes(random))
        self._obey(reply)


def evaluate(replica: Replica, rows: Rows, batch_size: int) -> None:
    """Let the replica's metrics take in all rows, in batches."""
    order = np.arange(rows.count)
    for start in range(0, rows.count, batch_size):
        replica.test(rows.batch(order, start, min(start + batch_size, rows.count)))


@dataclass(frozen=True)
class TrainJob:
    """What the tasks of a run share: values only, so that it can be broadcast.

    Attributes:
        spec: the model.
        settings: the loop's settings.
        schema: what every row has to be.
        layout: the digest of the trainable variables' layout.
        class_weight: the weight of a training row by the class of its label, where rows have no weights.
    """

    spec: models.ModelSpec
    settings: TrainSettings
    schema: Schema
    layout: bytes
    class_weight: dict[int, float] | None = None


@dataclass(frozen=True)
class Task:
    """What Spark says of a task.

    Attributes:
        worker: its partition, which is the worker's index.
        attempt: its taskAttemptId.
        threads: how many threads it may use.
        generation: which start of the gang it belongs to.
        endpoint: where its driver is.
    """

    worker: int
    attempt: int
    threads: int
    generation: int
    endpoint: Endpoint


class Code(NamedTuple):
    """What of a run is code: it travels inside Spark's closure.

    Attributes:
        objects: the custom objects of the model.
        builder: the function that builds the model, where there is one.
        distribution: the function that makes the distribution over a worker's devices, where there is one.
        rule: the rule, which may be a class of the user's own; None: that of the settings.
    """

    objects: models.Objects
    builder: Callable[[], Any] | None = None
    distribution: Callable[[], Any] | None = None
    rule: Rule | None = None


def train_task(job: TrainJob, task: Task, blocks: Iterable[Block], code: Code) -> None:
    """Train one worker from its blocks; what goes wrong is told to the driver before it is raised."""
    exchange = HttpExchange(task.endpoint, task.worker, task.attempt, task.generation, job.layout)
    package, log = logging.getLogger("sparkdl"), LogBuffer()
    level = package.level
    logging.getLogger().addHandler(log)
    package.setLevel(logging.INFO)
    try:
        exchange.join(socket.gethostname(), os.getpid())
        _train(job, task, blocks, exchange, code, log)
    except RefusedError as error:
        if error.status not in (409, 410):
            tell_failure(task, error)
        raise
    except Exception as error:
        tell_failure(task, error)
        raise
    finally:
        logging.getLogger().removeHandler(log)
        package.setLevel(level)
        exchange.close()


def _train(
    job: TrainJob, task: Task, blocks: Iterable[Block], exchange: HttpExchange, code: Code, log: LogBuffer
) -> None:
    spool = feed.Spool(job.schema, feed.local_directory())
    spool.extend(feed.weigh(blocks, job.schema, job.class_weight))
    rows, validation = spool.rows(feed.TRAINING), spool.rows(feed.VALIDATION)
    prepare_backend(task.threads)
    gpus, visible = devices.held(), devices.visible_gpus()
    on_gpu = bool(visible) and (devices.scheduled() or has_gpu())
    taken = gpus or visible[: int(on_gpu)]  # a backend that is given none computes on the first
    notes = {
        "one_class": rows.one_class(), "threads": task.threads, "empty": spool.empty, "gpus": list(taken),
        "on_gpu": on_gpu,
    }  # fmt: skip
    with distributed(code.distribution, len(gpus)) as spread:
        if spread:
            _kept.clear()
        replica = take_replica(job.spec, code.objects, code.builder, joint=job.settings.plan.joint)
        models.set_generators(replica.model, job.spec.generators, task.worker)
        settings = replace(job.settings, rule=code.rule or job.settings.rule)
        loop = Loop(settings, task.worker, replica, rows, validation, exchange)
        with Heartbeat(exchange, loop.position, loop.stop, log):
            loop.run(notes)
        if spread:
            _kept.clear()  # its variables lie on the devices of this task


_kept: dict[tuple[str, bool], Replica] = {}  # the newest model of this process, compiled functions and all


def take_replica(
    spec: models.ModelSpec, objects: models.Objects, builder: Callable[[], Any] | None, *, joint: bool
) -> Replica:
    """Return a replica with the values of a spec, the compiled one of an earlier task where it fits."""
    key = spec.key, joint
    if key not in _kept:
        _kept.clear()
        _kept[key] = make_replica(models.thaw(spec, objects, builder), joint=joint)
    else:
        models.restore(_kept[key].model, spec)
    return _kept[key]


def tell_failure(task: Task, error: Exception) -> None:
    """Tell the driver of an exception in this task."""
    client.report_failure(
        task.endpoint, kind="data" if isinstance(error, DataError) else "worker",
        generation=task.generation, worker=task.worker, host=socket.gethostname(),
        message=f"{error}"[:10_000] if isinstance(error, DataError) else f"{error!r}"[:10_000],
        traceback="".join(traceback.format_exception(error))[-100_000:],
    )  # fmt: skip

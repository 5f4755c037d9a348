"""One run of a fit on the driver, from start to end.

A fit is one run, except with ``frequency="auto"``: then a second run continues it after the joint start.

The thread that called ``fit`` does everything that the user can see: callbacks, progress, errors. A second
thread waits for the Spark job, and the endpoint's own threads serve the workers. At the end, also after an
error, the job is cancelled if it still runs, the endpoint is closed, and the broadcast with the model is
destroyed. The model then has the weights of the last complete merge, with the changes that callbacks made. If
the run diverged, a merge failed half-way, or no replica reported its weights, it has those of the last
snapshot instead.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from math import isfinite

from sparkdl.callbacks import LearningRateScaling, WorkerScalars
from sparkdl.config import Mode, Placement
from sparkdl.data.batch_plan import BatchPlan, num_batches
from sparkdl.driver import start_report
from sparkdl.driver.batch_hooks import require_savers_on_driver
from sparkdl.driver.checkpoint_policy import CheckpointPolicy, checkpoint_policy
from sparkdl.driver.display.choice import choose_display
from sparkdl.driver.display.observation import ObservedDisplay
from sparkdl.driver.display.progress import Display, LineDisplay, Results
from sparkdl.driver.epochs import Callbacks, DriverModel, Reports
from sparkdl.driver.remote_server import AnyCoordinator
from sparkdl.driver.request import Request
from sparkdl.driver.server_setup import ServerSetup, hybrid_of
from sparkdl.driver.start_report import Start
from sparkdl.driver.training_job import TrainingJob
from sparkdl.driver.training_record import TrainingRecord, record_of
from sparkdl.driver.worker_group import POLL_SECONDS, WorkerGroup
from sparkdl.modeling import optimizers, serialization
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.process.reasons import reason_of
from sparkdl.rules import choose
from sparkdl.server.http_app import Traffic
from sparkdl.server.monitoring.page import Page
from sparkdl.server.monitoring.record import RunRecord
from sparkdl.server.state import CarriedState, EpochResult, RowsHeld, Snapshot
from sparkdl.spark import jobs

logger = logging.getLogger(__name__)
STOP_SECONDS = 3.0  # the time that a run which ends early waits for its last merge
RESERVE_SECONDS = 1.0  # the time that an interrupted run keeps for its cleanup after that wait
ELSEWHERE = "The fit continues with a new page, whose link is in the output of the program."


class FitRun:
    """One run of a fit: the loop over its epochs.

    Args:
        request: the request of the fit.
        earlier: the joint start that this run continues, if there was one.

    Attributes:
        next_epoch: the first epoch of the next run, if this run was a joint start; None: the fit is complete.
    """

    def __init__(self, request: Request, earlier: FitRun | None = None) -> None:
        self.earlier = earlier
        self.next_epoch: int | None = None
        self.request, self.cluster, self.num_workers = request, request.cluster, request.num_workers
        config, fit, num_workers = request.config, request.fit, request.num_workers
        self.joint = config.joint
        choice = choose(config.merge, mode=config.mode.value, window=config.window)
        scaled = any(isinstance(callback, LearningRateScaling) for callback in request.callbacks)
        if scaled or not optimizers.scalable(request.model):
            choice = choice._replace(power=0.0)
        self.choice, self.rule = choice, choice.rule
        self.hybrid = hybrid_of(config, num_workers)
        batch_size = fit.batch_size
        if config.batch_size_per_worker is not None:
            batch_size = config.batch_size_per_worker * (num_workers if self.joint else 1)
        self.driver = DriverModel(request.model, joint=self.joint)
        self.training: TrainingRecord = TrainingRecord.of(
            {} if earlier is None else earlier.training,
            workers=num_workers,
            merge=None if self.joint else self.rule.name,
            batch_size=batch_size,
            seed=fit.seed,
        )
        self.checkpoints: CheckpointPolicy = checkpoint_policy(
            request, self.driver, self.rule, self.training, earlier=earlier.checkpoints if earlier else None
        )
        self.training["seed"] = self.checkpoints.seed
        self.plan = BatchPlan(
            rows=(),
            worker=0,
            batch_size=batch_size,
            window=config.window,
            joint=self.joint,
            shuffle=fit.shuffle,
            seed=self.checkpoints.seed,
            first_epoch=self.checkpoints.first[0],
            steps_per_epoch=fit.steps_per_epoch,
            local_batch_size=request.local_batch_size,
        )
        params = {"verbose": fit.verbose, "epochs": fit.epochs, "steps": request.known_steps(batch_size)}
        given = request.callbacks, request.model, request.history, params
        self.callbacks: Callbacks = Callbacks(*given) if earlier is None else earlier.callbacks
        require_savers_on_driver(self.callbacks.batches.savers, config.placement)
        self.factor = self.callbacks.factor(num_workers)
        if self.factor is not None and config.window is None and self.factor(0.0) != self.factor(0.5):
            logger.warning(
                'With frequency="epoch" a warm-up raises the learning rate only once per epoch, when workers '
                "exchange. Set frequency to a number of batches for a smoother warm-up."
            )
        self.reports, self.metrics = Reports(request.metrics), request.metrics
        self.rate = float("nan")  # the learning rate that workers got last
        self.begun = 0.0  # the run's progress when the epoch began
        self.before: Snapshot | None = None  # the newest one at the last request; None: no request is open
        self.traffic = Traffic()
        self.held: tuple[RowsHeld, ...] = ()
        self.carried: CarriedState | None = None
        self.reported = False
        self.changed = False  # whether callbacks set weights at an epoch's end that workers still lack

    def execute(self) -> None:
        """Train; leave the model with the weights of the last complete merge, also after an error."""
        request = self.request
        first, last, end = self._begin(), request.fit.epochs, request.end
        record = record_of(request, self.training, self.driver.layouts.trainable.size)
        self.record: RunRecord = self.earlier.record if self.earlier else record
        if first >= end:
            self._end_at_once(first)
            return
        changed = self.callbacks.begin_epoch(request.fit.initial_epoch)
        request.flags.require_kept()
        request.flags.trace()
        with Cleanup() as stack:
            group, display = self._start(stack)
            if self.checkpoints.resumed and changed and not self.coordinator.snapshot.place:
                self.coordinator.replace(*self.driver.values())
            logs: Results = {}
            try:
                group.start()
                for epoch in range(request.fit.initial_epoch, end):
                    result = self._epoch(epoch, group, display)
                    logs = self._end_epoch(epoch, result, display)
                    group.failures = 0
                    if request.model.stop_training:
                        break
                self.coordinator.stop()
                group.finish()
                interrupts.check()
            except BaseException as error:
                with interrupts.held():
                    self._load(self._interrupted(group))
                    self.record.settle(self.coordinator, self.traffic)
                    self.record.finish("failed", reason_of(error))
                    self._record()
                raise
            # The model has the weights of the last epoch's end, with the changes that callbacks made.
            self.record.settle(self.coordinator, self.traffic)
            if end < last and not request.model.stop_training:
                self.checkpoints.keep_at_switch(self.coordinator, logs)
                self._record()
                self.held = self.coordinator.held
                self._end_joint_start(end)
                del self.coordinator  # its center need not stay in memory while the next run trains
                return
            self.record.finish("stopped" if request.model.stop_training else "finished")
        optimizers.finalize(request.model, self.driver.variables.trainable)
        self.carried = self.coordinator.carried()
        self._record()
        before = self.checkpoints.digests()
        self.callbacks.end(logs)
        self.checkpoints.keep_last(self.coordinator, logs, before)

    def _end_joint_start(self, epoch: int) -> None:
        """End the joint start. The next run continues the fit at this epoch."""
        self.training.end_joint_start(epoch - self.plan.first_epoch)
        self.record.finish("continued", ELSEWHERE)
        self.next_epoch = epoch

    def _end_at_once(self, first: int) -> None:
        """End a run that has no epoch to train; ``first`` is the epoch at which the fit continues."""
        if (resumed := self.checkpoints.resumed) is not None:
            if first >= self.request.fit.epochs:
                self._compare_rows()
            self.training.count(resumed.counters | {"version": resumed.snapshot.version})
            self.held = resumed.held
        if first < self.request.fit.epochs:
            self._end_joint_start(first)
        else:
            self.record.finish("finished")
            self.callbacks.end({})
        self.request.history.training, self.request.history.run = self.training, self.record.values()

    def _compare_rows(self) -> None:
        """Let the workers compare their rows with those of the complete run, which trains no epoch."""
        with Cleanup() as stack:
            group, display = self._start(stack)
            group.start()
            _await_rows(self.coordinator, group, display)
            self.coordinator.stop()
            group.finish()

    def _begin(self) -> int:
        """Call ``on_train_begin``, and restore the checkpoint if any; return the first epoch to train."""
        if self.earlier is not None:
            return self.request.fit.initial_epoch
        restored = self.callbacks.begin()
        if self.checkpoints.resumed:
            restored = self.checkpoints.restore_model()
        elif restored:
            self.plan = replace(self.plan, first_epoch=restored)
        fit = self.request.fit
        if restored is not None and restored < fit.epochs:
            self.request.fit = replace(fit, initial_epoch=restored)
        return fit.initial_epoch if restored is None else restored

    def _start(self, stack: Cleanup) -> tuple[WorkerGroup, Display]:
        """Return the run's workers, for which slots are reserved, and the display of progress."""
        request = self.request
        stack.callback(self.checkpoints.close)
        stack.enter_context(jobs.cancelled_if_interrupted(self.cluster))
        stack.enter_context(jobs.claim(self.cluster, self.num_workers + request.spare_slot))
        setup = ServerSetup(
            request=request,
            driver=self.driver,
            plan=self.plan,
            choice=self.choice,
            hybrid=self.hybrid,
            first_step=self.checkpoints.first[1],
            evaluation_waits=self.callbacks.may_replace_weights,
            factor=self.factor,
        )
        with request.flags.applied():
            spec, objects = serialization.freeze(
                request.model, request.builder, request.custom_objects, check=request.check
            )
            self.coordinator = setup.make_coordinator(None if self.checkpoints.resumed else request.carried)
            self.checkpoints.restore(self.coordinator)
        job = TrainingJob(request=request, driver=self.driver, plan=self.plan, choice=self.choice)
        if self.earlier is not None:
            self.record.resume(merge=self.rule.name, batch_size=self.plan.batch_size)
        on_driver = request.config.placement is not Placement.WORKER
        shown = request.config.dashboard and on_driver and request.fit.verbose != 0
        page = Page(self.record, self.coordinator.shape.run) if shown else None
        group = job.group(self.coordinator, spec, objects, traffic=self.traffic, page=page, stack=stack)
        group.on_event = self.checkpoints.on_event = self.record.add_event
        display = choose_display(0 if self.callbacks.draws else request.fit.verbose, request.fit.epochs)
        stack.callback(display.close)
        if page is not None:
            noting = LineDisplay(request.fit.epochs) if self.callbacks.draws else display
            noting.note(f"Live page: {group.address}{page.link()} (works once)")
        if self.checkpoints.resumption:
            display.note(self.checkpoints.resumption)
            self.record.add_event(self.checkpoints.resumption, "info")
            self.checkpoints.resumption = ""
        return group, ObservedDisplay(display, self.record, self.coordinator, self.traffic)

    def _epoch(self, epoch: int, group: WorkerGroup, display: Display) -> EpochResult:
        """Follow an epoch until all workers have ended it; return its result."""
        if epoch > self.request.fit.initial_epoch:
            self._begin_epoch(epoch)
            self._release(epoch)
        display.begin(epoch, _epoch_rows(self.coordinator))
        self.reports.begin()
        snapshot = self.coordinator.snapshot
        self.begun, self.before = (snapshot.before or snapshot).progress, None
        started = time.monotonic()
        while True:
            result = self.coordinator.wait_epoch(epoch, POLL_SECONDS)
            interrupts.check()
            self.checkpoints.require_owned()
            if result is not None:
                if not self.reported:  # the start and the result arrived together
                    self._report_start(display)
                self.training["epoch_seconds"].append(time.monotonic() - started)
                self.training["epoch_rows"].append(result.rows)
                return result
            group.check()
            self._begin_test(epoch)
            self.checkpoints.keep(self.coordinator)
            if not self.reported and self.coordinator.plans:
                self._report_start(display)
                self._release(epoch)
                started = time.monotonic()
                display.begin(epoch, _epoch_rows(self.coordinator))
            self._follow(epoch, display)
            if not self.reported:
                display.wait(group.waiting)

    def _release(self, epoch: int) -> None:
        """Let workers train to the end of this epoch, at the model's present learning rate."""
        self.rate = optimizers.learning_rate(self.request.model)
        self.coordinator.release(epoch, self.rate)

    def _follow(self, epoch: int, display: Display) -> None:
        """Show the progress of the current epoch, and call the hooks of the batches that are done."""
        members = list(self.coordinator.members.values())
        running = [each for member in members for each in member.running if each.epoch == epoch]
        hooks = self.callbacks.batches
        if self.coordinator.plans and self.reports.take(running):
            plan = self.coordinator.plans[0]
            done = min(plan.steps - 1, self.reports.rows * plan.turn_steps // sum(plan.rows))
            hooks.reach(done, self.reports.results)
            if self.before is None and hooks.is_due(done):  # for a callback that saves after batches
                self.before = self.coordinator.newest_snapshot
                self.coordinator.request_snapshot()
            rate = optimizers.learning_rate(self.request.model)
            if isfinite(rate) and rate != self.rate:
                self._release(epoch)
        self._save_batch()
        if self.record.stop_request == "now" and self.coordinator.plans:
            self.request.model.stop_training = True
        if self.request.model.stop_training:
            self.coordinator.end_early(epoch)
        if self.coordinator.plans:
            done, rows = _rows_done(self.coordinator, epoch), _epoch_rows(self.coordinator)
            display.update(done, rows, self.reports.results)

    def _save_batch(self) -> None:
        """Call the callbacks that save after batches, once the requested snapshot has arrived."""
        if self.before is None or self.before is self.coordinator.newest_snapshot:
            return
        snapshot, self.before = self.coordinator.newest_snapshot, None
        hooks = self.callbacks.batches
        done = min(self.coordinator.plans[0].steps - 1, round(snapshot.progress - self.begun))
        states = [states for states in snapshot.metrics.values() if states]
        hooks.check()
        self._load(snapshot)
        hooks.mark()
        hooks.save(done, self.metrics.merge(states) if states else self.reports.results)

    def _begin_epoch(self, epoch: int) -> None:
        """Call the callbacks for the start of an epoch after the first, and send weights that they set.

        Without rounds, workers may have begun the epoch already, so weights that a callback changed and then
        restored are not sent again.
        """
        changed = self.callbacks.begin_epoch(epoch) or self.changed
        self.request.flags.require_kept()
        self.changed = False
        if changed and self.request.config.mode is not Mode.SYNCHRONOUS:
            changed = not self.driver.is_at(self.coordinator.snapshot)
        if changed:
            self.coordinator.replace(*self.driver.values())

    def _merged(self, epoch: int, result: EpochResult) -> Results:
        """Return the results of all workers' metrics over the training rows of an epoch."""
        if not (self.joint and self.num_workers > 1 and self.request.divides):
            return self.metrics.merge(result.metrics)
        return self.metrics.merge(result.metrics, result.losses, self.coordinator.plans[0].batch_rows(epoch))

    def _end_batches(self, snapshot: Snapshot, results: Results) -> None:
        """Load the weights at the end of an epoch into the model, and call the remaining batch hooks."""
        self.callbacks.batches.check()
        self._load(snapshot)
        self.callbacks.note_weights()
        self.callbacks.end_batches(self.coordinator.plans[0].steps, results)

    def _begin_test(self, epoch: int) -> None:
        """Call ``on_test_begin`` at an epoch's end, if workers wait for it, and let them evaluate."""
        ended = self.coordinator.awaiting_evaluation(epoch)
        if ended is None:
            return
        self._end_batches(ended.snapshot, self._merged(epoch, ended))
        changed = self.callbacks.begin_test()
        self.coordinator.evaluate(epoch, self.driver.values() if changed else None)

    def _validated(self, result: EpochResult) -> tuple[Results, int]:
        """Return the results over the validation rows, and the number of their batches in one process."""
        fit = self.request.fit
        size = fit.validation_batch_size or self.plan.batch_size
        rows = [member.validation_rows for member in self.coordinator.members.values()]
        total = min(sum(rows), fit.validation_rows(size) or sum(rows))
        known = rows if total == sum(rows) else ()
        return self.metrics.merge_tests(result.validation, known, size), num_batches(total, size)

    def _report_start(self, display: Display) -> None:
        """Check the workers' rows once all have counted theirs, and report how they are divided.

        Raises:
            ConfigError: two workers are on one GPU, and ``share_gpus`` is False; or no worker trains on any
                of the batches in ``profile``.
            DataError: validation rows were requested and there are none; the last batch is smaller, and the
                model takes full batches only; or some rows cannot be trained on.
        """
        self.reported = True
        plans, members = self.coordinator.plans, self.coordinator.members
        start = Start(self.request, self.choice, plans, members, "joint_start" in self.training)
        self.callbacks.set_steps(plans[0].steps)
        start_report.check(start)
        self.training.update(
            gpus=start_report.gpus_of(members, shared=self.request.config.share_gpus),
            rows=start.rows,
            worker_rows=list(start.plan.rows),
            learning_rate_scale=start.rate_scale,
        )
        start_report.report(start, display.note)

    def _end_epoch(self, epoch: int, result: EpochResult, display: Display) -> Results:
        """Load the weights at the end of an epoch, call callbacks, and return the epoch's results."""
        logs = results = self._merged(epoch, result)
        self.coordinator.commit(result.snapshot)
        self.training["losses"].append(result.losses)
        if not self.callbacks.testing:  # otherwise _begin_test has done this already
            self._end_batches(result.snapshot, results)
        if result.validation:
            held, batches = self._validated(result)
            logs = logs | {f"val_{name}": value for name, value in held.items()}
            self.callbacks.end_test(held, batches)
            if self.callbacks.may_replace_weights and self.driver.is_at(result.snapshot):
                self.callbacks.note_weights()
        display.end(epoch, result.rows, logs)
        for observer in [each for each in self.request.callbacks if isinstance(each, WorkerScalars)]:
            observer.observe(self.record.workers(), self.metrics.by_worker(result.metrics, self._rows()))
        self.changed = self.callbacks.end_epoch(epoch, logs, result.losses)
        if self.record.stop_request is not None:
            self.request.model.stop_training = True
        ends = self.request.model.stop_training or epoch + 1 == self.request.fit.epochs
        if self.changed and (ends or self.request.config.mode is Mode.SYNCHRONOUS):
            self.coordinator.replace(*self.driver.values())
            self.changed = False
        self.checkpoints.keep(self.coordinator, logs)
        return logs

    def _load(self, snapshot: Snapshot) -> None:
        """Load a snapshot into the user's model, but keep the model's present learning rate."""
        rate = optimizers.learning_rate(self.request.model)
        self.driver.load(snapshot, self._rows())
        optimizers.set_learning_rate(self.request.model, rate)

    def _interrupted(self, group: WorkerGroup) -> Snapshot:
        """Stop a run that ends early, wait for its last merge, and return its last snapshot."""
        try:
            job = group.job
            if job is not None and job.running and self.coordinator.plans and not self.coordinator.failure:
                self.coordinator.stop()
                deadline = time.monotonic() + interrupts.limited(STOP_SECONDS, reserve=RESERVE_SECONDS)
                while not self.coordinator.reported and job.running and time.monotonic() < deadline:
                    self.coordinator.wait_epoch(self.request.fit.epochs, POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - a coordinator in worker 0 may be gone
            logger.debug("The run could not be stopped: %r", error)
        return self.coordinator.stopped_snapshot()

    def _rows(self) -> tuple[int, ...]:
        """Return the training rows of each worker; zeros until they are known."""
        return self.coordinator.plans[0].rows if self.coordinator.plans else (0,) * self.num_workers

    def _record(self) -> None:
        """Record the counts of the run in its History."""
        counts = self.traffic.summary() | self.coordinator.summary() | {"restarts": self.coordinator.restarts}
        dropped = counts.pop("dropped", None)
        self.training.count(counts)
        if isinstance(dropped, dict) and dropped:
            workers = ", ".join(f"worker {worker}: {count}" for worker, count in sorted(dropped.items()))
            logger.warning("Late updates were not merged (%s).", workers)
        history = self.request.history
        history.training, history.run = self.training, self.record.values()
        history.trace(self.coordinator.intervals, self.coordinator.members)


def _epoch_rows(coordinator: AnyCoordinator) -> int:
    """Return the number of rows that all workers train on in an epoch; 0 until it is known."""
    return sum(plan.epoch_rows for plan in coordinator.plans)


def _await_rows(coordinator: AnyCoordinator, group: WorkerGroup, display: Display) -> None:
    """Wait until all workers of a run that resumes have compared their rows with those of its checkpoint.

    Raises:
        DataError: the rows differ.
    """
    while not coordinator.plans:
        time.sleep(POLL_SECONDS)
        interrupts.check()
        group.check()
        display.wait(group.waiting)


def _rows_done(coordinator: AnyCoordinator, epoch: int) -> int:
    """Return the number of rows done in an epoch. Without rounds, workers may be in the next one already."""
    return sum(
        member.seen_rows if member.epoch == epoch else coordinator.plans[worker].epoch_rows
        for worker, member in tuple(coordinator.members.items())
        if member.epoch >= epoch
    )

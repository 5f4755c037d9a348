"""The scheduler: a queue of fits that share the slots of one Spark application.

Each job has a thread of its own on the driver, which waits until the policy starts the job, and then calls
``SparkModel.fit``. There is no further thread: the thread that submits a job, completes an epoch, or pauses
or ends a job also applies the policy, under one lock.
"""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import logging
import math
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from sparkdl.api.spark_model import SparkModel
from sparkdl.config import FitConfig, Placement
from sparkdl.core.validation import positive_seconds, require_flag, text
from sparkdl.driver.display.progress import LineDisplay
from sparkdl.driver.epochs import check_callbacks
from sparkdl.driver.preparation import FitArguments
from sparkdl.driver.serving import shown
from sparkdl.errors import ClusterError, ConfigError, short
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.process.reasons import reason_of
from sparkdl.scheduling.job import POLL_SECONDS, Job, State
from sparkdl.scheduling.pauses import PausableFit, Paused
from sparkdl.scheduling.policy import JobSpec, Policy
from sparkdl.scheduling.schedule import Schedule, ScheduleRow, table_of
from sparkdl.scheduling.simulation import forecast
from sparkdl.server.monitoring.overview import Overview, OverviewTable
from sparkdl.settings import FaultTolerance, Network
from sparkdl.spark.application import application_of
from sparkdl.spark.failures import explained_if_stopped

logger = logging.getLogger(__name__)
CANCEL_SECONDS = 30.0  # the time that a fit may take to end after it is cancelled
_schedulers: WeakSet[Scheduler] = WeakSet()


@atexit.register
def cancel_all() -> None:
    """Cancel all jobs at the end of the program, which does not wait for their threads.

    Otherwise the temporary folders of their checkpoints would remain.
    """
    for scheduler in tuple(_schedulers):
        scheduler.cancel()


class Scheduler:
    """A queue of fits that share the slots of this Spark application.

    Jobs of a higher priority come first. Within a priority and share, jobs that have used fewer slot-seconds
    come first, so short jobs do not wait for long jobs. A job makes room at the end of an epoch, and later
    resumes from a checkpoint, in synchronous modes bit for bit. Waiting raises the level of a job, so each
    job gets its turn. Small jobs may use slots that a large job is waiting for, if this does not delay it.
    ``sparkdl.scheduling.policy`` has the exact rules.

    As a context manager, it waits for all jobs at the end of the ``with`` block, and then raises the error of
    the first job that failed. If the block ends with an exception, all jobs are cancelled. Jobs of a
    scheduler without a ``with`` block are cancelled when the program ends. During the ``with`` block there is
    a live page with the plan, whose link it prints.

    Args:
        slots: the number of slots to use; None: all slots of the application. Required under dynamic
            allocation.
        time_slice: the slot-seconds after which a job makes room for equally ranked jobs that have used
            fewer; each further slice is twice as long.
        aging: the seconds of waiting that count as much as one step of priority.
        shares: the weights of shares by name; 1 for a share that is not named. A share of weight 2 gets
            twice the slot-seconds of a share of weight 1 while both have waiting jobs.
        dashboard: whether there is a live page during the ``with`` block.
        network: the settings of the page's endpoint; None for the defaults.

    Raises:
        ConfigError: an argument is invalid, or the application has fewer slots.

    Example:
        >>> with Scheduler() as scheduler:  # doctest: +SKIP
        ...     nightly = scheduler.submit(SparkModel(large, num_workers=2), x, y, epochs=100)
        ...     urgent = scheduler.submit(SparkModel(small, num_workers=1), x, y, epochs=5, priority=1)
        ...     print(urgent.result())
    """

    @short
    def __init__(
        self,
        slots: int | None = None,
        *,
        time_slice: float = Policy.time_slice,
        aging: float = Policy.aging,
        shares: Mapping[str, float] | None = None,
        dashboard: bool = True,
        network: Network | None = None,
    ) -> None:
        self._policy = Policy(1 if slots is None else slots, time_slice, aging, shares or {})
        self._cluster = application_of(own_gpus=slots is None)
        with explained_if_stopped(self._cluster):
            self._policy.slots = self._slots(slots)
        self._changed = threading.Condition(threading.RLock())
        self._pausing: tuple[str, ...] = ()
        self._jobs: dict[str, Job] = {}
        self._closed = False
        self._dashboard, self._network = require_flag("dashboard", dashboard), network or Network()
        self._page = Cleanup()
        self._record = Overview("Scheduled fits", "jobs", self._table)
        _schedulers.add(self)

    def _slots(self, wanted: int | None) -> int:
        """Return the number of slots to share.

        Raises:
            ConfigError: the application has fewer, or their number varies and none was given.
        """
        if self._cluster.dynamic:
            if wanted is None:
                raise ConfigError(
                    "slots should be the number of slots to use, since this application allocates executors "
                    "dynamically; got None. Set slots, for example to those of spark.dynamicAllocation."
                    "maxExecutors executors."
                )
            return wanted
        found = self._cluster.num_workers(None, None, FaultTolerance.start_timeout)[0]
        if wanted is not None and wanted > found:
            raise ConfigError(
                f"slots should be at most {found}, the number of slots of this Spark application; got "
                f"{wanted}. Leave slots out, or start more executors."
            )
        return found if wanted is None else wanted

    def __repr__(self) -> str:
        return repr(self.plan())

    def _repr_html_(self) -> str:
        return self.plan()._repr_html_()

    def __enter__(self) -> Scheduler:
        if self._dashboard:
            note = LineDisplay(0).note
            self._page.enter_context(shown(self._record, self._cluster, self._network, note))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        complete = False
        try:
            if error is None:
                self.wait()
                complete = True
        finally:
            self._closed = True
            self.cancel()
            self._record.finish("finished" if complete else "failed")
            self._page.close()

    @property
    def slots(self) -> int:
        """The number of slots that the jobs share."""
        return self._policy.slots

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they were submitted."""
        with self._changed:
            return list(self._jobs.values())

    @short
    def submit(
        self,
        spark_model: SparkModel,
        x: Any = None,
        y: Any = None,
        *,
        name: str | None = None,
        priority: int = 0,
        share: str | None = None,
        seconds_per_epoch: float | None = None,
        **fit_arguments: Any,
    ) -> Job:
        """Put a fit into the queue, and return its handle at once.

        Args:
            spark_model: the model; ``num_workers`` is the number of slots that the job needs.
            x: as in ``SparkModel.fit``.
            y: as in ``SparkModel.fit``.
            name: the name of the job; by default that of the Keras model, with a number if it is taken.
            priority: a whole number; jobs of a higher priority come first.
            share: the name of the share that the job belongs to, such as a team; all jobs without one form a
                share.
            seconds_per_epoch: an estimate of the seconds of an epoch, for back-fill before the first epoch
                has ended; after that the measured time of the last epoch counts.
            fit_arguments: the other arguments of ``SparkModel.fit``. ``verbose`` is 0 by default, since the
                progress bars of several fits would overwrite each other. Without ``checkpoint``, a temporary
                folder is used; with it, ``every`` should be "epoch".

        Raises:
            ConfigError: an argument cannot be honoured; the job needs more slots than there are; the model,
                a callback or the checkpoint folder belongs to a job that has not ended; or the scheduler
                is closed.
            ClusterError: Spark was stopped.
        """
        slots = self._slots_of(spark_model)
        arguments = _bound(spark_model, {"x": x, "y": y, "verbose": 0} | fit_arguments)
        fit = FitArguments(**arguments).settings(arguments["batch_size"])
        pausable = PausableFit(spark_model, arguments, check_callbacks(arguments["callbacks"]))
        _require_pausable(fit)
        if seconds_per_epoch is not None:
            positive_seconds("seconds_per_epoch", seconds_per_epoch)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ConfigError(f"priority should be a whole number; got {priority!r}.")
        share = "" if share is None else text("share", share)
        with self._changed:
            self._require_free(pausable)
            self._require_running()
            spec = JobSpec(
                name=self._name(spark_model, name),
                slots=slots,
                epochs=max(0, fit.epochs - fit.initial_epoch),
                priority=priority,
                share=share,
                seconds=seconds_per_epoch,
            )
            # A job's callback may submit another job, whose thread inherits the tag of the first job.
            inherited = [j.tag for j in self._jobs.values() if j.thread is threading.current_thread()]
            job = self._jobs[spec.name] = self._make_job(spec, pausable, fit.epochs)
            self._policy.add(spec, time.monotonic())
            body = functools.partial(self._run, job, inherited)
            job.thread = self._cluster.thread(body, f"sparkdl-{spec.name}")
            job.thread.start()
            self._decide()
        return job

    def plan(self) -> Schedule:
        """Return the plan, a table of the jobs that can be printed."""
        with self._changed:
            now, policy, pausing = time.monotonic(), copy.deepcopy(self._policy), self._pausing
            states = {name: (job.state, job.epochs_done) for name, job in self._jobs.items()}
        expected = forecast(policy, now)  # outside of the lock, which fits wait for
        order = sorted(policy.ranked(now), key=lambda entry: not entry.running)
        names = dict.fromkeys([*(entry.name for entry in order), *states])
        rows = []
        for name in names:
            job, (state, done) = self._jobs[name], states[name]
            entry, times = policy.entries.get(name), expected.get(name)
            runs = entry is not None and entry.running
            row = ScheduleRow(
                name=name,
                state=f"{state}, to be paused" if runs and name in pausing else str(state),
                priority=job.priority,
                share=job.share,
                slots=job.slots,
                epochs_done=done,
                epochs=job.epochs,
                since=None if entry is None else now - entry.since,
                starts=None if times is None or runs else times.starts[0] - now,
                ends=None if times is None else times.stops[-1] - now,
            )
            rows.append(row)
        return Schedule(self.slots, rows)

    @short
    def wait(self) -> None:
        """Wait for the end of all jobs, then raise the error of the first job that failed.

        Errors that ``Job.result`` has raised are not raised again. Ctrl-C cancels all jobs.

        Raises:
            SparkDLError: a job has failed.
        """
        try:
            while left := [job for job in self.jobs if not job.done]:  # callbacks may submit more
                left[0].wait(math.inf)
        except BaseException:
            with interrupts.held():
                self.cancel()
            raise
        for job in self.jobs:
            if job.error is not None and not job.raised:
                job.result()

    def cancel(self) -> None:
        """Cancel all jobs that have not ended; each model has the weights of its last merge."""
        self._cancel(*self.jobs)

    def _table(self) -> OverviewTable:
        """Return the plan for the page."""
        return table_of(self.plan(), self.jobs)

    # The jobs' threads.

    def _run(self, job: Job, inherited: list[str]) -> None:
        """Run a job to its end: the body of its thread.

        Args:
            job: the job.
            inherited: the tags of other jobs that the thread has inherited.
        """
        try:
            with explained_if_stopped(self._cluster):
                for tag in inherited:
                    self._cluster.untag(tag)
                self._cluster.tag(job.tag)
            while self._has_slots(job):
                try:
                    history = job.fit.run()
                except Paused:
                    self._pause(job)
                else:
                    job.history = history
                    if history.epoch:  # empty if resume=True had nothing to train
                        job.epochs_done = history.epoch[-1] + 1
                    self._end(job, State.FINISHED)
        except BaseException as error:  # noqa: BLE001 - the user's callbacks may raise anything
            self._end(job, State.CANCELLED if job.cancelling else State.FAILED, error)
        finally:
            job.fit.close()

    def _has_slots(self, job: Job) -> bool:
        """Wait until a job gets its slots, and return True; False once it has ended.

        Raises:
            ClusterError: Spark was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: job.done or job.state is State.RUNNING)
        if not job.done:
            self._require_running()
        return not job.done

    def _require_running(self) -> None:
        """Raise a ClusterError if Spark was stopped, because a fit would start another application."""
        if self._cluster.stopped:
            raise ClusterError(
                "The Spark application of the scheduler was stopped before the job could run. Start a new "
                "session, and submit the job to a new scheduler."
            )

    def _end_epoch(self, name: str, done: int) -> None:
        """Record the end of an epoch, and decide; ``done`` counts the epochs before ``initial_epoch`` too."""
        with self._changed:
            job = self._jobs[name]
            job.epochs_done, job.history = done, job.spark_model.history
            self._policy.end_epoch(name, time.monotonic(), max(0, job.epochs - done))
            self._decide()

    def _may_train(self, name: str, first: bool) -> bool:
        """Return True if a job may train its next epoch. It may train the first one after each start."""
        with self._changed:
            return not self._jobs[name].cancelling and (first or name not in self._pausing)

    def _pause(self, job: Job) -> None:
        with self._changed:
            if job.cancelling:
                self._end(job, State.CANCELLED)
                return
            logger.info('The job "%s" is paused after epoch %d.', job.name, job.epochs_done)
            job.state = State.PAUSED
            self._policy.pause(job.name, time.monotonic())
            self._decide()

    def _end(self, job: Job, state: State, error: BaseException | None = None) -> None:
        job.fit.close()  # before a thread that waits for the end continues
        with self._changed:
            if job.done:
                return
            job.state = state
            if state is State.FAILED and error is not None:
                traceback.clear_frames(error.__traceback__)  # frames would keep the data in memory
                job.error = error
                logger.warning('The job "%s" failed; the others go on: %s', job.name, reason_of(error))
            else:
                logger.info('The job "%s" is %s after epoch %d.', job.name, state, job.epochs_done)
            self._policy.remove(job.name, time.monotonic())
            self._decide()

    def _decide(self) -> None:
        """Start the jobs that the policy starts, and record those to pause. The caller holds the lock."""
        now = time.monotonic()
        decision = self._policy.decide(now)
        for name in decision.start:
            logger.info('The job "%s" starts with %d slots.', name, self._jobs[name].slots)
            self._policy.start(name, now)
            self._jobs[name].state = State.RUNNING
        self._pausing = decision.pause
        self._changed.notify_all()
        self._record.publish()

    def _cancel(self, *jobs: Job) -> None:
        """Cancel jobs, and wait until those that run have ended."""
        with self._changed:
            left = [job for job in jobs if not job.done]
            for job in left:
                job.cancelling = True
                if job.state is not State.RUNNING:
                    job.state = State.CANCELLED
                    self._policy.remove(job.name, time.monotonic())
            self._decide()
        own = threading.current_thread()
        running = [job.thread for job in left if job.thread is not None and job.thread is not own]
        deadline = time.monotonic() + interrupts.limited(CANCEL_SECONDS)
        while any(thread.is_alive() for thread in running) and time.monotonic() < deadline:
            for job in left:
                if not job.done:
                    self._cluster.cancel(job.tag)  # repeated: a Spark job may be submitted late
            time.sleep(POLL_SECONDS)

    # Checks.

    def _make_job(self, spec: JobSpec, fit: PausableFit, epochs: int) -> Job:
        fit.gate.ended = functools.partial(self._end_epoch, spec.name)
        fit.gate.may_train = functools.partial(self._may_train, spec.name)
        return Job(fit, spec, epochs=epochs, changed=self._changed, cancel=self._cancel)

    def _slots_of(self, spark_model: SparkModel) -> int:
        """Return the number of slots that a model needs.

        Raises:
            ConfigError: it is not a SparkModel, its number of workers is missing or too large, or it has no
                checkpoints.
        """
        if not isinstance(spark_model, SparkModel):
            raise ConfigError(
                f"spark_model should be a sparkdl.SparkModel; got {type(spark_model).__name__}. Pass "
                "SparkModel(model, num_workers=...)."
            )
        num_workers = spark_model.config.num_workers
        if num_workers is None:
            raise ConfigError(
                f"num_workers should be a number from 1 to {self.slots}, the slots that jobs share; the "
                "SparkModel has None. Set it: SparkModel(model, num_workers=1)."
            )
        if num_workers > self.slots:
            raise ConfigError(
                f"num_workers should be at most {self.slots}, the slots that jobs share; the SparkModel has "
                f"{num_workers}. Use fewer workers, or a scheduler with more slots."
            )
        if spark_model.config.placement is Placement.WORKER:
            raise ConfigError(
                'A scheduled fit needs checkpoints, which placement="worker" does not have. Set '
                'placement="driver" or "executors".'
            )
        return num_workers

    def _require_free(self, fit: PausableFit) -> None:
        """Require that no other job uses the model, the callbacks or the checkpoints of a new one.

        Raises:
            ConfigError: another job uses one of them, or the scheduler is closed.
        """
        if self._closed:
            raise ConfigError("This scheduler is closed; its with block has ended. Make another one.")
        for job in self._jobs.values():
            if not job.done:
                job.require_apart(fit)

    def _name(self, spark_model: SparkModel, name: str | None) -> str:
        """Return the name of a new job.

        Raises:
            ConfigError: the given name is taken.
        """
        if name is not None:
            if text("name", name) in self._jobs:
                raise ConfigError(f'The name "{name}" belongs to another job. Choose another name.')
            return name
        base = str(spark_model.model.name)
        names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(self._jobs) + 2))
        return next(each for each in names if each not in self._jobs)


def _bound(spark_model: SparkModel, given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of ``fit`` by name, with their defaults."""
    bound = inspect.signature(spark_model.fit).bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def _require_pausable(fit: FitConfig) -> None:
    """Require that checkpoints, if the user chose them, are written at the ends of epochs.

    Raises:
        ConfigError: they are not.
    """
    if fit.checkpoint is not None and fit.checkpoint.every != "epoch":
        raise ConfigError(
            'every should be "epoch" in the checkpoints of a scheduled fit, which is paused at the end of an '
            f"epoch; got {fit.checkpoint.every!r}. Leave every out."
        )

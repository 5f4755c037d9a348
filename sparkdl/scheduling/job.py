"""The handle of a fit that a scheduler runs."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from enum import StrEnum

from sparkdl.api.spark_model import SparkModel
from sparkdl.config import CheckpointConfig
from sparkdl.errors import ClusterError, ConfigError, short
from sparkdl.process import interrupts
from sparkdl.scheduling.pauses import PausableFit
from sparkdl.scheduling.policy import JobSpec
from sparkdl.spark import files
from sparkdl.ui.history import History

POLL_SECONDS = 0.1


class State(StrEnum):
    """The state of a job: it waits for its first start, runs, waits after a pause, or has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = State.FINISHED, State.FAILED, State.CANCELLED


class Job:
    """A fit that was submitted to a ``Scheduler``; ``Scheduler.submit`` creates it.

    Attributes:
        name: the name.
        slots: the number of slots that it needs, which is its ``num_workers``.
        epochs: the number of epochs of the fit, those before ``initial_epoch`` included.
        epochs_done: the number of epochs that have ended, counted in the same way.
        priority: the priority.
        share: the share; "" is the share of jobs without one.
        state: "waiting", "running", "paused", "finished", "failed" or "cancelled".
        error: the error of a job that has failed, else None.
        history: the History of the epochs so far; None before the end of the job's first epoch.
        spark_model: the SparkModel, whose model is trained in place.
    """

    def __init__(
        self,
        fit: PausableFit,
        spec: JobSpec,
        *,
        epochs: int,
        changed: threading.Condition,  # guards the state of all jobs of the scheduler
        cancel: Callable[[Job], None],
    ) -> None:
        self.fit, self.epochs = fit, epochs
        self.name, self.slots, self.priority, self.share = spec.name, spec.slots, spec.priority, spec.share
        self.epochs_done = 0
        self.state = State.WAITING
        self.error: BaseException | None = None
        self.history: History | None = None
        self.spark_model: SparkModel = fit.spark_model
        self.thread: threading.Thread | None = None
        self.cancelling, self.raised = False, False
        self.tag = f"scheduled-{uuid.uuid4().hex}"  # the tag of its Spark jobs
        self._changed, self._cancel = changed, cancel

    def __repr__(self) -> str:
        return (
            f"Job({self.name!r}, {self.state}, epoch {self.epochs_done} of {self.epochs}, "
            f"priority {self.priority}, {self.slots} slot{'s' * (self.slots != 1)})"
        )

    @property
    def done(self) -> bool:
        """True if the job has ended: it is finished, failed or cancelled."""
        return self.state in ENDED

    @short
    def result(self, timeout: float | None = None) -> History:
        """Wait for the end of the job, and return its History, which has the epochs of all pieces.

        Args:
            timeout: the maximum number of seconds to wait; None: no limit.

        Raises:
            TimeoutError: the job has not ended in this time; it keeps running.
            ClusterError: the job was cancelled.
            SparkDLError: the fit failed, with the error of ``SparkModel.fit``.
        """
        if not self.wait(math.inf if timeout is None else timeout):
            raise TimeoutError(
                f'The job "{self.name}" should end within {timeout:g} s; it is {self.state}, with '
                f"{self.epochs_done} of {self.epochs} epochs done. Wait again, or cancel it."
            )
        if self.error is not None:
            self.raised = True
            raise self.error
        if self.state is State.CANCELLED or self.history is None:
            raise ClusterError(
                f'The job "{self.name}" was cancelled after {self.epochs_done} of {self.epochs} epochs. '
                "Its model has the weights of its last merge. Submit it again to train it."
            )
        return self.history

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the job for some seconds at most; return True if it has ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self.done and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, POLL_SECONDS))
                interrupts.check()
        return self.done

    def require_apart(self, fit: PausableFit) -> None:
        """Require that a new fit shares no model, callback or checkpoint folder with this job.

        Raises:
            ConfigError: it shares one of them.
        """
        model = fit.spark_model.model
        if self.spark_model.model is model:
            raise ConfigError(
                f'The model "{model.name}" belongs to the job "{self.name}", which has not '
                "ended. Wait for it, or submit a copy (keras.models.clone_model)."
            )
        callbacks = {id(callback) for callback in fit.callbacks}
        shared = [callback for callback in self.fit.callbacks if id(callback) in callbacks]
        if shared:
            raise ConfigError(
                f'The callback {type(shared[0]).__name__} belongs to the job "{self.name}", which has not '
                "ended. Make one for each job."
            )
        folder = _folder(fit.checkpoint)
        if folder is not None and folder == _folder(self.fit.checkpoint):
            raise ConfigError(
                f'The checkpoint folder {folder} belongs to the job "{self.name}", which has not ended. '
                "Choose another folder."
            )

    def cancel(self) -> None:
        """End the job now. Its model has the weights of its last merge. A job that has ended stays as it is.

        The call waits up to 30 s until the fit has ended. If a callback of the job itself makes the call, it
        does not wait, and the job ends before its next epoch.
        """
        self._cancel(self)


def _folder(checkpoint: CheckpointConfig | None) -> str | None:
    """Return the name of a checkpoint folder, the same for all spellings of a local path."""
    if checkpoint is None:
        return None
    return checkpoint.uri.rstrip("/") if files.is_uri(checkpoint.uri) else os.path.realpath(checkpoint.uri)

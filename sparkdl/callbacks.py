"""Keras callbacks for the learning rate, and for the scalars of workers in TensorBoard.

A callback for the learning rate defines a factor, which may change during training. ``SparkModel`` sends the
rate times the factor to the workers with every exchange, and leaves the rate of the model on the driver
unchanged. In plain ``model.fit`` the number of workers is 1.

Example:
    >>> callbacks = [LearningRateScaling(), LearningRateWarmup(epochs=5)]
    >>> spark_model.fit(data, epochs=90, callbacks=callbacks)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import keras

from sparkdl.config import Scaling
from sparkdl.core.validation import choose
from sparkdl.errors import ConfigError
from sparkdl.modeling import optimizers
from sparkdl.modeling.event_files import EventFile, require_summaries
from sparkdl.transport.messages import ACTIVITIES

KEPT = "_sparkdl_rate"  # attribute of an optimizer during a batch: the learning rate to restore after it


class LearningRateFactor(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that multiplies the learning rate; subclasses define the factor."""

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return the factor of the learning rate.

        Args:
            epoch: training progress, in epochs.
            num_workers: number of workers.
        """
        raise NotImplementedError

    def on_train_begin(self, logs: object = None) -> None:
        """Raise an error if the learning rate is a schedule.

        Raises:
            ConfigError: the learning rate is a schedule.
        """
        self._epoch = 0
        if isnan(optimizers.learning_rate(self.model)):
            raise ConfigError(
                f"{type(self).__name__} needs an optimizer whose learning rate is a number; got a schedule. "
                "Scale the schedule, or use a schedule with a warm-up (CosineDecay(warmup_steps=...))."
            )

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Store the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """In plain Keras, set the rate of one batch. The factors of several callbacks multiply."""
        optimizer, rate = self.model.optimizer, optimizers.learning_rate(self.model)
        if not hasattr(optimizer, KEPT):
            setattr(optimizer, KEPT, rate)
        done = self._epoch + batch / (self.params.get("steps") or float("inf"))
        optimizers.set_learning_rate(self.model, rate * self.factor(done, 1))

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Restore the rate, so that other callbacks find the value they set."""
        optimizer = self.model.optimizer
        if hasattr(optimizer, KEPT):
            optimizers.set_learning_rate(self.model, getattr(optimizer, KEPT))
            delattr(optimizer, KEPT)


class LearningRateScaling(LearningRateFactor):
    """Multiply the learning rate by the number of workers K (Goyal et al., 2017), or by its square root.

    Use it if K workers use K times the rows per step: with ``batch_size_per_worker=`` in synchronous mode
    at frequency "batch". If the workers train separately for several batches, it replaces the factor of the
    default merge rule, sqrt(min(K, 8)).

    Args:
        rule: "linear" (default): by K; "sqrt": by the square root of K, which suits Adam and its variants.

    Raises:
        ConfigError: the rule is not known.
    """

    def __init__(self, rule: str = "linear") -> None:
        super().__init__()
        self.rule = choose("rule", rule, Scaling)

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return K, or its square root."""
        return num_workers if self.rule is Scaling.LINEAR else num_workers**0.5


class LearningRateWarmup(LearningRateFactor):
    """Raise the learning rate linearly from a fraction of its value to the full value (Goyal et al., 2017).

    Args:
        epochs: length of the rise, in epochs; may be fractional. Default 5, as in the paper.
        start: the fraction at the beginning, from 0 to 1. None: 1 / K for K workers. With
            ``LearningRateScaling()``, training then begins at the compiled rate.

    Raises:
        ConfigError: a setting is out of its range.
    """

    def __init__(self, epochs: float = 5, start: float | None = None) -> None:
        super().__init__()
        if not epochs > 0:
            raise ConfigError(f"epochs should be a positive number; got {epochs!r}.")
        if start is not None and not 0 <= start <= 1:
            raise ConfigError(f"start should be a number from 0 to 1, or None; got {start!r}.")
        self.epochs, self.start = epochs, start

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return the fraction at this point, on the straight line from ``start`` to 1."""
        start = 1 / num_workers if self.start is None else self.start
        return start + (1 - start) * min(1.0, epoch / self.epochs)


class WorkerScalars(keras.callbacks.Callback):  # type: ignore[misc]
    """Write scalars of each worker for TensorBoard at the end of each epoch.

    Each worker has a run folder of its own, ``worker-0``, ``worker-1`` and so on, so that TensorBoard draws
    the curves of all workers in one chart. If ``log_dir`` is also the folder of
    ``keras.callbacks.TensorBoard``, the chart has the results over all rows too.

    The files are written with TensorFlow's summaries, as those of ``keras.callbacks.TensorBoard`` are, on any
    backend. In plain ``model.fit`` there are no workers, and nothing is written.

    Args:
        log_dir: the folder that gets the run folders; ``tensorboard --logdir`` takes it.

    Raises:
        ModuleNotFoundError: when training begins: TensorFlow or TensorBoard is not installed on the driver.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.log_dir = Path(log_dir)
        self._files: dict[int, EventFile] = {}
        self._before: dict[int, tuple[int, list[float]]] = {}  # each worker's rows and seconds by activity
        self._observed: list[tuple[Mapping[str, Any], Mapping[str, float]]] = []

    def on_train_begin(self, logs: object = None) -> None:
        """Require TensorFlow's summaries, and forget an earlier fit."""
        require_summaries(type(self).__name__)
        self.on_train_end()
        self._before, self._observed = {}, []

    def observe(
        self, workers: Sequence[Mapping[str, Any]], results: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Store the state of the workers at the end of an epoch. ``SparkModel`` calls this.

        Args:
            workers: the state of each worker, as in the run's record.
            results: the results of metrics over a worker's training rows of the epoch, by worker.
        """
        self._observed = [(each, results.get(each["worker"], {})) for each in workers]

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Write the scalars of the epoch."""
        for state, results in self._observed:
            scalars = {f"epoch_{name}": value for name, value in results.items()}
            scalars |= self._speed(epoch, state)
            if state["staleness"] is not None:
                scalars["worker/staleness"] = state["staleness"]
            if scalars:
                worker = state["worker"]
                if worker not in self._files:
                    self._files[worker] = EventFile(self.log_dir / f"worker-{worker}")
                self._files[worker].write(epoch, scalars)
        self._observed = []

    def _speed(self, epoch: int, state: Mapping[str, Any]) -> dict[str, float]:
        """Return a worker's seconds by activity, and its rows per second, since the end of the last epoch."""
        rows, times = (state["epoch"] - 1) * state["rows"] + state["seen"], list(state["times"])
        rows_before, before = self._before.get(state["worker"], (epoch * state["rows"], []))
        self._before[state["worker"]] = rows, times
        if len(before) != len(times) or any(now < then for now, then in zip(times, before, strict=True)):
            before = [0.0] * len(times)  # no earlier times, or the worker has restarted since
        spent = [now - then for now, then in zip(times, before, strict=True)]
        if not sum(spent) > 0:
            return {}  # the worker has reported no times since then
        scalars = {f"worker/seconds_{name}": each for name, each in zip(ACTIVITIES, spent, strict=True)}
        if rows > rows_before:
            scalars["worker/rows_per_second"] = (rows - rows_before) / sum(spent)
        return scalars

    def on_train_end(self, logs: object = None) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

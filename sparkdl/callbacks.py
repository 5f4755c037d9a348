"""Keras callbacks for the learning rate, for averaged weights, and for workers' scalars in TensorBoard.

A callback for the learning rate defines a factor, which may change during training. ``SparkModel`` sends the
rate times the factor to the workers with every exchange, and leaves the rate of the model on the driver
unchanged. In plain ``model.fit`` the number of workers is 1.

Example:
    >>> callbacks = [LearningRateScaling(), LearningRateWarmup(epochs=5)]
    >>> spark_model.fit(data, epochs=90, callbacks=callbacks)  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkdl.config import Scaling
from sparkdl.core.directions import is_better_larger
from sparkdl.core.validation import choose, one_of, text, whole_number
from sparkdl.core.vectors import Array
from sparkdl.errors import ConfigError
from sparkdl.modeling import optimizers
from sparkdl.modeling.event_files import EventFile, require_summaries
from sparkdl.transport.messages import ACTIVITIES

logger = logging.getLogger(__name__)
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
        """Raise an error unless the learning rate is a number.

        Raises:
            ConfigError: the learning rate is a schedule or a function.
        """
        self._epoch = 0
        if not optimizers.settable(self.model):
            kind = "schedule" if optimizers.scheduled(self.model) else "function"
            raise ConfigError(
                f"{type(self).__name__} needs an optimizer whose learning rate is a number; got a {kind}. "
                f"Scale the values of the {kind}, or use a schedule with a warm-up "
                "(CosineDecay(warmup_steps=...))."
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
        self._restore()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Restore the rate of a batch that did not end: Keras begins one too many for an iterator."""
        self._restore()

    def _restore(self) -> None:
        optimizer = self.model.optimizer
        if hasattr(optimizer, KEPT):
            optimizers.set_learning_rate(self.model, getattr(optimizer, KEPT))
            delattr(optimizer, KEPT)


class LearningRateScaling(LearningRateFactor):
    """Multiply the learning rate by the number of workers K (Goyal et al., 2017), or by its square root.

    Use it if K workers use K times the rows per step: with ``batch_size_per_worker=`` in synchronous mode
    at frequency "batch". At other frequencies, the default merge rule multiplies the learning rate by
    sqrt(min(K, 8)); this callback replaces that factor.

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
        start: the fraction at the beginning, from 0 to 1. None: 1 / K for K workers, so that with
            ``LearningRateScaling()`` training begins at the compiled rate. With one worker there is no
            warm-up unless ``start`` is set.

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


class AverageWeights(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the weights of the last epochs (SWA, Izmailov et al., 2018); keep the mean if it is no worse.

    From epoch ``start`` on, validation uses the mean of the weights so far. Training itself continues without
    averaging. At the end of training the model gets the last mean that was evaluated, if its result is no
    worse than the best result of the epochs up to ``start``, which are evaluated with their own weights.
    Otherwise the model keeps the weights of training, and a warning is logged. Without validation rows it
    gets the mean.

    Moving statistics, such as those of BatchNormalization, are averaged too. They may not match the mean
    weights exactly; the validation results show whether this matters.

    Args:
        start: the epoch whose weights are the first in the mean, counted from 0. Choose an epoch after which
            the results hardly improve, and keep the learning rate high.
        monitor: the validation result to compare, such as "val_accuracy".
        mode: "min" if less is better, "max" if more is; "auto" follows from the name of the result.

    Attributes:
        averaged: after training, whether the model has the mean.

    Raises:
        ConfigError: a setting is not valid.
    """

    def __init__(self, start: int, monitor: str = "val_loss", mode: str = "auto") -> None:
        super().__init__()
        self.start = whole_number("start", start, least=0)
        self.monitor = text("monitor", monitor)
        if not monitor.startswith("val_"):
            raise ConfigError(
                f'monitor should be a result of the validation rows, such as "val_loss"; got {monitor!r}.'
            )
        if one_of("mode", mode, ("auto", "min", "max")) == "auto":
            larger = is_better_larger(monitor)
            if larger is None:
                raise ConfigError(
                    f'Whether a smaller {monitor} is better is not known. Set mode="min" or "max".'
                )
            mode = "max" if larger else "min"
        self.mode, self.averaged = mode, False
        self._forget()

    def _forget(self) -> None:
        self._mean: list[Array] = []
        self._count, self._epoch, self._counted = 0, 0, False
        self._trained: list[Array] | None = None  # the weights of training, during an evaluation of the mean
        self._tested: tuple[list[Array], float] | None = None  # the last evaluated mean, and its result
        self._plain: float | None = None  # the best result of weights that are not averaged

    def on_train_begin(self, logs: object = None) -> None:
        """Forget an earlier fit."""
        self.averaged = False
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Store the epoch."""
        self._epoch, self._counted = epoch, False

    def on_test_begin(self, logs: object = None) -> None:
        """Count the epoch's weights, and put the mean in their place for the evaluation."""
        self._count_weights()
        if self._count > 1:
            self._trained = self.model.get_weights()
            self.model.set_weights(self._mean)

    def on_test_end(self, logs: object = None) -> None:
        """Restore the weights of training."""
        if self._trained is not None:
            self.model.set_weights(self._trained)
        self._trained = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's weights if there was no evaluation; otherwise store its result.

        Raises:
            ConfigError: the validation rows have no result of the name ``monitor``.
        """
        self._count_weights()
        result = (logs or {}).get(self.monitor)
        if result is None:
            found = [name for name in logs or {} if name.startswith("val_")]
            if found:
                raise ConfigError(f"monitor should be one of {', '.join(found)}; got {self.monitor!r}.")
            return
        if self._count > 1:
            self._tested = self._mean, float(result)
        elif not np.isnan(result) and (self._plain is None or self._is_no_worse(float(result), self._plain)):
            self._plain = float(result)

    def _count_weights(self) -> None:
        """Add the model's weights to the mean, once per epoch; whole numbers are replaced instead."""
        if self._counted or self._epoch < self.start:
            return
        self._counted, weights = True, self.model.get_weights()
        self._count += 1
        if self._count == 1:
            self._mean = [_in_full(weight) for weight in weights]
            return
        self._mean = [
            mean + (_in_full(weight) - mean) / self._count if "float" in weight.dtype.name else weight
            for mean, weight in zip(self._mean, weights, strict=True)
        ]

    def _is_no_worse(self, result: float, other: float) -> bool:
        """Return True if a result is at least as good as another; a NaN is not."""
        return result <= other if self.mode == "min" else result >= other

    def on_train_end(self, logs: object = None) -> None:
        """Give the model the mean, if it is no worse."""
        mean, result = self._tested or (self._mean, None)
        if self._count < 2:
            logger.warning(
                "AverageWeights(start=%d): training ended before there were two epochs to average, so the "
                "model has the weights of the last epoch.",
                self.start,
            )
        elif result is not None and self._plain is not None and not self._is_no_worse(result, self._plain):
            logger.warning(
                "AverageWeights: %s is %.4g with the mean of the weights, and was %.4g before, so the model "
                "keeps the weights of the last epoch.",
                self.monitor,
                result,
                self._plain,
            )
        else:
            self.model.set_weights(mean)
            self.averaged = True


def _in_full(weight: Array) -> Array:
    """Return a weight in at least single precision, since a mean in half precision would lose digits."""
    return weight.astype(np.float32) if weight.dtype.name in ("float16", "bfloat16") else weight


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

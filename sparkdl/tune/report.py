"""The callbacks that report the epochs, or the folds, of a trial."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from optuna import Trial

from sparkdl.driver.batch_hooks import overrides
from sparkdl.errors import ConfigError

Reported = Callable[[int, dict[str, Any], list[float]], object]
Curves = dict[str, dict[int, float]]  # by the name of a result, its values by epoch, counted from 1


class TestedWeights(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the weights that were evaluated after an epoch.

    Callbacks such as SwapEMAWeights and AverageWeights put other weights into the model for the evaluation
    only, and some change them again before the end of the epoch. This one comes after them.

    Attributes:
        weights: the weights; None if the epoch has not been evaluated.
    """

    weights: list[Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Forget the weights of the last epoch."""
        self.weights = None

    def on_test_begin(self, logs: object = None) -> None:
        """Keep the weights."""
        self.weights = self.model.get_weights()


class TrialReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the result of each epoch, keeps the best weights, and ends a trial that the pruner rejects.

    An epoch without the metric, as with ``validation_freq=2``, is not reported.

    Args:
        trial: the trial.
        metric: the name of the result to report.
        maximize: whether a larger result is better.
        stopping: set when the search ends.
        reported: called after each report with the number of the trial, its parameters and its results.

    Attributes:
        best: the best result so far; None if there is none.
        best_epoch: its epoch, counted from 1; 0 if there is none.
        weights: the weights with this result; None if they are not kept.
        pruned: whether the pruner has ended the trial.
        epochs: the number of epochs so far.
        may_be_added: whether other callbacks of the fit may add the metric to the results of later epochs.
        tested: keeps the weights that are evaluated; None if they are those at the end of the epoch.
        refusal: the error if the results do not include the metric.
    """

    def __init__(
        self, trial: Trial, metric: str, *, maximize: bool, stopping: threading.Event, reported: Reported
    ) -> None:
        super().__init__()
        self.trial, self.metric, self.maximize = trial, metric, maximize
        self.stopping, self.reported = stopping, reported
        self.best: float | None = None
        self.best_epoch = 0
        self.weights: list[Any] | None = None
        self.pruned = False
        self.epochs = 0
        self.may_be_added = False
        self.tested: TestedWeights | None = None
        self.refusal: ConfigError | None = None
        self._curves: Curves = {}

    @property
    def results(self) -> dict[str, list[float]]:
        """The results of each epoch by name, up to the last epoch with the result; NaN if one lacks it."""
        return {
            name: [curve.get(epoch, math.nan) for epoch in range(1, max(curve) + 1)]
            for name, curve in self._curves.items()
        }

    def set_model(self, model: Any) -> None:
        """Set the model: a keras.Model, or the SparkModel that a HyperModel's own loop has."""
        super().set_model(model if isinstance(model, keras.Model) else getattr(model, "model", model))

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """End the fit if the search ends."""
        self._end_if_stopping()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the result of the epoch, and end the fit if the pruner says so before the last epoch.

        Raises:
            ConfigError: the results do not include the metric, and those of later epochs will not either.
        """
        value = self._collect(epoch, logs or {})
        if value is None:
            self._end_if_stopping()
            return
        epochs = (self.params or {}).get("epochs")  # a HyperModel's own loop may leave them out
        if self._is_better(value):
            self.best, self.best_epoch, self.weights = value, self.epochs, self._weights()
        self._tell(value, self.epochs, last=epoch + 1 == epochs)

    def callbacks(self, others: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """Return the callbacks of a fit: others and this one, which has to see their changes."""
        self.may_be_added = any(map(_adds_results, others))
        if not any(_adds_results(each) or overrides(each, "on_test_begin") for each in others):
            return [*others, self]
        self.tested = TestedWeights()
        return [*others, self.tested, self]

    def _weights(self) -> list[Any]:
        """Return the weights that gave the metric of an epoch."""
        tested = self.tested.weights if self.tested and self.metric.startswith("val_") else None
        weights: list[Any] = self.model.get_weights() if tested is None else tested
        return weights

    def require_metric(self) -> None:
        """Require that an epoch had the metric, if there were epochs.

        Raises:
            ConfigError: none had it.
        """
        if self._curves and self.metric not in self._curves:
            self._refuse(self._curves)

    def _collect(self, epoch: int, logs: Mapping[str, Any]) -> float | None:
        """Record the results of an epoch, and return the metric; None if this epoch does not have it.

        Raises:
            ConfigError: the results do not include the metric, and those of later epochs will not either.
        """
        self.epochs = max(self.epochs, epoch) + 1  # a HyperModel may call fit several times
        scalars = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        for name, value in scalars.items():
            self._curves.setdefault(name, {})[self.epochs] = value
        validated = any(name.startswith("val_") for name in scalars)
        may_come = self.may_be_added or self.metric.startswith("val_") and not validated
        if self.metric not in self._curves and not may_come:
            self._refuse(scalars)
        return scalars.get(self.metric)

    def _refuse(self, found: Mapping[str, Any]) -> None:
        """Raise the error for a metric that is not among the results."""
        self.refusal = ConfigError(
            f"metric should be a result of an epoch ({', '.join(found)}); got {self.metric!r}."
        )
        raise self.refusal

    def _tell(self, value: float, step: int, *, last: bool) -> None:
        """Report a result, and end the fit if the search ends, or if the pruner rejects the trial."""
        self.trial.report(value, step)
        self.reported(self.trial.number, self.trial.params, self.results.get(self.metric, []))
        if not self._end_if_stopping() and not last and self.trial.should_prune():
            self.pruned = self.model.stop_training = True

    def _end_if_stopping(self) -> bool:
        """End the fit if the search ends; return True if it does."""
        if self.stopping.is_set():
            self.model.stop_training = True
        return self.stopping.is_set()

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value > self.best if self.maximize else value < self.best


class FoldReport(TrialReport):
    """Reports the mean of the folds of a trial after each fold, with which the pruner may end the trial.

    Its results are those of each epoch, averaged over the folds so far, and the best epoch is that of these
    means. A fold that ended before an epoch, as with EarlyStopping, counts there with its last result. Means
    over the other folds only would compare epochs of different rows, and without the epochs after the
    shortest fold, one fold that stops early would hide the progress of all others. The mean of an epoch is
    NaN if a fold has diverged by then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folds: list[Curves] = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the results of the epoch, and end the fit if the search ends.

        Raises:
            ConfigError: the results do not include the metric, and those of later epochs will not either.
        """
        self._collect(epoch, logs or {})
        self._end_if_stopping()

    def end_fold(self, *, last: bool) -> None:
        """Report the mean of the folds so far, and begin the next one.

        Raises:
            ConfigError: no epoch of the fold had the metric.
        """
        self.require_metric()
        self._folds.append(self._curves)
        self.best, self.best_epoch, self._curves = None, 0, _means(self._folds)
        for epoch, value in self._curves.get(self.metric, {}).items():
            if self._is_better(value):
                self.best, self.best_epoch = value, epoch
        self._tell(math.nan if self.best is None else self.best, len(self._folds), last=last)
        if not (last or self.pruned):
            self._curves, self.epochs = {}, 0


def _adds_results(callback: keras.callbacks.Callback) -> bool:
    """Return True if a callback may change the results of an epoch, or the weights before its end.

    Keras's own callbacks do not.
    """
    of_keras = type(callback).__module__.partition(".")[0] in ("keras", "sparkdl")
    of_user = isinstance(callback, keras.callbacks.LambdaCallback) or not of_keras
    return of_user and overrides(callback, "on_epoch_end")


def _means(folds: Sequence[Curves]) -> Curves:
    """Return the mean of each result at each epoch over all folds.

    A fold counts with its last result up to the epoch. Epochs before the first result of a fold have no mean.
    """
    means: Curves = {}
    for name in folds[0]:
        curves = [fold.get(name, {}) for fold in folds]
        last: list[float | None] = [None] * len(curves)
        means[name] = {}
        for epoch in sorted(set().union(*curves)):
            last = [curve.get(epoch, before) for curve, before in zip(curves, last, strict=True)]
            known = [value for value in last if value is not None]
            if len(known) == len(last):
                means[name][epoch] = float(np.mean(known))
    return {name: curve for name, curve in means.items() if curve}

"""The callbacks that report the epochs, or the folds, of a trial."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import keras
import numpy as np
from optuna import Trial

from sparkdl.errors import ConfigError

Reported = Callable[[int, dict[str, Any], list[float]], object]


class TrialReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the result of each epoch, keeps the best weights, and ends a trial that the pruner rejects.

    Args:
        trial: the trial.
        metric: the name of the result to report.
        maximize: whether a larger result is better.
        stopping: set when the search ends.
        reported: called after each report with the number of the trial, its parameters and its results.

    Attributes:
        best: the best result so far; None if there is none.
        best_epoch: its epoch, counted from 1; 0 if there is none.
        weights: the weights at the end of that epoch; None if they are not kept.
        pruned: whether the pruner has ended the trial.
        results: the results of all epochs, by name.
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
        self.results: dict[str, list[float]] = {}
        self.refusal: ConfigError | None = None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """End the fit if the search ends."""
        if self.stopping.is_set():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the result of the epoch, and end the fit if the pruner says so before the last epoch.

        Raises:
            ConfigError: the results do not include the metric.
        """
        value = self._collect(logs or {})
        if self._is_better(value):
            self.best, self.best_epoch, self.weights = value, epoch + 1, self.model.get_weights()
        self._tell(value, epoch + 1, last=epoch + 1 == self.params["epochs"])

    def _collect(self, logs: Mapping[str, Any]) -> float:
        """Record the results of an epoch, and return the metric.

        Raises:
            ConfigError: the results do not include the metric.
        """
        scalars = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        for name, value in scalars.items():
            self.results.setdefault(name, []).append(value)
        if self.metric not in scalars:
            self.refusal = ConfigError(
                f"metric should be a result of an epoch ({', '.join(scalars)}); got {self.metric!r}."
            )
            raise self.refusal
        return scalars[self.metric]

    def _tell(self, value: float, step: int, *, last: bool) -> None:
        """Report a result, and end the fit if the search ends, or if the pruner rejects the trial."""
        self.trial.report(value, step)
        self.reported(self.trial.number, self.trial.params, self.results[self.metric])
        if self.stopping.is_set():
            self.model.stop_training = True
        elif not last and self.trial.should_prune():
            self.pruned = self.model.stop_training = True

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value > self.best if self.maximize else value < self.best


class FoldReport(TrialReport):
    """Reports the mean of the folds of a trial after each fold, with which the pruner may end the trial.

    Its results are those of each epoch, averaged over the folds so far, and the best epoch is that of these
    means.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folds: list[dict[str, list[float]]] = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the results of the epoch, and end the fit if the search ends.

        Raises:
            ConfigError: the results do not include the metric.
        """
        self._collect(logs or {})
        if self.stopping.is_set():
            self.model.stop_training = True

    def end_fold(self, *, last: bool) -> None:
        """Report the mean of the folds so far, and begin the next one."""
        self._folds.append(self.results)
        names = self._folds[0]
        means = {name: _means([each[name] for each in self._folds]) for name in names}
        self.best, self.best_epoch, self.results = None, 0, means
        for epoch, value in enumerate(means[self.metric]):
            if self._is_better(value):
                self.best, self.best_epoch = value, epoch + 1
        self._tell(math.nan if self.best is None else self.best, len(self._folds), last=last)
        if not (last or self.pruned):
            self.results = {}


def _means(curves: list[list[float]]) -> list[float]:
    """Return the mean of each epoch over the curves that have it."""
    epochs = zip_longest(*curves)
    return [float(np.mean([each for each in values if each is not None])) for values in epochs]

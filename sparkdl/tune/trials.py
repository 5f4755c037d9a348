"""One trial of a search: its model is built on the driver and trained by a fit, which the pruner may end."""

from __future__ import annotations

import math
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from optuna import Trial
from optuna.exceptions import TrialPruned

from sparkdl.api.spark_model import SparkModel
from sparkdl.api.tracking import LoggedSearch
from sparkdl.driver.epochs import check_callbacks
from sparkdl.errors import ClusterError, ConfigError, SparkDLError, WorkerLostError
from sparkdl.modeling import keras_internals, serialization
from sparkdl.modeling.keras_types import Callback
from sparkdl.process.reasons import reason_of
from sparkdl.tune.cross_validation import CrossValidated
from sparkdl.tune.parameters import Parameters
from sparkdl.tune.report import FoldReport, Reported, TrialReport
from sparkdl.tune.rows import TrainingRows
from sparkdl.tune.side_by_side import own_callbacks, seeded, set_seed

# Arguments that a trial may set and still use the shared rows, whose name has the size of batches.
SAME_ROWS = {"batch_size", "epochs", "callbacks", "validation_batch_size", "validation_freq"}
LOST = WorkerLostError, ClusterError  # a trial that ends with one of these is tried once more


@dataclass
class TrialOutcome:
    """The end of a trial.

    Attributes:
        value: the value; None if the trial was pruned, failed or was interrupted.
        model: the model with its best weights; None if it is not kept.
        pruned: whether the pruner ended the trial.
        results: the results of its epochs, by name.
        best_epoch: the epoch with the value, counted from 1; 0 if there was none.
        reason: why the trial failed; empty if it did not.
        traceback: the traceback of the failure.
        again: whether the trial should be tried once more.
        interrupted: whether the search ended before the trial did.
    """

    value: float | None = None
    model: keras.Model | None = None
    pruned: bool = False
    results: dict[str, list[float]] = field(default_factory=dict)
    best_epoch: int = 0
    reason: str = ""
    traceback: str = ""
    again: bool = False
    interrupted: bool = False


class MainThread:
    """Calls that other threads leave to the main thread, which makes them one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._closed = False

    def call(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function that the main thread calls.

        Raises:
            CancelledError: the main thread makes no more calls.
        """
        future: Future[Any] = Future()
        self._calls.put((function, future))
        if self._closed:
            self.close()
        return future.result()

    def serve(self, seconds: float) -> None:
        """Make the next call, if there is one within some seconds."""
        try:
            function, future = self._calls.get(timeout=seconds)
        except queue.Empty:
            return
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - it is raised in the other thread
            future.set_exception(error)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the calls that have not been made, and all later ones."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()[1].cancel()


@dataclass(kw_only=True)
class TrialRunner:
    """Runs trials.

    Attributes:
        build: the user's function, or a HyperModel of KerasTuner.
        spread: whether the function takes the values of the space as keyword arguments.
        data: the positional arguments of each fit.
        shared: ``data`` with arrays as SharedArrays, which executors keep from one fit to the next; used
            unless the arguments of a trial may change the rows.
        fit_arguments: the keyword arguments of each fit.
        settings: the settings of each SparkModel.
        metric: the name of the result that is the value of a trial.
        maximize: whether a larger value is better.
        seed: the seed of the initial weights: trial n uses ``seed + n``; None: not seeded.
        stopping: set when the search ends.
        reported: called after each epoch of a trial.
        log: logs the fits to MLflow, if its autologging is on.
        running: the models that are being trained, by the number of their trials.
        builds: calls the function in the main thread if there is data. An objective is called in the trial's
            own thread.
        names: Keras's counters for the default names of layers when the search began. The names of each model
            start from them, so that equal models have equal names.
        begun: by a callback that the function returned for a trial, a copy of its state before the first fit;
            None if it cannot be copied.
        lock: guards ``begun``.
    """

    build: Any
    spread: bool
    data: tuple[Any, ...]
    shared: tuple[Any, ...]
    fit_arguments: dict[str, Any]
    settings: dict[str, Any]
    metric: str
    maximize: bool
    seed: int | None
    stopping: threading.Event = field(default_factory=threading.Event)
    reported: Reported = lambda number, params, results: None
    log: LoggedSearch = field(default_factory=lambda: LoggedSearch({}))
    running: dict[int, keras.Model] = field(default_factory=dict)
    builds: MainThread = field(default_factory=MainThread)
    names: dict[str, int] = field(default_factory=keras_internals.default_names)
    begun: weakref.WeakKeyDictionary[Callback, Callback | None] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, trial: Trial) -> TrialOutcome:
        """Run a trial, and return how it ended.

        Raises:
            ConfigError: the results do not include the metric.
        """
        kind = FoldReport if isinstance(self.build, CrossValidated) else TrialReport
        report = kind(
            trial, self.metric, maximize=self.maximize, stopping=self.stopping, reported=self.reported
        )
        try:
            with self.log.trial(trial.number, lambda: dict(trial.params)):
                outcome = self._train(trial, report)
        except TrialPruned:
            outcome = TrialOutcome(pruned=True)
        except CancelledError:
            outcome = TrialOutcome(interrupted=True)
        except Exception as error:
            if error is report.refusal:
                raise
            outcome = TrialOutcome(
                reason=reason_of(error),
                traceback=text_of(error),
                again=isinstance(error, LOST),
                interrupted=self.stopping.is_set(),
            )
        finally:
            self.running.pop(trial.number, None)
        outcome.results, outcome.best_epoch = report.results, report.best_epoch
        return outcome

    def _train(self, trial: Trial, report: TrialReport) -> TrialOutcome:
        parameters = Parameters(trial)
        built = self.builds.call(lambda: self._built(parameters)) if self.data else self._judged(parameters)
        if (number := _number(built)) is not None:
            return _outcome_of(number, None)
        model, own = built if isinstance(built, tuple) and len(built) == 2 else (built, {})
        if not isinstance(model, keras.Model) or not isinstance(own, Mapping):
            raise ConfigError(
                "build should return a compiled keras.Model, a model with a dict of arguments of fit, or a "
                f"number, the value of the trial; got {built!r:.200}."
            )
        if not self.data:
            raise ConfigError("build returned a model, but there is no data to train it on. Pass data=.")
        self.running[trial.number] = model
        arguments = self.fit_arguments | dict(own)
        if own.get("callbacks"):
            arguments["callbacks"] = self._own(own["callbacks"], model)
        else:
            arguments["callbacks"] = own_callbacks(arguments.get("callbacks"))
        if isinstance(report, FoldReport):
            return self._cross_validate(model, arguments, report)
        return self._fit(model, parameters, arguments, report, same_rows=not set(own) - SAME_ROWS)

    def _fit(
        self,
        model: keras.Model,
        parameters: Parameters,
        arguments: dict[str, Any],
        report: TrialReport,
        *,
        same_rows: bool,
    ) -> TrialOutcome:
        """Train a model, and return how the trial ended.

        Args:
            model: the compiled model.
            parameters: the parameters of the trial.
            arguments: the arguments of the fit.
            report: the callback that reports the epochs.
            same_rows: whether the arguments leave the rows of the other trials as they are.

        Raises:
            ConfigError: the metric is a result of validation, and there are no validation rows.
        """
        arguments["callbacks"] = report.callbacks(arguments["callbacks"])
        spark_model = SparkModel(model, **self.settings)
        if hasattr(self.build, "fit"):
            report.may_be_added = True
            fitted = self.build.fit(parameters, spark_model, *self.data, **arguments)
        else:
            self._require_validation(arguments, report)
            fitted = spark_model.fit(*(self.shared if same_rows else self.data), **arguments)
        if report.pruned:
            return TrialOutcome(pruned=True)
        if self.stopping.is_set():
            return TrialOutcome(interrupted=True)
        # The fit of a HyperModel may return something else, or leave the callbacks out.
        if fitted is not None and not hasattr(fitted, "history") or not report.results:
            value = self._value(fitted)
            if value == report.best:
                model.set_weights(report.weights)
            return _outcome_of(value, model)
        report.require_metric()
        if report.best is None:
            return TrialOutcome(reason=f"{self.metric} was not a number in any epoch.")
        model.set_weights(report.weights)
        return TrialOutcome(value=report.best, model=model)

    def _require_validation(self, arguments: Mapping[str, Any], report: TrialReport) -> None:
        """Require validation rows if the metric is a result of validation.

        Raises:
            ConfigError: there are none.
        """
        held = arguments.get("validation_split") or arguments.get("validation_indicator_col")
        if self.metric.startswith("val_") and not held and arguments.get("validation_data") is None:
            report.refusal = ConfigError(
                f"metric={self.metric!r} needs validation rows. Pass validation_data or validation_split, or "
                f"name a result of training, such as {self.metric.removeprefix('val_')!r}."
            )
            raise report.refusal

    def _cross_validate(
        self, model: keras.Model, arguments: dict[str, Any], report: FoldReport
    ) -> TrialOutcome:
        """Train a copy of the model for each fold."""
        rows = TrainingRows(*self.data)._replace(sample_weight=arguments.pop("sample_weight", None))
        folds = self.build.folds(rows, arguments["seed"])
        for place, (training, held) in enumerate(folds):
            copy = serialization.copy_of(model, self.settings.get("custom_objects"))
            self.running[report.trial.number] = copy
            same = {id(model): copy, id(getattr(model, "optimizer", None)): copy.optimizer}
            callbacks = report.callbacks(own_callbacks(arguments["callbacks"], same))
            of_fold = {"validation_data": held.as_data(), "callbacks": callbacks}
            SparkModel(copy, **self.settings).fit(**training._asdict(), **arguments | of_fold)
            if self.stopping.is_set():
                return TrialOutcome(interrupted=True)
            report.end_fold(last=place + 1 == self.build.num_folds)
            if report.pruned:
                return TrialOutcome(pruned=True)
        return _outcome_of(math.nan if report.best is None else report.best, None)

    def _value(self, fitted: Any) -> float:
        """Return the value that the fit of a HyperModel returned: a number, a dict, or a list of these."""
        if isinstance(fitted, list):
            return float(np.mean([self._value(each) for each in fitted]))
        if hasattr(fitted, "history"):
            results = fitted.history[self.metric]
            return float(max(results) if self.maximize else min(results))
        return float(fitted[self.metric] if isinstance(fitted, Mapping) else fitted)

    def _built(self, parameters: Parameters) -> Any:
        """Return the result of the user's function, with reproducible weights and names."""
        seed = nullcontext() if self.seed is None else seeded(self.seed + parameters.trial.number)
        with seed, keras_internals.names_from(self.names):
            return self._called(parameters)

    def _own(self, callbacks: object, model: keras.Model) -> list[Callback]:
        """Return the callbacks that the user's function made for a trial.

        They are used as they are, since they may refer to the model of the trial. If the function returns
        the same callback for another trial too, that one gets a copy of its state before the first fit.

        Raises:
            ConfigError: one is not a Keras callback, or is that of another trial and cannot be copied.
        """
        chosen = []
        parts = model, getattr(model, "optimizer", None), *model.layers, *model.variables
        same = {id(each): each for each in parts}
        with self.lock:
            for given in check_callbacks(callbacks):
                if given in self.begun:
                    chosen += own_callbacks(self.begun[given] or given)
                    continue
                self.begun[given] = None
                with suppress(ConfigError):
                    (self.begun[given],) = own_callbacks(given, same)
                chosen.append(given)
        return chosen

    def _judged(self, parameters: Parameters) -> Any:
        """Return the result of an objective, with reproducible initial weights if no other runs beside it.

        Objectives may take long, so they do not wait for each other, as functions that build a model do.
        """
        if self.seed is not None:
            set_seed(self.seed + parameters.trial.number)
        return self._called(parameters)

    def _called(self, parameters: Parameters) -> Any:
        build: Callable[..., Any] = self.build.build if hasattr(self.build, "build") else self.build
        return build(**parameters.values) if self.spread else build(parameters)


def _number(value: Any) -> float | None:
    """Return a number of any kind, such as a scalar tensor, as a float; None for other objects."""
    if isinstance(value, keras.Model | str | bytes | bytearray):
        return None
    try:
        return None if len(getattr(value, "shape", ())) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _outcome_of(value: float, model: keras.Model | None) -> TrialOutcome:
    if math.isnan(value):
        return TrialOutcome(reason="The value of the trial is NaN.")
    return TrialOutcome(value=value, model=model)


def text_of(error: BaseException) -> str:
    """Return the traceback of an error as text: the worker's own one, if the error has it."""
    own = getattr(error, "traceback", "")
    if isinstance(error, SparkDLError) and own:
        return str(own)
    return "".join(traceback.format_exception(error))

"""The driver's part of an epoch: merged metrics, the user's callbacks, History.

Keras's callbacks run on the driver, in the thread that called ``fit``, with the user's own model, which has
the merged weights. In synchronous mode workers wait for them between two epochs. So a stop, a new learning
rate or new weights that callbacks set there take effect exactly where they do in Keras.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import keras
import numpy as np

from sparkdl.callbacks import LearningRateFactor
from sparkdl.core.vectors import Array, Layout, Vector, trim
from sparkdl.data.batch_plan import Integers, num_batches
from sparkdl.driver import batch_hooks
from sparkdl.driver.batch_hooks import BatchHooks
from sparkdl.driver.display.progress import Results
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_internals, keras_metrics, keras_variables, object_pickling, optimizers
from sparkdl.modeling.backends.common import loss_metric
from sparkdl.modeling.keras_types import Callback, History, Model
from sparkdl.modeling.keras_variables import Layouts, Variables
from sparkdl.modeling.losses import are_sums
from sparkdl.modeling.signature import output_names
from sparkdl.process import interrupts
from sparkdl.server.state import Snapshot
from sparkdl.transport.messages import Running

logger = logging.getLogger(__name__)
REPORT_SECONDS = 0.5  # the minimum time between two reports
ROUNDING = 1e-6  # relative to the largest value of a variable


def check_callbacks(callbacks: object) -> list[Callback]:
    """Return the callbacks as a list.

    Raises:
        ConfigError: one of them is not a Keras callback, or would profile batches, which run on executors.
        ModuleNotFoundError: one of them needs a package that is not installed.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    kept: list[Callback] = [] if callbacks is None else keras.tree.flatten(callbacks)
    for callback in kept:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(
                f"callbacks should be keras.callbacks.Callback objects; got {type(callback).__name__}."
            )
        batch_hooks.require_usable(callback)
    return kept


class Metrics:
    """The metrics of the driver's model, which combine those of all workers.

    States are added, which is exact for Keras's own metrics. Any other metric is first tested. If its states
    cannot be added, its ``merge_state(metrics)`` is used. Without this method, the result is the mean of the
    workers' results, weighted by rows.

    Args:
        model: the user's model, its metrics built.
        y: labels of some rows.
        predicted: the model's predictions for them.
        logged: for each ``train_step`` or ``test_step`` with result names of its own, the index of the metric
            behind each name.
    """

    def __init__(
        self, model: Model, y: Any, predicted: Any, logged: dict[str, dict[str, int]] | None = None
    ) -> None:
        self.model = model
        metrics = keras_metrics.metrics_of(model)
        self.logged = {
            step: {name: metrics[place] for name, place in places.items()}
            for step, places in (logged or {}).items()
        }
        self.samples = list(zip(keras.tree.flatten(y), keras.tree.flatten(predicted), strict=False))
        self.variables = keras_variables.metric_variables(model)
        self.layout: Layout = keras_variables.layout_of(self.variables)
        model.reset_metrics()  # every worker begins from reset states
        self.initial = keras_variables.read(self.variables)
        self.apart = [
            metric
            for metric in keras_metrics.metrics_of(model)
            if not keras_metrics.from_keras(metric) and not keras_metrics.adds_up(metric, self.samples)
        ]
        means = [metric.name for metric in self.apart if not hasattr(metric, "merge_state")]
        if means:
            logger.warning(
                "%s: the states of two workers cannot be added, so the reported result is the mean of the "
                "workers' results, weighted by rows. Define merge_state(metrics) on the metric to get the "
                "exact result.",
                ", ".join(means),
            )

    def merge(
        self,
        states: Sequence[bytes],
        losses: Sequence[float] = (),
        rows: Integers | tuple[int, ...] = (),
        *,
        step: str = "train_step",
    ) -> Results:
        """Return the merged results of all workers' metrics. The initial state is counted only once.

        Args:
            states: each worker's metric states.
            losses: the loss of each batch that workers shared, if it is divided by the sum of masks or
                weights, not by the number of rows.
            rows: the number of rows of each of these batches.
            step: the step that updated the metrics, "train_step" or "test_step"; it may name the results.
        """
        given = [self.layout.from_bytes(state) for state in states if state]
        merged = [
            np.asarray(first + sum(state[index] - first for state in given), first.dtype)
            for index, first in enumerate(self.initial)
        ]
        if given and 0 < len(losses) <= len(rows) and np.isfinite(losses).all():
            self._set_loss(merged, losses, rows[: len(losses)])
        keras_variables.write(self.variables, merged)
        named = self.logged.get(step)
        found = self.model.get_metrics_result() if named is None else _results_of(named)
        results: Results = {name: to_number(value) for name, value in found.items()}
        for metric in self.apart if given else []:
            names = (
                [self._key(metric)] if named is None else [n for n, each in named.items() if each is metric]
            )
            results |= dict.fromkeys(names, self._merged(metric, given))
        self.model.reset_metrics()
        return results

    def by_worker(self, states: Sequence[bytes], rows: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the results of each worker's own metrics, by worker; empty if the states of one are missing.

        Args:
            states: the metric states of each worker.
            rows: the number of training rows of each worker.
        """
        results: dict[int, dict[str, float]] = {}
        if len(states) == len(rows):
            for worker, own in enumerate(states):
                merged = self.merge([own]) if own and rows[worker] else {}
                results[worker] = {name: value for name, value in merged.items() if isinstance(value, float)}
        return results

    def merge_tests(self, states: Sequence[bytes], rows: Sequence[int], batch_size: int) -> Results:
        """Return the merged results of an evaluation.

        Keras reports a loss that is a sum over a batch as its mean over batches, weighted by rows, so it
        depends on their sizes. It is converted to the batches of a single process.

        Args:
            states: the metric states of each worker or task.
            rows: the number of rows that each evaluated, in batches of its own; empty if they are not known.
            batch_size: rows per batch, except the last batch of each.
        """
        results = self.merge(states, step="test_step")
        if not sum(rows) or not are_sums(self.model):
            return results
        names = {"loss", *(f"{name}_loss" for name in output_names(self.model))}
        given = [self.layout.from_bytes(state) for state in states if state]
        places = {id(variable): index for index, variable in enumerate(self.variables)}
        batches = sum(num_batches(each, batch_size) for each in rows)
        for metric in keras_metrics.metrics_of(self.model):
            if metric.name not in names or metric.name not in results:
                continue
            count = sum(float(state[places[id(metric.count)]]) for state in given)
            if count == batches and metric.name != "loss":  # a graph does not weigh an output's batches
                factor = batches / num_batches(sum(rows), batch_size)
            else:
                squares = sum(_squares(each, batch_size) for each in rows)
                factor = _squares(sum(rows), batch_size) / squares
            results[metric.name] = to_number(np.multiply(results[metric.name], factor))
        return results

    def _set_loss(
        self, merged: list[Array], losses: Sequence[float], rows: Integers | tuple[int, ...]
    ) -> None:
        """Set the loss metric to the state that it would have in a single process after these batches."""
        loss = loss_metric(self.model)
        sums = {} if loss is None else {id(loss.total): np.dot(losses, rows), id(loss.count): np.sum(rows)}
        for index, variable in enumerate(self.variables):
            if id(variable) in sums:
                merged[index] = np.asarray(sums[id(variable)], merged[index].dtype)

    def _key(self, metric: keras.Metric) -> str:
        """Return Keras's name for a metric's result, which has a prefix if there are several outputs."""
        mark = object()
        metric.result = lambda: mark
        try:
            results = self.model.get_metrics_result().items()
        except TypeError:  # a custom get_metrics_result computes with the result
            results = ()
        finally:
            with interrupts.held():
                del metric.result
        return next((str(name) for name, value in results if value is mark), str(metric.name))

    def _merged(self, metric: keras.Metric, given: Sequence[Sequence[Array]]) -> float | Array:
        """Return the result of a metric whose states cannot be added."""
        if hasattr(metric, "merge_state"):
            first, *others = [self._copy(metric, state) for state in given]
            first.merge_state(others)
            return to_number(first.result())
        results = []
        for state in given:
            keras_variables.write(self.variables, state)
            results.append(to_number(metric.result()))
        return to_number(
            np.average(np.asarray(results), axis=0, weights=[self._rows(state) for state in given])
        )

    def _copy(self, metric: keras.Metric, state: Sequence[Array]) -> keras.Metric:
        """Return a copy of a metric, with the part of a worker's state that belongs to it."""
        copy = object_pickling.copied(metric)
        places = {id(variable): index for index, variable in enumerate(self.variables)}
        keras_variables.write(copy.variables, [state[places[id(variable)]] for variable in metric.variables])
        return copy

    def _rows(self, state: Sequence[Array]) -> float:
        """Return the rows that a worker's loss was averaged over; 1 if the model has no loss metric."""
        count = next((metric.count for metric in self.model.metrics if metric.name == "loss"), None)
        return next((float(s) for s, v in zip(state, self.variables, strict=True) if v is count), 1.0)


def _squares(rows: int, batch_size: int) -> int:
    """Return the sum of the squares of the sizes of the batches of some rows."""
    full, rest = divmod(rows, batch_size)
    return full * batch_size**2 + rest**2


def _results_of(metrics: dict[str, keras.Metric]) -> dict[str, object]:
    return {name: metric.result() for name, metric in metrics.items()}


def to_number(value: object) -> float | Array:
    """Return a metric's result as a float, or as an array if it has several values."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array


class Callbacks:
    """Keras's callback list, and the changes that it makes to the model.

    Args:
        callbacks: the user's callbacks.
        model: the user's model.
        history: the History that gets the results.
        params: Keras's parameters for callbacks: verbose, epochs, and steps if known.

    Attributes:
        may_replace_weights: whether a callback may replace the weights of the epoch's end for an evaluation.
        testing: whether an evaluation has begun and not ended.
    """

    def __init__(
        self,
        callbacks: list[Callback],
        model: Model,
        history: History,
        params: Mapping[str, object],
    ) -> None:
        self.model = model
        self.terminate = any(isinstance(one, keras.callbacks.TerminateOnNaN) for one in callbacks)
        self.factors = [one for one in callbacks if isinstance(one, LearningRateFactor)]
        self.early = any(batch_hooks.overrides(one, "on_epoch_begin") for one in callbacks)
        self.may_replace_weights = any(batch_hooks.overrides(one, "on_test_begin") for one in callbacks)
        self.testing = self.warned = False
        self.before: list[bytes] = []
        self.draws = any(isinstance(one, keras.callbacks.ProgbarLogger) for one in callbacks)
        self.batches = BatchHooks(callbacks, model)
        self.list = keras.callbacks.CallbackList(
            [*callbacks, history], add_history=False, add_progbar=False, model=model, **params
        )

    def set_steps(self, steps: int) -> None:
        """Tell callbacks the number of batches of an epoch, unless they have it already."""
        if self.list.params["steps"] != steps:
            self.list.set_params({**self.list.params, "steps": steps})

    def factor(self, num_workers: int) -> Callable[[float], float] | None:
        """Return the factor of the learning rate as a function of the epochs done; None: no factor."""
        factors = [_apart(factor) for factor in self.factors]  # the function is used where there is no model
        return (lambda epoch: prod(f.factor(epoch, num_workers) for f in factors)) if factors else None

    def begin(self) -> int | None:
        """Begin training; return the epoch that a callback restored, if one did."""
        self.model.stop_training = False
        keras_internals.forget_restored_epoch(self.model)
        self.list.on_train_begin()
        return keras_internals.restored_epoch(self.model)

    def begin_epoch(self, epoch: int) -> bool:
        """Begin an epoch; return True if a callback changed weights."""
        before = keras_variables.digests(self.model.weights) if self.early else []
        self.list.on_epoch_begin(epoch)
        self.batches.begin()
        return self.early and self._has_changed(before)

    def _has_changed(self, before: list[bytes]) -> bool:
        """Return True if weights have changed since these digests; warn once of those that stay here."""
        after = keras_variables.digests(self.model.weights)
        if not self.warned and len(before) == len(after):
            sent = {id(each) for part in Variables.of(self.model)[:2] for each in part}
            pairs = zip(self.model.weights, before, after, strict=True)
            kept = [weight.path for weight, one, other in pairs if one != other and id(weight) not in sent]
            if kept:
                self.warned = True
                logger.warning(
                    "Callbacks changed %s on the driver. Workers do not get these values: weights of frozen "
                    "layers and whole numbers are not sent.",
                    ", ".join(kept[:3]),
                )
        return before != after

    def end_batches(self, steps: int, results: Results) -> None:
        """Call an epoch's remaining batch hooks, on the weights of its end, unless training was stopped."""
        self.batches.weights = []
        if not self.model.stop_training:
            self.batches.reach(steps, results, ends=True)
            self.batches.save(steps, results)

    def note_weights(self) -> None:
        """Record digests of the weights at an epoch's end, before callbacks see them."""
        self.before = keras_variables.digests(self.model.weights)

    def begin_test(self) -> bool:
        """Begin the evaluation of the validation rows; return True if a callback changed weights for it."""
        self.testing = True
        self.list.on_test_begin()
        return self.may_replace_weights and self.before != keras_variables.digests(self.model.weights)

    def end_test(self, logs: Results, batches: int) -> None:
        """End the evaluation of ``batches`` batches of validation rows, with its results."""
        if not self.testing:
            self.begin_test()
        self.testing = False
        self.batches.test(batches, logs)
        self.list.on_test_end(logs)

    def end_epoch(self, epoch: int, logs: Results, losses: list[float]) -> bool:
        """End an epoch; return True if a callback changed weights since ``note_weights``."""
        self.list.on_epoch_end(epoch, logs)
        if not np.isfinite(losses).all():
            count = int((~np.isfinite(losses)).sum())
            logger.warning(
                "%d of %d updates of epoch %d had a non-finite loss.", count, len(losses), epoch + 1
            )
            if self.terminate:
                logger.warning("TerminateOnNaN stops training.")
                self.model.stop_training = True
        return self._has_changed(self.before)

    def end(self, logs: Results) -> None:
        """End training."""
        self.list.on_train_end(logs)


def _apart(callback: LearningRateFactor) -> LearningRateFactor:
    """Return a copy of a callback without its model."""
    made = copy.copy(callback)
    keras_internals.forget_model(made)
    return made


class Reports:
    """The workers' reports during an epoch, combined.

    Args:
        metrics: the metrics of the driver's model.

    Attributes:
        rows: the training rows of the epoch that the newest report covers.
        results: the results of all workers over these rows.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.rows, self.time = 0, 0.0
        self.results: Results = {}

    def take(self, running: Sequence[Running]) -> bool:
        """Combine the newest states of the workers; return True if that makes a new report."""
        rows, now = sum(each.rows for each in running), time.monotonic()
        if rows <= self.rows or now < self.time + REPORT_SECONDS:
            return False
        self.rows, self.time = rows, now
        states = [each.metrics for each in running if each.metrics]
        if states:
            self.results = self.metrics.merge(states)
        return True


class DriverModel:
    """The user's model on the driver, into which snapshots are loaded.

    Args:
        model: the user's model.
        joint: whether workers share one optimizer state.
    """

    def __init__(self, model: Model, *, joint: bool) -> None:
        self.model, self.joint = model, joint
        self.variables = Variables.of(model)  # a callback may change what is trainable
        self.layouts = Layouts(*map(keras_variables.layout_of, self.variables))

    def parameters(self) -> Vector:
        """Return the trainable variables as one vector."""
        return self.layouts.trainable.pack(keras_variables.reading(self.variables.trainable))

    def statistics(self) -> Vector:
        """Return the moving statistics as one vector."""
        return self.layouts.statistics.pack(keras_variables.reading(self.variables.statistics))

    def values(self) -> tuple[Vector, Vector]:
        """Return the trainable variables and the moving statistics, a vector each."""
        return self.parameters(), self.statistics()

    def load(self, snapshot: Snapshot, rows: Sequence[int]) -> None:
        """Load a snapshot into the model: weights, statistics, optimizer state and random generators.

        Args:
            snapshot: the snapshot.
            rows: the training rows of each worker, the weights for averaging optimizer states.
        """
        layouts = self.layouts
        keras_variables.write(self.variables.trainable, layouts.trainable.unpack(snapshot.parameters))
        keras_variables.write(self.variables.statistics, layouts.statistics.unpack(snapshot.statistics))
        states = self._optimizer_states(snapshot, rows)
        if states is not None:
            keras_variables.write(self.variables.optimizer, states)
        if not self.joint:
            keras_variables.constrain(self.variables.trainable)
            optimizers.batches_seen(self.model).assign(round(snapshot.progress))
        begin = layouts.optimizer.nbytes
        random = snapshot.state(snapshot.speaker)[begin : begin + layouts.generators.nbytes]
        if random:
            keras_variables.write(self.variables.generators, layouts.generators.from_bytes(random))
        trim(layouts.trainable.nbytes)  # return the memory of the old values to the system

    def is_at(self, snapshot: Snapshot) -> bool:
        """Return True if the model has the weights of a snapshot, up to the rounding of two swaps.

        SwapEMAWeights swaps by sums and differences on TensorFlow.
        """
        layouts = self.layouts
        before = [
            *layouts.trainable.unpack(snapshot.parameters),
            *layouts.statistics.unpack(snapshot.statistics),
        ]
        after = keras_variables.reading([*self.variables.trainable, *self.variables.statistics])
        pairs = zip(before, after, strict=True)
        return all(
            np.allclose(new, old, rtol=0, atol=ROUNDING * np.abs(old).max(initial=0)) for old, new in pairs
        )

    def _optimizer_states(self, snapshot: Snapshot, rows: Sequence[int]) -> list[Array] | None:
        """Return the optimizer state that replicas share, or the row-weighted mean of the workers' states."""
        size, layout = self.layouts.optimizer.nbytes, self.layouts.optimizer
        whole = size + self.layouts.generators.nbytes
        total: list[Array] | None = None
        weight = 0
        for worker in [snapshot.speaker] if self.joint else range(len(rows)):
            state = snapshot.state(worker)
            if len(state) < whole or not (rows[worker] or self.joint):
                continue
            arrays = layout.from_bytes(state[:size])
            if total is None:
                total, weight = arrays, rows[worker]
                continue
            weight += rows[worker]
            for mean, array in zip(total, arrays, strict=True):
                if "float" in mean.dtype.name:  # NumPy does not count bfloat16 as a floating type
                    mean += (array - mean) * (rows[worker] / weight)
        return total

"""The metrics of a compiled model: their states, and the names under which steps report them.

Each worker measures its part of the rows. The states of a metric are merged by addition. For a metric that is
not one of Keras's, ``adds_up`` tests whether this is exact; ``driver.epochs`` has the other ways to merge.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.modeling.execution import as_tensors, compute, take_step
from sparkdl.modeling.keras_variables import read, undisturbed
from sparkdl.modeling.signature import computes_loss, needs_labels
from sparkdl.process import interrupts

MARK = 2.0**20  # results from this value on encode the indices of metrics
Samples = Sequence[tuple[Any, Any]]  # labels and predictions of some rows, by output


def from_keras(thing: Any) -> bool:
    """Return True if the class of an object is part of Keras."""
    return type(thing).__module__.split(".")[0] == "keras"


def metrics_of(model: keras.Model) -> list[Any]:
    """Return the metrics of a model, with the metrics of ``compile`` one by one."""
    return [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]


def build_metrics(
    model: keras.Model, x: Any, y: Any, sample_weight: Any = None, *, step: str = "train_step"
) -> Any:
    """Build the states of a model's metrics by one forward pass over a few rows, and reset them.

    Args:
        model: a compiled model.
        x: some rows.
        y: their labels, or None.
        sample_weight: their weights, or None.
        step: the step that follows, "train_step" or "test_step".

    Returns:
        The model's predictions for those rows.
    """
    x, y, sample_weight = as_tensors((x, y, sample_weight))
    with undisturbed(model):
        predicted = compute(model, x)
        if y is None and not needs_labels(model, step):
            _build_without_labels(model, x, predicted, step)
            return predicted
        if computes_loss(model):
            model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
        with warnings.catch_warnings(action="ignore"):  # a metric may warn of too few rows
            model.compute_metrics(x, y, predicted, sample_weight)
    return predicted


def _build_without_labels(model: keras.Model, x: Any, predicted: Any, step: str) -> None:
    """Build the states of a model's metrics for rows without labels.

    With Keras's own step, only ``compute_loss`` is called. A custom step may make labels itself;
    the predictions take their place here, because they have the right shape.
    """
    if getattr(type(model), step) is getattr(keras.Model, step):
        model.compute_loss(x=x, y=None, y_pred=predicted, sample_weight=None)
    elif not keras.tree.is_nested(predicted):
        model.compute_metrics(x, predicted, predicted)


def build_metric(metric: Any, samples: Samples) -> tuple[Any, Any] | None:
    """Build the states of a metric from some rows of the first output that it can measure.

    Returns:
        Labels and predictions of these rows; None if it can measure no output.
    """
    for y, predicted in samples:
        try:
            metric.update_state(y, predicted)
        except Exception:  # noqa: BLE001 - another kind of labels; the error depends on the backend
            continue
        return y, predicted
    return None


def adds_up(metric: Any, samples: Samples) -> bool:
    """Return True if the states of a metric may be added.

    Rows are measured alone and in pairs, and the states are compared. The rows differ in predictions and in
    labels, since a metric may count only some labels, or be 0 for some rows.
    """
    sample = build_metric(metric, samples)
    if sample is None:
        return False
    y, predicted = sample
    changes = (1.0, 0.0), (0.5, 0.1), (0.25, 0.3)  # a probability stays one
    outputs = [keras.ops.add(keras.ops.multiply(predicted, factor), term) for factor, term in changes]

    def states(*parts: tuple[Any, Any]) -> list[Array]:
        metric.reset_state()
        for part in parts:
            metric.update_state(*part)
        return read(metric.variables)

    try:
        start, parts = states(), [(y, output) for output in outputs]
        with suppress(Exception):  # labels that cannot be compared, or that the metric does not take
            values = keras.ops.convert_to_numpy(y)
            flipped: Any = (values == 0).astype(values.dtype)
            if not isinstance(y, np.ndarray):
                flipped = keras.ops.convert_to_tensor(flipped)
            states(*((flipped, output) for output in outputs))
            parts += [(flipped, output) for output in outputs]
        alone = [states(part) for part in parts]
        return all(
            np.allclose(b + c - a, d, rtol=1e-4)
            for one, other_one in itertools.combinations(range(len(parts)), 2)
            for a, b, c, d in zip(
                start, alone[one], alone[other_one], states(parts[one], parts[other_one]), strict=True
            )
        )
    finally:
        with interrupts.held():
            metric.reset_state()


def logged_metrics(model: keras.Model, step: str, data: Any) -> dict[str, int | None] | None:
    """Return the metric behind each name in the logs of a model's own step, found by an experiment.

    Keras reports the logs of the step if their names differ from those of the model's metrics.

    Args:
        model: a compiled model with built metrics, which is not used again: the ``result`` of its
            metrics is replaced, and its weights may change.
        step: "train_step" or "test_step".
        data: some rows, in the form that the step takes.

    Returns:
        Indices in ``metrics_of(model)`` by name, None for a value that is no metric's result. None instead of
        the dict if the names are those of the metrics, or if the step returns no dict.
    """
    for place, metric in enumerate(metrics_of(model)):
        metric.result = functools.partial(keras.ops.convert_to_tensor, MARK + place)
    logs = take_step(model, step, data)
    if not isinstance(logs, dict) or logs.keys() == model.get_metrics_result().keys():
        return None
    places = {MARK + place: place for place in range(len(metrics_of(model)))}
    values = {name: np.ravel(keras.ops.convert_to_numpy(value)) for name, value in logs.items()}
    return {name: places.get(float(value[0])) if value.size == 1 else None for name, value in values.items()}

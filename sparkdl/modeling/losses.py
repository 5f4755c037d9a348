"""The denominators of a model's losses, and checks that gradients of parts of a batch can be averaged.

In the mean of all workers, the weight of a worker's gradient is the denominator of its loss: the number of
rows or, if a mask or weights decide it, their sum. So the reduction of losses is watched while a step is
traced or runs. If no such weight makes the mean correct, the driver warns and names the loss. A
loss without a reduction is refused.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from sparkdl.core.tree import leaves
from sparkdl.data.bad_values import KnownClasses
from sparkdl.data.batch import Batch
from sparkdl.errors import ConfigError, ModelError
from sparkdl.modeling import (
    checks,
    execution,
    keras_internals,
    keras_metrics,
    keras_settings,
    keras_variables,
    serialization,
    signature,
)
from sparkdl.modeling.classification import OutputKind
from sparkdl.process import interrupts

logger = logging.getLogger(__name__)
MEANS = ("sum_over_batch_size", "mean")


class LossReduction(NamedTuple):
    """The reduction of one loss.

    Attributes:
        name: the name of the loss.
        kind: "rows" (a mean over rows), "weights" (a mean whose divisor may differ between workers with
            equally many rows: the number of entries that a mask keeps, or the sum of weights), "sum", or
            "none".
        denominator: the divisor, if it is not the number of rows.
    """

    name: str
    kind: str
    denominator: Any = None


class ReductionWatch:
    """The reductions of the losses that were computed in this thread while it was watched.

    A worker may compute only a share of a batch. A metric that takes one number per batch, such as
    the loss of an output or the value of a tracker, then gets this number with the weight
    1 / ``scale``, the share's part of the batch. So the shares together count as one batch with the
    mean of their values.

    Args:
        scale: rows of the whole batch per row of this share; None if the batch is not shared. Summed losses
            are multiplied by it, so that a mean over shares, weighted by rows, is the sum over all rows.
    """

    def __init__(self, scale: Any = None) -> None:
        self.scale = scale
        self.name = ""
        self.reductions: list[LossReduction] = []

    def denominator(self) -> Any:
        """Return the weight of this worker's gradient; None for its number of rows."""
        means = [each for each in self.reductions if each.kind != "sum"]
        if len(means) != 1 or means[0].kind != "weights":
            return None
        return means[0].denominator + 1e-6  # not 0, which stands for the number of rows

    def note(self, loss: Any, weights: Any, mask: Any, reduction: str | None) -> Any:
        """Record a reduction; return the loss, scaled if it is a sum."""
        kind, denominator = "rows", None
        if reduction == "sum":
            kind = "sum"
            loss = loss if self.scale is None else loss * keras.ops.cast(self.scale, loss.dtype)
        elif reduction in MEANS and mask is not None:
            kind, denominator = "weights", keras.ops.sum(keras.ops.cast(mask, "float32"))
        elif reduction == "mean_with_sample_weight" and weights is not None:
            kind, denominator = "weights", keras.ops.sum(keras.ops.cast(weights, "float32"))
        elif reduction in (None, "none"):
            kind = "none"
        self.reductions.append(LossReduction(self.name, kind, denominator))
        return loss


_reduce, _call = keras_internals.reduce_weighted_values, keras.losses.Loss.__call__
_update = keras.metrics.Mean.update_state
_watches: dict[int, ReductionWatch] = {}  # by thread id
_installing = threading.Lock()


@contextmanager
def watched(scale: Any = None) -> Iterator[ReductionWatch]:
    """Watch the reductions of losses in a ``with`` block; see ReductionWatch for ``scale``."""
    thread = threading.get_ident()
    with _installing:
        _watches[thread] = watch = ReductionWatch(scale)
        keras_internals.set_reduction(_watched_reduce)
        keras.losses.Loss.__call__ = _watched_call
        keras.metrics.Mean.update_state = _watched_update
    try:
        yield watch
    finally:
        with interrupts.held(), _installing:
            del _watches[thread]
            if not _watches:
                keras_internals.set_reduction(_reduce)
                keras.losses.Loss.__call__ = _call
                keras.metrics.Mean.update_state = _update


def scale_in_force() -> Any:
    """Return the scale of this thread's watch; None if there is no watch."""
    watch = _watches.get(threading.get_ident())
    return None if watch is None else watch.scale


def _watched_update(self: Any, values: Any, sample_weight: Any = None) -> Any:
    scale = scale_in_force()
    if scale is not None and sample_weight is None and not len(getattr(values, "shape", ())):
        sample_weight = 1 / scale
    return _update(self, values, sample_weight)


def _watched_call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    watch = _watches.get(threading.get_ident())
    if watch is not None:
        watch.name = self.name
    return _call(self, y_true, y_pred, sample_weight)


def _watched_reduce(
    values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = MEANS[0], dtype: Any = None
) -> Any:
    weights = None
    if reduction == "mean_with_sample_weight":  # on torch Keras multiplies the weights in place
        copy = None if sample_weight is None else keras.ops.copy(sample_weight)
        weights = keras_internals.apply_mask(copy, mask, dtype="float32", reduction=reduction)
    loss = _reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    watch = _watches.get(threading.get_ident())
    return loss if watch is None else watch.note(loss, weights, mask, reduction)


def check(model: keras.Model, x: Any, y: Any, sample_weight: Any, predicted: Any) -> bool:
    """Warn of losses whose gradients over parts of a batch do not average to the gradient of the whole batch.

    Args:
        model: a compiled model.
        x: some rows.
        y: their labels.
        sample_weight: their weights, or None.
        predicted: the model's predictions for them.

    Returns:
        True if the model has one loss that is a mean, and it is divided by the sum of a mask or of weights
        instead of the number of rows.

    Raises:
        ModelError: a loss is not reduced at all.
    """
    with keras_variables.undisturbed(model), watched() as watch:
        if signature.computes_loss(model):
            given = execution.as_tensors({"x": x, "y": y, "sample_weight": sample_weight})
            model.compute_loss(y_pred=predicted, **given)
    kinds = {each.name: each.kind for each in watch.reductions}
    for name, kind in kinds.items():
        if kind == "none":
            raise ModelError(
                f"The loss {name!r} has no reduction, but workers need one number per batch to average "
                'gradients. Set its reduction to "sum_over_batch_size" or "sum".'
            )
    own = [name for name in ("train_step", "compute_loss") if is_own(model, name)]
    if own:
        logger.warning(
            "%s has its own %s. Workers average gradients over rows, which equals the step of one process "
            "only if the loss is a mean over rows.",
            type(model).__name__,
            " and ".join(own),
        )
    weighed = [name for name, kind in kinds.items() if kind == "weights"]
    if weighed and len(watch.reductions) > 1:
        logger.warning(
            "%s: these losses are divided by the sum of masks or weights, and other losses of the model by a "
            "different number. Workers average gradients over rows, so a step differs slightly from that of "
            "one process.",
            ", ".join(weighed),
        )
    coupled = [name for name, loss, samples in _losses(model, y, predicted) if _couples_rows(loss, samples)]
    if coupled:
        logger.warning(
            "%s: the loss of a batch is not the mean of the losses of its rows. Workers average gradients "
            "over rows, so a step differs from that of one process.",
            ", ".join(coupled),
        )

    if _adds_by_rows(model, x):
        adding = filter(keras_internals.adds_losses, keras_internals.flat_layers(model))
        logger.warning(
            "%s: these layers add a term to the loss that is not a mean over rows. Workers average "
            "gradients over rows, so a step differs from that of one process. Add a mean over rows instead.",
            ", ".join(layer.name for layer in adding),
        )
    return watch.denominator() is not None


def _adds_by_rows(model: keras.Model, x: Any) -> bool:
    """Return True if layers add a term to the loss that is not a mean over rows, found by an experiment.

    Random terms are ignored.
    """

    def added(rows: Any) -> list[float]:
        with keras_variables.undisturbed(model):
            model(rows, training=False)
            return [float(keras.ops.sum(loss)) for loss in model.losses]

    def same(one: list[float], other: list[float]) -> bool:
        return np.allclose(one, other, rtol=1e-3, equal_nan=True)  # a regularizer may give NaN for one row

    if not model.losses or not same(once := added(x), added(x)):
        return False
    twice = keras.tree.map_structure(lambda part: np.concatenate([part, part]), x)
    return not same(once, added(twice))


def is_own(model: keras.Model, name: str) -> bool:
    """Return True if a method of a model is the user's instead of Keras's."""
    return not getattr(type(model), name).__module__.startswith("keras.")


def logged(
    model: keras.Model, steps: Iterable[str], first: Sequence[Any], builder: Any = None, objects: Any = None
) -> dict[str, dict[str, int]]:
    """Return, for each custom step of a model, the index of the metric behind each name in logs.

    Args:
        model: a compiled and built model.
        steps: the names of steps, "train_step" or "test_step". The result leaves out Keras's own
            steps, steps that report the metrics' own names or return no dict, and steps that fail on these
            rows.
        first: x, y and weights of some rows.
        builder: the function that built the model, if any.
        objects: custom objects that the model needs.
    """
    found = {}
    for step in steps:
        if not is_own(model, step):
            continue
        try:
            with keras_settings.alone():
                copy = serialization.copy_of(model, objects) if builder is None else builder()
                keras_metrics.build_metrics(copy, *first, step=step)
                constants = keras_variables.constants(copy)
                before = keras_variables.digests(constants)
                places = keras_metrics.logged_metrics(copy, step, Batch(*first).to_data())
                after = keras_variables.digests(constants)
        except Exception:  # the user's step may raise anything on a few rows
            logger.debug("The trial of %s failed.", step, exc_info=True)
            continue
        pairs = zip(constants, before, after, strict=True)
        checks.require_constant(model, step, [each for each, one, other in pairs if one != other])
        if places is None:
            continue
        unknown = [name for name, place in places.items() if place is None]
        if unknown:
            logger.warning(
                "%s: %s returns these values, which are not results of metrics, so the values of several "
                "workers cannot be merged and are not reported. Return metric.result() instead.",
                ", ".join(unknown),
                step,
            )
        found[step] = {name: place for name, place in places.items() if place is not None}
    return found


Samples = list[tuple[Any, Any]]  # labels and predictions of some rows, by output


def _losses(model: keras.Model, y: Any, predicted: Any) -> Iterator[tuple[str, Any, Samples]]:
    """Yield each loss of ``compile``: its name, the Loss, and samples of outputs that it may belong to.

    The name "crossentropy" is left out: Keras chooses the kind of this loss by the output's shape.
    """
    given, names = model.loss, getattr(model, "output_names", None)
    if not isinstance(predicted, dict) and names:
        given, y = (
            [part.get(name) for name in names] if isinstance(part, dict) else part for part in (given, y)
        )
    losses = leaves(given)
    samples = list(zip(keras.tree.flatten(y), keras.tree.flatten(predicted), strict=False))
    for place, loss in enumerate(losses):
        if loss is not None and str(loss).lower() not in ("crossentropy", "ce"):  # Keras chooses the loss
            computed = keras.losses.get(loss)
            if not isinstance(computed, keras.losses.Loss):
                name = getattr(computed, "__name__", str(loss))
                computed = keras_internals.LossFunctionWrapper(computed, name=name)
            yield computed.name, computed, [samples[place]] if len(losses) == len(samples) else samples


def classes_of(model: keras.Model, template: Any, predicted: Any) -> dict[int, KnownClasses]:
    """Return the classes that sparse categorical cross-entropies accept, by the index of the label column.

    Args:
        model: a compiled model.
        template: the indices of the label columns.
        predicted: the model's predictions for some rows.
    """
    known: dict[int, KnownClasses] = {}
    if is_own(model, "train_step") or is_own(model, "compute_loss"):
        return known
    for _, loss, samples in _losses(model, template, predicted):
        function = getattr(loss, "fn", None)  # of Keras's LossFunctionWrapper
        arguments = keras_internals.function_arguments(loss)
        if function is keras.losses.sparse_categorical_crossentropy and len(samples) == 1:
            place, output = samples[0]
            size = output.shape[arguments.get("axis", -1)]
            known[place] = KnownClasses(int(size), arguments.get("ignore_class"))
    return known


CROSSENTROPIES = {
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "sparse_categorical_crossentropy",
}
CLASSIFICATIONS = CROSSENTROPIES | {
    "crossentropy",
    "ce",
    "categorical_generalized_cross_entropy",
    "categorical_hinge",
    "hinge",
    "squared_hinge",
}


def labels_are_classes(model: keras.Model) -> bool | None:
    """Return True if the labels of a compiled model with one loss are classes, False if they are not.

    Return None if that is not known: the model has another number of losses, or code that is not Keras's.
    """
    if is_own(model, "train_step") or is_own(model, "compute_loss"):
        return None
    name, _ = _only_loss(model)
    if not name or name in CLASSIFICATIONS:
        return True if name else None
    loss = keras.losses.get(leaves(model.loss)[0])
    function = getattr(loss, "fn", loss)  # of Keras's LossFunctionWrapper
    code = function if inspect.isfunction(function) else type(function)
    return False if code.__module__.startswith("keras.") else None


def head_of(
    model: keras.Model, task: str, shape: Any, thresholds: Sequence[float] | None = None
) -> OutputKind:
    """Return the kind of a model's output.

    Args:
        model: the model.
        task: "classification", "regression", or "auto": classification if a model with one output was
            compiled with a cross-entropy. With a binary cross-entropy, the output must have one unit.
        shape: the shape of one row's prediction, or a dict of shapes by output.
        thresholds: the threshold of each class, if any.

    Raises:
        ConfigError: "classification" was requested, but the output is not a vector of classes. Or there are
            thresholds, but the model does not classify or has a different number of classes.
    """
    shape = (1,) if shape == () else shape  # one number per row
    vector = isinstance(shape, tuple) and len(shape) == 1
    name, logits = _only_loss(model)
    if name in ("crossentropy", "ce"):  # Keras picks binary or categorical by the output's shape
        name = "binary_crossentropy" if shape == (1,) else "categorical_crossentropy"
    if task == "classification" and not vector:
        raise ConfigError(
            'task="classification" needs a model with one output of shape (classes,), or (1,) for two '
            f'classes; got {shape}. Set task="auto", which returns other outputs unchanged.'
        )
    binary = name.startswith("binary")
    found = vector and name in CROSSENTROPIES and (not binary or shape == (1,))
    classifies = task == "classification" or (task == "auto" and found)
    if thresholds is not None:
        _check_thresholds(thresholds, shape, classifies)
    return OutputKind(classifies, logits, tuple(thresholds) if thresholds is not None else None)


def _check_thresholds(thresholds: Sequence[float], shape: Any, classifies: bool) -> None:
    if not classifies:
        raise ConfigError(
            "thresholds need a model that classifies, but the output of this model is returned unchanged. "
            'Leave thresholds out, or set task="classification".'
        )
    classes = max(2, shape[0])
    if len(thresholds) != classes:
        raise ConfigError(
            f"thresholds should have a number for each class; got {len(thresholds)} for {classes} classes."
        )


def are_sums(model: keras.Model) -> bool:
    """Return True if each loss of a compiled model is the sum over the rows of a batch."""
    given = [loss for loss in leaves(getattr(model, "loss", None)) if loss is not None]
    return bool(given) and not model.losses and all(getattr(each, "reduction", "") == "sum" for each in given)


def _only_loss(model: keras.Model) -> tuple[str, bool]:
    """Return the name of the only loss of a model, and True if it takes logits.

    The result is ("", False) if the model has several losses or none.
    """
    given = leaves(getattr(model, "loss", None))
    if len(given) != 1 or given[0] is None:
        return "", False
    if str(given[0]).lower() in ("crossentropy", "ce"):
        return str(given[0]).lower(), False
    loss = keras.losses.get(given[0])
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(loss).__name__).lower()
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return (name if config else getattr(loss, "__name__", "")), bool(config.get("from_logits"))


def _couples_rows(loss: Any, samples: Samples) -> bool:
    """Return True if the loss of rows together is not the mean or sum of their losses, by an experiment.

    Each loss has a weight in the mean: its denominator, such as the number of entries that a mask or an
    ignored class leaves.
    """
    near = 1e-3 if keras.config.floatx() in ("float32", "float64") else 0.05
    for labels, first in samples:
        try:
            found = [_reduced(loss, pair) for pair in _pairs(labels, first)]
        except Exception:  # noqa: BLE001 - another output's rows; the error depends on the backend
            continue
        (a, b, together), weights = zip(*found, strict=True)
        if None in weights:
            return False
        expected = 2.0 * (a + b)
        if loss.reduction != "sum":
            expected = float(np.dot((a, b), weights[:2])) / (sum(weights[:2]) or 1.0)
        return not np.isclose(together, expected, rtol=near, atol=1e-6, equal_nan=True)
    return False


def _reduced(loss: Any, pair: tuple[Any, Any]) -> tuple[float, float | None]:
    """Return a loss and its weight in a mean over rows.

    The weight is the denominator if a mask or weights decide it, otherwise 1. It is None if the
    loss has several reductions, of which one has such a denominator.
    """
    with watched() as watch:
        value = float(keras.ops.mean(loss(*pair)))
    weights = [float(each.denominator) for each in watch.reductions if each.kind == "weights"]
    if not weights:
        return value, 1.0
    return value, weights[0] if len(watch.reductions) == 1 else None


def _pairs(labels: Any, predicted: Any) -> Iterator[tuple[Any, Any]]:
    """Yield labels and predictions of some rows, then of other rows, then of both sets together.

    The last pair contains every row twice.

    A loss that compares rows may need two rows of the same class and a row of another class.
    """
    kind = keras.config.floatx()
    labels, others = keras.ops.cast(labels, kind), keras.ops.cast(_other_labels(labels), kind)
    first = keras.ops.multiply(keras.ops.cast(predicted, kind), 1.0)  # without a mask
    second = keras.ops.add(keras.ops.multiply(first, 0.5), 0.1)
    yield labels, first
    yield others, second
    yield tuple(keras.ops.concatenate([*pair, *pair]) for pair in ((labels, others), (first, second)))


def _other_labels(labels: Any) -> Any:
    """Return labels of the same kind: other classes, or other positions in a vector."""
    if len(labels.shape) > 1 and labels.shape[-1] > 1:
        return keras.ops.roll(labels, 1, axis=-1)
    # Spark's labels are doubles, even if they are classes. TensorFlow logs an error for a class below 0.
    fractions = "float" in keras.backend.standardize_dtype(labels.dtype)
    if fractions and not bool(keras.ops.all(keras.ops.equal(labels, keras.ops.floor(labels)))):
        return 1 - labels
    return keras.ops.where(labels > 0, keras.ops.zeros_like(labels), keras.ops.ones_like(labels))

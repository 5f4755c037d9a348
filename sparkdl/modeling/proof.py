"""Comparison of a restored model with the live model, by their results for the first row.

Workers train a model that is restored from its configuration or by the user's function, and from a list of
the attributes that these do not set (see ``modeling.differences``). The list may be incomplete: a constructor
may keep an argument in the graph of a functional model, in a closure or in an object of another library. So
before training begins, the driver runs both models on the first row and compares the results.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.data.batch import Batch
from sparkdl.errors import ModelError
from sparkdl.modeling import execution, keras_metrics, keras_variables, optimizers
from sparkdl.modeling.object_pickling import copied
from sparkdl.process import interrupts, memory
from sparkdl.process.reasons import reason_of

logger = logging.getLogger(__name__)
Results = Iterator[tuple[str, Sequence[Array]]]  # the description of each result, and its arrays
# Names and shapes of the variables for trial steps of an optimizer. The names are always the same, because
# TensorFlow 2.21 leaks about 35 kB for each new variable name.
SHAPES = {"matrix": (3, 2), "vector": (2,)}
STEPS = 2  # number of trial steps of an optimizer
# Maximum size of the weights for a trial training step, in bytes. The step of a larger model would take more
# of the driver's memory than the run itself.
STEP_BYTES = 64 << 20


def require_same(model: keras.Model, again: keras.Model, first: Sequence[Any]) -> None:
    """Raise an error unless two models compute the same results.

    The results are predictions, losses, metrics, constraints, an optimizer update and a training step. A
    training step is tried only if it is Keras's own, because a custom one may do anything, and if the weights
    have at most ``STEP_BYTES``. Results that are random in the live model, or that it cannot compute on the
    driver, are ignored.

    Args:
        model: the live model, compiled and built. It stays unchanged, except that its metrics are reset.
        again: the restored model. Its variables have the same values as the live model's, and may change.
        first: x, y and sample weights of the first row, repeated if the inputs declare a batch
            size; y and the weights may be None.

    Raises:
        ModelError: a result differs. The message names the result.
        Exception: memory ran out in the restored model.
    """
    ours = dict(_results(model, first))
    theirs = dict(_results(again, first, made_again=True))
    apart = [what for what, values in ours.items() if not _equal(values, theirs.get(what))]
    if not apart:
        return
    once_more = dict(_results(model, first))
    for what in apart:
        if _equal(ours[what], once_more.get(what)):
            raise ModelError(
                f'The model "{model.name}" gives different results when it is rebuilt, as it would be on '
                f"executors. For the first row, {what} is {_shown(ours[what])} in the original and "
                f"{_shown(theirs.get(what))} in the copy. Return all settings of its classes from get_config "
                "and accept them in __init__, or pass SparkModel a function that builds and compiles the "
                "model."
            )


def _results(model: keras.Model, first: Sequence[Any], *, made_again: bool = False) -> Results:
    """Yield the results of a model, and skip those that it cannot compute.

    Raises:
        Exception: memory ran out in a restored model.
    """
    for compute in (_of_rows, _of_constraints, _of_optimizer, _of_step):
        try:
            with warnings.catch_warnings(action="ignore"):  # training shows the same warnings
                found = list(compute(model, first))
            yield from found
        except Exception as error:  # the user's code may raise anything on a few rows
            reason = reason_of(error)
            if made_again and reason.startswith(memory.SHORT):
                raise
            logger.debug("%s of %s: %s", compute.__name__, model.name, reason, exc_info=True)


def _of_rows(model: keras.Model, first: Sequence[Any]) -> Results:
    predicted = keras_metrics.build_metrics(model, *first, step="test_step")
    yield "the prediction", [keras.ops.convert_to_numpy(part) for part in keras.tree.flatten(predicted)]
    with keras_variables.undisturbed(model):
        logs = execution.take_step(model, "test_step", Batch(*first).to_data())
    for name, value in logs.items():
        yield f'"{name}"', [np.asarray(keras.ops.convert_to_numpy(value))]


def _of_constraints(model: keras.Model, first: Sequence[Any]) -> Results:
    for place, variable in enumerate(model.weights):
        if variable.constraint is not None:
            constrained = keras.ops.convert_to_numpy(variable.constraint(variable.value))
            yield f"the constraint of model.weights[{place}]", [constrained]


def _of_optimizer(model: keras.Model, first: Sequence[Any]) -> Results:
    optimizer = copied(optimizers.inner(model))
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype="float32", name=name)
        for name, shape in SHAPES.items()
    ]
    optimizer.build(variables)
    for _ in range(STEPS):
        gradients = [random.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]
        optimizer.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients], variables)
    yield "an update of the optimizer", keras_variables.read(variables)


def _of_step(model: keras.Model, first: Sequence[Any]) -> Results:
    """Yield the change of each weight in Keras's own training step."""
    own = type(model).train_step is not keras.Model.train_step
    if own or keras_variables.layout_of(model.weights).nbytes > STEP_BYTES:
        return
    before = keras_variables.read(model.weights)
    optimizer, decays = model.optimizer, optimizers.decays_weights(model)
    try:
        with keras_variables.undisturbed(model):
            model.optimizer = copied(optimizer)
            # Keras records variables without weight decay by their ids. The copy lacks this record.
            optimizers.set_decays_weights(model, decays)
            model.optimizer.build(model.trainable_variables)
            execution.train_once(model, Batch(*first).to_data())
            after = keras_variables.read(model.weights)
    finally:
        with interrupts.held():
            model.optimizer = optimizer
            keras_variables.write(model.weights, before)
    for place, (start, end) in enumerate(zip(before, after, strict=True)):
        yield f"the training step of model.weights[{place}]", [end - start]


def _equal(ours: Sequence[Array], theirs: Sequence[Array] | None) -> bool:
    """Return True if results are equal, up to rounding that depends on the order of sums."""
    if theirs is None or [each.shape for each in ours] != [each.shape for each in theirs]:
        return False
    return all(map(_close, ours, theirs))


def _close(ours: Array, theirs: Array) -> bool:
    if ours.dtype.kind not in "fc":
        return np.array_equal(ours, theirs)
    one, other = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.abs(one[np.isfinite(one)])
    return np.allclose(one, other, rtol=1e-4, atol=1e-5 * finite.max(initial=0), equal_nan=True)


def _shown(values: Sequence[Array] | None) -> str:
    if values is None:
        return "impossible to compute"
    flat = np.concatenate([np.ravel(value) for value in values])
    return ", ".join(f"{value:.6g}" for value in flat[:3]) + (", …" if flat.size > 3 else "")

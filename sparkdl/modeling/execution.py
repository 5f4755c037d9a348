"""A model's predictions and single steps for some rows, computed in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from sparkdl.core.tree import leaves
from sparkdl.data.schema import Sample, Schema
from sparkdl.data.sparse import TEXT
from sparkdl.errors import DataError
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.signature import fit_features, known_features, named_batch_size
from sparkdl.process.reasons import reason_of, text_of


def compute(model: keras.Model, x: Any) -> Any:
    """Return the predictions of a model for some rows.

    A model that is not built yet is built for any number of rows.

    Args:
        model: the model.
        x: the rows, in the form that the model takes.
    """
    if not model.built:
        with suppress(Exception):  # if the model fails on symbolic inputs, the call below builds it
            keras_internals.compute_output_spec(
                model, keras.tree.map_structure(_any_number_of, x), training=False
            )
    return model(x, training=False)


def _any_number_of(part: Any) -> keras.KerasTensor:
    dtype = TEXT if part.dtype == object else keras.backend.standardize_dtype(part.dtype)
    return keras.KerasTensor((None, *part.shape[1:]), dtype)


def probe(model: keras.Model, schema: Schema) -> Any:
    """Return the predictions for one row of zeros, or for a whole batch if the inputs declare a batch size.

    Raises:
        DataError: the model fails on such rows.
    """
    rows = named_batch_size(model) or 1
    zeros = [column.zeros(rows) for column in schema.columns]
    try:
        return compute(model, schema.batch(zeros).x)
    except Exception as error:
        message = f"The model failed on a row of zeros with the shapes of your rows: {reason_of(error)}"
        raise DataError(message, traceback=text_of(error)) from error


def of_no_rows(model: keras.Model, sample: Sample) -> Any:
    """Return the predictions for no rows: arrays of length 0.

    Args:
        model: the model.
        sample: an example of a row. If the user's rows are an empty list, the shape of a row is unknown, and
            the values of the sample have the shape ().
    """
    known = known_features(model, sample) if all(value.shape == () for value in sample.values) else None
    predicted = probe(model, known or fit_features(model, sample.schema(keras.config.floatx())))
    return keras.tree.map_structure(lambda part: keras.ops.convert_to_numpy(part)[:0], predicted)


def predict(model: keras.Model, x: Any, batch_size: int) -> Any:
    """Return the model's predictions for arrays, or structures of arrays, as NumPy arrays.

    If the inputs declare ``batch_size`` as their batch size, the last row is repeated to fill the last batch.
    """
    rows = len(leaves(x)[0])
    missing = -rows % batch_size if named_batch_size(model) == batch_size else 0
    if missing:
        x = keras.tree.map_structure(lambda array: np.concatenate([array, array[-1:].repeat(missing, 0)]), x)
    parts = [
        model.predict_on_batch(
            keras.tree.map_structure(lambda array, at=start: array[at : at + batch_size], x)
        )
        for start in range(0, rows, batch_size)
    ]
    return keras.tree.map_structure(lambda array: array[:rows], concatenate(parts))


def concatenate(parts: Sequence[Any]) -> Any:
    """Join structures of arrays along their rows."""
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def rows_of(predictions: Any) -> Iterator[Any]:
    """Yield the prediction of each row."""
    for index in range(len(leaves(predictions)[0])):
        yield keras.tree.map_structure(lambda array, at=index: array[at], predictions)


def as_tensors(rows: Any) -> Any:
    """Return rows in the form that Keras passes to a model's methods: arrays as tensors, None unchanged."""

    def convert(part: Any) -> Any:
        known = isinstance(part, np.ndarray) and part.dtype.kind in "biufcO"
        return keras.ops.convert_to_tensor(part) if known else part

    return keras.tree.map_structure(convert, rows)


def take_step(model: keras.Model, step: str, data: Any) -> Any:
    """Return the result of a model's "train_step" or "test_step" for rows in the form that the step takes.

    On JAX the variables keep their values.
    """
    return _step(model, step, data)[0]


def train_once(model: keras.Model, data: Any) -> None:
    """Train a model on some rows with one eager "train_step". The model's optimizer must be built."""
    for variable, value in _step(model, "train_step", data)[1]:
        variable.assign(value)


def _step(model: keras.Model, step: str, data: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the result of a step; on JAX also its variables with their new values."""
    data = as_tensors(data)
    if keras.backend.backend() != "jax":
        return getattr(model, step)(data), []
    optimizer = [optimizers.variables(model)] if step == "train_step" else []
    parts = model.trainable_variables, model.non_trainable_variables, *optimizer, model.metrics_variables
    logs, state = getattr(model, step)(tuple([each.value for each in part] for part in parts), data)
    variables, values = (itertools.chain.from_iterable(each) for each in (parts, state))
    return logs, list(zip(variables, values, strict=True))

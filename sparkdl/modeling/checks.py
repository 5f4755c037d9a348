"""Checks of a model before a run: its class, its compile arguments, and its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from sparkdl.data.column import Column
from sparkdl.data.sparse import TEXT
from sparkdl.errors import ModelError
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.keras_variables import dtype_of


def is_model(thing: Any) -> bool:
    """Return True if this is a Keras model."""
    return isinstance(thing, keras.Model)


def require_model(model: Any) -> None:
    """Raise an error unless this is a Keras model.

    Raises:
        ModelError: it is something else.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"model should be a keras.Model; got {type(model).__name__}.")


def require_compiled(model: Any) -> None:
    """Raise an error unless this is a compiled Keras model.

    Raises:
        ModelError: it is something else, or not compiled.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            "model should be a compiled keras.Model or a function without arguments that returns one; "
            f"got {type(model).__name__}."
        )
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ModelError(
            f'The model "{model.name}" is not compiled. Call model.compile(optimizer=..., loss=...) first.'
        )


def require_backend_of_strings(model: keras.Model, columns: Sequence[Column] = ()) -> None:
    """Raise an error if the model or the rows have strings and the backend does not support them.

    Args:
        model: the model. Its inputs are checked if it declares them.
        columns: the columns of the rows, if known.

    Raises:
        ModelError: there are strings, and the backend is not TensorFlow. The message names the input.
    """
    texts = [tensor.name for tensor in getattr(model, "inputs", None) or () if dtype_of(tensor) == TEXT]
    texts += [column.name for column in columns if column.texts]
    if texts and keras.backend.backend() != "tensorflow":
        raise ModelError(
            f'The input "{texts[0]}" of the model "{model.name}" takes strings, which need the TensorFlow '
            f"backend; got {keras.backend.backend()}. Set KERAS_BACKEND=tensorflow, or apply layers such as "
            "TextVectorization or StringLookup to the data first and pass a model that takes their output."
        )


def require_honoured(model: keras.Model) -> None:
    """Raise an error if workers cannot follow the compile arguments of a model.

    Raises:
        ModelError: an argument is not supported, or the model takes strings and the backend does not
            support them. The message names the argument or the input.
    """
    require_backend_of_strings(model)
    if keras.backend.backend() == "torch" and model.jit_compile:
        raise ModelError(
            f'The model "{model.name}" was compiled with jit_compile=True, which is not supported on torch. '
            "Compile it without jit_compile."
        )
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # new in Keras 3.14
    if several is not None and isinstance(optimizers.inner(model), several):
        raise ModelError(
            f'The model "{model.name}" was compiled with a MultiOptimizer, which is not supported. Use one '
            "optimizer for all variables."
        )


def require_divisible(model: keras.Model, num_workers: int) -> None:
    """Raise an error if the rows of a batch cannot be divided among workers.

    Raises:
        ModelError: a trainable layer needs statistics of the whole batch, but each of several workers has
            only a part of it.
    """
    whole = [
        layer.name
        for layer in keras_internals.flat_layers(model)
        if layer.trainable and getattr(layer, "synchronized", False)
    ]
    if num_workers > 1 and whole:
        raise ModelError(
            f"{', '.join(whole)}: synchronized=True needs the statistics of the whole batch, but each of "
            f"the {num_workers} workers has only a part of it. Set synchronized=False to use the statistics "
            'of each part, set num_workers=1, or set frequency to a number of batches or "epoch", so that '
            "each worker trains on batches of its own."
        )


def require_numbers(model: keras.Model, predicted: Any) -> None:
    """Raise an error unless all predictions are numbers, because a column of predictions holds only numbers.

    Raises:
        ModelError: an output returns strings.
    """
    if any(dtype_of(part) == TEXT for part in keras.tree.flatten(predicted)):
        raise ModelError(
            f'An output of the model "{model.name}" returns strings, which a column of predictions cannot '
            "hold. Leave out the layer that returns strings, or pass arrays or an RDD to SparkModel.predict."
        )


def require_constant(model: keras.Model, step: str, changed: list[Any]) -> None:
    """Require a step that does not change weights of frozen layers.

    Raises:
        ModelError: it changes these.
    """
    if changed:
        raise ModelError(
            f'{step} of the model "{model.name}" should not change weights of frozen layers, which workers '
            f"do not send; it changed {', '.join(each.path for each in changed[:3])}. Leave the layer "
            "trainable, and set trainable=False on each of its variables instead (for variable in "
            "layer.variables: variable.trainable = False). Workers merge these as moving statistics."
        )

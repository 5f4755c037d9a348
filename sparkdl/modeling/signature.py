"""The inputs and outputs of a model, as far as the model declares them.

The driver checks the first row against them before workers start.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import keras

from sparkdl.core.tree import leaves
from sparkdl.core.vectors import Array
from sparkdl.data.column import LISTS, TEXT_BYTES, Column
from sparkdl.data.schema import Sample, Schema, Takes
from sparkdl.data.sparse import TEXT
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.modeling import keras_internals
from sparkdl.modeling.checks import require_backend_of_strings
from sparkdl.modeling.keras_variables import dtype_of, undisturbed


def count_parts(model: keras.Model) -> tuple[int | None, int | None]:
    """Return the number of arrays in x and in y of a model; None if only a call of the model shows it."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    alone = 1 if isinstance(model, keras.Sequential) else None
    return len(inputs) if inputs else alone, len(outputs) if outputs else None


def takes(model: keras.Model, step: str = "train_step") -> Takes:
    """Return the kind of rows that a model takes in a step, "train_step" or "test_step"."""
    return Takes(needs_labels(model, step), takes_strings(model))


def takes_strings(model: keras.Model) -> bool:
    """Return True if an input of a model takes strings, or if the model does not declare its inputs."""
    inputs = getattr(model, "inputs", None)
    return not inputs or any(dtype_of(tensor) == TEXT for tensor in inputs)


def needs_labels(model: keras.Model, step: str = "train_step") -> bool:
    """Return True if a step compares labels with predictions; False for a custom step, which may need none.

    Args:
        model: a compiled model.
        step: "train_step" or "test_step".
    """
    kind = type(model)
    if getattr(kind, step) is not getattr(keras.Model, step):
        return False
    loses = kind.compute_loss is keras.Model.compute_loss and any(
        loss is not None for loss in leaves(model.loss)
    )
    # model.metrics is empty before the first batch
    measures = keras_internals.compiled_part(model, "metrics") is not None
    return loses or (measures and kind.compute_metrics is keras.Model.compute_metrics)


def computes_loss(model: keras.Model) -> bool:
    """Return True if the model can compute a loss: it has one, or its ``train_step`` is Keras's own."""
    return model.loss is not None or type(model).train_step is keras.Model.train_step


def is_stateful(model: keras.Model) -> bool:
    """Return True if a layer of the model carries its state from one batch to the next."""
    return any(getattr(layer, "stateful", False) for layer in keras_internals.flat_layers(model))


def named_batch_size(model: keras.Model) -> int | None:
    """Return the batch size that the inputs of a model declare; None for any size."""
    sizes = {tensor.shape[0] for tensor in getattr(model, "inputs", None) or ()}
    return next((int(size) for size in sizes if size is not None), None)


def fixed_batch_size(model: keras.Model, **given: int | None) -> int | None:
    """Return the number of rows that every batch of a model must have; None: any number.

    Args:
        model: the model.
        given: arguments that set a batch size, by name.

    Raises:
        ConfigError: an argument differs from the required number.
    """
    size = _needed_batch_size(model)
    for name, value in given.items():
        if size is not None and value not in (None, size):
            raise ConfigError(
                f'The model "{model.name}" takes only batches of {size} rows, because its Input fixes '
                f"the batch size and a layer depends on it; got {name}={value}. Pass {name}={size}."
            )
    return size


def _needed_batch_size(model: keras.Model) -> int | None:
    """Return the batch size that a layer of a model needs.

    The inputs may declare a size that no layer needs, so a different size is tried.
    """
    size = named_batch_size(model)
    if size is None or is_stateful(model):
        return size
    rows = 2 if size == 1 else 1
    inputs = keras_internals.input_structure(model)
    inputs = model.inputs[0] if inputs is None else inputs

    def zeros(tensor: Any) -> Array:
        shape = [1 if length is None else length for length in tensor.shape[1:]]
        return Column("", tuple(shape), dtype_of(tensor)).zeros(rows)

    try:
        with undisturbed(model):
            predicted = model(keras.tree.map_structure(zeros, inputs), training=False)
    except Exception:  # noqa: BLE001 - backends raise different errors for wrong shapes
        return size
    return None if all(len(part) == rows for part in keras.tree.flatten(predicted)) else size


def input_names(model: keras.Model) -> tuple[str, ...]:
    """Return the names of a model's inputs in order, if known: the keys of a dict, or the inputs' names."""
    wanted, inputs = keras_internals.input_structure(model), getattr(model, "inputs", None) or ()
    keys = {id(tensor): key for key, tensor in wanted.items()} if isinstance(wanted, dict) else {}
    return tuple(keys.get(id(tensor), tensor.name) for tensor in inputs)


def output_names(model: keras.Model) -> tuple[str, ...]:
    """Return the names of a model's outputs in order, if known: the keys of a dict, or the outputs' names."""
    made = keras_internals.output_structure(model)
    return tuple(made) if isinstance(made, dict) else tuple(getattr(model, "output_names", None) or ())


def known_output(model: keras.Model) -> Any:
    """Return the shape of one row's prediction, as ``output_shapes`` does; None if it is not declared."""
    outputs = getattr(model, "outputs", None)
    return output_shapes(model, outputs[0] if len(outputs) == 1 else outputs) if outputs else None


def input_places(model: keras.Model) -> Any:
    """Return the structure of a model's inputs, with the index in ``model.inputs`` in place of each."""
    count = len(model.inputs)
    structure = keras_internals.input_structure(model)
    if structure is None or count == 1:
        return 0 if count == 1 else tuple(range(count))
    return keras.tree.pack_sequence_as(structure, range(count))


def output_shapes(model: keras.Model, predicted: Any) -> Any:
    """Return the shape of one row's prediction; a dict by output name if there are several outputs.

    Raises:
        ModelError: the outputs are nested.
    """
    parts = list(predicted.values()) if isinstance(predicted, dict) else predicted
    if isinstance(parts, list | tuple) and any(isinstance(part, dict | list | tuple) for part in parts):
        shapes = keras.tree.map_structure(lambda part: tuple(part.shape[1:]), predicted)
        raise ModelError(
            "Predictions in columns need one output, or a list, tuple or dict of outputs; the model "
            f'"{model.name}" has nested outputs of shapes {shapes}. Use a model with flat outputs, or pass '
            "arrays to predict."
        )
    if isinstance(predicted, dict):
        return {str(name): tuple(part.shape[1:]) for name, part in predicted.items()}
    if not isinstance(predicted, list | tuple):
        return tuple(predicted.shape[1:])
    names = getattr(model, "output_names", None) or []
    if len(names) != len(predicted) or len(set(names)) != len(names):
        names = [f"output_{index}" for index in range(len(predicted))]
    return {name: tuple(part.shape[1:]) for name, part in zip(names, predicted, strict=True)}


def known_features(model: keras.Model, sample: Sample | None = None) -> Schema | None:
    """Return the schema of rows of x that the model takes; None if only a row can show it.

    Args:
        model: the model.
        sample: the structure of x and the names of its columns in errors; one column by default.

    Raises:
        DataError: the structure does not match the inputs of the model.
        ModelError: the model takes strings, and the backend does not support them.
    """
    require_backend_of_strings(model)
    inputs = getattr(model, "inputs", None)
    if not inputs or any(None in tensor.shape[1:] for tensor in inputs):
        return None
    if sample is None:
        if len(inputs) > 1:
            return None
        sample = Sample((0,), ("x",), ())
    schema = Schema(tuple(Column(name, (), keras.config.floatx()) for name in sample.names), sample.form)
    columns = list(schema.columns)
    for place, tensor in _inputs_by_place(model, schema):
        dtype, parts = dtype_of(tensor), sample.parts[place] if sample.parts else 1
        size = TEXT_BYTES if dtype == TEXT else 0
        columns[place] = Column(sample.names[place], tuple(tensor.shape[1:]), dtype, size, parts)
    return replace(schema, columns=tuple(columns))


def fit_features(model: keras.Model, schema: Schema, *, reshape: bool = False) -> Schema:
    """Return the schema with features as the model takes them, and labels in the shape of its outputs.

    Args:
        model: the model.
        schema: the schema of the first row.
        reshape: whether flat values may be reshaped for the model, as vectors of a DataFrame have to be.
            Labels are reshaped only if this is True.

    Raises:
        ConfigError: a list of columns does not form rows of the shape that the model takes.
        DataError: the features do not match the inputs of the model.
        ModelError: the model or the rows have strings, and the backend does not support them.
    """
    require_backend_of_strings(model, schema.columns)
    columns = [_flat(column) for column in schema.columns]
    if getattr(model, "inputs", None):
        for place, tensor in _inputs_by_place(model, schema):
            columns[place] = _fit_column(model, schema.columns[place], tensor, reshape=reshape)
    for place, tensor in _outputs_by_place(model, schema) if reshape else ():
        columns[place] = _shaped(schema.columns[place], tuple(tensor.shape[1:])) or columns[place]
    return replace(schema, columns=tuple(columns))


def _flat(column: Column) -> Column:
    """Return the column; if it is made of several flat columns, join them into one dimension."""
    if column.parts == 1 or len(column.shape) > 2:
        return column
    return replace(column, shape=(prod(column.shape),))


def _outputs_by_place(model: keras.Model, schema: Schema) -> list[tuple[int, Any]]:
    """Return pairs of a label column's index and its output, as far as the model declares them."""
    outputs = getattr(model, "outputs", None)
    if not outputs or len(schema.template) < 2:
        return []
    template, made = schema.template[1], keras_internals.output_structure(model)
    if isinstance(template, dict):
        named = made if isinstance(made, dict) else dict(zip(output_names(model), outputs, strict=False))
        return [
            (template[name], named[name])
            for name in template
            if isinstance(template[name], int) and name in named
        ]
    places = leaves(template)
    return list(zip(places, outputs, strict=True)) if len(places) == len(outputs) else []


def _inputs_by_place(model: keras.Model, schema: Schema) -> list[tuple[int, Any]]:
    """Return pairs of a feature column's index and the input for it of a model that declares its inputs."""
    template, wanted = schema.template[0], keras_internals.input_structure(model)
    named = {tensor.name: tensor for tensor in model.inputs}
    if isinstance(template, dict):
        known = wanted if isinstance(wanted, dict) else named
        if not template.keys() >= known.keys():
            raise DataError(
                f'The model "{model.name}" takes inputs {", ".join(map(repr, known))}; x has '
                f"{', '.join(map(repr, template))}."
            )
        pairs = [(template[name], known[name]) for name in known]
        if all(isinstance(place, int) for place, _ in pairs):
            return pairs
    places = leaves(template)
    if len(places) != len(model.inputs):
        raise DataError(
            f'The model "{model.name}" takes {len(model.inputs)} inputs; x has {len(places)}. Pass a tuple, '
            "or a dict whose keys are the names of the inputs."
        )
    return list(zip(places, model.inputs, strict=True))


def _fit_column(model: keras.Model, column: Column, tensor: Any, *, reshape: bool) -> Column:
    expected = tuple(tensor.shape[1:])
    if column.texts != (dtype_of(tensor) == TEXT):
        wanted, given = ("numbers", "strings") if column.texts else ("strings", "numbers")
        raise DataError(
            f'Expected {column.name} to be {wanted} for the input "{tensor.name}" of the model '
            f'"{model.name}"; the first row has {given}. Convert the rows, or change the dtype of the Input.'
        )
    found = _shaped(column, expected, reshape=reshape)
    if found is not None:
        return _ranked(found, len(expected)) if found.texts else found
    if column.parts > 1:
        raise ConfigError(
            f'The model "{model.name}" takes rows of shape {expected}; the columns {column.name} form rows '
            f"of shape {column.shape}. {LISTS}"
        )
    raise DataError(
        f'The model "{model.name}" takes rows of shape {expected}; {column.name} has rows of shape '
        f"{column.shape}. Reshape the rows, or the model's Input."
    )


def _ranked(column: Column, rank: int) -> Column:
    """Return a column with this many dimensions: one of size 1 is added at the end, or the last is dropped.

    Batches of two ranks would be traced with an unknown rank, on which string layers fail. So strings always
    get the rank that the model declares.
    """
    shape = column.shape
    if len(shape) < rank:
        shape = (*shape, 1)
    return replace(column, shape=shape[:-1] if len(shape) > rank else shape)


def _shaped(column: Column, expected: tuple[int | None, ...], *, reshape: bool = True) -> Column | None:
    """Return the column in a shape that the model takes; None if no shape fits.

    Args:
        column: the column, in the shape of its first row.
        expected: the shape that the model declares; None for a dimension of any size.
        reshape: whether flat values may be reshaped.
    """
    given = column.shape
    shapes = [given]
    if column.parts > 1:  # stacked along the first or last dimension, or joined
        shapes = [given, (*given[1:], given[0]), (prod(given),)] if len(given) > 1 else [given]
    for shape in shapes:
        fits = len(expected) == len(shape) and all(
            size in (None, own) for size, own in zip(expected, shape, strict=True)
        )
        if fits or (*shape, 1) == expected or shape == (*expected, 1):
            return replace(column, shape=shape)
    flat = 1 in (len(expected), len(given)) or len(given) == 2 and column.parts > 1
    whole = tuple(size for size in expected if size is not None)
    if reshape and flat and len(whole) == len(expected) and prod(whole) == prod(given):
        return replace(column, shape=whole)
    return None

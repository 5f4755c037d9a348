"""The description of a training run, by which a resumption is compared with the run that it continues.

A checkpoint holds arrays; the program that made them gives them their meaning. So a checkpoint also holds a
description of that program: its settings in words, and the model's outputs for a fixed input at fixed
weights. Two programs with equal outputs are taken to compute the same function of the weights, even if the
configurations of their layers differ.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import keras
import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.driver.checkpoints import Description, Words
from sparkdl.modeling import differences, keras_internals, keras_metrics, keras_variables, optimizers
from sparkdl.modeling.backends.outer import KerasOuter

PLAIN = (bool, int, float, str, bytes, np.generic)
# Attributes that are not described: names, to which Keras appends numbers; states; properties that follow
# from the shapes and dtypes of the variables; values that are used only until the variables exist; and
# settings that are described in another way.
LEFT_OUT = {
    "name",
    "path",
    "built",
    "trainable",
    "learning_rate",
    "iterations",
    "layers",
    "input_layers",
    "output_layers",
    "build_input_shape",
    "registered_name",
    "module",
    "supports_masking",
    "autocast",
    "units",
    "filters",
    "input_dim",
    "input_spec",
    "batch_shape",
    "seed",
    "metrics_names",
    "optimizer",
    "compiled",
    "loss",
    "stop_training",
    "call_signature_parameters",
    "supports_jit",
    "seed_generator",
    "train_function",
    "test_function",
    "predict_function",
    "build",
    "quantize",
    "dtype",
    "vocabulary",
    "input_vocabulary",
    "idf_weights",
    "input_idf_weights",
}


def describe(model: keras.Model, schema: Schema, others: Mapping[str, object]) -> Description:
    """Return the description of a run.

    Args:
        model: the compiled and built model.
        schema: the shape and the dtype of each column of a row.
        others: further settings by name.
    """
    optimizer = optimizers.inner(model)
    compiled = keras_internals.compile_arguments(model)
    words: Words = {
        "optimizer": {"class": type(optimizer).__name__, **_settings(optimizer)},
        "compile": _named({name: compiled.get(name) for name in ("loss", "loss_weights")}),
        "metrics": {
            each.name: _text(each) for each in keras_metrics.metrics_of(model) if each.name != "loss"
        },
        "fit": _named(others),
    }
    if not optimizers.settable(model):
        words["optimizer"]["learning_rate"] = _text(keras_internals.learning_rate(optimizer))
    for index, layer in enumerate(keras_internals.flat_layers(model, include_self=False)):
        words[f"layer {index} ({type(layer).__name__})"] = _settings(layer)
    return Description(words, optimizers.learning_rate(model), outputs(model, schema), _constants(model))


def outer_name(rule: object) -> str | None:
    """Return the class name of a rule's optimizer for the center; None if the rule has none."""
    optimizer = getattr(rule, "optimizer", None)
    return None if optimizer is None else type(getattr(optimizer, "optimizer", optimizer)).__name__


def _named(values: Mapping[str, object]) -> dict[str, str]:
    return {name: text for name, value in values.items() if (text := _text(value))}


def _settings(thing: Any) -> dict[str, str]:
    """Return the settings of a Keras object in words: public attributes, configuration and arguments."""
    values = dict(vars(thing))
    with suppress(Exception):  # custom objects may lack a configuration; Keras's fit does not need one
        values |= thing.get_config()
    values |= keras_internals.function_arguments(thing)
    policy = getattr(thing, "dtype_policy", None)
    shown = {
        name: value
        for name, value in sorted(values.items())
        if not (name.startswith("_") or name in LEFT_OUT or name.endswith("initializer"))
    }
    return _named({"dtype": policy and policy.name, **shown})


def _text(value: object) -> str:
    """Return a value in words; empty for states and parts of the model's graph."""
    if value is None:
        return ""
    if isinstance(value, PLAIN):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, np.ndarray):
        return f"array of shape {value.shape}, sum {float(np.sum(value, dtype=np.float64)):g}"
    if isinstance(value, Mapping):
        known = {"class_name", "config"} <= value.keys()
        return _call(value["class_name"], value["config"]) if known else _call("dict", value)
    if isinstance(value, list | tuple):
        return f"({', '.join(filter(None, map(_text, value)))})"
    return _object_text(value)


def _object_text(value: object) -> str:
    if isinstance(value, functools.partial):
        return _call(_text(value.func), value.keywords)
    if inspect.ismethod(value):
        return ""
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__qualname__
    if is_dataclass(value):
        return _call(
            type(value).__name__, {each.name: getattr(value, each.name) for each in fields(value)}, set()
        )
    if isinstance(value, KerasOuter):
        value = value.optimizer
    if hasattr(value, "get_config") and not isinstance(value, keras.Layer):
        return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in _settings(value).items())})"
    return ""


def _call(name: str, arguments: object, left_out: set[str] = LEFT_OUT) -> str:
    pairs: Iterable[tuple[object, object]]
    pairs = arguments.items() if isinstance(arguments, Mapping) else [("", arguments)]
    texts = {str(key): _text(value) for key, value in pairs if key not in left_out}
    return f"{name}({', '.join(f'{key}={text}' for key, text in texts.items() if text)})"


def outputs(model: keras.Model, schema: Schema) -> list[Array]:
    """Return the model's outputs for a fixed row at fixed weights.

    The result is empty if the outputs cannot be computed, or are not finite.

    The model's own variables do not change.
    """
    stated = {id(variable): index for index, variable in enumerate(keras_variables.generators(model))}
    constant = {id(variable) for layer in keras_variables.adapted(model) for variable in layer.variables}
    moved = {id(variable) for variable in keras_variables.statistics(model)}
    trainable = {id(variable) for variable in keras_variables.trainable(model)}

    def value(index: int, variable: keras.Variable) -> object:
        if id(variable) in stated:
            return np.zeros(variable.shape, keras.backend.standardize_dtype(variable.dtype))
        if id(variable) in constant or id(variable) not in moved | trainable:
            return variable.value
        random = np.random.default_rng(index)
        if id(variable) in moved:  # a variance is positive
            return random.uniform(0.5, 1.5, variable.shape).astype(np.float32)
        width = max(1, prod(variable.shape) // max(1, variable.shape[-1] if variable.shape else 1))
        return random.standard_normal(variable.shape, np.float32) / np.float32(width**0.5)

    def values(variables: list[keras.Variable]) -> list[object]:
        made = [(variable, value(index, variable)) for index, variable in enumerate(variables)]
        return [keras.ops.convert_to_tensor(given, variable.dtype) for variable, given in made]

    inputs = [_input(column) for column in schema.columns]
    try:
        made, _ = model.stateless_call(
            values(model.trainable_variables),
            values(model.non_trainable_variables),
            schema.batch(inputs).x,
            training=False,
        )
        arrays = [
            keras.ops.convert_to_numpy(keras.ops.cast(part, "float32")) for part in keras.tree.flatten(made)
        ]
    except Exception:  # noqa: BLE001 - a model may raise anything on artificial rows
        return []
    return arrays if all(np.isfinite(array).all() for array in arrays) else []


def _input(column: Column) -> Array:
    if column.texts:
        return column.zeros()
    if np.dtype(column.dtype).kind == "f":
        return np.random.default_rng(0).standard_normal((1, *column.shape)).astype(column.dtype)
    return np.zeros((1, *column.shape), column.dtype)


def _constants(model: keras.Model) -> str:
    """Return a digest of values that are not exchanged: frozen and adapted weights, and vocabularies."""
    own = (
        *keras_variables.trainable(model),
        *keras_variables.statistics(model),
        *keras_variables.generators(model),
    )
    travels = {id(variable) for variable in own}
    constants = [variable for variable in model.weights if id(variable) not in travels]
    digest = hashlib.blake2b(b"".join(keras_variables.digests(constants)), digest_size=16)
    for words in filter(None, map(differences.vocabulary, keras_internals.flat_layers(model))):
        digest.update(repr(words).encode())
    return digest.hexdigest()

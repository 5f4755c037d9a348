"""A Keras model as values that can be sent, and the model restored from them.

A model is sent as its serialized configuration (architecture, compile arguments, shapes), raw arrays and
custom objects. Workers must compute the same as the live model. So the driver first restores each model, and
compares it with the live one.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkdl.core.pickling import pickled
from sparkdl.core.vectors import LARGE, Array, trim
from sparkdl.data.sparse import TEXT
from sparkdl.errors import ModelError
from sparkdl.modeling import ensemble_layers as ensemble_layers  # registers the layers that a file may have
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.checks import require_compiled
from sparkdl.modeling.configuration import Objects, deserialize, serialize, unwarned
from sparkdl.modeling.differences import PATCH, Difference, describe, differences, patch
from sparkdl.modeling.keras_settings import alone, set_defaults
from sparkdl.modeling.keras_variables import (
    Layouts,
    adapted,
    generators,
    layout_of,
    places_of,
    read,
    statistics,
    trainable,
    write,
)
from sparkdl.modeling.object_pickling import ByValue, copied
from sparkdl.modeling.trainability import require_known
from sparkdl.process import interrupts


@dataclass(frozen=True)
class ModelSpec:
    """A built model as values, without code.

    Attributes:
        config: the serialized model as JSON; None for a model that a function builds.
        built: the shapes that the model was built with, from Keras's ``get_build_config``.
        weights: the values of ``model.weights``.
        optimizer: the values of the optimizer's variables.
        generators: the states of random generators, and counters.
        backend: the Keras backend of the driver.
        floatx: Keras's default float type on the driver.
        policy: the name of Keras's default dtype policy on the driver. With "mixed_float16",
            ``compile`` makes the optimizer scale the loss.
        epsilon: Keras's epsilon on the driver, which losses and metrics read when they compute.
        data_format: Keras's default image format on the driver: channels first or last.
        moved: the indices in ``model.weights`` of the variables that the optimizer updates.
        key: a digest. Two specs have the same key only if one restored model can serve both, after its values
            are replaced.
        trains: whether the model will be trained. If not, it may be uncompiled, and ``optimizer`` is empty.
    """

    config: str | None
    built: Any
    weights: list[Array]
    optimizer: list[Array]
    generators: list[Array]
    backend: str
    floatx: str
    policy: str
    epsilon: float
    data_format: str
    moved: tuple[int, ...]
    key: str
    trains: bool = True


@alone()
def freeze(
    model: keras.Model,
    builder: Callable[[], keras.Model] | None = None,
    custom_objects: Objects | None = None,
    *,
    trains: bool = True,
    check: Callable[[keras.Model], None] | None = None,
) -> tuple[ModelSpec, Objects]:
    """Return a built model as values, and the custom objects that it needs.

    Args:
        model: the model.
        builder: the function that built it, if any; the configuration is then not needed.
        custom_objects: objects named by the user. Those that the live model uses need not be named.
        trains: whether the model will be trained, for which it has to be compiled.
        check: called with the model that is restored here as on executors.

    Raises:
        ModelError: the model cannot be serialized or restored, or its optimizer was built for other
            variables; the message says why.
    """
    if trains:
        require_known(model)
    objects = dict(custom_objects or {})
    config = None
    if builder is None:
        config, found = serialize(model)
        objects = {**found, **objects}
    spec = ModelSpec(
        config=config,
        built=model.get_build_config(),
        weights=read(model.weights),
        optimizer=read(optimizers.variables(model)) if trains else [],
        generators=read(generators(model)),
        backend=keras.backend.backend(),
        floatx=keras.config.floatx(),
        policy=keras.config.dtype_policy().name,
        epsilon=keras.config.epsilon(),
        data_format=keras.config.image_data_format(),
        moved=places_of(model, optimizers.moves(model)),
        key="",
        trains=trains,
    )
    again = _made(spec, objects, builder)
    objects |= _complete(model, again, spec)
    if check is not None:
        check(again)
    del again
    spec = replace(spec, key=_key(spec, objects, builder, model))
    freed = sum(array.nbytes for array in spec.weights)
    if freed > LARGE:
        gc.collect()  # a model refers to itself, so the restored one would stay in memory
        trim(freed)
    return spec, objects


def _complete(model: keras.Model, again: keras.Model, spec: ModelSpec) -> Objects:
    """Return the objects that make a restored model equal to the live one, and check the result.

    Raises:
        ModelError: a part of the model cannot be sent, or the restored model still differs.
    """
    names = [[layer.name for layer in keras_internals.flat_layers(one)] for one in (model, again)]
    if len(names[0]) != len(names[1]):
        raise ModelError(
            f'The model "{model.name}" has different layers after it is rebuilt: expected {names[0]}; got '
            f"{names[1]}. Check get_config of its custom classes. A function that builds the model should "
            "return the same model each time."
        )
    found = differences(model, again)
    objects: Objects = {}
    if found:
        for each in found:
            _require_picklable(model, each)
        objects[PATCH] = ByValue(found)
        patch(again, copied(found))
    _settle(again, spec)
    _check_restored(model, again, trains=spec.trains)
    left = differences(model, again)
    if left:
        raise ModelError(
            f'The model "{model.name}" cannot be rebuilt on executors: {describe(model, left[0])} differs '
            "in the copy. Return it from get_config of its class and accept it in __init__, or pass "
            "SparkModel a function that builds and compiles the model."
        )
    return objects


def _require_picklable(model: keras.Model, difference: Difference) -> None:
    import cloudpickle  # installed on the driver; an executor that sparkdl was sent to may lack it

    try:
        pickled(difference.value, cloudpickle)
    except Exception as error:
        raise ModelError(
            f'The model "{model.name}" cannot be sent to executors: {describe(model, difference)} is not in '
            f"its configuration and cannot be pickled ({error}). Return all arguments of __init__ from "
            "get_config of its class, or pass SparkModel a function that builds and compiles the model."
        ) from error


def _key(spec: ModelSpec, objects: Objects, builder: Any, model: keras.Model) -> str:
    """Return a digest of a model's architecture, compile arguments, code and constants.

    The names of optimizers, which Keras numbers, are left out, and so are the learning rates of Keras's
    optimizers, which are among the values.
    """
    import cloudpickle  # installed on the driver; an executor that sparkdl was sent to may lack it

    config = spec.config and _without_rates(spec.config)
    for optimizer in (model.optimizer, optimizers.inner(model)) if model.compiled else ():
        config = config and config.replace(json.dumps(optimizer.name), "null")
    code = pickled((sorted(objects.items()), builder), cloudpickle)
    layouts = [layout_of(part) for part in (trainable(model), statistics(model), generators(model))]
    constants = [array.tobytes() for layer in adapted(model) for array in read(layer.weights)]
    return hashlib.sha256(f"{config} {layouts} {spec.moved} {constants}".encode() + code).hexdigest()


def _without_rates(config: str) -> str:
    """Return a configuration without the learning rates of Keras's own optimizers."""
    values = json.loads(config)
    optimizer = (values.get("compile_config") or {}).get("optimizer")
    while isinstance(optimizer, dict) and isinstance(settings := optimizer.get("config"), dict):
        if optimizer.get("module") == "keras.optimizers" and isinstance(settings.get("learning_rate"), float):
            settings["learning_rate"] = None
        optimizer = settings.get("inner_optimizer")
    return json.dumps(values)


def _check_restored(model: keras.Model, restored: keras.Model, *, trains: bool) -> None:
    same = layout_of(model.weights) == layout_of(restored.weights)
    if not same or (trains and Layouts.of(model) != Layouts.of(restored)):
        raise ModelError(
            f'The model "{model.name}" has different variables after it is rebuilt. Check get_config and '
            "build of its custom layers, or pass SparkModel a function that builds and compiles the model."
        )


@alone()
def thaw(spec: ModelSpec, objects: Objects, builder: Callable[[], keras.Model] | None = None) -> keras.Model:
    """Return the model of a spec, with its values set.

    Raises:
        ModelError: the model cannot be restored, for example because a custom object is missing.
    """
    model = _made(spec, objects, builder)
    if PATCH in objects:
        patch(model, objects[PATCH].get())
    _settle(model, spec)
    return model


def _made(spec: ModelSpec, objects: Objects, builder: Callable[[], keras.Model] | None) -> keras.Model:
    """Return the built model that a configuration or a function makes."""
    kept = keras.config.floatx(), keras.config.dtype_policy(), keras.config.image_data_format()
    try:
        set_defaults(spec.floatx, spec.policy, spec.data_format)
        model = deserialize(spec.config or "", objects) if builder is None else builder()
    finally:
        with interrupts.held():
            set_defaults(*kept)
    if spec.trains and builder is None and getattr(model, "optimizer", None) is None:
        raise ModelError(
            f'The model "{model.name}" is not compiled after it is rebuilt: {type(model).__name__} has its '
            "own compile method. Define get_compile_config and compile_from_config too, or pass SparkModel "
            "a function that builds and compiles the model."
        )
    if spec.trains:
        require_compiled(model)
    _build(model, spec)
    _check_weights(model, spec)
    if spec.trains and model.optimizer.built and places_of(model, optimizers.moves(model)) != spec.moved:
        model.optimizer = copied(model.optimizer)  # unbuilt; Keras built it for other variables
    return model


def _build(model: keras.Model, spec: ModelSpec) -> None:
    """Build a model that is not built yet, for the input shapes in its spec."""
    if not model.built and spec.built:
        with unwarned():
            model.build_from_config(spec.built)
    shape = (spec.built or {}).get("input_shape")
    if spec.weights and not model.weights and isinstance(shape, list | tuple):
        # Keras calls the model with symbolic numbers to build it. A model that takes strings fails on them.
        with suppress(Exception):  # _check_weights reports a failure
            model(keras.Input(batch_shape=tuple(shape), dtype=TEXT))


def _settle(model: keras.Model, spec: ModelSpec) -> None:
    """Build the optimizer for the variables that it updates, and set a restored model's values."""
    if spec.trains and not model.optimizer.built:
        model.optimizer.build([model.weights[place] for place in spec.moved])
    restore(model, spec)


def _check_weights(model: keras.Model, spec: ModelSpec) -> None:
    expected = [array.shape for array in spec.weights]
    given = [tuple(weight.shape) for weight in model.weights]
    if given != expected:
        raise ModelError(
            f'The model "{model.name}" has different weights after it is rebuilt: expected shapes '
            f"{expected}; got {given}. Check get_config and build of its custom layers. A function that "
            "builds the model should return the same model each time."
        )


def restore(model: keras.Model, spec: ModelSpec) -> None:
    """Set a model's weights, optimizer and generators to the values of its spec, and reset its metrics.

    Keras's epsilon in this process is set too.
    """
    keras.config.set_epsilon(spec.epsilon)
    model.set_weights(spec.weights)
    for layer in adapted(model):
        layer.finalize_state()
    if spec.trains:
        write(optimizers.variables(model), spec.optimizer)
    write(generators(model), spec.generators)
    model.reset_metrics()


@alone()
def copy_of(model: keras.Model, custom_objects: Objects | None = None) -> keras.Model:
    """Return an independent copy of a compiled model, with its weights and its optimizer's state.

    Raises:
        ModelError: the model cannot be serialized, or cannot be restored.
    """
    if model.built:
        return thaw(*freeze(model, custom_objects=custom_objects))
    config, objects = serialize(model)
    again = deserialize(config, {**objects, **(custom_objects or {})})
    patch(again, copied(differences(model, again)))
    return again


def outline(model: keras.Model, custom_objects: Objects | None = None) -> tuple[ModelSpec, Objects]:
    """Return a built model as ``freeze`` does, without memory for its weights; ``filled`` restores it.

    Raises:
        ModelError: the model cannot be serialized, or cannot be restored.
    """
    spec, objects = freeze(model, custom_objects=custom_objects, trains=bool(model.compiled))
    return replace(spec, weights=_unset(spec.weights), optimizer=_unset(spec.optimizer)), objects


def _unset(arrays: list[Array]) -> list[Array]:
    """Return zeros in the shapes of arrays, which need no memory."""
    return [np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in arrays]


def filled(path: Path, spec: ModelSpec, objects: Objects) -> keras.Model:
    """Return the model of an outline with the weights of a file of Keras's own format.

    Unlike ``load``, it needs no code from the file, so any code that the model of this process uses works.

    Raises:
        ModelError: the model cannot be restored.
    """
    model = thaw(spec, objects)
    model.load_weights(path)
    return model


def save(model: keras.Model, path: Path) -> None:
    """Write a model as a file in Keras's own format."""
    if model.built:
        optimizers.variables(model)  # creates them; without them Keras warns at loading
    model.save(path)


def load(
    path: Path, shown: str, custom_objects: Objects | None = None, *, safe_mode: bool | None = None
) -> keras.Model:
    """Return the model in a file of Keras's own format.

    Args:
        path: the path of the file.
        shown: the name of the file in errors.
        custom_objects: classes and functions that the model needs, by name.
        safe_mode: whether to refuse models that carry code; None for Keras's setting in this process.

    Raises:
        ModelError: the model cannot be restored.
    """
    try:
        return keras.saving.load_model(path, custom_objects, safe_mode=safe_mode)
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(f"{shown} cannot be loaded: {error}") from error

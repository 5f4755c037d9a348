"""A Keras model as its serialized configuration, and the custom objects that the configuration names.

Custom objects are code. They are sent only from the driver to executors, inside Spark's closure.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import keras

from sparkdl.errors import ModelError
from sparkdl.modeling import keras_internals
from sparkdl.modeling.stand_ins import stand_in, standing_in, with_stand_ins
from sparkdl.process import interrupts

Objects = dict[str, Any]
LAMBDA = "sparkdl_lambda_"


def serialize(model: keras.Model) -> tuple[str, Objects]:
    """Return the configuration of a live model as JSON, and the custom objects that it names.

    Raises:
        ModelError: Keras cannot serialize the model, or two of its objects have the same name.
    """
    found = list(_custom_objects(model))
    lambdas = [(name, thing) for name, thing in found if name.startswith(LAMBDA)]
    try:
        for name, function in lambdas:
            function.__name__ = name  # else Keras serializes its bytecode, without the objects it refers to
        with keras.saving.custom_object_scope(dict(found)), standing_in() as values:
            config = json.dumps(with_stand_ins(keras.saving.serialize_keras_object(model)))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f'The model "{model.name}" cannot be serialized: {error} Define get_config in its layers, or '
            "pass SparkModel a function that builds and compiles the model."
        ) from error
    finally:
        with interrupts.held():
            for _, function in lambdas:
                function.__name__ = "<lambda>"
    objects: Objects = dict(values)
    for name, thing in found:
        if json.dumps(name) in config and objects.setdefault(name, thing) is not thing:
            raise ModelError(
                f'The model "{model.name}" uses two objects named {name!r}, from {objects[name].__module__} '
                f"and {thing.__module__}. Rename one, or register it with "
                "keras.saving.register_keras_serializable."
            )
    return config, objects


def _custom_objects(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each class or function outside Keras that a live model uses."""
    for index, thing in enumerate(_made_of([model, keras_internals.compile_arguments(model)], set())):
        if thing.__module__.split(".")[0] in ("keras", "builtins"):
            continue
        name = thing.__name__ if isinstance(thing, FunctionType) else keras.saving.get_registered_name(thing)
        yield f"{LAMBDA}{index}" if name == "<lambda>" else name, thing


def _made_of(things: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield each function, and the class of each Keras object, held by these objects at any depth."""
    for thing in things:
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            yield thing
        elif isinstance(thing, dict):
            yield from _made_of(thing.values(), seen)
        elif isinstance(thing, list | tuple):
            yield from _made_of(thing, seen)
        elif hasattr(thing, "get_config") and not isinstance(thing, type):
            yield type(thing)
            yield from _made_of(list(vars(thing).values()), seen)


def deserialize(config: str, objects: Objects) -> keras.Model:
    """Return the model made from a configuration.

    Raises:
        ModelError: Keras cannot make the model, for example because a custom object is missing.
    """
    try:
        with keras.saving.custom_object_scope({**objects, **stand_in(objects)}), unwarned():
            model = keras.saving.deserialize_keras_object(json.loads(config), safe_mode=False)
    except (TypeError, ValueError, ModuleNotFoundError, ImportError, AttributeError) as error:
        raise ModelError(
            f"The model cannot be restored from its configuration: {error} Pass missing objects as "
            "SparkModel(..., custom_objects={name: object}), or register them with "
            "keras.saving.register_keras_serializable."
        ) from error
    return model


@contextmanager
def unwarned() -> Iterator[None]:
    """Silence Keras's warnings about layers that it cannot build. The weights are compared later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`build\(\)` was called on layer")
        warnings.filterwarnings("ignore", "Model .* had a build config, but the model cannot be built")
        yield

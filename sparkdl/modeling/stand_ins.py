"""Stand-ins, in a model's configuration, for objects that their own configuration cannot restore.

``keras.Model.fit`` never uses the configuration of an object. So plain Keras trains a model even if a
``get_config`` leaves out an argument or is missing. Workers, however, make the model from its configuration.
Such an object is therefore sent with the configuration: a layer or model as a call of its constructor, any
other object pickled.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import keras
import numpy as np

from sparkdl.modeling import keras_internals
from sparkdl.modeling.object_pickling import ByValue
from sparkdl.process import interrupts

STAND_IN = "sparkdl_value_"  # prefix of the names of objects that have a stand-in
OF_MODELS = ("build_config", "compile_config")  # entries that Keras adds for a model


class Constructed(NamedTuple):
    """A call that restores a user's layer or model if Keras's ``from_config`` cannot.

    Attributes:
        kind: the class.
        arguments: the arguments of the constructor. Keras records them if all are numbers, strings,
            booleans, None, or structures of these.
        name: the name of the layer or model.
    """

    kind: type[keras.Layer]
    arguments: dict[str, Any]
    name: str

    def get(self) -> keras.Layer:
        """Return a new instance, with initial values."""
        made = self.kind(**self.arguments)
        made.name = self.name
        return made


def _constructed(layer: Any) -> Constructed | None:
    """Return the call that restores a layer; None if it is not needed or not possible.

    It is needed if the constructor does not accept the layer's configuration. For example, an
    ``__init__(self)`` does not accept ``trainable`` and ``dtype``, which every configuration has.
    """
    kind, arguments = type(layer), keras_internals.constructor_arguments(layer)
    users = [base for base in kind.__mro__ if base.__module__.split(".")[0] != "keras"]
    if arguments is None or users[0] is not kind or any("from_config" in vars(base) for base in users):
        return None
    signature = inspect.signature(kind.__init__)
    if isinstance(layer, keras.Model) and len(signature.parameters) > 1:
        return None  # Keras does not record the arguments of a model's constructor
    try:
        signature.bind(layer, **layer.get_config())
    except TypeError:
        return Constructed(kind, arguments, layer.name)
    except NotImplementedError:  # Keras raises it again; its message says what get_config lacks
        pass
    return None


def stand_in(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class, by name, through which Keras makes the objects that have a stand-in."""

    class StandIn:
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return objects[config["name"]].get()

    return {STAND_IN: StandIn}


_serializing = threading.local()
_config_of = keras_internals.class_or_function_config


def _config_or_stand_in(thing: Any) -> Any:
    taken = getattr(_serializing, "taken", None)
    if taken is None:
        return _config_of(thing)
    made: ByValue | Constructed | None
    if isinstance(thing, keras.Layer):
        made = _constructed(thing)
    else:
        made = ByValue(thing) if _goes_by_value(thing) else None
    if made is None:
        return _config_of(thing)
    shared = (name for name, one in taken.items() if isinstance(one, ByValue) and one.live is thing)
    name = next(shared, f"{STAND_IN}{len(taken)}")
    taken.setdefault(name, made)
    return {STAND_IN: name}


@contextmanager
def standing_in() -> Iterator[dict[str, ByValue | Constructed]]:
    """Make Keras serialize objects without a working configuration as stand-ins, in a ``with`` block.

    Yields the replaced objects by name; ``with_stand_ins`` completes the configuration.
    """
    try:
        _serializing.taken = {}
        keras_internals.set_class_or_function_config(_config_or_stand_in)
        yield _serializing.taken
    finally:
        with interrupts.held():
            _serializing.taken = None
            keras_internals.set_class_or_function_config(_config_of)


def with_stand_ins(config: Any) -> Any:
    """Return a configuration in which each stand-in has a form that Keras can deserialize."""
    if isinstance(config, list):
        return [with_stand_ins(part) for part in config]
    if not isinstance(config, dict):
        return config
    inner = config.get("config")
    if isinstance(inner, dict) and STAND_IN in inner:
        of_models = {key: with_stand_ins(config[key]) for key in OF_MODELS if key in config}
        return {
            **of_models,
            "module": None,
            "class_name": STAND_IN,
            "config": {"name": inner[STAND_IN]},
            "registered_name": STAND_IN,
        }
    return {name: with_stand_ins(part) for name, part in config.items()}


def _goes_by_value(thing: Any) -> bool:
    """Return True if an object to be serialized has no configuration that restores it."""
    if isinstance(thing, FunctionType | BuiltinFunctionType | type) or thing is None:
        return False
    kind = type(thing)
    own = kind.__module__.split(".")[0] != "keras"
    if not own and isinstance(thing, keras.Layer):
        return False
    if not hasattr(thing, "get_config"):
        return own and callable(thing)
    try:
        config = thing.get_config()
        if own:
            kind.from_config(config)
        if _has_arrays(config):  # Keras serializes arrays as dicts, which some classes, even AUC, cannot read
            kind.from_config(keras.saving.serialize_keras_object(config))
    except Exception:  # noqa: BLE001 - a constructor may raise anything if it lacks arguments
        return True
    return False


def _has_arrays(config: Any) -> bool:
    """Return True if a configuration contains arrays or tensors."""
    return any(
        isinstance(part, np.ndarray) or keras.ops.is_tensor(part) for part in keras.tree.flatten(config)
    )

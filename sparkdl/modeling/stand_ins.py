"""Stand-ins, in a model's configuration, for objects that their own configuration does not make again.

``keras.Model.fit`` never asks an object for its configuration. So a program works although a ``get_config``
leaves an argument out or is missing. Workers make the model from its configuration. Such an object is
therefore pickled itself, and travels beside the configuration.
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
from keras.src.saving import serialization_lib

from sparkdl.modeling.object_pickling import ByValue
from sparkdl.process import interrupts

STAND_IN = "sparkdl_value_"  # the names, among custom objects, of what travels by value
OF_MODELS = ("build_config", "compile_config")  # what Keras adds to the configuration of a model


class Constructed(NamedTuple):
    """A call that makes a user's layer or model again where Keras's ``from_config`` cannot.

    Attributes:
        kind: its class.
        arguments: what its constructor was given, which Keras notes where it is numbers, texts and the like.
        name: its name.
    """

    kind: type[keras.Layer]
    arguments: dict[str, Any]
    name: str

    def get(self) -> keras.Layer:
        """Return another one, with initial values."""
        made = self.kind(**self.arguments)
        made.name = self.name
        return made


def _constructed(layer: Any) -> Constructed | None:
    """Return the call that makes a layer again, or None if that is not needed or not possible.

    ``__init__(self)`` takes no configuration, for Keras's own has ``trainable`` and ``dtype`` too.
    """
    kind, noted = type(layer), getattr(layer, "_auto_config", None)
    users = [base for base in kind.__mro__ if base.__module__.split(".")[0] != "keras"]
    if noted is None or users[0] is not kind or any("from_config" in vars(base) for base in users):
        return None
    signature = inspect.signature(kind.__init__)
    if isinstance(layer, keras.Model) and len(signature.parameters) > 1:
        return None  # Keras does not note what the constructor of a model was given
    try:
        signature.bind(layer, **layer.get_config())
    except TypeError:
        return Constructed(kind, dict(noted.config), layer.name)
    except NotImplementedError:  # which says what get_config lacks
        pass
    return None


def stand_in(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class, by its name, of which Keras makes the custom objects that travel by value."""

    class StandIn:
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return objects[config["name"]].get()

    return {STAND_IN: StandIn}


_serializing = threading.local()
_config_of = serialization_lib._get_class_or_fn_config  # as of Keras 3.5 to 3.15, for all but plain values


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
    """Have Keras, in a ``with`` block, put stand-ins for objects without a working configuration.

    Yields what they stand in for, by name; ``with_stand_ins`` completes the configuration.
    """
    try:
        _serializing.taken = {}
        serialization_lib._get_class_or_fn_config = _config_or_stand_in
        yield _serializing.taken
    finally:
        with interrupts.held():
            _serializing.taken = None
            serialization_lib._get_class_or_fn_config = _config_of


def with_stand_ins(config: Any) -> Any:
    """Return a configuration in which each stand-in is one that Keras can make an object of."""
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
    """Return whether an object that Keras is to serialize has no configuration that makes it again."""
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
        if _has_arrays(config):  # of which Keras makes dicts that not every class can read, not even its AUC
            kind.from_config(serialization_lib.serialize_keras_object(config))
    except Exception:  # noqa: BLE001 - whatever a constructor raises without its arguments
        return True
    return False


def _has_arrays(config: Any) -> bool:
    """Return whether a configuration holds arrays or tensors."""
    return any(
        isinstance(part, np.ndarray) or keras.ops.is_tensor(part) for part in keras.tree.flatten(config)
    )

"""Pickling of Keras objects attribute by attribute.

Keras pickles an object as its configuration and the values of its variables. That loses attributes that the
configuration leaves out, and fails for a class without a configuration.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import keras

from sparkdl.core import pickling
from sparkdl.modeling import keras_internals
from sparkdl.modeling.keras_variables import Variable

# Settings of a variable that are set after its constructor has run; ``trainable`` is also an argument of it.
OF_VARIABLES = ("trainable", "overwrite_with_gradient", "constraint", "regularizer")


class ByValue:
    """A wrapper of an object that is pickled when it is sent. Each ``get`` returns a new copy.

    Args:
        live: the object, or its bytes.
        load: the function that makes the object from its bytes; None if ``live`` is the object.
    """

    def __init__(self, live: Any, load: Callable[[bytes], Any] | None = None) -> None:
        self.live, self.load = live, load

    def get(self) -> Any:
        """Return a copy of the object."""
        return copied(self.live) if self.load is None else self.load(self.live)


def copied(live: Any) -> Any:
    """Return a copy of an object; both use the same classes and functions.

    Unpickling a class that was pickled by value would replace the methods of the live class.
    """
    pickler: Any = _pickler()
    shared: list[Any] = []

    class ObjectPickler(pickler.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, FunctionType | ModuleType | type) and thing is not _shared_part:
                shared.append(thing)
                return _shared_part, (len(shared) - 1,)
            found = reduced(thing, pickler)
            return super().reducer_override(thing) if found is NotImplemented else found

    with io.BytesIO() as file:
        ObjectPickler(file).dump(live)
        data = file.getvalue()
    _copying.parts = shared
    try:
        return pickler.loads(data)  # bytes from this call, never from a socket
    finally:
        del _copying.parts


def _pickler() -> Any:
    """Return cloudpickle, or PySpark's copy if it is not installed, as on executors with --py-files."""
    try:
        import cloudpickle
    except ImportError:
        from pyspark import cloudpickle
    return cloudpickle


_copying = threading.local()


def _shared_part(index: int) -> Any:
    return _copying.parts[index]


def reduced(thing: Any, pickler: Any) -> Any:
    """Return the reduce value of a Keras variable, optimizer, metric or loss, with its attributes.

    A ``ByValue`` that holds a live object is handled too, and so are the lists, dicts and sets that Keras
    tracks. NotImplemented is returned for other objects, such as layers and models.

    Keras's own reduce value holds only the configuration and the values of variables.

    Args:
        thing: the object.
        pickler: cloudpickle, or PySpark's copy of it.
    """
    if isinstance(thing, ByValue) and thing.load is None:
        return ByValue, (pickling.pickled(thing.live, pickler), pickler.loads)
    update = keras_internals.set_attributes
    if isinstance(thing, Variable):
        settings = {name: getattr(thing, name) for name in OF_VARIABLES if hasattr(thing, name)}
        value = keras.ops.convert_to_numpy(thing.value)
        dtype = keras.backend.standardize_dtype(thing.dtype)
        return _variable, (value, dtype, thing.name, thing.trainable), settings, None, None, _set_attributes
    if isinstance(thing, keras.optimizers.Optimizer):
        rate = keras_internals.learning_rate(thing)
        rate = float(rate) if isinstance(rate, Variable) else rate
        return _optimizer, (type(thing), rate, thing.name), settings_of(thing), None, None, update
    if (values := keras_internals.tracked_values(thing)) is not None:
        return values
    if (arguments := keras_internals.arguments_of_metrics(thing)) is not None:
        return type(thing), arguments
    if isinstance(thing, keras.metrics.Metric):
        state = keras_internals.metric_attributes(thing)
        return _metric, (type(thing),), state, None, None, keras_internals.set_metric_attributes
    if isinstance(thing, keras.losses.Loss):
        return _new, (type(thing),), dict(vars(thing)), None, None, update
    return NotImplemented


pickling.reducers.append(reduced)


def _new(kind: type[Any]) -> Any:
    return object.__new__(kind)


def _set_attributes(thing: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(thing, name, value)


def _variable(value: Any, dtype: str, name: str, trainable: bool) -> Any:
    # Integer variables cannot be trainable on torch, so the constructor has to receive ``trainable``.
    return keras.Variable(value, dtype=dtype, name=name, trainable=trainable)


def _optimizer(kind: type[Any], rate: Any, name: str) -> Any:
    """Return an unbuilt optimizer, without calling the user's constructor."""
    made = object.__new__(kind)
    keras.optimizers.Optimizer.__init__(made, learning_rate=rate, name=name)
    return made


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that hold no variables and that ``build`` does not make."""
    return {
        name: value
        for name, value in keras_internals.optimizer_settings(optimizer).items()
        if not _holds_variables(value)
    }


def _holds_variables(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, Variable) for part in parts)


def _metric(kind: type[Any]) -> Any:
    made = object.__new__(kind)
    keras.metrics.Metric.__init__(made)
    return made

"""What live Keras objects have beyond their configuration, and how it travels.

``keras.Model.fit`` never asks an object for its configuration. So a program works although a ``get_config``
leaves an argument out or is missing, and although an attribute was changed after construction. Workers make
the model from its configuration. An object that has no working configuration is therefore pickled itself
(``standing_in``). What else differs between the live model and the one that is made from its configuration
is found attribute by attribute (``differences``) and set on workers (``patch``).
"""

from __future__ import annotations

import functools
import inspect
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.saving import serialization_lib
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from sparkdl.core import pickling
from sparkdl.errors import ModelError
from sparkdl.modeling import optimizers
from sparkdl.process import interrupts

# The backend's own class: in Keras 3.5 keras.Variable is one of its own, which weights of layers are not of.
Variable: type[Any] = keras.Variable.__mro__[1]
STAND_IN = "sparkdl_value_"  # the names, among custom objects, of what travels by value
OF_MODELS = ("build_config", "compile_config")  # what Keras adds to the configuration of a model
COMPILED = ("loss", "metrics")  # what a model has of compile, as _compile_loss and _compile_metrics
PATCH = "sparkdl_differences"
DECAY = "optimizer.exclude_from_weight_decay"
VOCABULARY = "vocabulary"
PLAIN = bool | int | float | complex | str | bytes | None | Enum | np.generic
VARIABLE = ("trainable", "overwrite_with_gradient", "constraint", "regularizer")
# What optimizers keep that is made again on workers, by ``build`` or by Keras's own constructor.
OF_OPTIMIZERS = {
    "built",
    "_tracker",
    "_lock",
    "_variables",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_iterations",
    "_distribution_strategy",
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_cache",
}
# What layers and models have that is settled by being built, called, compiled or trained.
OF_LAYERS = {
    "_compile_metrics",
    "_eval_epoch_iterator",
    "_epoch_iterator",
    "_functional",
    "_jax_state",
    "build",
    "built",
    "history",
    "quantize",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
}
KEPT = {
    "_trainable",
    "_dtype_policy",
    "_remat_mode",
    "_supports_masking",
    "_run_eagerly",
    "_jit_compile",
    "autocast",
    "supports_jit",
    "activity_regularizer",
    "steps_per_execution",
}


class Difference(NamedTuple):
    """An attribute in which a live model and the one of its configuration differ.

    Attributes:
        path: where it is: the name of a root (see ``roots``), then attributes and places; or VOCABULARY and
            the place of a layer.
        value: what the live one has.
    """

    path: tuple[Any, ...]
    value: Any


class ByValue:
    """An object that travels pickled, and is made anew each time that it is asked for.

    Args:
        live: the object.
        load: what makes objects of bytes, where ``live`` is bytes already.
    """

    def __init__(self, live: Any, load: Callable[[bytes], Any] | None = None) -> None:
        self.live, self.load = live, load

    def get(self) -> Any:
        """Return a copy of the object."""
        return copied(self.live) if self.load is None else self.load(self.live)


class Constructed(NamedTuple):
    """How a layer or model of the user's is made again where Keras's ``from_config`` cannot make it.

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
    """Return how to construct a layer again, or None if that is not needed or not possible.

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


def copied(live: Any) -> Any:
    """Return a copy of an object, of the same classes and functions.

    To unpickle a class that was pickled by value would replace the methods of the live one.
    """
    import cloudpickle  # the driver has it; an executor that sparkdl was sent to may not

    shared: list[Any] = []

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, FunctionType | ModuleType | type) and thing is not _shared_part:
                shared.append(thing)
                return _shared_part, (len(shared) - 1,)
            found = reduced(thing, cloudpickle)
            return super().reducer_override(thing) if found is NotImplemented else found

    with io.BytesIO() as file:
        Pickler(file).dump(live)
        data = file.getvalue()
    _copying.parts = shared
    try:
        return cloudpickle.loads(data)  # bytes of this call, never of a socket
    finally:
        del _copying.parts


_copying = threading.local()


def _shared_part(index: int) -> Any:
    return _copying.parts[index]


def reduced(thing: Any, pickler: Any) -> Any:
    """Return how a Keras object is pickled as it is, or NotImplemented; Keras would pickle its configuration.

    Args:
        thing: the object.
        pickler: cloudpickle, or the copy of it that PySpark has.
    """
    if isinstance(thing, ByValue) and thing.load is None:
        return ByValue, (pickling.pickled(thing.live, pickler), pickler.loads)
    if isinstance(thing, Variable):
        settings = {name: getattr(thing, name) for name in VARIABLE if hasattr(thing, name)}
        value = keras.ops.convert_to_numpy(thing.value)
        dtype = keras.backend.standardize_dtype(thing.dtype)
        return _variable, (value, dtype, thing.name, thing.trainable), settings, None, None, _set_attributes
    if isinstance(thing, keras.optimizers.Optimizer):
        rate = thing._learning_rate
        rate = float(rate) if isinstance(rate, Variable) else rate
        return _optimizer, (type(thing), rate, thing.name), settings_of(thing), None, None, _update
    if isinstance(thing, keras.metrics.Metric):
        state = {name: value for name, value in vars(thing).items() if name != "_tracker"}
        return _metric, (type(thing),), state, None, None, _set_metric
    if isinstance(thing, keras.losses.Loss):
        return _new, (type(thing),), dict(vars(thing)), None, None, _update
    return NotImplemented


pickling.reducers.append(reduced)


def _new(kind: type[Any]) -> Any:
    return object.__new__(kind)


def _update(thing: Any, state: dict[str, Any]) -> None:
    vars(thing).update(state)


def _set_attributes(thing: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(thing, name, value)


def _variable(value: Any, dtype: str, name: str, trainable: bool) -> Any:
    return keras.Variable(value, dtype=dtype, name=name, trainable=trainable)  # on torch integers are not


def _optimizer(kind: type[Any], rate: Any, name: str) -> Any:
    """Return an optimizer that is not built, without calling a constructor of the user's."""
    made = object.__new__(kind)
    keras.optimizers.Optimizer.__init__(made, learning_rate=rate, name=name)
    return made


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that are neither variables nor made with them."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in OF_OPTIMIZERS and not name.startswith("_self_") and not _holds_variables(value)
    }


def _holds_variables(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, Variable) for part in parts)


def _metric(kind: type[Any]) -> Any:
    made = object.__new__(kind)
    keras.metrics.Metric.__init__(made)
    return made


def _set_metric(metric: Any, state: dict[str, Any]) -> None:
    for store in ("variables", "metrics"):  # the lists that its tracker fills
        for part in state.pop(f"_{store}", ()):
            metric._tracker.add_to_store(store, part)
    vars(metric).update(state)


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


def roots(model: keras.Model) -> dict[str, Any]:
    """Return what a model is made of, from which the paths of differences begin."""
    found: dict[str, Any] = {
        "layer": model._flatten_layers(),
        "weight": model.weights,
        "optimizer": getattr(model, "optimizer", None),
    }
    for name in COMPILED:
        found[name] = vars(model).get(f"_compile_{name}")
    return found


def differences(live: keras.Model, again: keras.Model) -> list[Difference]:
    """Return in what a model that was made again differs from the live one, but for values of variables."""
    found: list[Difference] = []
    theirs = roots(again)
    for name, ours in roots(live).items():
        pairs = zip(ours, theirs[name], strict=True) if name in ("layer", "weight") else ()
        for place, (one, other) in enumerate(pairs):
            found += _attributes_apart(one, other, (name, ("item", place)), {})
        if name not in ("layer", "weight"):
            found += _apart(ours, theirs[name], (name,), {})
    layers = zip(live._flatten_layers(), again._flatten_layers(), strict=True)
    for place, (one, other) in enumerate(layers):
        if (words := vocabulary(one)) != vocabulary(other):
            found.append(Difference((VOCABULARY, place), words))
    decays = optimizers.decays_weights(live)
    if decays != optimizers.decays_weights(again):
        found.append(Difference((DECAY,), decays))
    return found


def vocabulary(layer: keras.Layer) -> tuple[list[Any], list[float] | None] | None:
    """Return the vocabulary of a layer and the weights of its words; None if it has none of its own.

    The configuration of a layer has a vocabulary that was given, and leaves out one that ``adapt`` found.

    Raises:
        ModelError: a word is not text.
    """
    if not isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return None  # such as TextVectorization, which has a StringLookup
    try:
        words = list(layer.get_vocabulary())
    except UnicodeDecodeError as error:
        raise ModelError(
            f'The vocabulary of the layer "{layer.name}" has words that are not text in its encoding: '
            f"{error}. Adapt it to text."
        ) from error
    weights = getattr(layer, "idf_weights_const", None)
    if layer.output_mode != "tf_idf" or weights is None:
        return words, None
    return words, keras.ops.convert_to_numpy(weights)[: len(words)].tolist()


# Pairs that are being compared, by their ids, which nothing else can have while they are kept here.
Seen = dict[tuple[int, int], Any]


def _apart(ours: Any, theirs: Any, path: tuple[Any, ...], seen: Seen) -> Iterator[Difference]:
    """Yield the differences of two values."""
    pair = id(ours), id(theirs)
    if ours is theirs or pair in seen or _is_settled_elsewhere(ours):
        return
    seen[pair] = ours, theirs
    parts = _parts(ours, theirs)
    if parts is not None:
        found = [each for step, one, other in parts for each in _apart(one, other, (*path, step), seen)]
        whole = isinstance(ours, tuple) or isinstance(ours, list) and isinstance(theirs, tuple)
        if whole and any(len(each.path) == len(path) + 1 for each in found):
            yield Difference(path, ours)
        else:
            yield from found
    elif _has_attributes(ours) and _same_kind(type(ours), type(theirs)):
        yield from _attributes_apart(ours, theirs, path, seen)
    else:
        same = _equal(ours, theirs, seen)
        del seen[pair]  # what is replaced as a whole is replaced at each place that has it
        if not same:
            yield Difference(path, _plain(ours))


def _attributes_apart(ours: Any, theirs: Any, path: tuple[Any, ...], seen: Seen) -> Iterator[Difference]:
    own = type(ours).__module__.split(".")[0] != "keras"
    for name, value in _attributes(ours).items():
        other = getattr(theirs, name) if isinstance(ours, Variable) else vars(theirs).get(name, MISSING)
        if other is not MISSING or own:  # what a user hangs on an object of Keras's own, that never reads
            yield from _apart(value, other, (*path, ("attr", name)), seen)


def _parts(ours: Any, theirs: Any) -> Iterable[tuple[Any, Any, Any]] | None:
    """Return what two containers hold at the same places; None if they are none, or hold other places."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return (
            [(("item", key), ours[key], theirs[key]) for key in ours]
            if ours.keys() == theirs.keys()
            else None
        )
    sequences = isinstance(ours, list | tuple) and isinstance(theirs, list | tuple)
    if not sequences or len(ours) != len(theirs):
        return None
    return [(("item", place), *pair) for place, pair in enumerate(zip(ours, theirs, strict=True))]


MISSING = object()


def _is_settled_elsewhere(value: Any) -> bool:
    """Return whether a value is compared or made again by other means, as layers and variables are."""
    if isinstance(value, list | tuple | set):
        return bool(value) and all(map(_is_settled_elsewhere, value))
    kinds = keras.Layer, Variable, keras.KerasTensor, keras.initializers.Initializer, ModuleType
    return isinstance(value, (*kinds, keras.random.SeedGenerator))


def _same_kind(ours: type[Any], theirs: type[Any]) -> bool:
    """Return whether two classes are one, or made by the same lines of a function that ran twice."""
    return ours is theirs or (ours.__module__, ours.__qualname__) == (theirs.__module__, theirs.__qualname__)


def _has_attributes(value: Any) -> bool:
    foreign = type(value).__module__.split(".")[0] in (
        "tensorflow",
        "jax",
        "jaxlib",
        "torch",
        "numpy",
        "builtins",
    )
    return (
        hasattr(value, "__dict__")
        and not foreign
        and not isinstance(value, type | FunctionType | MethodType | Enum | keras.DTypePolicy)
    )


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object that say what it computes."""
    if isinstance(thing, Variable):
        return {name: getattr(thing, name) for name in VARIABLE if hasattr(thing, name)}
    if isinstance(thing, CompileLoss | CompileMetrics):  # the rest is made when they are built
        return {name: value for name, value in vars(thing).items() if name.startswith("_user")}
    if isinstance(thing, keras.optimizers.Optimizer):
        found = settings_of(thing)
        return {key: value for key, value in found.items() if not key.startswith("_exclude_from")}
    left = _of_layers() if isinstance(thing, keras.Layer) else {"built", "_built", "_tracker", "_lock"}
    return {
        name: value
        for name, value in vars(thing).items()
        if name not in left and not name.startswith(("_self_", "_build_"))
    }


@functools.cache
def _of_layers() -> frozenset[str]:
    """Return the attributes that Keras keeps of any layer or model, but for settings."""
    inputs = keras.Input((1,))
    made = [keras.Sequential(), keras.Model(inputs, keras.layers.Identity()(inputs)), keras.Layer()]
    made[0].compile("sgd", "mse")
    names = OF_LAYERS.union(*map(vars, made))
    return frozenset(name for name in names if name not in KEPT)


def _equal(ours: Any, theirs: Any, seen: Seen) -> bool:
    """Return whether two values without parts are equal."""
    if isinstance(ours, FunctionType | MethodType | functools.partial):
        return type(ours) is type(theirs) and _equal_functions(ours, theirs, seen)
    if isinstance(ours, np.ndarray) or keras.ops.is_tensor(ours):
        return _equal_arrays(ours, theirs)
    if isinstance(ours, keras.DTypePolicy):  # a process shares it, so that it is never changed but replaced
        return type(ours) is type(theirs) and bool(ours.get_config() == theirs.get_config())
    if isinstance(ours, float) and isinstance(theirs, float) and ours != ours:
        return theirs != theirs
    if type(ours) is type(theirs) and vars(object)["__eq__"] is type(ours).__eq__:
        return True  # such as a lock: nothing tells them apart
    try:
        return bool(ours == theirs)
    except Exception:  # noqa: BLE001 - an object of the user's that cannot be compared
        return False


def _equal_functions(ours: Any, theirs: Any, seen: Seen) -> bool:
    def parts(function: Any) -> Any:
        if isinstance(function, functools.partial):
            return [function.func, function.args, function.keywords]
        if isinstance(function, MethodType):
            return [function.__func__, function.__self__]
        cells = [_content(cell) for cell in function.__closure__ or ()]
        return [function.__defaults__, function.__kwdefaults__, cells]

    same = getattr(ours, "__code__", None) == getattr(theirs, "__code__", None)
    return same and not any(True for _ in _apart(parts(ours), parts(theirs), (), seen))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in
        return None


def _equal_arrays(ours: Any, theirs: Any) -> bool:
    try:
        one, other = map(keras.ops.convert_to_numpy, (ours, theirs))
    except Exception:  # noqa: BLE001 - a tensor of a graph, which the next call makes again
        return True
    return one.shape == other.shape and bool(
        (one == other).all() or np.array_equal(one, other, equal_nan=True)
    )


def _plain(value: Any) -> Any:
    """Return a container as Python's own, for Keras has containers that know the layer that they are in."""
    for kind in (list, dict, set):
        if isinstance(value, kind):
            return kind(value)
    return value


def patch(model: keras.Model, found: Sequence[Difference]) -> None:
    """Give a model what the live one has."""
    starts = roots(model)
    for path, value in found:
        root, *steps = path
        if root == DECAY:
            optimizers.set_decays_weights(model, value)
        elif root == VOCABULARY:
            model._flatten_layers()[steps[0]].set_vocabulary(*value)
        elif not steps:
            setattr(model, f"_compile_{root}" if root in COMPILED else root, value)
        else:
            parent = functools.reduce(_step, steps[:-1], starts[root])
            _put(parent, steps[-1], value)


def _step(parent: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    if kind == "item":
        return parent[key]
    return getattr(parent, key) if isinstance(parent, Variable) else vars(parent)[key]


def _put(parent: Any, step: tuple[str, Any], value: Any) -> None:
    kind, key = step
    if kind == "item":
        parent[key] = value
    elif isinstance(parent, Variable):
        setattr(parent, key, value)
    else:
        vars(parent)[key] = value  # past Keras, which locks layers that are built


def describe(model: keras.Model, difference: Difference) -> str:
    """Return how an error calls an attribute of a live model."""
    root, *steps = difference.path
    if root == VOCABULARY:
        return f'the vocabulary of the layer "{model._flatten_layers()[steps[0]].name}"'
    if root in ("layer", "weight"):
        thing = roots(model)[root][steps.pop(0)[1]]
        root = f'layer "{thing.name}"' if root == "layer" else f'variable "{thing.path}"'
    names = [f".{key.removeprefix('_user_')}" if kind == "attr" else f"[{key!r}]" for kind, key in steps]
    return f"{''.join(names).removeprefix('.')} of the {root}" if names else f"the {root}"

"""Differences between a live model and the model that is rebuilt from its configuration.

An attribute may be changed after construction, and the configuration may not record that change. The driver
finds such attributes one by one (``differences``), and workers set them (``patch``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np

from sparkdl.errors import ModelError
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.keras_internals import flat_layers
from sparkdl.modeling.keras_variables import Variable
from sparkdl.modeling.object_pickling import OF_VARIABLES, settings_of

PATCH = "sparkdl_differences"
DECAY = "optimizer.exclude_from_weight_decay"
VOCABULARY = "vocabulary"
COMPILED = ("loss", "metrics")  # arguments that ``compile`` turns into objects


class Difference(NamedTuple):
    """An attribute that differs between a live model and the model made from its configuration.

    Attributes:
        path: the name of a root (see ``roots``), then the attributes, keys and indices that lead from it to
            the attribute; or VOCABULARY and the index of a layer; or DECAY.
        value: the value in the live model.
    """

    path: tuple[Any, ...]
    value: Any


def roots(model: keras.Model) -> dict[str, Any]:
    """Return the parts of a model at which the paths of differences begin."""
    found: dict[str, Any] = {
        "layer": flat_layers(model),
        "weight": model.weights,
        "optimizer": getattr(model, "optimizer", None),
    }
    for name in COMPILED:
        found[name] = keras_internals.compiled_part(model, name)
    return found


def differences(live: keras.Model, again: keras.Model) -> list[Difference]:
    """Return the differences between a live model and its restored copy, except values of variables."""
    found: list[Difference] = []
    theirs = roots(again)
    for name, ours in roots(live).items():
        pairs = zip(ours, theirs[name], strict=True) if name in ("layer", "weight") else ()
        for place, (one, other) in enumerate(pairs):
            found += _attributes_apart(one, other, (name, ("item", place)), {})
        if name not in ("layer", "weight"):
            found += _apart(ours, theirs[name], (name,), {})
    layers = zip(flat_layers(live), flat_layers(again), strict=True)
    for place, (one, other) in enumerate(layers):
        if (words := vocabulary(one)) != vocabulary(other):
            found.append(Difference((VOCABULARY, place), words))
    decays = optimizers.decays_weights(live)
    if decays != optimizers.decays_weights(again):
        found.append(Difference((DECAY,), decays))
    return found


def vocabulary(layer: keras.Layer) -> tuple[list[Any], list[float] | None] | None:
    """Return the vocabulary of a layer and the weights of its words; None if it has no vocabulary itself.

    The configuration of a layer contains a vocabulary that was passed to it, but not one from ``adapt``.

    Raises:
        ModelError: a word is not text in the layer's encoding.
    """
    if not isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return None  # including TextVectorization, which holds a StringLookup
    try:
        words = list(layer.get_vocabulary())
    except UnicodeDecodeError as error:
        raise ModelError(
            f'The vocabulary of the layer "{layer.name}" has entries that cannot be decoded with its '
            f"encoding: {error}. Use only text in that encoding."
        ) from error
    weights = getattr(layer, "idf_weights_const", None)
    if layer.output_mode != "tf_idf" or weights is None:
        return words, None
    return words, keras.ops.convert_to_numpy(weights)[: len(words)].tolist()


# Pairs of values that are or were compared, by their ids. Keeping them here prevents the reuse of their ids.
Seen = dict[tuple[int, int], Any]


def _apart(ours: Any, theirs: Any, path: tuple[Any, ...], seen: Seen) -> Iterator[Difference]:
    """Yield the differences between two values."""
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
        del seen[pair]  # compare it again at other paths: each occurrence is replaced separately
        if not same:
            yield Difference(path, _plain(ours))


def _attributes_apart(ours: Any, theirs: Any, path: tuple[Any, ...], seen: Seen) -> Iterator[Difference]:
    own = type(ours).__module__.split(".")[0] != "keras"
    for name, value in _attributes(ours).items():
        other = getattr(theirs, name) if isinstance(ours, Variable) else vars(theirs).get(name, MISSING)
        if other is not MISSING or own:  # Keras never reads an attribute that a user adds
            yield from _apart(value, other, (*path, ("attr", name)), seen)


def _parts(ours: Any, theirs: Any) -> Iterable[tuple[Any, Any, Any]] | None:
    """Return the paired items of two containers; None for other values, or if keys or lengths differ."""
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
    """Return True if a value is compared or restored by other means, as layers and variables are."""
    if isinstance(value, list | tuple | set):
        return bool(value) and all(map(_is_settled_elsewhere, value))
    kinds = keras.Layer, Variable, keras.KerasTensor, keras.initializers.Initializer, ModuleType
    return isinstance(value, (*kinds, keras.random.SeedGenerator))


def _same_kind(ours: type[Any], theirs: type[Any]) -> bool:
    """Return True if two classes are the same, or were defined twice by the same code."""
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
    """Return the attributes of an object that affect its results."""
    if isinstance(thing, Variable):
        return {name: getattr(thing, name) for name in OF_VARIABLES if hasattr(thing, name)}
    if (given := keras_internals.given_to_compile(thing)) is not None:  # ``build`` creates all others
        return given
    if isinstance(thing, keras.optimizers.Optimizer):
        found = settings_of(thing)
        return {key: value for key, value in found.items() if not keras_internals.is_of_weight_decay(key)}
    return {name: value for name, value in vars(thing).items() if not keras_internals.is_state(thing, name)}


def _equal(ours: Any, theirs: Any, seen: Seen) -> bool:
    """Return True if two values without parts are equal."""
    if isinstance(ours, FunctionType | MethodType | functools.partial):
        return type(ours) is type(theirs) and _equal_functions(ours, theirs, seen)
    if isinstance(ours, np.ndarray) or keras.ops.is_tensor(ours):
        return _equal_arrays(ours, theirs)
    if isinstance(ours, keras.DTypePolicy):  # shared by layers, so it is replaced, never mutated
        return type(ours) is type(theirs) and bool(ours.get_config() == theirs.get_config())
    if isinstance(ours, float) and isinstance(theirs, float) and ours != ours:
        return theirs != theirs
    if type(ours) is type(theirs) and vars(object)["__eq__"] is type(ours).__eq__:
        return True  # for example locks, which cannot be compared
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
    except ValueError:  # the cell is empty
        return None


def _equal_arrays(ours: Any, theirs: Any) -> bool:
    try:
        one, other = map(keras.ops.convert_to_numpy, (ours, theirs))
    except Exception:  # noqa: BLE001 - a symbolic tensor, which the next call recreates
        return True
    return one.shape == other.shape and bool(
        (one == other).all() or np.array_equal(one, other, equal_nan=True)
    )


def _plain(value: Any) -> Any:
    """Return a container as Python's own type. Keras's containers refer to the layer that holds them."""
    for kind in (list, dict, set):
        if isinstance(value, kind):
            return kind(value)
    return value


def patch(model: keras.Model, found: Sequence[Difference]) -> None:
    """Set the attributes in which a restored model differs from the live model."""
    starts = roots(model)
    for path, value in found:
        root, *steps = path
        if root == DECAY:
            optimizers.set_decays_weights(model, value)
        elif root == VOCABULARY:
            flat_layers(model)[steps[0]].set_vocabulary(*value)
        elif not steps and root in COMPILED:
            keras_internals.set_compiled_part(model, root, value)
        elif not steps:
            setattr(model, root, value)
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
        vars(parent)[key] = value  # bypasses Keras, which locks built layers


def describe(model: keras.Model, difference: Difference) -> str:
    """Return the name of an attribute of a live model for an error message."""
    root, *steps = difference.path
    if root == VOCABULARY:
        return f'the vocabulary of the layer "{flat_layers(model)[steps[0]].name}"'
    if root in ("layer", "weight"):
        thing = roots(model)[root][steps.pop(0)[1]]
        root = f'layer "{thing.name}"' if root == "layer" else f'variable "{thing.path}"'
    names = [
        f".{keras_internals.public_name(key)}" if kind == "attr" else f"[{key!r}]" for kind, key in steps
    ]
    return f"{''.join(names).removeprefix('.')} of the {root}" if names else f"the {root}"

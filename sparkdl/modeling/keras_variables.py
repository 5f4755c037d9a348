"""The variables of a Keras model, and their values as arrays.

There are four lists:

* *trainable*: variables that gradients update.
* *statistics*: floating-point variables that trainable layers update themselves, such as BatchNormalization's
  mean and variance. They are averaged.
* *optimizer*: the variables of the optimizer.
* *generators*: the states of random generators, and the counters of layers.

Optimizer variables and generators stay with their worker and are saved in snapshots. Weights of frozen layers
are constants and are never sent again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan, prod
from typing import Any, NamedTuple

import keras
import numpy as np

from sparkdl.core.vectors import Array, Layout, Vector
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.keras_internals import flat_layers
from sparkdl.process import interrupts

# The backend's class. In Keras 3.5 the weights of layers are not instances of keras.Variable itself.
Variable: type[Any] = keras.Variable.__mro__[1]
# Keras's name for the state of a SeedGenerator: the seed, and the count of ``next(ordered=True)``.
SEED = "seed_generator_state"


@dataclass(frozen=True)
class Layouts:
    """The layouts of a model's four lists of variables."""

    trainable: Layout
    statistics: Layout
    optimizer: Layout
    generators: Layout

    @classmethod
    def of(cls, model: keras.Model) -> Layouts:
        """Return the layouts of a compiled model."""
        return cls(*map(layout_of, Variables.of(model)))


class Variables(NamedTuple):
    """A model's four lists of variables at the start of a fit."""

    trainable: list[Any]
    statistics: list[Any]
    optimizer: list[Any]
    generators: list[Any]

    @classmethod
    def of(cls, model: keras.Model) -> Variables:
        """Return the variables of a compiled model."""
        return cls(trainable(model), statistics(model), optimizers.variables(model), generators(model))


def trainable(model: keras.Model) -> list[Any]:
    """Return the variables that gradients update."""
    return list(model.trainable_variables)


def constrain(variables: Sequence[Any]) -> None:
    """Apply the constraints of variables. A merge may violate them, since it is not an optimizer step."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def statistics(model: keras.Model) -> list[Any]:
    """Return the floating-point variables that trainable layers update themselves."""
    return [variable for variable in _moved(model) if _is_float(variable)]


def constants(model: keras.Model) -> list[Any]:
    """Return the weights that workers never send: those of frozen and adapted layers."""
    moved = {id(variable) for variable in _moved(model)}
    return [variable for variable in model.non_trainable_weights if id(variable) not in moved]


def _moved(model: keras.Model) -> list[Any]:
    """Return the weights that are neither trained nor constant."""
    fixed = [layer for layer in flat_layers(model) if not layer.trainable] + adapted(model)
    frozen = {id(variable) for layer in fixed for variable in layer.weights}
    return [variable for variable in model.non_trainable_weights if id(variable) not in frozen]


def _is_float(variable: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def dtype_of(tensor: Any) -> str:
    """Return the name of the dtype of a variable or symbolic tensor."""
    return str(keras.backend.standardize_dtype(tensor.dtype))


def adapted(model: keras.Model) -> list[Any]:
    """Return the layers that compute with constants derived from their variables, such as Normalization."""
    return [layer for layer in flat_layers(model) if layer.weights and hasattr(layer, "finalize_state")]


def decays(model: keras.Model) -> Vector:
    """Return the share of each moving statistic that one training step keeps, as a vector; NaN if unknown."""
    again = _called_again(model)  # such a layer updates its statistics more than once in a step
    known = {
        id(variable): layer.momentum
        for layer in flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and np.float32(layer.momentum) < 1
        if id(layer) not in again
        for variable in (layer.moving_mean, layer.moving_variance)
    }
    parts = [(known.get(id(variable), nan), prod(variable.shape)) for variable in statistics(model)]
    return np.repeat([decay for decay, _ in parts], [size for _, size in parts]).astype(np.float32)


def _called_again(model: keras.Model) -> set[int]:
    """Return the ids of layers that a model's graphs call more than once, and of their nested layers."""
    layers = flat_layers(model)
    times = Counter(id(operation) for layer in layers for operation in keras_internals.calls(layer))
    return {id(part) for layer in layers if times[id(layer)] > 1 for part in flat_layers(layer)}


def generators(model: keras.Model) -> list[Any]:
    """Return the states of random generators of layers such as Dropout, and the counters of layers."""
    known = {id(variable) for variable in model.weights}
    known |= {id(variable) for metric in model.metrics for variable in metric.variables}
    random = [variable for variable in model.non_trainable_variables if id(variable) not in known]
    return random + [variable for variable in _moved(model) if not _is_float(variable)]


def set_generators(model: keras.Model, arrays: Sequence[Array], worker: int) -> None:
    """Set generators so that every worker draws different random numbers.

    Worker 0 draws the numbers that the model itself would draw. Layer counters are set as given.
    """
    counters = {id(variable) for variable in model.weights}
    for variable, array in zip(generators(model), arrays, strict=True):
        apart = 0 if id(variable) in counters else worker
        variable.assign(np.add(array, np.asarray(apart, array.dtype)))


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the states of all metrics, including the loss; complete once the metrics are built."""
    return [variable for metric in model.metrics for variable in metric.variables]


def recurrent_states(model: keras.Model) -> list[Any]:
    """Return the states of stateful recurrent layers, which are not among a model's variables."""
    layers = [layer for layer in flat_layers(model) if getattr(layer, "stateful", False)]
    states = [keras.tree.flatten(getattr(layer, "states", None)) for layer in layers]
    return [state for part in states for state in part if isinstance(state, Variable)]


def layout_of(variables: Sequence[Any]) -> Layout:
    """Return the layout of Keras variables, without reading them."""
    return Layout(
        tuple(tuple(variable.shape) for variable in variables),
        tuple(keras.backend.standardize_dtype(variable.dtype) for variable in variables),
    )


def places_of(model: keras.Model, variables: Iterable[Any]) -> tuple[int, ...]:
    """Return the indices of variables among a model's weights; -1 for a variable that is not a weight."""
    places = {id(weight): place for place, weight in enumerate(model.weights)}
    return tuple(places.get(id(variable), -1) for variable in variables)


def read(variables: Sequence[Any]) -> list[Array]:
    """Return copies of the values of Keras variables."""
    return list(reading(variables))


def reading(variables: Sequence[Any]) -> Iterator[Array]:
    """Yield copies of the values of Keras variables, one at a time."""
    for variable in variables:
        array = keras.ops.convert_to_numpy(variable.value)
        ours = array.flags.owndata and array.flags.writeable  # not a view of the backend's memory
        yield array if ours else array.copy()


def digests(variables: Sequence[Any]) -> list[bytes]:
    """Return a digest of the value of each Keras variable."""
    contiguous = (np.ascontiguousarray(array) for array in reading(variables))
    return [hashlib.blake2b(array.view(np.uint8).data).digest() for array in contiguous]


def fingerprint(model: keras.Model) -> bytes:
    """Return sixteen bytes that change if the weights or the optimizer's variables change."""
    digest = hashlib.blake2b(digest_size=16)
    for array in read([*model.weights, *optimizers.variables(model)]):
        digest.update(array.tobytes())
    return digest.digest()


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Set Keras variables to copies of arrays."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(np.array(array))


@contextmanager
def undisturbed(model: keras.Model) -> Iterator[None]:
    """Undo the changes that computations in a ``with`` block make to a model's state.

    Random generators, counters, moving statistics and states of recurrent layers keep their values. Metrics
    are reset.
    """
    kept = [*generators(model), *statistics(model), *recurrent_states(model)]
    values = read(kept)
    known = set(map(id, kept))
    try:
        yield
    finally:
        with interrupts.held():
            write(kept, values)
            for variable in generators(model):
                if id(variable) not in known and variable.name == SEED:  # the model was not built before
                    seed, _ = keras.ops.convert_to_numpy(variable.value)
                    variable.assign(np.array([seed, 0]))
            model.reset_metrics()

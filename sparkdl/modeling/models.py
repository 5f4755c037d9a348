"""A Keras model and what of it travels.

A model is shipped as its serialized configuration (architecture, compile arguments, shapes), raw arrays,
and the custom objects that the configuration names. The objects are code, and go only from the driver to
executors, inside Spark's own closure; arrays and states are what an endpoint exchanges.

The variables of a model fall into four lists: *trainable* variables, which a rule merges; *statistics*,
the floating-point variables that trainable layers move themselves (BatchNormalization's mean and
variance), which are averaged; *optimizer* variables and *generators*, the states of random numbers and
other counters, which stay with their worker and are saved in cuts. Weights of frozen layers are constants
and never travel again.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import nan, prod
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.backend import compute_output_spec

from sparkdl.core.pickling import pickled
from sparkdl.core.tree import leaves
from sparkdl.core.vectors import LARGE, Array, Layout, Vector, trim
from sparkdl.data.schema import LISTS, TEXT_BYTES, Column, Sample, Schema, Takes
from sparkdl.data.sparse import TEXT
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.modeling import live_objects, optimizers
from sparkdl.process import interrupts
from sparkdl.process.reasons import reason_of, text_of

Objects = dict[str, Any]


@dataclass(frozen=True)
class ModelSpec:
    """A compiled model as values: nothing in it is code.

    Attributes:
        config: the serialized model as JSON; None for a model that a function builds.
        built: the shapes that the model was built with, as Keras says them.
        weights: the values of ``model.weights``.
        optimizer: the values of the optimizer's variables.
        generators: the states of random generators, and counters.
        backend: the Keras backend that it was made on.
        floatx: Keras's default float type on the driver.
        policy: the name of Keras's default dtype policy there, by which compile scales the loss.
        epsilon: the small number of Keras's there, which losses and metrics look up when they compute.
        data_format: whether images have their channels last there, by default.
        moved: the places among the model's weights of those that its optimizer was built for.
        key: what two specs share only if one model, with other values set, can serve for both.
        trains: whether it is to be trained; else it may not be compiled, and the optimizer's values are left.
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


@dataclass(frozen=True)
class Layouts:
    """The layouts of a model's four lists of variables, and of its metrics once they are built."""

    trainable: Layout
    statistics: Layout
    optimizer: Layout
    generators: Layout

    @classmethod
    def of(cls, model: keras.Model) -> Layouts:
        """Return the layouts of a compiled model."""
        return cls(*map(layout_of, Variables.of(model)))


class Variables(NamedTuple):
    """A model's four lists of variables, as they are when a fit begins."""

    trainable: list[Any]
    statistics: list[Any]
    optimizer: list[Any]
    generators: list[Any]

    @classmethod
    def of(cls, model: keras.Model) -> Variables:
        """Return the variables of a compiled model."""
        return cls(trainable(model), statistics(model), optimizers.variables(model), generators(model))


def trainable(model: keras.Model) -> list[Any]:
    """Return the variables that a gradient moves."""
    return list(model.trainable_variables)


def constrain(variables: Sequence[Any]) -> None:
    """Hold variables to their constraints, which a rule may leave: a merge is no step of an optimizer."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def statistics(model: keras.Model) -> list[Any]:
    """Return the floating-point variables that trainable layers move by themselves."""
    return [variable for variable in _moved(model) if _is_float(variable)]


def _moved(model: keras.Model) -> list[Any]:
    """Return the weights that are not trained and not constant."""
    fixed = [layer for layer in model._flatten_layers() if not layer.trainable] + adapted(model)
    frozen = {id(variable) for layer in fixed for variable in layer.weights}
    return [variable for variable in model.non_trainable_weights if id(variable) not in frozen]


def _is_float(variable: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def adapted(model: keras.Model) -> list[Any]:
    """Return the layers that compute with constants made of their variables, such as Normalization."""
    return [layer for layer in model._flatten_layers() if layer.weights and hasattr(layer, "finalize_state")]


def decays(model: keras.Model) -> Vector:
    """Return how much of each moving statistic one training step keeps, as a vector; nan: not known."""
    again = _called_again(model)  # such a layer moves more than once in a step
    known = {
        id(variable): layer.momentum
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and np.float32(layer.momentum) < 1
        if id(layer) not in again
        for variable in (layer.moving_mean, layer.moving_variance)
    }
    parts = [(known.get(id(variable), nan), prod(variable.shape)) for variable in statistics(model)]
    return np.repeat([decay for decay, _ in parts], [size for _, size in parts]).astype(np.float32)


def _called_again(model: keras.Model) -> set[int]:
    """Return which layers a model's graphs call more than once, and the layers in those, by id."""
    layers = model._flatten_layers()
    graphs = (getattr(layer, "_functional", None) or layer for layer in layers)
    depths = (depth for graph in graphs for depth in getattr(graph, "_nodes_by_depth", {}).values())
    calls = Counter(id(node.operation) for nodes in depths for node in nodes)
    return {id(part) for layer in layers if calls[id(layer)] > 1 for part in layer._flatten_layers()}


def generators(model: keras.Model) -> list[Any]:
    """Return the states of the random generators of layers such as Dropout, and layers' own counters."""
    known = {id(variable) for variable in model.weights}
    known |= {id(variable) for metric in model.metrics for variable in metric.variables}
    random = [variable for variable in model.non_trainable_variables if id(variable) not in known]
    return random + [variable for variable in _moved(model) if not _is_float(variable)]


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the states of all metrics, the loss's among them; complete once the metrics are built."""
    return [variable for metric in model.metrics for variable in metric.variables]


def metrics_of(model: keras.Model) -> list[Any]:
    """Return the metrics of a model, those of ``compile`` one by one."""
    return [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]


def from_keras(thing: Any) -> bool:
    """Return whether an object is of a class of Keras's own."""
    return type(thing).__module__.split(".")[0] == "keras"


def layout_of(variables: Sequence[Any]) -> Layout:
    """Return the layout of Keras variables, without reading them."""
    return Layout(
        tuple(tuple(variable.shape) for variable in variables),
        tuple(keras.backend.standardize_dtype(variable.dtype) for variable in variables),
    )


def read(variables: Sequence[Any]) -> list[Array]:
    """Return copies of the values of Keras variables."""
    return list(reading(variables))


def reading(variables: Sequence[Any]) -> Iterator[Array]:
    """Yield copies of the values of Keras variables, one after the other."""
    for variable in variables:
        array = keras.ops.convert_to_numpy(variable.value)
        ours = array.flags.owndata and array.flags.writeable  # no view of the backend's memory
        yield array if ours else array.copy()


def digests(variables: Sequence[Any]) -> list[bytes]:
    """Return what tells the values of Keras variables from others, without keeping them."""
    contiguous = (np.ascontiguousarray(array) for array in reading(variables))
    return [hashlib.blake2b(array.view(np.uint8).data).digest() for array in contiguous]


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Set Keras variables; the arrays are copied."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(np.array(array))


def set_generators(model: keras.Model, arrays: Sequence[Array], worker: int) -> None:
    """Set generators so that every worker draws random numbers of its own, worker 0 the model's."""
    counters = {id(variable) for variable in model.weights}
    for variable, array in zip(generators(model), arrays, strict=True):
        apart = 0 if id(variable) in counters else worker
        variable.assign(np.add(array, np.asarray(apart, array.dtype)))


def require_model(model: Any) -> None:
    """Check that this is a Keras model.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"model should be a keras.Model; got {type(model).__name__}.")


def require_compiled(model: Any) -> None:
    """Check that this is a compiled Keras model.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            "model should be a compiled keras.Model or a function without arguments that returns one; "
            f"got {type(model).__name__}."
        )
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ModelError(
            f'The model "{model.name}" is not compiled. Call model.compile(optimizer=..., loss=...) first.'
        )


def flat_losses(given: Any) -> list[Any]:
    """Return the losses of a structure that ``compile`` took, dicts by name.

    On TensorFlow a model wraps what it holds, and an older Keras (3.5) does not look into its own wraps.
    """
    if isinstance(given, Mapping):
        return [loss for name in sorted(given) for loss in flat_losses(given[name])]
    if isinstance(given, list | tuple):
        return [loss for part in given for loss in flat_losses(part)]
    return [given]


def require_backend_of_strings(model: keras.Model, columns: Sequence[Column] = ()) -> None:
    """Check that the backend computes with strings, if the model or the rows have strings.

    Args:
        model: the model, whose inputs tell, if it has them.
        columns: what rows are, if that is known.

    Raises:
        ModelError: the backend is not TensorFlow; names the input.
    """
    texts = [tensor.name for tensor in getattr(model, "inputs", None) or () if _dtype(tensor) == TEXT]
    texts += [column.name for column in columns if column.texts]
    if texts and keras.backend.backend() != "tensorflow":
        raise ModelError(
            f'The input "{texts[0]}" of the model "{model.name}" takes strings, which are supported on '
            f"TensorFlow only; Keras runs on {keras.backend.backend()}. Set KERAS_BACKEND=tensorflow, or "
            "apply layers such as TextVectorization or StringLookup to the data first and give a model that "
            "begins with their output."
        )


def _dtype(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def require_honoured(model: keras.Model) -> None:
    """Check that workers do what the model was compiled to do.

    Raises:
        ModelError: they cannot; names it.
    """
    require_backend_of_strings(model)
    if keras.backend.backend() == "torch" and model.jit_compile:
        raise ModelError(
            f'The model "{model.name}" was compiled with jit_compile=True, which workers on torch do not do. '
            "Leave it out."
        )
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # which Keras has had since 3.14
    if several is not None and isinstance(optimizers.inner(model), several):
        raise ModelError(
            f'The model "{model.name}" was compiled with a MultiOptimizer, whose optimizers workers do not '
            "follow. Take one optimizer for all variables."
        )


class Trainability:
    """Which layers and variables of a model are trainable, as it was at some time.

    Plain Keras looks at this when it traces the first step after ``compile`` (TensorFlow), or at each step
    (torch). On JAX an optimizer takes no other variables than those that it was built for.

    Args:
        model: the model.

    Attributes:
        traced: whether Keras looks at it no more, until the model is compiled again.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model, self.traced = model, False
        self.compiled = vars(model).get("_compile_loss")  # another one whenever the model is compiled
        self.layers = [(layer, layer._trainable) for layer in model._flatten_layers()]
        self.weights = [(weight, weight.trainable) for weight in model.weights]
        fitted = vars(model).get("train_function") is not None and model.optimizer.built
        if fitted and keras.backend.backend() == "tensorflow":
            self.traced = True
            moved = set(map(id, optimizers.moves(model)))
            self.weights = [(weight, id(weight) in moved) for weight, _ in self.weights]
            self.layers = [
                (layer, trainable or any(id(weight) in moved for weight in layer.weights))
                for layer, trainable in self.layers
            ]

    def changed(self) -> list[str]:
        """Return the names of what is trainable now and was not, or the other way round."""
        layers = [f'layer "{layer.name}"' for layer, was in self.layers if layer._trainable != was]
        return layers or [f'variable "{one.path}"' for one, was in self.weights if one.trainable != was]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model as it was in a ``with`` block."""
        now = [layer._trainable for layer, _ in self.layers], [one.trainable for one, _ in self.weights]
        try:
            self._set([was for _, was in self.layers], [was for _, was in self.weights])
            yield
        finally:
            with interrupts.held():
                self._set(*now)

    def _set(self, layers: Sequence[bool], weights: Sequence[bool]) -> None:
        for (layer, _), value in zip(self.layers, layers, strict=True):
            layer._trainable = value  # its setter sets those of layers and variables within, too
        for (weight, _), value in zip(self.weights, weights, strict=True):
            if weight.trainable != value:
                weight.trainable = value

    def still(self) -> Trainability:
        """Return what counts for the next fit: on TensorFlow this, until the model is compiled again."""
        same = vars(self.model).get("_compile_loss") is self.compiled
        same = same and len(self.weights) == len(self.model.weights)
        return self if same and keras.backend.backend() == "tensorflow" else Trainability(self.model)

    def trace(self) -> None:
        """Let changes count from the next ``compile`` on, if Keras does so on this backend."""
        self.traced = keras.backend.backend() == "tensorflow"

    def require_kept(self) -> None:
        """Check that callbacks have changed nothing that plain Keras would heed.

        Raises:
            ModelError: they have; names the layer.
        """
        if vars(self.model).get("_compile_loss") is not self.compiled:
            raise ModelError(
                f'A callback compiled the model "{self.model.name}" while fit runs. Compile it between fits.'
            )
        changed = [] if self.traced else self.changed()
        if changed:
            raise ModelError(
                f"A callback changed whether the {changed[0]} is trainable, and workers train what is "
                "trainable when a fit begins. Set it between two fits, and compile the model again."
            )


def require_known(model: keras.Model) -> None:
    """Check that the optimizer can move what is trainable, as Keras does at the first step.

    Raises:
        ModelError: it was built for other variables.
    """
    known, wanted = optimizers.moves(model), trainable(model)
    others = [variable.path for variable in wanted if id(variable) not in set(map(id, known))]
    exact = keras.backend.backend() == "jax" and len(known) != len(wanted)
    if others or exact:
        raise ModelError(
            f'The optimizer of the model "{model.name}" was built for other variables than those that are '
            f"trainable now{': ' + others[0] if others else ''}. Compile the model with a new optimizer."
        )


def require_trainable(model: keras.Model) -> None:
    """Check that there is something to train, if that is known yet.

    Raises:
        ModelError: the model is built, and all of its variables are frozen.
    """
    if model.built and not model.trainable_variables:
        raise ModelError(
            f'The model "{model.name}" has no trainable variables, so fit has nothing to train. Set '
            "trainable = True on a layer and compile the model again."
        )


def require_divisible(model: keras.Model, num_workers: int) -> None:
    """Check that the rows of a batch can be divided among workers.

    Raises:
        ModelError: a trainable layer asks for statistics of the whole batch, of which each of several
            workers has a part.
    """
    whole = [
        layer.name
        for layer in model._flatten_layers()
        if layer.trainable and getattr(layer, "synchronized", False)
    ]
    if num_workers > 1 and whole:
        raise ModelError(
            f"{', '.join(whole)}: synchronized=True asks for statistics of the whole batch, but each of "
            f"the {num_workers} workers has a part of it. Set synchronized=False to use the statistics of "
            'each part, set num_workers=1, or set frequency to a number or "epoch", where each worker '
            "trains on batches of its own."
        )


_alone = threading.RLock()  # for fits of several threads: Keras's float type and policy are the process's


@contextmanager
def alone() -> Iterator[None]:
    """Let one thread at a time make values of a model, or a model of values.

    Python's and NumPy's global generators are left as they are: initializers without a seed draw one.
    """
    with _alone:
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            with interrupts.held():
                random.setstate(states[0])
                np.random.set_state(states[1])


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
        builder: the function that built it; then the configuration is not needed.
        custom_objects: what the user named; objects of the live model's configuration are found.
        trains: whether it is to be trained, for which it has to be compiled.
        check: what to do with the model that is made again here, as on executors.

    Raises:
        ModelError: the model cannot be restored from what would be shipped; the message names why.
    """
    if trains:
        require_known(model)
    objects = dict(custom_objects or {})
    config = None
    if builder is None:
        config, found = _serialize(model)
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
        gc.collect()  # a model knows itself, so that the restored one would stay
        trim(freed)
    return spec, objects


def places_of(model: keras.Model, variables: Iterable[Any]) -> tuple[int, ...]:
    """Return where variables are among the weights of a model."""
    places = {id(weight): place for place, weight in enumerate(model.weights)}
    return tuple(places.get(id(variable), -1) for variable in variables)


def _complete(model: keras.Model, again: keras.Model, spec: ModelSpec) -> Objects:
    """Return what a model that was made again needs to be the live one, and check that it then is.

    Raises:
        ModelError: something of it cannot travel, or the model still is another one.
    """
    names = [[layer.name for layer in one._flatten_layers()] for one in (model, again)]
    if len(names[0]) != len(names[1]):
        raise ModelError(
            f'The model "{model.name}" does not come back with the same layers: expected {names[0]}, got '
            f"{names[1]}. Check get_config of its own classes; a function that builds a model should build "
            "the same one each time."
        )
    found = live_objects.differences(model, again)
    objects: Objects = {}
    if found:
        for each in found:
            _require_picklable(model, each)
        objects[live_objects.PATCH] = live_objects.ByValue(found)
        live_objects.patch(again, live_objects.copied(found))
    _settle(again, spec)
    _check_restored(model, again, trains=spec.trains)
    left = live_objects.differences(model, again)
    if left:
        raise ModelError(
            f'The model "{model.name}" cannot be made again on executors: '
            f"{live_objects.describe(model, left[0])} does not come back as it is. Let its class carry it in "
            "get_config and __init__, or pass SparkModel a function that builds and compiles the model."
        )
    return objects


def _require_picklable(model: keras.Model, difference: live_objects.Difference) -> None:
    import cloudpickle  # the driver has it; an executor that sparkdl was sent to may not

    try:
        pickled(difference.value, cloudpickle)
    except Exception as error:
        raise ModelError(
            f'The model "{model.name}" cannot be sent to executors: its configuration does not have '
            f"{live_objects.describe(model, difference)}, and it cannot be pickled ({error}). Give its class "
            "a get_config that has what __init__ needs, or pass SparkModel a function that builds and "
            "compiles the model."
        ) from error


def _key(spec: ModelSpec, objects: Objects, builder: Any, model: keras.Model) -> str:
    """Return a digest of a model's architecture, compile arguments, code and constants."""
    import cloudpickle  # the driver has it; an executor that sparkdl was sent to may not

    config = spec.config
    for optimizer in (model.optimizer, optimizers.inner(model)) if model.compiled else ():
        config = config and config.replace(json.dumps(optimizer.name), "null")  # Keras numbers those it names
    code = pickled((sorted(objects.items()), builder), cloudpickle)
    layouts = [layout_of(part) for part in (trainable(model), statistics(model), generators(model))]
    constants = [array.tobytes() for layer in adapted(model) for array in read(layer.weights)]
    return hashlib.sha256(f"{config} {layouts} {spec.moved} {constants}".encode() + code).hexdigest()


def _serialize(model: keras.Model) -> tuple[str, Objects]:
    found = list(_custom_objects(model))
    lambdas = [(name, thing) for name, thing in found if name.startswith(LAMBDA)]
    try:
        for name, function in lambdas:
            function.__name__ = name  # Keras would ship its bytecode, without what it refers to
        with keras.saving.custom_object_scope(dict(found)), live_objects.standing_in() as values:
            config = json.dumps(live_objects.with_stand_ins(keras.saving.serialize_keras_object(model)))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f'The model "{model.name}" cannot be serialized: {error} Give its layers a get_config, or pass '
            "SparkModel a function that builds and compiles the model."
        ) from error
    finally:
        with interrupts.held():
            for _, function in lambdas:
                function.__name__ = "<lambda>"
    objects: Objects = dict(values)
    for name, thing in found:
        if json.dumps(name) in config and objects.setdefault(name, thing) is not thing:
            raise ModelError(
                f'The model "{model.name}" uses two objects that are called {name!r}, of '
                f"{objects[name].__module__} and {thing.__module__}. Rename one, or register it with "
                "keras.saving.register_keras_serializable."
            )
    return config, objects


LAMBDA = "sparkdl_lambda_"


def _custom_objects(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions outside of Keras that a live model is made of, and their names."""
    compiled = getattr(model, "_compile_config", None)
    for index, thing in enumerate(_made_of([model, getattr(compiled, "config", None)], set())):
        if thing.__module__.split(".")[0] in ("keras", "builtins"):
            continue
        name = thing.__name__ if isinstance(thing, FunctionType) else keras.saving.get_registered_name(thing)
        yield f"{LAMBDA}{index}" if name == "<lambda>" else name, thing


def _made_of(things: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield each function, and the class of each Keras object, that these hold at any depth."""
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


def _check_restored(model: keras.Model, restored: keras.Model, *, trains: bool) -> None:
    same = layout_of(model.weights) == layout_of(restored.weights)
    if not same or (trains and Layouts.of(model) != Layouts.of(restored)):
        raise ModelError(
            f'The model "{model.name}" does not come back from its configuration with the same variables. '
            "Check get_config and build of its custom layers, or pass SparkModel a function that builds it."
        )


@alone()
def thaw(spec: ModelSpec, objects: Objects, builder: Callable[[], keras.Model] | None = None) -> keras.Model:
    """Return the compiled model of a spec with its values set.

    Raises:
        ModelError: the model cannot be restored, for one because a custom object is missing.
    """
    model = _made(spec, objects, builder)
    if live_objects.PATCH in objects:
        live_objects.patch(model, objects[live_objects.PATCH].get())
    _settle(model, spec)
    return model


def _made(spec: ModelSpec, objects: Objects, builder: Callable[[], keras.Model] | None) -> keras.Model:
    """Return the built model that a configuration, or a function, makes."""
    kept = keras.config.floatx(), keras.config.dtype_policy(), keras.config.image_data_format()
    try:
        _set_defaults(spec.floatx, spec.policy, spec.data_format)
        model = _deserialize(spec.config or "", objects) if builder is None else builder()
    finally:
        with interrupts.held():
            _set_defaults(*kept)
    if spec.trains and builder is None and getattr(model, "optimizer", None) is None:
        raise ModelError(
            f'The model "{model.name}" does not come back compiled: {type(model).__name__} has a compile of '
            "its own. Give it a get_compile_config and a compile_from_config, or pass SparkModel a function "
            "that builds and compiles the model."
        )
    if spec.trains:
        require_compiled(model)
    _build(model, spec)
    _check_weights(model, spec)
    if spec.trains and model.optimizer.built and places_of(model, optimizers.moves(model)) != spec.moved:
        model.optimizer = live_objects.copied(model.optimizer)  # Keras built it for what is trainable
    return model


def _build(model: keras.Model, spec: ModelSpec) -> None:
    """Build a model that is not built yet, for inputs of the shapes that its spec names."""
    if not model.built and spec.built:
        with _unwarned():
            model.build_from_config(spec.built)
    shape = (spec.built or {}).get("input_shape")
    if spec.weights and not model.weights and isinstance(shape, list | tuple):
        with suppress(Exception):  # Keras traced call with numbers; the check of the weights tells
            model(keras.Input(batch_shape=tuple(shape), dtype=TEXT))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Keep Keras from warning, in a ``with`` block, of what it cannot build: weights are compared later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`build\(\)` was called on layer")
        warnings.filterwarnings("ignore", "Model .* had a build config, but the model cannot be built")
        yield


def _set_defaults(floatx: str, policy: Any, data_format: str) -> None:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    keras.config.set_image_data_format(data_format)


def _settle(model: keras.Model, spec: ModelSpec) -> None:
    """Build the optimizer for what it moves, and set all values of a model that was made again."""
    if spec.trains and not model.optimizer.built:
        model.optimizer.build([model.weights[place] for place in spec.moved])
    restore(model, spec)


def _check_weights(model: keras.Model, spec: ModelSpec) -> None:
    expected = [array.shape for array in spec.weights]
    given = [tuple(weight.shape) for weight in model.weights]
    if given != expected:
        raise ModelError(
            f'The model "{model.name}" does not come back with the same weights: expected shapes {expected}, '
            f"got {given}. Check get_config and build of its custom layers; a function that builds a model "
            "should build the same one each time."
        )


def _deserialize(config: str, objects: Objects) -> keras.Model:
    try:
        with keras.saving.custom_object_scope({**objects, **live_objects.stand_in(objects)}), _unwarned():
            model = keras.saving.deserialize_keras_object(json.loads(config), safe_mode=False)
    except (TypeError, ValueError, ModuleNotFoundError, ImportError, AttributeError) as error:
        raise ModelError(
            f"The model cannot be restored from its configuration: {error} Pass what is missing in "
            "SparkModel(..., custom_objects={name: object}), or register it with "
            "keras.saving.register_keras_serializable."
        ) from error
    return model


def restore(model: keras.Model, spec: ModelSpec) -> None:
    """Set weights, optimizer and generators of a model to what its spec holds, and clear its metrics."""
    keras.config.set_epsilon(spec.epsilon)
    model.set_weights(spec.weights)
    for layer in adapted(model):
        layer.finalize_state()
    if spec.trains:
        write(optimizers.variables(model), spec.optimizer)
    write(generators(model), spec.generators)
    model.reset_metrics()


def count_parts(model: keras.Model) -> tuple[int | None, int | None]:
    """Return how many arrays a model takes for x and for y; None if only calling it can tell."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    alone = 1 if isinstance(model, keras.Sequential) else None
    return len(inputs) if inputs else alone, len(outputs) if outputs else None


def takes_strings(model: keras.Model) -> bool:
    """Return whether an input of a model takes strings, or may take them because the model does not say."""
    inputs = getattr(model, "inputs", None)
    return not inputs or any(_dtype(tensor) == TEXT for tensor in inputs)


def takes(model: keras.Model, step: str = "train_step") -> Takes:
    """Return what rows a model takes in a step, "train_step" or "test_step"."""
    return Takes(needs_labels(model, step), takes_strings(model))


def known_features(model: keras.Model, sample: Sample | None = None) -> Schema | None:
    """Return the schema of rows of x that the model takes, None if only a row can tell.

    Args:
        model: the model.
        sample: how columns make x, and what errors call them; one column by default.

    Raises:
        DataError: the model takes other inputs.
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
        dtype, parts = _dtype(tensor), sample.parts[place] if sample.parts else 1
        size = TEXT_BYTES if dtype == TEXT else 0
        columns[place] = Column(sample.names[place], tuple(tensor.shape[1:]), dtype, size, parts)
    return replace(schema, columns=tuple(columns))


def named_batch_size(model: keras.Model) -> int | None:
    """Return how many rows the inputs of a model say that a batch has; None: any number."""
    sizes = {tensor.shape[0] for tensor in getattr(model, "inputs", None) or ()}
    return next((int(size) for size in sizes if size is not None), None)


def _states(model: keras.Model) -> list[Any]:
    """Return the states of stateful recurrent layers, which are not among a model's variables."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    states = [keras.tree.flatten(getattr(layer, "states", None)) for layer in layers]
    return [state for part in states for state in part if isinstance(state, live_objects.Variable)]


def is_stateful(model: keras.Model) -> bool:
    """Return whether a layer of the model goes on in a batch from what it kept of the last one."""
    return any(getattr(layer, "stateful", False) for layer in model._flatten_layers())


def fixed_batch_size(model: keras.Model) -> int | None:
    """Return how many rows every batch of a model has to have; None: any number.

    That the inputs say a number does not mean that a layer needs it: another number is tried out.
    """
    size = named_batch_size(model)
    if size is None or is_stateful(model):
        return size
    rows = 2 if size == 1 else 1
    inputs = getattr(model, "_inputs_struct", None)  # Keras's own, to 3.15
    inputs = model.inputs[0] if inputs is None else inputs

    def zeros(tensor: Any) -> Array:
        shape = [1 if length is None else length for length in tensor.shape[1:]]
        return Column("", tuple(shape), _dtype(tensor)).zeros(rows)

    try:
        with undisturbed(model):
            predicted = model(keras.tree.map_structure(zeros, inputs), training=False)
    except Exception:  # noqa: BLE001 - each backend has its own for shapes that do not fit
        return size
    return None if all(len(part) == rows for part in keras.tree.flatten(predicted)) else size


def compute(model: keras.Model, x: Any) -> Any:
    """Return what a model predicts for some rows. One that is not built is built for any number of rows.

    Args:
        model: the model.
        x: the rows, as the model takes them.
    """
    if not model.built:
        with suppress(Exception):  # a model that cannot be computed on symbols is built by the rows
            compute_output_spec(model, keras.tree.map_structure(_any_number_of, x), training=False)
    return model(x, training=False)


def _any_number_of(part: Any) -> keras.KerasTensor:
    dtype = TEXT if part.dtype == object else keras.backend.standardize_dtype(part.dtype)
    return keras.KerasTensor((None, *part.shape[1:]), dtype)


def probe(model: keras.Model, schema: Schema) -> Any:
    """Return what the model predicts for a row of zeros, or for as many as its inputs say.

    Raises:
        DataError: it cannot be computed on such rows.
    """
    rows = named_batch_size(model) or 1
    zeros = [column.zeros(rows) for column in schema.columns]
    try:
        return compute(model, schema.batch(zeros).x)
    except Exception as error:
        message = f"The model cannot be computed on rows like these: {reason_of(error)}"
        raise DataError(message, traceback=text_of(error)) from error


def require_numbers(model: keras.Model, predicted: Any) -> None:
    """Check that predictions are numbers, as columns of predictions are.

    Raises:
        ModelError: an output gives strings.
    """
    if any(_dtype(part) == TEXT for part in keras.tree.flatten(predicted)):
        raise ModelError(
            f'An output of the model "{model.name}" gives strings, which a column of predictions does not '
            "hold. Leave out the layer that makes strings, or pass arrays or an RDD to SparkModel.predict."
        )


def of_no_rows(model: keras.Model, sample: Sample) -> Any:
    """Return what the model predicts for no rows at all: arrays of length 0.

    Args:
        model: the model.
        sample: a row such as there are none of; of an empty list nobody knows what its rows would be.
    """
    known = known_features(model, sample) if all(value.shape == () for value in sample.values) else None
    predicted = probe(model, known or fit_features(model, sample.schema(keras.config.floatx())))
    return keras.tree.map_structure(lambda part: keras.ops.convert_to_numpy(part)[:0], predicted)


def fit_features(model: keras.Model, schema: Schema, *, reshape: bool = False) -> Schema:
    """Return the schema with features as the model takes them, and labels in the shape of its outputs.

    Args:
        model: the model.
        schema: the schema as the first row has it.
        reshape: whether flat values may take the model's shape, as vectors of a DataFrame must.

    Raises:
        ConfigError: columns of a list do not make what the model takes.
        DataError: the model takes other features.
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
    """Return a column, of a list of flat columns with all their values in a row."""
    if column.parts == 1 or len(column.shape) > 2:
        return column
    return replace(column, shape=(prod(column.shape),))


def _outputs_by_place(model: keras.Model, schema: Schema) -> list[tuple[int, Any]]:
    """Return which output of a model each column of y is for, as far as the model tells."""
    outputs = getattr(model, "outputs", None)
    if not outputs or len(schema.template) < 2:
        return []
    template, named = schema.template[1], dict(zip(output_names(model), outputs, strict=False))
    if isinstance(template, dict):
        return [
            (template[name], named[name])
            for name in template
            if isinstance(template[name], int) and name in named
        ]
    places = list(leaves(template))
    return list(zip(places, outputs, strict=True)) if len(places) == len(outputs) else []


def _inputs_by_place(model: keras.Model, schema: Schema) -> list[tuple[int, Any]]:
    """Return which input of a functional model each column of x is for."""
    template, wanted = schema.template[0], getattr(model, "_inputs_struct", None)
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
    places = list(leaves(template))
    if len(places) != len(model.inputs):
        raise DataError(
            f'The model "{model.name}" takes {len(model.inputs)} inputs; x has {len(places)}. Pass a tuple, '
            "or a dict by the names of the inputs."
        )
    return list(zip(places, model.inputs, strict=True))


def _fit_column(model: keras.Model, column: Column, tensor: Any, *, reshape: bool) -> Column:
    expected = tuple(tensor.shape[1:])
    if column.texts != (_dtype(tensor) == TEXT):
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
            f'The model "{model.name}" takes rows of shape {expected}; {column.name} make rows of shape '
            f"{column.shape}. {LISTS}"
        )
    raise DataError(
        f'The model "{model.name}" takes rows of shape {expected}; {column.name} has rows of shape '
        f"{column.shape}. Reshape the rows, or the model's Input."
    )


def _ranked(column: Column, rank: int) -> Column:
    """Return a column in a shape of so many dimensions, of which the last one may be missing or too many.

    Keras traces a model's functions for the ranks that it has seen, and layers of strings do not compute with
    a rank that is left open.
    """
    shape = column.shape
    if len(shape) < rank:
        shape = (*shape, 1)
    return replace(column, shape=shape[:-1] if len(shape) > rank else shape)


def _shaped(column: Column, expected: tuple[int | None, ...], *, reshape: bool = True) -> Column | None:
    """Return the column in a shape that the model takes, None if it has none.

    Args:
        column: the column, in the shape of its first row.
        expected: what the model says; None where any size will do.
        reshape: whether flat values may take another shape.
    """
    given = column.shape
    shapes = [given]
    if column.parts > 1:  # stacked as the first dimension or the last, or joined
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


def predict(model: keras.Model, x: Any, batch_size: int) -> Any:
    """Return the model's predictions for arrays, or structures of arrays, as NumPy arrays.

    Where the inputs say how many rows a batch has, the last row is repeated until the last batch has as many.
    """
    rows = len(next(leaves(x)))
    missing = -rows % batch_size if named_batch_size(model) == batch_size else 0
    if missing:
        x = keras.tree.map_structure(lambda array: np.concatenate([array, array[-1:].repeat(missing, 0)]), x)
    parts = [
        model.predict_on_batch(
            keras.tree.map_structure(lambda array, at=start: array[at : at + batch_size], x)
        )
        for start in range(0, rows, batch_size)
    ]
    return keras.tree.map_structure(lambda array: array[:rows], concatenate(parts))


def concatenate(parts: Sequence[Any]) -> Any:
    """Return structures of arrays of rows as one, the rows in order."""
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def is_model(thing: Any) -> bool:
    """Return whether this is a Keras model."""
    return isinstance(thing, keras.Model)


def backend() -> str:
    """Return the backend that Keras runs on."""
    return str(keras.backend.backend())


def float_type() -> str:
    """Return Keras's default float type."""
    return str(keras.config.floatx())


def input_names(model: keras.Model) -> tuple[str, ...]:
    """Return how a model calls its inputs, in their order, if it tells: a dict's keys, or their names."""
    wanted, inputs = getattr(model, "_inputs_struct", None), getattr(model, "inputs", None) or ()
    keys = {id(tensor): key for key, tensor in wanted.items()} if isinstance(wanted, dict) else {}
    return tuple(keys.get(id(tensor), tensor.name) for tensor in inputs)


def output_names(model: keras.Model) -> tuple[str, ...]:
    """Return how a model calls its outputs, in their order, if it tells: a dict's keys, or their names."""
    made = getattr(model, "_outputs_struct", None)
    return tuple(made) if isinstance(made, dict) else tuple(getattr(model, "output_names", None) or ())


@alone()
def copy_of(model: keras.Model, custom_objects: Objects | None = None) -> keras.Model:
    """Return a compiled model like this one, of its own: with its weights and its optimizer's state.

    Raises:
        ModelError: it cannot be restored from its configuration.
    """
    if model.built:
        return thaw(*freeze(model, custom_objects=custom_objects))
    config, objects = _serialize(model)
    again = _deserialize(config, {**objects, **(custom_objects or {})})
    live_objects.patch(again, live_objects.copied(live_objects.differences(model, again)))
    return again


def save(model: keras.Model, path: Path) -> None:
    """Write a model as a file of Keras's own format."""
    if model.built:
        optimizers.variables(model)  # makes them, without which Keras warns when it loads
    model.save(path)


def load(
    path: Path, shown: str, custom_objects: Objects | None = None, *, safe_mode: bool | None = None
) -> keras.Model:
    """Return the model that a file of Keras's own format holds.

    Args:
        path: where it is.
        shown: how an error calls it.
        custom_objects: classes and functions that the model needs, by name.
        safe_mode: whether to refuse models that carry code; None is Keras's setting of this process.

    Raises:
        ModelError: it cannot be restored.
    """
    try:
        return keras.saving.load_model(path, custom_objects, safe_mode=safe_mode)
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(f"{shown} cannot be loaded: {error}") from error


def rows_of(predictions: Any) -> Iterator[Any]:
    """Yield the prediction of each row."""
    for index in range(len(next(leaves(predictions)))):
        yield keras.tree.map_structure(lambda array, at=index: array[at], predictions)


def output_shapes(model: keras.Model, predicted: Any) -> Any:
    """Return the shape of one row's prediction; by the names of the outputs, if there are several."""
    if isinstance(predicted, dict):
        return {str(name): tuple(part.shape[1:]) for name, part in predicted.items()}
    if not isinstance(predicted, list | tuple):
        return tuple(predicted.shape[1:])
    names = getattr(model, "output_names", None) or []
    if len(names) != len(predicted) or len(set(names)) != len(names):
        names = [f"output_{index}" for index in range(len(predicted))]
    return {name: tuple(part.shape[1:]) for name, part in zip(names, predicted, strict=True)}


def known_output(model: keras.Model) -> Any:
    """Return the shape of one row's prediction as ``output_shapes`` does, None if only a row can tell."""
    outputs = getattr(model, "outputs", None)
    return output_shapes(model, outputs[0] if len(outputs) == 1 else outputs) if outputs else None


def computes_loss(model: keras.Model) -> bool:
    """Return whether ``compute_loss`` is what trains the model; its own ``train_step`` may do without."""
    return model.loss is not None or type(model).train_step is keras.Model.train_step


@contextmanager
def undisturbed(model: keras.Model) -> Iterator[None]:
    """Leave a model as a fit finds it, whatever is computed with it in a ``with`` block.

    Random generators, counters, moving statistics and states of recurrent layers keep their values, and
    metrics are reset.
    """
    kept = [*generators(model), *statistics(model), *_states(model)]
    values = read(kept)
    known = set(map(id, kept))
    try:
        yield
    finally:
        with interrupts.held():
            write(kept, values)
            for variable in generators(model):
                if id(variable) not in known and variable.name == SEED:  # of a model that was not built
                    seed, _ = keras.ops.convert_to_numpy(variable.value)
                    variable.assign(np.array([seed, 0]))
            model.reset_metrics()


SEED = "seed_generator_state"  # Keras's name of the state of a generator that draws in order: (seed, draws)


def needs_labels(model: keras.Model, step: str = "train_step") -> bool:
    """Return whether a step of the model's compares labels with predictions; its own one may do without.

    Args:
        model: a compiled model.
        step: "train_step" or "test_step".
    """
    kind = type(model)
    if getattr(kind, step) is not getattr(keras.Model, step):
        return False
    loses = kind.compute_loss is keras.Model.compute_loss and any(
        loss is not None for loss in flat_losses(model.loss)
    )
    # Set by compile where there are metrics (Keras 3.5 to 3.15); model.metrics has nothing before a batch.
    measures = getattr(model, "_compile_metrics", None) is not None
    return loses or (measures and kind.compute_metrics is keras.Model.compute_metrics)


def as_tensors(rows: Any) -> Any:
    """Return rows as Keras passes them to a model's methods: arrays as tensors, None as it is."""

    def convert(part: Any) -> Any:
        known = isinstance(part, np.ndarray) and part.dtype.kind in "biufcO"
        return keras.ops.convert_to_tensor(part) if known else part

    return keras.tree.map_structure(convert, rows)


def build_metrics(
    model: keras.Model, x: Any, y: Any, sample_weight: Any = None, *, step: str = "train_step"
) -> Any:
    """Build the states of a model's metrics by one forward pass over a few rows, and reset them.

    Args:
        model: a compiled model.
        x: some rows.
        y: their labels, or None.
        sample_weight: their weights, or None.
        step: which step of the model's is to come, "train_step" or "test_step".

    Returns:
        What the model predicts for those rows.
    """
    x, y, sample_weight = as_tensors((x, y, sample_weight))
    with undisturbed(model):
        predicted = compute(model, x)
        if y is None and not needs_labels(model, step):
            _build_without_labels(model, x, predicted, step)
            return predicted
        if computes_loss(model):
            model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
        with warnings.catch_warnings(action="ignore"):  # a metric may say that these rows are too few
            model.compute_metrics(x, y, predicted, sample_weight)
    return predicted


def take_step(model: keras.Model, step: str, data: Any) -> Any:
    """Return what "train_step" or "test_step" of a model returns for some rows, as the step takes them.

    On JAX the values of variables stay as they were.
    """
    return _step(model, step, data)[0]


def train_once(model: keras.Model, data: Any) -> None:
    """Train a model on some rows, by one eager "train_step"; its optimizer is built."""
    for variable, value in _step(model, "train_step", data)[1]:
        variable.assign(value)


def _step(model: keras.Model, step: str, data: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return what a step returns, and on JAX its variables with the values that they are to have."""
    data = as_tensors(data)
    if keras.backend.backend() != "jax":
        return getattr(model, step)(data), []
    optimizer = [optimizers.variables(model)] if step == "train_step" else []
    parts = model.trainable_variables, model.non_trainable_variables, *optimizer, model.metrics_variables
    logs, state = getattr(model, step)(tuple([each.value for each in part] for part in parts), data)
    variables, values = (itertools.chain.from_iterable(each) for each in (parts, state))
    return logs, list(zip(variables, values, strict=True))


MARK = 2.0**20  # from here on results stand for the places of metrics


def logged_metrics(model: keras.Model, step: str, data: Any) -> dict[str, int | None] | None:
    """Return which metric's result a step of a model's own returns under each name, by an experiment.

    Keras reports what the step returns where its names are not those of the model's metrics.

    Args:
        model: a compiled model with built metrics, whose weights may change.
        step: "train_step" or "test_step".
        data: some rows, as the step takes them.

    Returns:
        Places in ``metrics_of(model)`` by name, None for what is no metric's result; or None if the names are
        those of the metrics.
    """
    for place, metric in enumerate(metrics_of(model)):
        metric.result = functools.partial(keras.ops.convert_to_tensor, MARK + place)
    logs = take_step(model, step, data)
    if not isinstance(logs, dict) or logs.keys() == model.get_metrics_result().keys():
        return None
    places = {MARK + place: place for place in range(len(metrics_of(model)))}
    values = {name: np.ravel(keras.ops.convert_to_numpy(value)) for name, value in logs.items()}
    return {name: places.get(float(value[0])) if value.size == 1 else None for name, value in values.items()}


def _build_without_labels(model: keras.Model, x: Any, predicted: Any, step: str) -> None:
    """Let the metrics of ``compile`` make their states where only the model's own step knows its labels.

    The predictions stand in for these: they have the shape of whatever they are compared with.
    """
    if getattr(type(model), step) is getattr(keras.Model, step):
        model.compute_loss(x=x, y=None, y_pred=predicted, sample_weight=None)
    elif not keras.tree.is_nested(predicted):
        model.compute_metrics(x, predicted, predicted)


Samples = Sequence[tuple[Any, Any]]  # labels and predictions of some rows, of one output after the other


def adds_up(metric: Any, samples: Samples) -> bool:
    """Return whether states of a metric may be added, by an experiment: two halves apart, and together."""
    sample = build_metric(metric, samples)
    if sample is None:
        return False
    y, predicted = sample
    other = keras.ops.add(keras.ops.multiply(predicted, 0.5), 0.1)  # still a probability, where it was one

    def states(*halves: Any) -> list[Array]:
        metric.reset_state()
        for half in halves:
            metric.update_state(y, half)
        return read(metric.variables)

    try:
        start, first, second, both = states(), states(predicted), states(other), states(predicted, other)
    finally:
        with interrupts.held():
            metric.reset_state()
    return all(
        np.allclose(b + c - a, d, rtol=1e-4) for a, b, c, d in zip(start, first, second, both, strict=True)
    )


def build_metric(metric: Any, samples: Samples) -> tuple[Any, Any] | None:
    """Let a metric make its states by some rows of an output that it can measure.

    Returns:
        Labels and predictions of these rows; None if it measures no output.
    """
    for y, predicted in samples:
        try:
            metric.update_state(y, predicted)
        except Exception:  # noqa: BLE001 - each backend has its own for labels and predictions of another kind
            continue
        return y, predicted
    return None


def fingerprint(model: keras.Model) -> bytes:
    """Return sixteen bytes that change when the weights or the optimizer's variables do."""
    digest = hashlib.blake2b(digest_size=16)
    for array in read([*model.weights, *optimizers.variables(model)]):
        digest.update(array.tobytes())
    return digest.digest()

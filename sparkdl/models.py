"""A Keras model and what of it travels.

A model is shipped as its serialized configuration (architecture, compile arguments, shapes), raw arrays,
and the custom objects that the configuration names. The objects are code, and go only from the driver to
executors, inside Spark's own closure; arrays and states are what an endpoint exchanges.

The variables of a model fall into four lists: *trainable* variables, which a rule merges; *statistics*,
the floating-point variables that trainable layers move themselves (BatchNormalization's mean and
variance), which are averaged; *optimizer* variables and random *generators*, which stay with their worker
and are saved in cuts. Weights of frozen layers are constants and never travel again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from sparkdl.errors import DataError, ModelError
from sparkdl.feed import Column
from sparkdl.weights import Array, Layout

Objects = dict[str, Any]


@dataclass(frozen=True)
class ModelSpec:
    """A compiled model as values: nothing in it is code.

    Attributes:
        config: the serialized model as JSON; None for a model that a function builds.
        weights: the values of ``model.weights``.
        optimizer: the values of the optimizer's variables.
        generators: the states of the random generators.
        backend: the Keras backend that it was made on.
        floatx: Keras's default float type on the driver.
        key: what two specs share only if one model, with other values set, can serve for both.
    """

    config: str | None
    weights: list[Array]
    optimizer: list[Array]
    generators: list[Array]
    backend: str
    floatx: str
    key: str


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
        parts = (trainable(model), statistics(model), optimizer_variables(model), generators(model))
        return cls(*(layout_of(part) for part in parts))


def trainable(model: keras.Model) -> list[Any]:
    """Return the variables that a gradient moves."""
    return list(model.trainable_variables)


def statistics(model: keras.Model) -> list[Any]:
    """Return the floating-point variables that trainable layers move by themselves."""
    frozen = {
        id(variable) for layer in model._flatten_layers() if not layer.trainable for variable in layer.weights
    }
    return [
        variable
        for variable in model.non_trainable_weights
        if id(variable) not in frozen and "float" in keras.backend.standardize_dtype(variable.dtype)
    ]


def generators(model: keras.Model) -> list[Any]:
    """Return the states of the random generators of layers such as Dropout."""
    known = {id(variable) for variable in model.weights}
    known |= {id(variable) for metric in model.metrics for variable in metric.variables}
    return [variable for variable in model.non_trainable_variables if id(variable) not in known]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Return the optimizer's variables: iterations, learning rate unless scheduled, slots."""
    model.optimizer.build(model.trainable_variables)
    return list(model.optimizer.variables)


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
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Set Keras variables; the arrays are copied."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(np.array(array))


def set_generators(variables: Sequence[Any], arrays: Sequence[Array], worker: int) -> None:
    """Set random generators so that every worker draws numbers of its own, worker 0 the model's."""
    write(variables, [np.add(array, np.asarray(worker, array.dtype)) for array in arrays])


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


def require_mean_loss(model: keras.Model) -> None:
    """Check that the loss of a batch is a mean over its rows, as a mean of gradients takes it to be.

    Raises:
        ModelError: a loss is reduced in another way; names it.
    """
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
            raise ModelError(
                f"The loss {loss.name!r} has reduction={reduction!r}. Workers' gradients are averaged by "
                'rows, which is right for a mean over rows: use reduction="sum_over_batch_size" (and a '
                'learning rate that fits), frequency="epoch" or a number, or num_workers=1.'
            )


def freeze(
    model: keras.Model,
    builder: Callable[[], keras.Model] | None = None,
    custom_objects: Objects | None = None,
) -> tuple[ModelSpec, Objects]:
    """Return a compiled and built model as values, and the custom objects that it needs.

    Args:
        model: the model.
        builder: the function that built it; then the configuration is not needed.
        custom_objects: what the user named; objects of the live model's configuration are found.

    Raises:
        ModelError: the model cannot be restored from what would be shipped; the message names why.
    """
    objects = dict(custom_objects or {})
    config = None
    if builder is None:
        config, found = _serialize(model)
        objects = {**found, **objects}
    spec = ModelSpec(
        config=config,
        weights=read(model.weights),
        optimizer=read(optimizer_variables(model)),
        generators=read(generators(model)),
        backend=keras.backend.backend(),
        floatx=keras.config.floatx(),
        key=_key(config, objects, builder, Layouts.of(model)),
    )
    if builder is None:
        _check_restored(model, thaw(spec, objects))
    return spec, objects


def _key(config: str | None, objects: Objects, builder: Any, layouts: Layouts) -> str:
    """Return a digest of a model's architecture, compile arguments and code."""
    import cloudpickle  # the driver has it; an executor that sparkdl was sent to may not

    code = cloudpickle.dumps((sorted(objects.items()), builder))
    return hashlib.sha256(f"{config} {layouts}".encode() + code).hexdigest()


def _serialize(model: keras.Model) -> tuple[str, Objects]:
    try:
        config = keras.saving.serialize_keras_object(model)
        return json.dumps(config), dict(_custom_objects(config))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f'The model "{model.name}" cannot be serialized: {error} Give its layers a get_config, or pass '
            "SparkModel a function that builds and compiles the model."
        ) from error


def _custom_objects(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions outside of Keras that a serialized model names."""
    if isinstance(config, list | tuple):
        for part in config:
            yield from _custom_objects(part)
    if not isinstance(config, dict):
        return
    module, name = config.get("module"), config.get("registered_name")
    if name and "class_name" in config:
        thing = keras.saving.get_registered_object(name)
        if thing is None and module and module.split(".")[0] not in ("keras", "builtins"):
            is_function = config["class_name"] == "function"
            label = config["config"] if is_function else config["class_name"]
            thing = getattr(importlib.import_module(module), label, None)
            name = label if is_function else name
        if thing is not None:
            yield name, thing
    for part in config.values():
        yield from _custom_objects(part)


def _check_restored(model: keras.Model, restored: keras.Model) -> None:
    if Layouts.of(model) != Layouts.of(restored):
        raise ModelError(
            f'The model "{model.name}" does not come back from its configuration with the same variables. '
            "Check get_config and build of its custom layers, or pass SparkModel a function that builds it."
        )


def thaw(spec: ModelSpec, objects: Objects, builder: Callable[[], keras.Model] | None = None) -> keras.Model:
    """Return the compiled model of a spec with its values set.

    Raises:
        ModelError: the model cannot be restored, for one because a custom object is missing.
    """
    if builder is not None:
        model = builder()
        require_compiled(model)
    else:
        model = _deserialize(spec, objects)
    restore(model, spec)
    return model


def _deserialize(spec: ModelSpec, objects: Objects) -> keras.Model:
    try:
        with keras.saving.custom_object_scope(objects):
            model = keras.saving.deserialize_keras_object(json.loads(spec.config or ""), safe_mode=False)
    except (TypeError, ValueError, ModuleNotFoundError, ImportError, AttributeError) as error:
        raise ModelError(
            f"The model cannot be restored from its configuration: {error} Pass what is missing in "
            "SparkModel(..., custom_objects={name: object}), or register it with "
            "keras.saving.register_keras_serializable."
        ) from error
    require_compiled(model)
    return model


def restore(model: keras.Model, spec: ModelSpec) -> None:
    """Set weights, optimizer and generators of a model to what its spec holds, and clear its metrics."""
    model.set_weights(spec.weights)
    write(optimizer_variables(model), spec.optimizer)
    write(generators(model), spec.generators)
    model.reset_metrics()


def known_features(model: keras.Model) -> Column | None:
    """Return the features column that the model takes, None if only a row can tell."""
    inputs = getattr(model, "inputs", None)
    if not inputs or len(inputs) > 1 or None in inputs[0].shape[1:]:
        return None
    return Column("x", tuple(inputs[0].shape[1:]), keras.backend.standardize_dtype(inputs[0].dtype))


def fit_features(model: keras.Model, column: Column, *, reshape: bool = False) -> Column:
    """Return the features column as the model takes it.

    Args:
        model: the model.
        column: the column as the first row has it.
        reshape: whether flat features may take the model's shape, as vectors of a DataFrame must.

    Raises:
        DataError: the model takes features of another shape.
        ModelError: it takes several inputs, which is not supported yet.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return column
    if len(inputs) > 1:
        raise ModelError(f'The model "{model.name}" has {len(inputs)} inputs; several are not supported yet.')
    expected = tuple(inputs[0].shape[1:])
    fits = len(expected) == len(column.shape) and all(
        size in (None, given) for size, given in zip(expected, column.shape, strict=False)
    )
    if fits or (*column.shape, 1) == expected or column.shape == (*expected, 1):
        return column
    if reshape and None not in expected and int(np.prod(expected)) == int(np.prod(column.shape)):
        return replace(column, shape=expected)
    raise DataError(
        f'The model "{model.name}" takes rows of shape {expected}; {column.name} has rows of shape '
        f"{column.shape}. Reshape the rows, or the model's Input."
    )


def build_metrics(model: keras.Model, x: Any, y: Any, sample_weight: Any = None) -> Any:
    """Let the model's metrics make their states, by one forward pass over a few rows; then clear them.

    Returns:
        What the model predicts for those rows.
    """
    predicted = model(x, training=False)
    model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
    model.compute_metrics(x, y, predicted, sample_weight)
    model.reset_metrics()
    return predicted


def adds_up(metric: Any, y: Any, predicted: Any) -> bool:
    """Return whether states of a metric may be added, by an experiment: two halves apart, and together."""
    other = keras.ops.add(keras.ops.multiply(predicted, 0.5), 0.1)  # still a probability, where it was one

    def states(*halves: Any) -> list[Array]:
        metric.reset_state()
        for half in halves:
            metric.update_state(y, half)
        return read(metric.variables)

    try:
        start, first, second, both = states(), states(predicted), states(other), states(predicted, other)
    except (TypeError, ValueError):  # it is not a metric of labels and predictions
        return False
    finally:
        metric.reset_state()
    return all(
        np.allclose(b + c - a, d, rtol=1e-4) for a, b, c, d in zip(start, first, second, both, strict=True)
    )


def set_learning_rate(model: keras.Model, value: float) -> None:
    """Set the learning rate, where it is a number and not a schedule."""
    if not scheduled(model) and float(model.optimizer.learning_rate) != value:
        model.optimizer.learning_rate = value


def learning_rate(model: keras.Model) -> float:
    """Return the optimizer's learning rate of this moment; nan where a schedule gives it."""
    return float("nan") if scheduled(model) else float(model.optimizer.learning_rate)


def scheduled(model: keras.Model) -> bool:
    """Return whether a schedule gives the learning rate."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(getattr(model.optimizer, "_learning_rate", None), schedule)


class Followed(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule that is evaluated at the run's progress instead of a worker's own iterations.

    Adam's bias correction needs the worker's own count, a schedule that of the whole run, so the two part
    here: progress = what the endpoint last said + own steps since then x the speed of the whole gang.

    Args:
        schedule: the user's schedule.
        iterations: the optimizer's iterations at this moment.
    """

    def __init__(self, schedule: Any, iterations: int) -> None:
        self.schedule = schedule
        self.progress = keras.Variable(float(iterations), trainable=False, dtype="float32", name="progress")
        self.anchor = keras.Variable(int(iterations), trainable=False, dtype="int64", name="anchor")
        self.speed = keras.Variable(1.0, trainable=False, dtype="float32", name="speed")

    def __call__(self, step: Any) -> Any:
        """Return the user's schedule at the run's progress; ``step`` is the worker's own iterations."""
        own = keras.ops.cast(keras.ops.cast(step, "int64") - self.anchor.value, "float32")
        progress = self.progress.value + own * self.speed.value
        return self.schedule(keras.ops.cast(keras.ops.floor(progress + 1e-3), "int64"))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the user's schedule."""
        return dict(self.schedule.get_config())


def follow(model: keras.Model) -> Followed | None:
    """Make a scheduled optimizer follow the run's progress; None where there is no schedule."""
    optimizer = model.optimizer
    if not scheduled(model):
        return None
    if not isinstance(optimizer._learning_rate, Followed):
        # Keras refuses to replace a schedule through `learning_rate`.
        optimizer._learning_rate = Followed(optimizer._learning_rate, int(optimizer.iterations))
    followed: Followed = optimizer._learning_rate
    return followed

"""Wrappers for the private APIs of Keras that this package depends on, and for one of TensorFlow.

No other module uses a private API of Keras. There are no public equivalents. The comment beside each private
name gives the versions that it was checked with. If a Keras release changes one,
``tests/keras/test_keras_internals.py`` fails and names it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

# Keras 3.5 to 3.15
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend.common import global_state as _global_state
from keras.src.losses import loss as _losses
from keras.src.losses.losses import LossFunctionWrapper as LossFunctionWrapper
from keras.src.saving import serialization_lib as _serialization
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedOrderedDict, TrackedSet

# Keras 3.5 to 3.15: attributes that Keras sets when it builds, calls, compiles or trains a layer or model.
_STATE_OF_LAYERS = {
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
# Keras 3.5 to 3.15: attributes that every layer or model has, and that a user may set.
_SETTINGS_OF_LAYERS = {
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
# Keras 3.5 to 3.15: attributes that Keras sets when it builds another object, such as a metric.
_STATE_OF_OTHERS = {"built", "_built", "_tracker", "_lock"}
# Keras 3.5 to 3.15: attributes of optimizers that ``build`` or Keras's own constructor creates again.
_STATE_OF_OPTIMIZERS = {
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


# Layers and models.


def flat_layers(layer: keras.Layer, *, include_self: bool = True) -> list[keras.Layer]:
    """Return all layers nested in a layer or model, preceded by the layer itself if ``include_self``."""
    return list(layer._flatten_layers(include_self=include_self))  # Keras 3.5 to 3.15


def calls(layer: keras.Layer) -> Iterator[Any]:
    """Yield the operation of each call in a functional or sequential model; nothing for other models."""
    graph = getattr(layer, "_functional", None) or layer  # Keras 3.5 to 3.15
    for nodes in getattr(graph, "_nodes_by_depth", {}).values():  # Keras 3.5 to 3.15
        for node in nodes:
            yield node.operation


def input_structure(model: keras.Model) -> Any:
    """Return a functional model's inputs in their original structure; None for other models."""
    # Keras 3.5 to 3.15. The public ``input`` raises an error for other models.
    return getattr(model, "_inputs_struct", None)


def output_structure(model: keras.Model) -> Any:
    """Return a functional model's outputs in their original structure; None for other models."""
    # Keras 3.5 to 3.15. The public ``output`` raises an error for other models.
    return getattr(model, "_outputs_struct", None)


def own_trainable(layer: keras.Layer) -> Any:
    """Return the ``trainable`` flag of a layer itself."""
    return layer._trainable  # Keras 3.5 to 3.15


def set_own_trainable(layer: keras.Layer, value: bool) -> None:
    """Set a layer's own ``trainable`` flag, but not those of its variables and sublayers."""
    layer._trainable = value  # Keras 3.5 to 3.15


def adds_losses(layer: keras.Layer) -> bool:
    """Return True if a layer's last call added a loss with ``add_loss``."""
    return bool(layer._losses)  # Keras 3.5 to 3.15


def constructor_arguments(layer: keras.Layer) -> dict[str, Any] | None:
    """Return the arguments that a layer was constructed with; None if Keras did not record them."""
    recorded = getattr(layer, "_auto_config", None)  # Keras 3.5 to 3.15
    return None if recorded is None else dict(recorded.config)


def is_state(thing: Any, name: str) -> bool:
    """Return True if Keras sets an attribute of an object when it builds, calls, compiles or trains it."""
    names = _state_of_layers() if isinstance(thing, keras.Layer) else _STATE_OF_OTHERS
    return name in names or name.startswith(("_self_", "_build_"))  # Keras 3.5 to 3.15


@functools.cache
def _state_of_layers() -> frozenset[str]:
    """Return the attributes that Keras gives every layer or model, except settings."""
    inputs = keras.Input((1,))
    made = [keras.Sequential(), keras.Model(inputs, keras.layers.Identity()(inputs)), keras.Layer()]
    made[0].compile("sgd", "mse")
    return frozenset(_STATE_OF_LAYERS.union(*map(vars, made)) - _SETTINGS_OF_LAYERS)


# Compiled models.


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments that ``compile`` was called with, by name."""
    return getattr(getattr(model, "_compile_config", None), "config", None) or {}  # Keras 3.5 to 3.15


def compiled_part(model: keras.Model, part: str) -> Any:
    """Return the object that ``compile`` made from its "loss" or "metrics" argument; None without one."""
    return vars(model).get(f"_compile_{part}")  # Keras 3.5 to 3.15


def set_compiled_part(model: keras.Model, part: str, value: Any) -> None:
    """Replace the object that ``compile`` made from its argument "loss" or "metrics"."""
    # Keras 3.5 to 3.15. An assignment would also add it to the metrics of the layer.
    vars(model)[f"_compile_{part}"] = value


def given_to_compile(thing: Any) -> dict[str, Any] | None:
    """Return the arguments of ``compile`` that a ``compiled_part`` keeps; None for any other object."""
    if not isinstance(thing, CompileLoss | CompileMetrics):
        return None
    # Keras 3.5 to 3.15
    return {name: value for name, value in vars(thing).items() if name.startswith("_user")}


def arguments_of_metrics(thing: Any) -> tuple[Any, ...] | None:
    """Return the constructor arguments of the object for the metrics of ``compile``; None for any other."""
    if not isinstance(thing, CompileMetrics):
        return None
    # Keras 3.5 to 3.15
    return thing._user_metrics, thing._user_weighted_metrics, thing.name, thing.output_names


def public_name(name: str) -> str:
    """Return the user-visible name of an attribute from ``given_to_compile``; any other name unchanged."""
    return name.removeprefix("_user_")  # Keras 3.5 to 3.15


def loss_tracker(model: keras.Model) -> Any:
    """Return the metric that tracks the mean loss of a compiled model."""
    return model._loss_tracker  # Keras 3.5 to 3.15


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return results in the form of ``evaluate``: a list in the order of the metrics, or a single value."""
    return model._flatten_metrics_in_order(logs)  # Keras 3.5 to 3.15


# Optimizers.


def learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of an optimizer as it holds it: a variable, a schedule or a function."""
    return getattr(optimizer, "_learning_rate", None)  # Keras 3.5 to 3.15


def set_schedule(optimizer: Any, schedule: Any) -> None:
    """Replace an optimizer's learning-rate schedule."""
    optimizer._learning_rate = schedule  # Keras 3.5 to 3.15


def built_for(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)  # Keras 3.5 to 3.15


def steps_taken(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's batches, including those it only accumulates."""
    return optimizer._iterations  # Keras 3.5 to 3.15


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Return True if an optimizer's weight decay applies to a variable."""
    return bool(optimizer._use_weight_decay(variable))  # Keras 3.5 to 3.15


def set_excluded_from_weight_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """Apply an optimizer's weight decay to all variables but these, even if it is already built."""
    optimizer._exclude_from_weight_decay = set(map(optimizer._var_key, variables))  # Keras 3.5 to 3.15
    optimizer._exclude_from_weight_decay_pattern = None
    optimizer._exclude_from_weight_decay_cache = {}


def is_of_weight_decay(name: str) -> bool:
    """Return True if an attribute of an optimizer records the variables excluded from weight decay."""
    return name.startswith("_exclude_from")  # Keras 3.5 to 3.15


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its constructor and ``build`` do not create again."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _STATE_OF_OPTIMIZERS and not name.startswith("_self_")  # Keras 3.5 to 3.15
    }


def adam_moments(optimizer: keras.optimizers.Adam, variable: Any) -> tuple[Any, Any]:
    """Return the variables that hold Adam's first and second moment for a trainable variable."""
    place = optimizer._get_variable_index(variable)  # Keras 3.5 to 3.15
    return optimizer._momentums[place], optimizer._velocities[place]


# Metrics and losses.


def metric_attributes(metric: keras.metrics.Metric) -> dict[str, Any]:
    """Return the attributes of a metric, for ``set_metric_attributes``."""
    return {name: value for name, value in vars(metric).items() if name != "_tracker"}  # Keras 3.5 to 3.15


def set_metric_attributes(metric: keras.metrics.Metric, attributes: dict[str, Any]) -> None:
    """Give a new metric the attributes of another one, including the lists that its tracker maintains."""
    for store in ("variables", "metrics"):
        for part in attributes.pop(f"_{store}", ()):  # Keras 3.5 to 3.15
            metric._tracker.add_to_store(store, part)
    set_attributes(metric, attributes)


def tracked_values(thing: Any) -> tuple[Any, ...] | None:
    """Return the reduce value of a collection that Keras tracks, without its tracker; None for other objects.

    Keras wraps the lists, dicts and sets that are attributes of a metric, an optimizer or a layer. Their
    default reduce value fails, since it adds the items before the tracker is set.
    """
    kind = type(thing)
    if kind is TrackedList:  # Keras 3.5 to 3.15
        return kind, (), None, iter(thing)
    if kind is TrackedSet:
        return kind, (list(thing),)
    return (kind, (), None, None, iter(thing.items())) if kind in (TrackedDict, TrackedOrderedDict) else None


def set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Give a metric, an optimizer or a loss attributes, whose collections Keras goes on to track."""
    tracker = getattr(thing, "_tracker", None)  # Keras 3.5 to 3.15
    for value in attributes.values():
        _set_tracker(value, tracker)
    vars(thing).update(attributes)


def _set_tracker(value: Any, tracker: Any) -> None:
    if isinstance(value, TrackedList | TrackedDict | TrackedOrderedDict | TrackedSet):
        value.tracker = tracker
    if isinstance(value, dict | list | tuple | set):
        for each in value.values() if isinstance(value, dict) else value:
            _set_tracker(each, tracker)


def wrapped_function(metric: Any) -> Any:
    """Return the function whose mean a ``MeanMetricWrapper`` is; None for any other metric."""
    return metric._fn if type(metric) is keras.metrics.MeanMetricWrapper else None  # Keras 3.5 to 3.15


def function_arguments(thing: Any) -> dict[str, Any]:
    """Return the arguments that a loss or metric passes to its function, as ``LossFunctionWrapper`` does."""
    return vars(thing).get("_fn_kwargs") or {}  # Keras 3.5 to 3.15


reduce_weighted_values, apply_mask = _losses.reduce_weighted_values, _losses.apply_mask  # Keras 3.5 to 3.15


def set_reduction(function: Callable[..., Any]) -> None:
    """Make every loss reduce its values with this function. ``reduce_weighted_values`` is the original."""
    _losses.reduce_weighted_values = function  # Keras 3.5 to 3.15


# Serialization.

# Keras 3.5 to 3.15. Keras calls it for classes, functions and objects, not for plain values.
class_or_function_config = _serialization._get_class_or_fn_config


def set_class_or_function_config(function: Callable[[Any], Any]) -> None:
    """Make Keras serialize objects with this function. ``class_or_function_config`` is the original."""
    _serialization._get_class_or_fn_config = function  # Keras 3.5 to 3.15


# Callbacks.


def profiles_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Return True if a TensorBoard callback profiles batches."""
    return bool(callback._should_trace)  # Keras 3.5 to 3.15


def forget_model(callback: Any) -> None:
    """Remove the model from a callback."""
    # Keras 3.5 to 3.15. The user may have overridden the public ``set_model``.
    callback._model = None


def restored_epoch(model: keras.Model) -> int | None:
    """Return the epoch from which BackupAndRestore resumes training; None if it restored no backup."""
    epoch: int | None = model._initial_epoch  # Keras 3.5 to 3.15
    return epoch


def forget_restored_epoch(model: keras.Model) -> None:
    """Reset the result of ``restored_epoch``, which Keras itself never does."""
    model._initial_epoch = None  # Keras 3.5 to 3.15


# Backends.


def held_value(variable: Any) -> Any:
    """Return the array that a JAX variable holds, even inside a ``StatelessScope`` that overrides it."""
    return variable._value  # Keras 3.5 to 3.15


def set_held_value(variable: Any, value: Any) -> None:
    """Set the array that a JAX variable holds. It may be a tracer."""
    variable._value = value  # Keras 3.5 to 3.15


def call_flat(trace: Any, tensors: Sequence[Any], captured: Sequence[Any]) -> Any:
    """Call a concrete TensorFlow function and return its results. String arguments stay on the CPU."""
    return trace._call_flat(tensors, captured)  # TensorFlow 2.16 to 2.21


_COUNTS = "object_name_uids"  # Keras 3.5 to 3.15: the numbers of default names, of this thread


def default_names() -> dict[str, int]:
    """Return the numbers that the next default names of this thread get, by kind of object."""
    return dict(_global_state.get_global_attribute(_COUNTS) or {})


@contextmanager
def names_from(counts: dict[str, int]) -> Iterator[None]:
    """Number default names from these numbers on in a ``with`` block; afterwards no name is given twice.

    Models of one architecture then have equal names, so that a process can use the compiled functions of one
    for the others.

    Args:
        counts: the result of ``default_names``.
    """
    kept = default_names()
    _global_state.set_global_attribute(_COUNTS, defaultdict(int, counts))
    try:
        yield
    finally:
        found = default_names()
        most = {name: max(found.get(name, 0), kept.get(name, 0)) for name in found | kept}
        _global_state.set_global_attribute(_COUNTS, defaultdict(int, most))

"""A compiled model's optimizer: its variables, its learning rate, and a schedule that follows the run.

An optimizer that scales losses (``LossScaleOptimizer``) wraps the optimizer that takes the steps.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_internals


def variables(model: keras.Model) -> list[Any]:
    """Return the variables of a model's optimizer, if it has one: iterations, learning rate, moments."""
    if getattr(model, "optimizer", None) is None:
        return []
    if not model.optimizer.built:  # else a LossScaleOptimizer would get its variables twice
        model.optimizer.build(model.trainable_variables)
    return list(model.optimizer.variables)


def moves(model: keras.Model) -> list[Any]:
    """Return the variables that a model's optimizer was built for; if it is unbuilt, the trainable ones."""
    if getattr(model, "optimizer", None) is None:
        return []
    built = model.optimizer.built
    return keras_internals.built_for(inner(model)) if built else list(model.trainable_variables)


def decays_weights(model: keras.Model) -> list[bool]:
    """Return a flag for each weight of a model: True if the optimizer's weight decay applies to it."""
    if getattr(model, "optimizer", None) is None:
        return []
    return [keras_internals.uses_weight_decay(inner(model), weight) for weight in model.weights]


def set_decays_weights(model: keras.Model, decays: list[bool]) -> None:
    """Apply weight decay only to weights with a True flag, even if the optimizer is already built.

    Args:
        model: the compiled model.
        decays: a flag for each weight, as ``decays_weights`` returns them.
    """
    excluded = (weight for weight, one in zip(model.weights, decays, strict=True) if not one)
    keras_internals.set_excluded_from_weight_decay(inner(model), excluded)


def require_nesterov(model: keras.Model, merge: str) -> None:
    """Raise an error unless the model's optimizer is SGD with Nesterov momentum, which the rule requires.

    Raises:
        ConfigError: it is a different optimizer, or SGD without Nesterov momentum.
    """
    optimizer = inner(model)
    if not (isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum and optimizer.nesterov):
        raise ConfigError(
            f'merge="{merge}" needs SGD with Nesterov momentum; the model was compiled with '
            f"{optimizer.name}. Use keras.optimizers.SGD(..., momentum=0.9, nesterov=True), or "
            'merge="aeasgd".'
        )


def finalize(model: keras.Model, moved: list[Any]) -> None:
    """End training as Keras does: an optimizer that averages weights over time sets them to the averages."""
    model.optimizer.finalize_variable_values(moved)


def set_learning_rate(model: keras.Model, value: float) -> None:
    """Set the learning rate, unless a schedule or a function gives it."""
    if settable(model) and float(model.optimizer.learning_rate) != value:
        model.optimizer.learning_rate = value


def learning_rate(model: keras.Model) -> float:
    """Return the optimizer's current learning rate; NaN if a schedule or a function gives it.

    Workers call their own copy of a function, so its value on the driver would mean nothing to them.
    """
    return float(model.optimizer.learning_rate) if settable(model) else float("nan")


def inner(model: keras.Model) -> Any:
    """Return the optimizer that takes the steps; if a LossScaleOptimizer wraps it, the wrapped optimizer."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def scales_loss(model: keras.Model) -> bool:
    """Return True for a LossScaleOptimizer: a gradient may be Inf, and the step is then skipped.

    An optimizer with ``loss_scale_factor`` also scales the loss, but skips no steps.
    """
    return inner(model) is not model.optimizer


def refuses_slices(model: keras.Model) -> bool:
    """Return True if the model's optimizer divides gradients by a scale, which fails on slices."""
    return any(optimizer.loss_scale_factor is not None for optimizer in (model.optimizer, inner(model)))


def adds_slices(model: keras.Model) -> bool:
    """Return True if an optimizer's step is the same for slices and for their sum by row.

    Most optimizers square or clip a gradient slice by slice. An optimizer that accumulates
    gradients adds the slices up before that.
    """
    optimizer = inner(model)
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    linear = type(optimizer) in (keras.optimizers.SGD, keras.optimizers.Lion) and not clips
    return bool(linear or optimizer.gradient_accumulation_steps)


def reset_not_finite(model: keras.Model) -> None:
    """Set to zero each variable of the optimizer that contains NaN or Inf."""
    for variable in variables(model):
        value = keras.ops.convert_to_numpy(variable)
        if value.dtype.kind not in "iub" and not np.isfinite(value.astype(np.float32)).all():
            variable.assign(np.zeros(value.shape, value.dtype))


def batches_seen(model: keras.Model) -> Any:
    """Return the variable in which an optimizer counts batches.

    If it accumulates gradients, ``iterations`` counts only the steps taken, and is not a variable.
    """
    return keras_internals.steps_taken(inner(model))


def settable(model: keras.Model) -> bool:
    """Return True if the learning rate is a number, which can be set: not a schedule or a function."""
    return not callable(keras_internals.learning_rate(inner(model)))


def scalable(model: keras.Model) -> bool:
    """Return True if the learning rate can be multiplied: a number or a schedule, but not a function."""
    return scheduled(model) or settable(model)


def adaptive(model: keras.Model) -> bool:
    """Return True unless the optimizer is SGD, with or without momentum."""
    return not isinstance(inner(model), keras.optimizers.SGD)


def scheduled(model: keras.Model) -> bool:
    """Return True if a schedule gives the learning rate."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(keras_internals.learning_rate(inner(model)), schedule)


class Followed(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule that is evaluated at the run's progress instead of a worker's own iterations.

    Adam's bias correction needs the worker's own count, but a schedule needs the count of the whole run. So
    progress = the endpoint's last value + own steps since then * speed, where ``speed`` is the progress of
    all workers together while this worker takes one step.

    ``scale`` multiplies the learning rate if workers step independently.

    Args:
        schedule: the user's schedule.
        seen: number of batches that the optimizer has seen so far.
    """

    def __init__(self, schedule: Any, seen: int) -> None:
        self.schedule = schedule
        self.progress = keras.Variable(float(seen), trainable=False, dtype="float32", name="progress")
        self.anchor = keras.Variable(seen, trainable=False, dtype="int32", name="anchor")
        self.speed = keras.Variable(1.0, trainable=False, dtype="float32", name="speed")
        self.scale = keras.Variable(1.0, trainable=False, dtype="float32", name="scale")

    @property
    def variables(self) -> list[Any]:
        """The variables that change during a run."""
        return [self.progress, self.anchor, self.speed, self.scale]

    def __call__(self, step: Any) -> Any:
        """Return the scaled schedule at the run's progress; ``step`` is the worker's own iterations."""
        own = keras.ops.cast(keras.ops.cast(step, "int32") - self.anchor.value, "float32")
        progress = self.progress.value + own * self.speed.value
        return self.scale.value * self.schedule(keras.ops.cast(keras.ops.floor(progress + 1e-3), step.dtype))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the user's schedule."""
        return dict(self.schedule.get_config())


def followed_variables(model: keras.Model) -> list[Any]:
    """Return the variables of a schedule that follows the run; an empty list without one."""
    schedule = keras_internals.learning_rate(inner(model))
    return schedule.variables if isinstance(schedule, Followed) else []


def follow(model: keras.Model) -> Followed | None:
    """Make a scheduled optimizer follow the run's progress; return None if there is no schedule."""
    optimizer = inner(model)
    if not scheduled(model):
        return None
    schedule = keras_internals.learning_rate(optimizer)
    if not isinstance(schedule, Followed):
        schedule = Followed(schedule, int(batches_seen(model)))
        keras_internals.set_schedule(optimizer, schedule)
    return schedule

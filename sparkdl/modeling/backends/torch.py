"""Keras on torch: steps run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import torch

from sparkdl.core.tree import replaced
from sparkdl.core.vectors import Vector
from sparkdl.modeling import keras_internals, keras_variables
from sparkdl.modeling.backends.stateful import StatefulReplica
from sparkdl.modeling.losses import is_own, scale_in_force, watched


class TorchReplica(StatefulReplica):
    """A replica on torch.

    Steps are not compiled, so this class avoids overhead of Keras where it can:

    * It converts arrays, reads variables and clears gradients without Keras.
    * If the model's steps and ``compute_metrics`` are Keras's own, a step does not compute the metrics'
      results. The metrics are updated while the reply to an update is on its way, or at the next operation.
    * If ``joint`` is False and all trainable variables are float32, the variables are views of one tensor.
      They are set and read with one operation.

    Args:
        model: a compiled and built model.
        joint: True to return gradients and apply their means; False to take whole steps.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        super().__init__(model, joint=joint)
        self._device = keras.ops.convert_to_tensor(0.0).device
        requested = *self._trainable, *self._statistics, *keras_variables.metric_variables(model)
        self._values = {id(variable): variable.value for variable in requested}
        self._flat = self._joined() if self.exact and self._trainable and not joint else None
        self._waiting: list[Callable[[], Any]] = []
        self._loss: tuple[Any, Any] | None = None  # the newest loss not in the metrics yet, and its weight
        if not any(is_own(model, name) for name in ("train_step", "test_step", "compute_metrics")):
            tracker = keras_internals.loss_tracker(model)
            self._measure, self._track = model.compute_metrics, tracker.update_state
            vars(model).update(compute_metrics=self._measure_later, get_metrics_result=dict)
            vars(tracker).update(update_state=self._track_later)
        if type(model).zero_grad is torch.nn.Module.zero_grad:
            vars(model).update(zero_grad=self._clear)

    def _joined(self) -> Any:
        """Make the trainable variables parts of one tensor, and return it."""
        flat = self.pack(self._trainable, self._shapes[: len(self._trainable)])
        for variable, part in zip(self._trainable, self.split(flat, self._trainable), strict=True):
            self._value(variable).data = part
        return flat

    @property
    def model(self) -> keras.Model:
        """The model. Its variables are up to date until the replica's next operation."""
        self.catch_up()
        return self._model

    def catch_up(self) -> None:
        """Update the metrics with the results of the last step."""
        waiting, self._waiting, self._loss = self._waiting, [], None
        with torch.no_grad():
            for take_in in waiting:
                take_in()

    def _measure_later(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        self._waiting.append(partial(self._measure_share, scale_in_force(), *arguments, **named))
        return {}

    def _measure_share(self, scale: Any, *arguments: Any, **named: Any) -> None:
        """Do a deferred update of the metrics, with the ``ReductionWatch.scale`` of its step."""
        with watched(scale):
            self._measure(*arguments, **named)

    def _track_later(self, loss: Any, sample_weight: Any = None) -> None:
        self._loss = loss.detach(), sample_weight
        self._waiting.append(partial(self._track, *self._loss))

    def loss_sums(self, loss: keras.metrics.Mean) -> list[Any]:
        """Return the loss metric's sums of losses and of weights, including a loss not in the metric yet."""
        total, count = (self._value(variable) for variable in (loss.total, loss.count))
        if self._loss is None:
            return [total, count]
        value, weight = self._loss
        return [total + value * weight, count + weight]

    def _clear(self, set_to_none: bool = True) -> None:
        """Set the last step's gradients to None, even if zeros are requested.

        The next step gives the same result in both cases.
        """
        for variable in self._trainable:
            self._value(variable).grad = None

    def difference(self, vectors: Sequence[Any], since: Any) -> Any:
        """Return vectors as one flat tensor, minus ``since`` if it is given."""
        if vectors is not self._trainable or self._flat is None:
            return super().difference(vectors, since)
        return self._flat.clone() if since is None else self._flat - since

    def compiled(self, function: Callable[..., Any], what: str = "") -> Callable[..., Any]:
        """Return a version of a function that takes arrays.

        ``what`` is "train" or "test" if the function runs a training or test step, else empty.
        """
        training = what == "train"

        def run(*arguments: Any) -> Any:
            self.catch_up()
            if what and self._model.training is not training:  # for layers written in torch
                self._model.train(training)
            with torch.set_grad_enabled(training):
                return function(*replaced(arguments, self._tensor))

        return run

    def pack(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return tensors as one flat float32 tensor. None stands for zeros."""
        with torch.no_grad():
            dense = [
                torch.zeros(shape, device=self._device) if part is None else self._value(part)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            return torch.cat([part.reshape(-1).to(torch.float32) for part in dense])

    def split(self, flat: Any, variables: Sequence[Any]) -> list[Any]:
        """Return each variable's part of a flat tensor, in its shape and dtype."""
        values = [self._value(variable) for variable in variables]
        parts = torch.split(flat, [value.numel() for value in values])
        return [part.view(value.shape).to(value.dtype) for value, part in zip(values, parts, strict=True)]

    def array(self, packed: Any) -> Vector:
        """Return a flat tensor as an array."""
        return np.asarray(packed.cpu().numpy())

    def _set(self, flat: Any, variables: list[Any]) -> None:
        if flat is not None:
            with torch.no_grad():
                if variables is self._trainable and self._flat is not None:
                    self._flat.copy_(flat)
                    return
                for variable, part in zip(variables, self.split(flat, variables), strict=True):
                    self._value(variable).copy_(part)

    def _value(self, part: Any) -> Any:
        """Return the tensor of a Keras variable; return a tensor unchanged."""
        held = self._values.get(id(part))
        return getattr(part, "value", part) if held is None else held

    def _tensor(self, value: Any) -> Any:
        """Return an array as a tensor; return any other value unchanged."""
        if not isinstance(value, np.ndarray):
            return value
        array = value if value.flags.writeable else value.copy()
        if array.dtype.kind in "fib":  # torch shares the memory of these; Keras would copy the array first
            return torch.as_tensor(array, device=self._device)
        return keras.ops.convert_to_tensor(array)


def set_threads(count: int) -> None:
    """Limit the threads of torch's operations."""
    torch.set_num_threads(count)


def has_gpu() -> bool:
    """Return True if torch computes on a GPU."""
    return bool(torch.cuda.is_available())

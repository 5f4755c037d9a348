"""Keras on torch: each step runs as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from sparkdl import models
from sparkdl.backends.stateful import StatefulReplica
from sparkdl.losses import is_own
from sparkdl.weights import Vector


class TorchReplica(StatefulReplica):
    """A replica on torch.

    Steps are not compiled, so what Keras does to take an array in, or to be asked for a variable's value, is
    spared them where it can be, and so are the metrics' results, which a step of Keras's own returns.

    Args:
        model: a compiled and built model.
        joint: whether gradients are taken and applied apart, or steps taken whole.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        super().__init__(model, joint=joint)
        self._device = keras.ops.convert_to_tensor(0.0).device
        asked = *self._trainable, *self._statistics, *models.metric_variables(model)
        self._values = {id(variable): variable.value for variable in asked}
        if not any(is_own(model, name) for name in ("train_step", "test_step", "compute_metrics")):
            vars(model)["get_metrics_result"] = dict

    def compiled(self, function: Callable[..., Any], what: str = "") -> Callable[..., Any]:
        """Return a function of arrays; ``what`` says whether a step to "train" or to "test" is in it."""
        training = what == "train"

        def run(*arguments: Any) -> Any:
            if what and self.model.training is not training:  # layers written in torch want to know
                self.model.train(training)
            with torch.set_grad_enabled(training):
                return function(*self._tensors(arguments))

        return run

    def pack(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return tensors, of which some may be None for zeros, as one flat float32 tensor."""
        with torch.no_grad():
            dense = [
                torch.zeros(shape, device=self._device) if part is None else self._value(part)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            return torch.cat([part.reshape(-1).to(torch.float32) for part in dense])

    def cut(self, flat: Any, variables: Sequence[Any]) -> list[Any]:
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
                for variable, part in zip(variables, self.cut(flat, variables), strict=True):
                    self._value(variable).copy_(part)

    def _value(self, part: Any) -> Any:
        """Return the tensor that a variable of Keras holds, or a tensor itself."""
        held = self._values.get(id(part))
        return getattr(part, "value", part) if held is None else held

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._tensors(part) for part in value)
        if isinstance(value, dict):
            return {name: self._tensors(part) for name, part in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        array = value if value.flags.writeable else value.copy()
        if array.dtype.kind in "fib":  # torch has these; Keras would copy them first
            return torch.as_tensor(array, device=self._device)
        return keras.ops.convert_to_tensor(array)


def set_threads(count: int) -> None:
    """Bound the threads of torch's operations."""
    torch.set_num_threads(count)

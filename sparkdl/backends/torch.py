"""Keras on torch: each step runs as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from sparkdl.backends.stateful import StatefulReplica
from sparkdl.weights import Vector


class TorchReplica(StatefulReplica):
    """A replica on torch."""

    def compiled(self, function: Callable[..., Any], what: str = "") -> Callable[..., Any]:
        """Return a function of arrays; ``what`` says whether a step to "train" or to "test" is in it."""

        def run(*arguments: Any) -> Any:
            if what:
                self.model.train(what == "train")  # layers written in torch want to know
            with torch.set_grad_enabled(what == "train"):
                return function(*_tensors(arguments))

        return run

    def pack(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return tensors, of which some may be None for zeros, as one flat float32 tensor."""
        device = keras.ops.convert_to_tensor(0.0).device
        with torch.no_grad():
            dense = [
                torch.zeros(shape, device=device) if part is None else getattr(part, "value", part)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            return torch.cat([part.detach().reshape(-1).to(torch.float32) for part in dense])

    def cut(self, flat: Any, variables: Sequence[Any]) -> list[Any]:
        """Return each variable's part of a flat tensor, in its shape and dtype."""
        parts = torch.split(flat, [int(np.prod(variable.shape, dtype=int)) for variable in variables])
        return [
            part.reshape(tuple(variable.shape)).to(variable.value.dtype)
            for variable, part in zip(variables, parts, strict=True)
        ]

    def array(self, packed: Any) -> Vector:
        """Return a flat tensor as an array."""
        return np.asarray(packed.cpu().numpy())


def _tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_tensors(part) for part in value)
    if isinstance(value, dict):
        return {name: _tensors(part) for name, part in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    return keras.ops.convert_to_tensor(value if value.flags.writeable else value.copy())


def set_threads(count: int) -> None:
    """Bound the threads of torch's operations."""
    torch.set_num_threads(count)

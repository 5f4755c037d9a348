"""A Keras optimizer as the optimizer of the center."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.core.vectors import Array, Vector
from sparkdl.modeling.object_pickling import copied
from sparkdl.rules.outer import Outer


class KerasOuter(Outer):
    """Steps of a copy of a Keras optimizer on one flat variable.

    Args:
        optimizer: the optimizer to copy. Learning-rate schedules count rounds.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = copied(optimizer)

    def init(self, center: Vector) -> list[Array]:
        """Return the values of the optimizer's variables before the first step."""
        with keras.device("cpu"):
            return self._read(self._made(center)[0])

    def step(self, gradient: Vector, state: list[Array], center: Vector) -> tuple[Vector, list[Array]]:
        """Return the optimizer's change of the center, and the values of its variables after the step."""
        with keras.device("cpu"):  # as on the driver, wherever the rule is applied
            optimizer, variable = self._made(center)
            for kept, value in zip(optimizer.variables, state, strict=True):
                kept.assign(value)
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
            return keras.ops.convert_to_numpy(variable) - center, self._read(optimizer)

    def _made(self, center: Vector) -> tuple[Any, Any]:
        variable = keras.Variable(center, dtype="float32", name="center")
        optimizer = copied(self.optimizer)
        optimizer.build([variable])
        return optimizer, variable

    @staticmethod
    def _read(optimizer: keras.optimizers.Optimizer) -> list[Array]:
        return [np.array(keras.ops.convert_to_numpy(kept)) for kept in optimizer.variables]

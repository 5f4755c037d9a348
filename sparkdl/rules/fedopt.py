"""FedOpt (Reddi et al., 2020) and DiLoCo (Douillard et al., 2023): the center has its own optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule
from sparkdl.rules.outer import SGD, Adam, Outer

ALONE = 'its optimizer steps once per round; set mode="synchronous"'


@dataclass(frozen=True)
class FedOpt(Rule):
    """A rule that uses the negative mean delta of a round as a gradient of the center, and takes a step.

    Attributes:
        optimizer: an optimizer of ``sparkdl.rules.outer``, by default ``Adam`` (FedAdam), or a
            Keras optimizer, which gets all trainable variables as one vector.
    """

    name = "fedopt"
    alone: ClassVar[str | None] = ALONE
    optimizer: Any = Adam()

    def init(self, center: Vector) -> Any:
        """Return the optimizer's initial state."""
        return self.optimizer.init(center)

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return the optimizer's step and its next state."""
        optimizer: Outer = self.optimizer
        return optimizer.step(np.negative(delta), state, merge.center)


@dataclass(frozen=True)
class DiLoCo(Rule):
    """FedOpt with SGD and Nesterov momentum as the optimizer of the center.

    In the paper, a worker takes hundreds of AdamW steps between rounds. Here the compiled optimizer
    and ``frequency`` decide this.

    Attributes:
        outer_learning_rate: the step size; 1 without momentum is the rule "average".
        outer_momentum: fraction of the velocity kept in each step, at least 0 and below 1.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "diloco"
    alone: ClassVar[str | None] = ALONE
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        self._outer()

    def _outer(self) -> SGD:
        return SGD(self.outer_learning_rate, self.outer_momentum, nesterov=True)

    def init(self, center: Vector) -> Vector:
        """Return the outer optimizer's initial state."""
        return self._outer().init(center)

    def update(self, delta: Vector, state: Vector, merge: Merge) -> tuple[Vector, Vector]:
        """Return the outer optimizer's step and its next state."""
        return self._outer().step(np.negative(delta), state, merge.center)

"""AEASGD and EAMSGD (Zhang, Choromanska and LeCun, 2015): springs tie the workers to the center.

Every window a worker pulls c and sends e = alpha (w - c). It goes on from w - e, the center takes c + e;
its weights are never replaced by the center.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sparkdl.core.reduction import Reduction, Total
from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule, require

BETA = 0.9  # the paper's alpha times the number of workers; the center is stable below 2


@dataclass(frozen=True)
class AEASGD(Rule):
    """Let the workers explore, and draw them and the center together.

    Attributes:
        alpha: how far a spring draws both its ends in one exchange: the paper's learning rate times rho,
            above 0 and below 1. None is 0.9 / K, the paper's choice.
    """

    name = "aeasgd"
    elastic: ClassVar[bool] = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        require("alpha", self.alpha, self.alpha is None or 0 < self.alpha < 1, "above 0 and below 1")

    def bound(self, num_workers: int) -> Rule:
        """Return the rule for this many workers."""
        return replace(self, alpha=BETA / num_workers) if self.alpha is None else self

    def reduction(self) -> Reduction:
        """Return the sum: in a round every spring draws the center."""
        return Total()

    def draw(self, local: Vector, center: Vector) -> Vector:
        """Return e, by which a worker's weights are drawn to the center."""
        return (local - center) * np.float32(self.alpha)

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return e, by which the center is drawn to a worker, or the sum of a round's."""
        return delta, state


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    """AEASGD whose workers step with Nesterov's momentum, which is their optimizer's: SGD(nesterov=True)."""

    name = "eamsgd"
    momentum: ClassVar[bool] = True

"""AEASGD and EAMSGD (Zhang, Choromanska and LeCun, 2015): springs tie the workers to the center.

After every window, a worker with the weights w sends e = alpha (w - c). In rounds, c is the center after the
last round; otherwise it is the current center, which the worker pulls first. The worker continues from w - e,
and e is added to the center.

The center replaces a worker's weights only if the worker begins without weights of its own in a snapshot,
after an update that was not merged because of NaN, Inf or values that are too large, and (in rounds) after a
callback has set the center.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sparkdl.core.reduction import Reduction, Total
from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule, require

BETA = 0.9  # alpha times the number of workers, as in the paper; the center is stable below 2


@dataclass(frozen=True)
class AEASGD(Rule):
    """A rule that lets the workers explore, and pulls them and the center together.

    Attributes:
        alpha: fraction of their distance by which the worker and the center each move in one exchange: the
            paper's learning rate times rho, above 0 and below 1. None is the paper's choice, 0.9
            divided by the number of workers with rows.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "aeasgd"
    elastic: ClassVar[bool] = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        require("alpha", self.alpha, self.alpha is None or 0 < self.alpha < 1, "above 0 and below 1")

    def bound(self, num_workers: int) -> Rule:
        """Return the rule for this many workers, with its alpha set."""
        return replace(self, alpha=BETA / num_workers) if self.alpha is None else self

    def reduction(self) -> Reduction:
        """Return the sum: in a round every spring pulls the center."""
        return Total()

    def draw(self, local: Vector, center: Vector) -> Vector:
        """Return e, by which the worker's weights move towards the center."""
        return (local - center) * np.float32(self.alpha)

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return e, by which the center moves towards a worker, or the sum of e over a round."""
        return delta, state


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    """AEASGD with Nesterov momentum in the workers, from their own optimizer: SGD(nesterov=True)."""

    name = "eamsgd"
    momentum: ClassVar[bool] = True

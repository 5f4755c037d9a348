"""DOWNPOUR (Dean et al., 2012): every delta is added as it is, c += delta."""

from __future__ import annotations

from sparkdl.core.reduction import Reduction, Total
from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class Sum(Rule):
    """A rule that adds every delta to the center. With many workers the steps add up and may diverge."""

    name = "sum"

    def reduction(self) -> Reduction:
        """Return the sum of a round."""
        return Total()

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return the delta."""
        return delta, state

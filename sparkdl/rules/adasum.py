"""Adasum (Maleki et al., 2020): c += delta_1 + ... + delta_K, where shared parts count once."""

from __future__ import annotations

from typing import ClassVar

from sparkdl.core.reduction import AdaptiveSum, Reduction
from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class Adasum(Rule):
    """A rule that averages the deltas of a round where they agree, and adds them where they are orthogonal.

    Lengths and angles are those of all trainable variables as one vector.
    """

    name = "adasum"
    alone: ClassVar[str | None] = 'it combines the updates of a round; set mode="synchronous"'

    def reduction(self) -> Reduction:
        """Return the adaptive sum."""
        return AdaptiveSum()

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return the adaptive sum of a round."""
        return delta, state

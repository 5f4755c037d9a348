"""ADAG (Hermans, 2017): c += delta / window, where window is the number of batches in the delta."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class ADAG(Rule):
    """A rule that divides a delta by its number of batches, so a window moves the center by its mean step."""

    name = "adag"
    rounds: ClassVar[str | None] = 'it normalizes updates that are merged one by one; use merge="average"'

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return the delta divided by the number of batches in its window."""
        return (delta if merge.steps <= 1 else delta * np.float32(1 / merge.steps)), state

"""Model averaging (McDonald, Hall and Mann, 2010; local SGD, Stich, 2019).

In a round, c += sum(n_k delta_k) / sum(n_k), where n_k is the number of rows that worker k used. Without
rounds, each of K workers adds a K-th of its delta: c += delta / K.
"""

from __future__ import annotations

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class Average(Rule):
    """A rule that moves the center by the mean of the workers' deltas."""

    name = "average"

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return the delta of a round as it is, or a K-th of one worker's delta without rounds."""
        return (delta if merge.workers == 1 else delta * np.float32(1 / merge.workers)), state

"""Model averaging (McDonald, Hall and Mann, 2010; local SGD, Stich, 2019).

In a round c += sum(n_k delta_k) / sum(n_k). Without rounds each of K workers moves the center by its
K-th part, c += delta / K.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class Average(Rule):
    """Move the center by the mean of the workers' deltas."""

    name = "average"

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return the delta of a round whole, or a K-th of one worker's where there are no rounds."""
        return (delta if merge.workers == 1 else delta * np.float32(1 / merge.workers)), state

"""DynSGD (Jiang et al., 2017): c += delta / (staleness + 1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule


class DynSGD(Rule):
    """A rule that scales an update by 1 / (staleness + 1)."""

    name = "dynsgd"
    rounds: ClassVar[str | None] = (
        "it divides an update by its staleness plus one, and updates in rounds have no staleness; use "
        'merge="average"'
    )

    def update(self, delta: Vector, state: object, merge: Merge) -> tuple[Vector, object]:
        """Return the delta divided by its staleness plus one."""
        return (delta if not merge.staleness else delta * np.float32(1 / (merge.staleness + 1))), state

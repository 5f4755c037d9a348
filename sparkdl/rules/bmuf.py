"""BMUF (Chen and Huo, 2016): averaging with a momentum of the center that compensates for the averaging.

K workers that each take a K-th of the rows make a K-th of the steps, and the mean of their deltas goes
no further than one of them. With v = momentum v + mean and c += mean + momentum v (Nesterov), each mean
counts 1 / (1 - momentum) times in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import Merge, Rule, require
from sparkdl.rules.fedopt import ALONE
from sparkdl.rules.outer import SGD


@dataclass(frozen=True)
class BMUF(Rule):
    """Blockwise model-update filtering: a round's mean delta, plus a decaying sum of earlier ones.

    Attributes:
        block_momentum: fraction of the velocity kept in each round, at least 0 and below 1; None stands for
            1 - K ** -power, where K is the number of workers with rows.
        power: 1 (default) is the paper's choice: each mean counts K times in the end.
            ``SparkModel`` uses 0.5, with sqrt(K) times the learning rate in the workers, if a round
            has several batches and ``merge`` is not set. K then counts as at most 8.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "bmuf"
    alone: ClassVar[str | None] = ALONE
    block_momentum: float | None = None
    power: float = 1.0

    def __post_init__(self) -> None:
        block = self.block_momentum
        require("block_momentum", block, block is None or 0 <= block < 1, "at least 0 and below 1")
        require("power", self.power, 0 <= self.power <= 1, "from 0 to 1")

    def bound(self, num_workers: int) -> Rule:
        """Return the rule for this many workers, with its momentum set."""
        if self.block_momentum is not None:
            return self
        return replace(self, block_momentum=1 - num_workers**-self.power)

    def _outer(self) -> SGD:
        return SGD(1.0, self.block_momentum or 0.0, nesterov=True)

    def init(self, center: Vector) -> Vector:
        """Return the initial velocity, 0."""
        return self._outer().init(center)

    def update(self, delta: Vector, state: Vector, merge: Merge) -> tuple[Vector, Vector]:
        """Return the mean plus momentum times the new velocity, and the new velocity."""
        return self._outer().step(np.negative(delta), state, merge.center)

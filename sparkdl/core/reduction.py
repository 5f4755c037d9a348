"""Reductions: combine the vectors of a round into one vector, in the order in which they are added.

That is worker order, except in rounds with a quorum or a timeout, which add updates as they arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.core.vectors import EMPTY, PART, Vector

NUMBERS = frozenset(  # dtypes that can be added, in NumPy's notation
    ["<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<c8", "<c16"]
)


class Reduction(ABC):
    """Base class of reductions of one round. They do not modify the vectors that are added.

    Attributes:
        elementwise: True if each element of the result depends only on the same element of the vectors, so
            that ranges of the vectors can be reduced separately.
        pool: memory for the result.
    """

    elementwise: ClassVar[bool] = False
    pool: BufferPool | None = None

    @abstractmethod
    def add(self, vector: Vector, weight: float) -> None:
        """Add one worker's vector; ``weight`` is above 0."""

    @abstractmethod
    def result(self) -> Vector:
        """Return the reduced vector, empty if nothing was added. The object cannot be used afterwards."""


def is_elementwise(reduction: Reduction) -> bool:
    """Return True if the class of a reduction itself says so; a subclass may need whole vectors."""
    return bool(vars(type(reduction)).get("elementwise"))


class Total(Reduction):
    """Unweighted sum of the vectors."""

    elementwise = True

    def __init__(self) -> None:
        self._total, self._count = EMPTY, 0

    def add(self, vector: Vector, weight: float) -> None:
        """Add a vector; its weight is ignored."""
        self._plus(vector)

    def result(self) -> Vector:
        """Return the sum."""
        return self._total

    def _plus(self, vector: Vector, scale: np.float32 | None = None) -> None:
        """Add a vector to the total, part by part, so that scaling needs little memory.

        The first vector is kept as it is, since it belongs to the caller; the second one allocates the total.
        With loss scaling, some gradients may overflow to inf and others to -inf. Their sum is NaN, by which
        the optimizer detects the overflow, so NumPy's warnings are turned off.
        """
        self._count += 1
        if self._count == 1:
            self._total = vector
            return
        before = self._total
        if self._count == 2:
            self._total = np.empty_like(before) if self.pool is None else self.pool.borrow_like(before)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(before), PART):
                part = slice(start, start + PART)
                scaled = vector[part] if scale is None else vector[part] * scale
                np.add(before[part], scaled, out=self._total[part])


class Mean(Total):
    """Weighted mean of the vectors.

    Each vector is scaled by its weight relative to the first weight. So vectors of equal weights are added
    as they are, and a single vector is returned unchanged.
    """

    elementwise = True

    def __init__(self) -> None:
        super().__init__()
        self._unit, self._weight = 0.0, 0.0

    def add(self, vector: Vector, weight: float) -> None:
        """Add a vector with its weight."""
        self._unit = self._unit or weight
        self._weight += weight
        self._plus(vector, None if weight == self._unit else np.float32(weight / self._unit))

    def result(self) -> Vector:
        """Return the weighted mean; a single vector is returned unchanged."""
        if self._count > 1:
            self._total *= np.float32(self._unit / self._weight)
        return self._total


class AdaptiveSum(Reduction):
    """Adasum (Maleki et al., 2020): parallel vectors are averaged, orthogonal vectors are added.

    Two vectors a and b are combined into (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, pair by pair over a
    binary tree. Its leaves are the vectors in the order in which they are added. At most log2 K + 1
    of K vectors are kept at once.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, Vector]] = []  # (leaves, sum) of subtrees without a sibling

    def add(self, vector: Vector, weight: float) -> None:
        """Add a vector as a leaf, and combine the subtrees that it completes; its weight is ignored."""
        leaves = 1
        while self._parts and self._parts[-1][0] == leaves:
            vector, leaves = adaptive_sum(self._parts.pop()[1], vector), 2 * leaves
        self._parts.append((leaves, vector))

    def result(self) -> Vector:
        """Return the combined vector; subtrees without a sibling are combined from the right."""
        parts = [part for _, part in self._parts]
        total = parts.pop() if parts else EMPTY
        while parts:
            total = adaptive_sum(parts.pop(), total)
        return total


def adaptive_sum(a: Vector, b: Vector) -> Vector:
    """Return the adaptive sum of two vectors; if one is zero, return the other."""
    common, a_norm, b_norm = (float(np.dot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    if not a_norm or not b_norm:
        return a + b
    return a * np.float32(1 - common / (2 * a_norm)) + b * np.float32(1 - common / (2 * b_norm))

"""How a round makes one vector of its workers', which are added one after the other, in worker order."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from sparkdl.core.vectors import EMPTY, Vector

NUMBERS = frozenset(  # the dtypes that are added, as NumPy spells them
    ["<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<c8", "<c16"]
)
PART = 1 << 16  # elements that are added at a time, and stay in the processor's cache


class Reduction(ABC):
    """The reduction of one round. What is added stays as it is."""

    @abstractmethod
    def add(self, vector: Vector, weight: float) -> None:
        """Take in what one worker sent; ``weight`` is above 0."""

    @abstractmethod
    def result(self) -> Vector:
        """Return the reduced vector, empty if nothing was added; ends the use of this object."""


class Total(Reduction):
    """The sum."""

    def __init__(self) -> None:
        self._total, self._count = EMPTY, 0

    def add(self, vector: Vector, weight: float) -> None:
        """Add a vector as it is, whatever its weight."""
        self._plus(vector)

    def result(self) -> Vector:
        """Return the sum."""
        return self._total

    def _plus(self, vector: Vector, scale: np.float32 | None = None) -> None:
        """Add in place, but to the first one, which is somebody else's; in parts, for want of memory.

        Gradients of a scaled loss overflow now and then, in both directions, and their NaN tells the
        optimizer so: nothing to warn of.
        """
        self._count += 1
        if self._count == 1:
            self._total = vector
            return
        before = self._total
        if self._count == 2:
            self._total = np.empty_like(before)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(before), PART):
                part = slice(start, start + PART)
                scaled = vector[part] if scale is None else vector[part] * scale
                np.add(before[part], scaled, out=self._total[part])


class Mean(Total):
    """The weighted mean. The sum is kept in units of the first weight; a lone vector is its own mean."""

    def __init__(self) -> None:
        super().__init__()
        self._unit, self._weight = 0.0, 0.0

    def add(self, vector: Vector, weight: float) -> None:
        """Add a vector as often as its weight says."""
        self._unit = self._unit or weight
        self._weight += weight
        self._plus(vector, None if weight == self._unit else np.float32(weight / self._unit))

    def result(self) -> Vector:
        """Return the weighted mean, without a rounding where there is nothing to divide by."""
        if self._count > 1:
            self._total *= np.float32(self._unit / self._weight)
        return self._total


class AdaptiveSum(Reduction):
    """Adasum (Maleki et al., 2020): vectors that agree are averaged, orthogonal ones added.

    a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, pair by pair over a binary tree whose leaves
    are the workers in their order. At most log2 K + 1 vectors are kept at once.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, Vector]] = []  # (leaves, sum) of subtrees that still lack a sibling

    def add(self, vector: Vector, weight: float) -> None:
        """Add a leaf, whatever its weight, and every subtree that it completes."""
        leaves = 1
        while self._parts and self._parts[-1][0] == leaves:
            vector, leaves = adaptive_sum(self._parts.pop()[1], vector), 2 * leaves
        self._parts.append((leaves, vector))

    def result(self) -> Vector:
        """Return the root; subtrees without a sibling are joined from the right."""
        parts = [part for _, part in self._parts]
        total = parts.pop() if parts else EMPTY
        while parts:
            total = adaptive_sum(parts.pop(), total)
        return total


def adaptive_sum(a: Vector, b: Vector) -> Vector:
    """Return the adaptive sum of two vectors; one that is zero adds nothing and changes nothing."""
    common, a_norm, b_norm = (float(np.dot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    if not a_norm or not b_norm:
        return a + b
    return a * np.float32(1 - common / (2 * a_norm)) + b * np.float32(1 - common / (2 * b_norm))

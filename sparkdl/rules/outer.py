"""Optimizers of the center, for FedOpt and DiLoCo: pure functions of a gradient and a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import require


class Outer(ABC):
    """An optimizer that takes the mean delta of a round, turned around, for a gradient."""

    @abstractmethod
    def init(self, center: Vector) -> Any:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, gradient: Vector, state: Any, center: Vector) -> tuple[Vector, Any]:
        """Return what is added to the center, and the next state; no argument is changed."""


@dataclass(frozen=True)
class SGD(Outer):
    """Gradient descent with momentum: v = momentum v + g; c -= rate v, of Nesterov rate (g + momentum v).

    Attributes:
        learning_rate: the step's length; 1 takes the mean delta as it is.
        momentum: what a step keeps of the one before, from 0 up to below 1.
        nesterov: whether the momentum is Nesterov's.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        require("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 up to below 1")

    def init(self, center: Vector) -> Vector:
        """Return the velocity, which is 0."""
        return np.zeros_like(center)

    def step(self, gradient: Vector, state: Vector, center: Vector) -> tuple[Vector, Vector]:
        """Return the step down the gradient, and the velocity."""
        rate, momentum = np.float32(-self.learning_rate), np.float32(self.momentum)
        if not momentum:
            return gradient * rate, state
        velocity = momentum * state + gradient
        return rate * (gradient + momentum * velocity if self.nesterov else velocity), velocity


class Moments(NamedTuple):
    """The state of Adam: the moving means of the gradient and of its square."""

    first: Vector
    second: Vector


@dataclass(frozen=True)
class Adam(Outer):
    """FedAdam (Reddi et al., 2020, algorithm 2): no bias correction, and a floor under the root.

    Attributes:
        learning_rate: the step's length in units of the parameters.
        beta_1: what the mean keeps of itself.
        beta_2: what the mean of squares keeps of itself.
        tau: added to the root; the larger, the less adaptive.
    """

    learning_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        for name in ("beta_1", "beta_2"):
            require(name, getattr(self, name), 0 <= getattr(self, name) < 1, "from 0 up to below 1")
        require("tau", self.tau, self.tau > 0, "above 0")

    def init(self, center: Vector) -> Moments:
        """Return moments of 0 and, as in the paper, of tau squared."""
        return Moments(np.zeros_like(center), np.full_like(center, self.tau**2))

    def step(self, gradient: Vector, state: Moments, center: Vector) -> tuple[Vector, Moments]:
        """Return the step, and the moments."""
        one, two = np.float32(self.beta_1), np.float32(self.beta_2)
        first = one * state.first + (1 - one) * gradient
        second = two * state.second + (1 - two) * gradient * gradient
        step: Vector = first * np.float32(-self.learning_rate)
        step /= np.sqrt(second) + np.float32(self.tau)
        return step, Moments(first, second)

"""Outer optimizers, by which the rules FedOpt, DiLoCo and BMUF update the center.

They are pure: the state is an argument and a result of ``step``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.rules.base import require


class Outer(ABC):
    """An outer optimizer. Its gradient is the negative mean delta of a round."""

    @abstractmethod
    def init(self, center: Vector) -> Any:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, gradient: Vector, state: Any, center: Vector) -> tuple[Vector, Any]:
        """Return the step to add to the center, and the next state. Do not modify the arguments."""


@dataclass(frozen=True)
class SGD(Outer):
    """Gradient descent with momentum.

    For the gradient g, the velocity v and the center c: v = momentum v + g; c -= learning_rate v. With
    Nesterov momentum: c -= learning_rate (g + momentum v).

    Attributes:
        learning_rate: the step size; 1 adds the mean delta as it is, if there is no momentum.
        momentum: fraction of the velocity kept in each step, at least 0 and below 1.
        nesterov: whether to use Nesterov momentum.

    Raises:
        ConfigError: a setting is out of range.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")

    def init(self, center: Vector) -> Vector:
        """Return the initial velocity, 0."""
        return np.zeros_like(center)

    def step(self, gradient: Vector, state: Vector, center: Vector) -> tuple[Vector, Vector]:
        """Return the step down the gradient, and the next velocity."""
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
    """FedAdam (Reddi et al., 2020, algorithm 2): Adam without bias correction.

    The step is -learning_rate first / (sqrt(second) + tau), where first and second are the moving means of
    the gradient and of its square.

    Attributes:
        learning_rate: the step size, in units of the parameters.
        beta_1: fraction of the mean of gradients kept in each step.
        beta_2: fraction of the mean of squares kept in each step.
        tau: the constant in the denominator; with a larger value the step sizes are less adaptive.

    Raises:
        ConfigError: a setting is out of range.
    """

    learning_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        for name in ("beta_1", "beta_2"):
            require(name, getattr(self, name), 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        require("tau", self.tau, self.tau > 0, "above 0")

    def init(self, center: Vector) -> Moments:
        """Return the initial moments: 0 and, as in the paper, tau squared."""
        return Moments(np.zeros_like(center), np.full_like(center, self.tau**2))

    def step(self, gradient: Vector, state: Moments, center: Vector) -> tuple[Vector, Moments]:
        """Return the step to add to the center, and the next moments."""
        one, two = np.float32(self.beta_1), np.float32(self.beta_2)
        first = one * state.first + (1 - one) * gradient
        second = two * state.second + (1 - two) * gradient * gradient
        step: Vector = first * np.float32(-self.learning_rate)
        step /= np.sqrt(second) + np.float32(self.tau)
        return step, Moments(first, second)

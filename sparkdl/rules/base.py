"""The base of every rule: two pure functions, and a record about each update."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.errors import ConfigError, RuleError
from sparkdl.process.reasons import reason_of


class Merge(NamedTuple):
    """The facts about one update that a rule may use.

    Attributes:
        staleness: number of other updates merged since this worker last pulled; 0 in rounds.
        workers: number of workers with rows whose updates are merged one by one; 1 in rounds, where all
            updates were reduced to one.
        steps: number of batches the worker trained on since it last pulled.
        center: in rounds, the center before this update.
    """

    staleness: int
    workers: int
    steps: int = 1
    center: Vector = EMPTY


class Rule:
    """A merge rule: it computes the change of the center variable for an update.

    Subclasses hold settings only. The state is passed in and out. Neither it nor an update is modified, so
    that a run can resume from an earlier state.

    Attributes:
        name: the value of ``merge=`` for this rule.
        rounds: the reason why the rule cannot merge updates in rounds; None if it can.
        alone: the reason why the rule cannot merge updates one by one; None if it can.
        elastic: whether workers keep their own weights, and ``draw`` computes the updates they send.
        momentum: whether the workers' optimizer has to be SGD with Nesterov momentum.
    """

    name: ClassVar[str]
    rounds: ClassVar[str | None] = None
    alone: ClassVar[str | None] = None
    elastic: ClassVar[bool] = False
    momentum: ClassVar[bool] = False

    def bound(self, num_workers: int) -> Rule:
        """Return the rule for this many workers with rows; itself unless a setting depends on the number."""
        return self

    def reduction(self) -> Reduction:
        """Return the reduction of a round's deltas; by default their mean, weighted by rows."""
        return Mean()

    def init(self, center: Vector) -> Any:
        """Return the state before the first merge; None for most rules."""
        return None

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return the step to add to the center, of the shape of ``delta``, and the next state."""
        raise NotImplementedError

    def draw(self, local: Vector, center: Vector) -> Vector:
        """Return the update of a worker of an elastic rule, which is also subtracted from its own weights.

        Args:
            local: the worker's weights at the end of a window.
            center: the current center.
        """
        raise NotImplementedError


def apply(rule: Rule, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
    """Return a rule's step as float32, and the next state.

    Raises:
        RuleError: the rule, which may be the user's own, failed or returned an invalid step.
    """
    try:
        step, after = rule.update(delta, state, merge)
        made = np.asarray(step, np.float32)
        if made.shape != delta.shape:
            raise ValueError(f"a step of shape {delta.shape} was expected; got {made.shape}")
    except Exception as error:
        raise RuleError(f"The rule {rule.name!r} failed on an update: {reason_of(error)}") from error
    return made, after


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Raise an error if a setting is invalid.

    Raises:
        ConfigError: ``holds`` is False.
    """
    if not holds:
        raise ConfigError(f"{name} should be {expected}; got {value!r}.")

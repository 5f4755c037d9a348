"""The base class of merge rules, and the facts about an update that a rule may use.

The methods of a rule are pure functions. So a user can write a rule without knowing the endpoint.
"""

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
        staleness: number of other updates merged since this worker last pulled the center; 0 in rounds.
        workers: number of workers with rows, if updates are merged one by one; 1 in rounds, where the updates
            are first reduced to a single one.
        steps: number of batches in the worker's window; 1 in rounds.
        center: in rounds, the center before this update; otherwise empty.
    """

    staleness: int
    workers: int
    steps: int = 1
    center: Vector = EMPTY


class Rule:
    """A merge rule, which computes the change of the center for an update.

    Subclasses hold settings only. The state of a rule is an argument and a result of ``update``. A rule must
    modify neither the state nor the update, because a run may restart from an earlier state.

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
        """Return the rule for a number of workers with rows.

        By default this is the rule itself. Override it if a setting depends on the number of workers.
        """
        return self

    def reduction(self) -> Reduction:
        """Return the reduction of a round's deltas; by default their mean, weighted by rows."""
        return Mean()

    def init(self, center: Vector) -> Any:
        """Return the state before the first update; None if the rule has no state."""
        return None

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return the step to add to the center, of the shape of ``delta``, and the next state."""
        raise NotImplementedError

    def draw(self, local: Vector, center: Vector) -> Vector:
        """Return the update of a worker, if the rule is elastic.

        The worker also subtracts the update from its own weights.

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
            raise ValueError(f"expected a step of shape {delta.shape}; got {made.shape}")
    except Exception as error:
        raise RuleError(f"The rule {rule.name!r} failed on an update: {reason_of(error)}") from error
    return made, after


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Raise an error if a setting is invalid.

    Args:
        name: the name of the setting.
        value: its value.
        holds: True if the value is valid.
        expected: the valid values, in words.

    Raises:
        ConfigError: ``holds`` is False.
    """
    if not holds:
        raise ConfigError(f"{name} should be {expected}; got {value!r}.")

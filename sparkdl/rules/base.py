"""What every rule is: two pure functions, and what the second is told about the update."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.errors import ConfigError, RuleError
from sparkdl.process.reasons import reason_of


class Merge(NamedTuple):
    """What a rule is told about one update.

    Attributes:
        staleness: how many other updates the center took since this worker last pulled; 0 in rounds.
        workers: how many workers with rows send updates that are merged one by one; 1 in rounds, where
            those of all workers were reduced to one.
        steps: how many batches the worker trained on since it last pulled.
        center: in rounds, the center that is to be moved.
    """

    staleness: int
    workers: int
    steps: int = 1
    center: Vector = EMPTY


class Rule:
    """How an update changes the center variable.

    Subclasses hold settings only; the state is handed over, and neither it nor an update is changed, so
    that a run can be taken up again from an earlier one.

    Attributes:
        name: the word that ``merge=`` takes.
        rounds: why the rule has no meaning where updates are merged in rounds, or None where it has one.
        alone: the same for updates that are merged one by one.
        elastic: whether a worker keeps weights of its own, and ``draw`` says what it sends.
        momentum: whether the workers' optimizer has to be SGD with Nesterov's momentum.
    """

    name: ClassVar[str]
    rounds: ClassVar[str | None] = None
    alone: ClassVar[str | None] = None
    elastic: ClassVar[bool] = False
    momentum: ClassVar[bool] = False

    def bound(self, num_workers: int) -> Rule:
        """Return the rule for this many workers with rows: itself, unless a setting depends on it."""
        return self

    def reduction(self) -> Reduction:
        """Return what makes one delta of a round's; a mean weighted by rows, unless a rule says else."""
        return Mean()

    def init(self, center: Vector) -> Any:
        """Return the state before the first merge; most rules have none."""
        return None

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return what one update adds to the center, shape of ``delta``, and the next state."""
        raise NotImplementedError

    def draw(self, local: Vector, center: Vector) -> Vector:
        """Return what a worker of an elastic rule sends, and takes off its own weights.

        Args:
            local: the worker's weights at the end of a window.
            center: the center of this moment.
        """
        raise NotImplementedError


def apply(rule: Rule, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
    """Return a rule's step as float32, and the next state.

    Raises:
        RuleError: the rule, which may be the user's own, failed, or made something else than a step.
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
    """Refuse a setting that does not hold.

    Raises:
        ConfigError: it does not.
    """
    if not holds:
        raise ConfigError(f"{name} should be {expected}; got {value!r}.")

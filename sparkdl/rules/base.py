"""What every rule is: two pure functions, and what the second is told about the update."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from sparkdl.weights import Vector


class Merge(NamedTuple):
    """What a rule is told about one update.

    Attributes:
        staleness: how many other updates the center took since this worker last pulled; 0 in rounds.
        workers: how many workers send updates that are merged one by one; 1 in rounds, where those of
            all workers were reduced to one.
    """

    staleness: int
    workers: int


class Rule:
    """How an update changes the center variable. Subclasses are stateless; state is handed over."""

    name: ClassVar[str]
    reduces: ClassVar[Literal["mean", "sum"]] = "mean"  # how a round makes one delta of its workers'

    def init(self, center: Vector) -> Any:
        """Return the state before the first merge; most rules have none."""
        return None

    def update(self, delta: Vector, state: Any, merge: Merge) -> tuple[Vector, Any]:
        """Return what one update adds to the center, shape of ``delta``, and the next state."""
        raise NotImplementedError

    def adopt(self, local: Vector, center: Vector) -> Vector:
        """Return the weights that a worker goes on with: the center."""
        return center

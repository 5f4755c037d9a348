"""What a worker's loop asks of a model, whatever Keras runs on."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from sparkdl.weights import Array, Vector


class Batch(NamedTuple):
    """Rows as Keras takes them: arrays of equal length; ``sample_weight`` None where there is none."""

    x: Array
    y: Array
    sample_weight: Array | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.x)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return what Keras's ``train_step`` takes in ``fit``: (x, y) or (x, y, sample_weight)."""
        return (self.x, self.y) if self.sample_weight is None else tuple(self)


class Replica(Protocol):
    """One worker's model, moved in and out as flat float32 vectors."""

    model: Any

    def gradient(self, batch: Batch) -> Vector:
        """Return the gradient of the batch's loss, shape (trainable,); metrics take the batch in."""

    def apply(self, gradient: Vector) -> None:
        """Take one optimizer step along a gradient."""

    def step(self, batch: Batch) -> None:
        """Train on a batch with the replica's own optimizer; metrics take the batch in."""

    def test(self, batch: Batch) -> None:
        """Let the metrics take in a batch without training on it."""

    def parameters(self) -> Vector:
        """Return the trainable variables."""

    def set_parameters(self, parameters: Vector) -> None:
        """Set the trainable variables."""

    def statistics(self) -> Vector:
        """Return the moving statistics."""

    def set_statistics(self, statistics: Vector) -> None:
        """Set the moving statistics."""

    def loss_sums(self) -> tuple[float, float]:
        """Return the sum of losses and of weights that the loss metric has taken in."""

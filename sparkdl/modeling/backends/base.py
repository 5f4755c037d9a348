"""What a worker's loop asks of a model, whatever Keras runs on."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from sparkdl.core.vectors import Vector
from sparkdl.data.batch import Batch


class Reading(NamedTuple):
    """What is read from a replica at once.

    Attributes:
        vector: the trainable variables, how far they moved, or a gradient of them.
        statistics: the moving statistics.
        loss: the sum of losses and of weights that the loss metric has taken in.
        denominator: what a gradient weighs by in the mean of all workers; 0: the rows it was taken over.
        sliced: whether the vector is a gradient with slices, encoded as in ``core.sparse_gradients``.
    """

    vector: Vector
    statistics: Vector
    loss: tuple[float, float]
    denominator: float = 0.0
    sliced: bool = False


class Mean(NamedTuple):
    """What a round makes of its workers' gradients and statistics.

    ``sliced``: whether the gradient has slices, encoded as in ``core.sparse_gradients``.
    """

    gradient: Vector
    statistics: Vector
    sliced: bool = False


class Center(NamedTuple):
    """What a replica goes on from."""

    parameters: Vector
    statistics: Vector


class Replica(Protocol):
    """One worker's model, moved in and out as flat float32 vectors.

    Attributes:
        exact: whether every trainable variable holds just what it is set to.
        slices: how many words a gradient with slices may have; one that has more, or on a backend that keeps
            none, is dense. 0: all are.
    """

    exact: bool
    slices: int

    @property
    def model(self) -> Any:
        """The Keras model, its variables up to date until the replica's next move."""

    def gradient(self, batch: Batch, last: Mean | None = None, scale: float | None = None) -> Reading:
        """Apply the last mean gradient, if given, then return the gradient of the batch's loss.

        Args:
            batch: this worker's share of a batch.
            last: the mean of the gradients of the batch before.
            scale: rows of the whole batch per row of this share, which multiplies losses that are sums and
                divides what metrics count as one batch; None if the share is the whole batch.
        """

    def apply(self, mean: Mean) -> None:
        """Take one optimizer step along a mean gradient, and set the statistics unless they are empty."""

    def step(self, batch: Batch, center: Center | None = None, since: Vector | None = None) -> Reading | None:
        """Go on from the center, if given, and train on a batch.

        Args:
            batch: what to train on.
            center: what to go on from.
            since: earlier trainable variables, float32; how far they moved is returned where it is given.
        """

    def catch_up(self) -> None:
        """Do what could wait, now that there is time; the next move, or use of the model, does it too."""

    def test(self, batch: Batch) -> None:
        """Let the metrics take in a batch without training on it."""

    def loss(self) -> tuple[float, float]:
        """Return the sum of losses and of weights that the loss metric has taken in."""

    def read(self) -> Reading:
        """Return the trainable variables."""

    def write(self, center: Center) -> None:
        """Set the trainable variables, and the statistics unless they are empty."""

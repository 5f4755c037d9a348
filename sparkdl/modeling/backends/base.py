"""The interface between a worker's loop and a model, for every supported backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from sparkdl.core.vectors import Vector
from sparkdl.data.batch import Batch


class Reading(NamedTuple):
    """The values read from a replica in one call.

    Attributes:
        vector: the trainable variables, their change, or their gradient.
        statistics: the moving statistics.
        loss: the sums of losses and of weights that the loss metric has accumulated.
        denominator: the weight of a gradient in the mean over all workers; 0 stands for its number of rows.
        sliced: whether the vector is a gradient with slices, encoded as in ``core.sparse_gradients``.
    """

    vector: Vector
    statistics: Vector
    loss: tuple[float, float]
    denominator: float = 0.0
    sliced: bool = False


class RoundMeans(NamedTuple):
    """The means of the workers' gradients and statistics in a round.

    ``sliced``: whether the gradient has slices, encoded as in ``core.sparse_gradients``.
    """

    gradient: Vector
    statistics: Vector
    sliced: bool = False


class Center(NamedTuple):
    """The values from which a replica continues."""

    parameters: Vector
    statistics: Vector


class Replica(Protocol):
    """One worker's model, read and written as flat float32 vectors.

    Attributes:
        exact: whether every trainable variable holds exactly the values that it is set to.
        slices: maximum length of a gradient with slices, in 32-bit words. A longer one is made dense. If this
            is 0, or if the backend keeps no slices, all gradients are dense. None: as 0, but slices that the
            optimizer does not simply add up are refused.
    """

    exact: bool
    slices: int | None

    @property
    def model(self) -> Any:
        """The Keras model. Its variables are up to date until the replica's next operation."""

    def gradient(self, batch: Batch, last: RoundMeans | None = None, scale: float | None = None) -> Reading:
        """Apply the last mean gradient, if given, then return the gradient of the batch's loss.

        Args:
            batch: this worker's share of a batch.
            last: the mean gradient of the previous batch.
            scale: rows of the whole batch per row of this share; None if the share is the whole batch. It
                multiplies losses that are sums. A value that a metric takes once per batch gets the weight
                1 / ``scale``.
        """

    def apply(self, mean: RoundMeans) -> None:
        """Take one optimizer step along a mean gradient, and set the statistics unless they are empty."""

    def step(self, batch: Batch, center: Center | None = None, since: Vector | None = None) -> Reading | None:
        """Set the center, if given, and train on a batch.

        Args:
            batch: the batch.
            center: the values from which to continue.
            since: earlier trainable variables, float32.

        Returns:
            The change of the trainable variables from ``since``, with the statistics and the sums of the loss
            metric; None without ``since``.
        """

    def catch_up(self) -> None:
        """Do deferred work now. Otherwise the next operation, or an access to the model, does it."""

    def test(self, batch: Batch) -> None:
        """Update the metrics with a batch, without training on it."""

    def loss(self) -> tuple[float, float]:
        """Return the sums of losses and of weights that the loss metric has accumulated."""

    def read(self) -> Reading:
        """Return the trainable variables, the statistics, and the sums of the loss metric."""

    def write(self, center: Center) -> None:
        """Set the trainable variables, and the statistics unless they are empty."""

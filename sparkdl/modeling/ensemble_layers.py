"""Layers that combine the outputs of an ensemble's members.

They are registered with Keras, so a model that contains them is saved and loaded as any other. A process that
loads such a file with Keras alone has to import this module first, as ``modeling.serialization`` does.

All layers add the members one by one, in their order. So every backend and every process computes the same
bits from the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="sparkdl")
class Vote(keras.layers.Layer):  # type: ignore[misc]
    """The weighted mean of the members' outputs, or of their votes for a class.

    Args:
        shares: the weight of each member; they sum to 1.
        voting: "soft" for the mean of outputs, "hard" for the share of votes of each class.
        logits: with "hard", whether an output of one unit is a logit, whose threshold is 0 instead of 0.5.
        options: arguments of keras.layers.Layer.
    """

    def __init__(
        self, shares: Sequence[float], voting: str = "soft", logits: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.shares, self.voting, self.logits = list(shares), voting, logits

    def call(self, outputs: Sequence[Any]) -> Any:
        """Return the combined output.

        Args:
            outputs: the output of each member. All have the same shape, and so does the result.
        """
        if self.voting == "hard":
            outputs = [self._vote(output) for output in outputs]
        return weighted_sum(outputs, self.shares)

    def _vote(self, output: Any) -> Any:
        """Return 1 for the class that a member votes for, and 0 for the others."""
        if output.shape[-1] == 1:
            return ops.cast(output > (0.0 if self.logits else 0.5), self.compute_dtype)
        return ops.one_hot(ops.argmax(output, axis=-1), output.shape[-1], dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer."""
        config: dict[str, Any] = super().get_config()
        return config | {"shares": list(self.shares), "voting": self.voting, "logits": self.logits}


@keras.saving.register_keras_serializable(package="sparkdl")
class Spread(keras.layers.Layer):  # type: ignore[misc]
    """The weighted standard deviation of the members' outputs.

    Args:
        shares: the weight of each member; they sum to 1.
        options: arguments of keras.layers.Layer.
    """

    def __init__(self, shares: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.shares = list(shares)

    def call(self, outputs: Sequence[Any]) -> Any:
        """Return the standard deviation of each entry, in the shape of one output."""
        # The square of a number above 255 is not a float16.
        wide = "float64" if self.compute_dtype == "float64" else "float32"
        outputs = [ops.cast(output, wide) for output in outputs]
        mean = weighted_sum(outputs, self.shares)
        variance = weighted_sum([ops.square(output - mean) for output in outputs], self.shares)
        return ops.cast(ops.sqrt(variance), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer."""
        config: dict[str, Any] = super().get_config()
        return config | {"shares": list(self.shares)}


@keras.saving.register_keras_serializable(package="sparkdl")
class LearnedShares(keras.layers.Layer):  # type: ignore[misc]
    """A weighted mean of the members' outputs whose weights are trained.

    The weights are a softmax, so that they are positive and sum to 1. They begin equal.
    """

    def build(self, shapes: Sequence[Any]) -> None:
        """Create the variable of the weights, before the softmax."""
        self.scores = self.add_weight(shape=(len(shapes),), initializer="zeros", name="scores")

    def call(self, outputs: Sequence[Any]) -> Any:
        """Return the weighted mean, in the shape of one output."""
        shares = ops.softmax(self.scores)
        return weighted_sum(outputs, [shares[member] for member in range(len(outputs))])

    def learned(self) -> list[float]:
        """Return the weight of each member."""
        return [float(share) for share in ops.convert_to_numpy(ops.softmax(self.scores))]


def weighted_sum(outputs: Iterable[Any], weights: Iterable[Any]) -> Any:
    """Return the weighted sum of outputs, which are added in their order."""
    first, *others = (output * weight for output, weight in zip(outputs, weights, strict=True))
    for each in others:
        first = first + each
    return first

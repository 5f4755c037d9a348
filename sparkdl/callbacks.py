"""Keras callbacks for the learning rate.

Each callback defines a factor of the learning rate for each point of training. ``SparkModel`` sends the
resulting rate to the workers with every exchange, and leaves the rate of the model on the driver unchanged.
In plain ``model.fit`` the number of workers is 1.

Example:
    >>> callbacks = [LearningRateScaling(), LearningRateWarmup(epochs=5)]
    >>> spark_model.fit(data, epochs=90, callbacks=callbacks)  # doctest: +SKIP
"""

from __future__ import annotations

from math import isnan

import keras

from sparkdl.config import Scaling
from sparkdl.core.validation import choose
from sparkdl.errors import ConfigError
from sparkdl.modeling import optimizers

KEPT = "_sparkdl_rate"  # attribute of an optimizer during a batch: the learning rate to restore after it


class LearningRateFactor(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that multiplies the learning rate; subclasses define the factor."""

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return the factor of the learning rate.

        Args:
            epoch: training progress, in epochs.
            num_workers: number of workers.
        """
        raise NotImplementedError

    def on_train_begin(self, logs: object = None) -> None:
        """Raise an error if the learning rate is a schedule.

        Raises:
            ConfigError: the learning rate is not a number.
        """
        self._epoch = 0
        if isnan(optimizers.learning_rate(self.model)):
            raise ConfigError(
                f"{type(self).__name__} needs an optimizer whose learning rate is a number; got a schedule. "
                "Scale the schedule, or use a schedule with a warm-up (CosineDecay(warmup_steps=...))."
            )

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Store the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """In plain Keras, set the rate of one batch. The factors of several callbacks multiply."""
        optimizer, rate = self.model.optimizer, optimizers.learning_rate(self.model)
        if not hasattr(optimizer, KEPT):
            setattr(optimizer, KEPT, rate)
        done = self._epoch + batch / (self.params.get("steps") or float("inf"))
        optimizers.set_learning_rate(self.model, rate * self.factor(done, 1))

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Restore the rate, so that other callbacks find the value they set."""
        optimizer = self.model.optimizer
        if hasattr(optimizer, KEPT):
            optimizers.set_learning_rate(self.model, getattr(optimizer, KEPT))
            delattr(optimizer, KEPT)


class LearningRateScaling(LearningRateFactor):
    """Multiply the learning rate by the number of workers K (Goyal et al., 2017), or by its square root.

    Use it if K workers use K times the rows per update: with ``batch_size_per_worker=`` in synchronous mode
    at frequency "batch". If the workers train separately for several batches, it replaces the default
    rule's factor, which is sqrt(K), with K at most 8.

    Args:
        rule: "linear" (default): by K; "sqrt": by the square root of K, which suits Adam and its variants.

    Raises:
        ConfigError: the rule is not known.
    """

    def __init__(self, rule: str = "linear") -> None:
        super().__init__()
        self.rule = choose("rule", rule, Scaling)

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return K, or its square root."""
        return num_workers if self.rule is Scaling.LINEAR else num_workers**0.5


class LearningRateWarmup(LearningRateFactor):
    """Raise the learning rate linearly from a fraction of its value to the full value (Goyal et al., 2017).

    Args:
        epochs: length of the rise, in epochs; may be fractional. Default 5, as in the paper.
        start: the fraction at the beginning, from 0 to 1. None: 1 / K. Training then begins at the
            compiled rate with ``LearningRateScaling()``, and at 1 / sqrt(K) of it with the default
            rule's factor sqrt(K).

    Raises:
        ConfigError: a setting is out of its range.
    """

    def __init__(self, epochs: float = 5, start: float | None = None) -> None:
        super().__init__()
        if not epochs > 0:
            raise ConfigError(f"epochs should be a positive number; got {epochs!r}.")
        if start is not None and not 0 <= start <= 1:
            raise ConfigError(f"start should be a number from 0 to 1, or None; got {start!r}.")
        self.epochs, self.start = epochs, start

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return the fraction at this point, on the straight line from ``start`` to 1."""
        start = 1 / num_workers if self.start is None else self.start
        return start + (1 - start) * min(1.0, epoch / self.epochs)

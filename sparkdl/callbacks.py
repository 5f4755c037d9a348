"""Help with the learning rate, as Keras callbacks.

Each says by what the rate is multiplied at some moment of training. With ``SparkModel`` that reaches the
workers with every exchange, and the model on the driver keeps the rate that it was compiled with; in plain
``model.fit`` it is what one worker would do.

Example:
    >>> callbacks = [LearningRateScaling(), LearningRateWarmup(epochs=5)]
    >>> spark_model.fit(data, epochs=90, callbacks=callbacks)  # doctest: +SKIP
"""

from __future__ import annotations

from math import isnan
from typing import Any

import keras

from sparkdl.config import Scaling
from sparkdl.core.validation import choose
from sparkdl.errors import ConfigError
from sparkdl.modeling import optimizers

KEPT = "_sparkdl_rate"  # an optimizer's attribute during a batch: the rate that its model has otherwise


class LearningRateFactor(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that multiplies the learning rate; subclasses say by what."""

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return by what the rate is multiplied.

        Args:
            epoch: how much of training is done, in epochs.
            num_workers: how many workers train.
        """
        raise NotImplementedError

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse an optimizer whose rate is not a number.

        Raises:
            ConfigError: a schedule gives it.
        """
        self._epoch = 0
        if isnan(optimizers.learning_rate(self.model)):
            raise ConfigError(
                f"{type(self).__name__} is for an optimizer whose learning rate is a number; got a schedule. "
                "Scale the schedule, or take its own warm-up (CosineDecay(warmup_steps=...))."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """In plain Keras, set the rate of one batch; several callbacks multiply one after the other."""
        optimizer, rate = self.model.optimizer, optimizers.learning_rate(self.model)
        if not hasattr(optimizer, KEPT):
            setattr(optimizer, KEPT, rate)
        done = self._epoch + batch / (self.params.get("steps") or float("inf"))
        optimizers.set_learning_rate(self.model, rate * self.factor(done, 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set it back, so that other callbacks find what they left."""
        optimizer = self.model.optimizer
        if hasattr(optimizer, KEPT):
            optimizers.set_learning_rate(self.model, getattr(optimizer, KEPT))
            delattr(optimizer, KEPT)


class LearningRateScaling(LearningRateFactor):
    """Multiply the learning rate by the number of workers K (Goyal et al., 2017), or by its square root.

    For settings in which K workers use K times the rows per update: ``batch_size_per_worker=`` in
    synchronous mode at "batch". Where workers step on their own it takes the place of what the default does.

    Args:
        rule: "linear" (default): by K; "sqrt": by its square root, which suits Adam and its kin.

    Raises:
        ConfigError: another rule.
    """

    def __init__(self, rule: str = "linear") -> None:
        super().__init__()
        self.rule = choose("rule", rule, Scaling)

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return K, or its root."""
        return num_workers if self.rule is Scaling.LINEAR else num_workers**0.5


class LearningRateWarmup(LearningRateFactor):
    """Begin with a part of the learning rate and rise to it steadily (Goyal et al., 2017).

    Args:
        epochs: how long it rises, in epochs; parts of one count. Default 5, as in the paper.
        start: with which part it begins, from 0 up to 1. None: 1 / K, which is the rate of one worker
            where ``LearningRateScaling`` multiplies by K, and a root of K less where the default does.

    Raises:
        ConfigError: a setting out of its range.
    """

    def __init__(self, epochs: float = 5, start: float | None = None) -> None:
        super().__init__()
        if not epochs > 0:
            raise ConfigError(f"epochs should be a positive number; got {epochs!r}.")
        if start is not None and not 0 <= start <= 1:
            raise ConfigError(f"start should be from 0 up to 1, or None; got {start!r}.")
        self.epochs, self.start = epochs, start

    def factor(self, epoch: float, num_workers: int) -> float:
        """Return the part at this moment: the straight line from ``start`` to 1."""
        start = 1 / num_workers if self.start is None else self.start
        return start + (1 - start) * min(1.0, epoch / self.epochs)

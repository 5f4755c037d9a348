"""The batch hooks of the user's callbacks, called on the driver while executors train.

Executors do not wait for the driver after a batch. They report rows and metric states about twice a second.
At each report the driver calls the hooks of every batch since the one before, in order, with the merged
results at that report. An epoch thus has as many calls as in Keras, and the last one has the final results.

The driver's model has the weights that the epoch began with meanwhile. A callback with a number of batches
as ``save_freq``, such as ModelCheckpoint, is a *saver*: it is called with weights that were taken from the
workers for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import isfinite
from typing import Any

import keras

from sparkdl.callbacks import LearningRateFactor
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_variables, optimizers

logger = logging.getLogger(__name__)
HOOKS = "on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"
TEST_HOOKS = "on_test_batch_begin", "on_test_batch_end"
LOOK_AT_RESULTS = "keras", "tqdm", "wandb", "mlflow"  # packages whose batch hooks need no weights


def overrides(callback: Any, hook: str) -> bool:
    """Return whether a callback has a hook of its own, in its class or as an attribute."""
    method = getattr(callback, hook, None)
    own = getattr(method, "__func__", method)
    return bool(own is not getattr(keras.callbacks.Callback, hook))


def saves(callback: Any) -> bool:
    """Return whether a callback saves weights after a number of batches, as ModelCheckpoint can."""
    freq = getattr(callback, "save_freq", None)
    return isinstance(freq, int) and not isinstance(freq, bool) and _listens(callback)


def require_results_only(callback: Any) -> None:
    """Check that a callback's batch hooks need nothing but results.

    Raises:
        ConfigError: it is TensorBoard, and profiles batches.
    """
    if isinstance(callback, keras.callbacks.TensorBoard) and callback._should_trace:
        raise ConfigError(
            "TensorBoard(profile_batch=...) profiles this process, and executors train. Leave profile_batch "
            "at 0."
        )


def _listens(callback: Any) -> bool:
    return any(overrides(callback, hook) for hook in HOOKS)


class BatchHooks:
    """The batch hooks of some callbacks.

    Args:
        callbacks: the callbacks.
        model: the user's model.

    Attributes:
        done: the batches of the epoch whose hooks were called.
        savers: the callbacks that are called with weights of their batch.
    """

    def __init__(self, callbacks: Sequence[Any], model: keras.Model) -> None:
        self.model, self.done = model, 0
        self.all = callbacks
        kept = [one for one in callbacks if not isinstance(one, LearningRateFactor)]
        self.savers = [one for one in kept if saves(one)]
        self.others = [one for one in kept if one not in self.savers]
        self.every = min((one.save_freq for one in self.savers), default=0)
        self.saved, self.unsaved = 0, 0  # batches of the epoch at the savers' last call, and since one saved
        self.iterations = 0
        self.weights: list[bytes] = []  # digests of those that hooks are to leave; none: they may set them
        self.announced, self.warned = False, False

    @property
    def size(self) -> int:
        """The batches that hooks are called once for."""
        return getattr(self.model, "steps_per_execution", None) or 1

    @property
    def listening(self) -> list[Any]:
        """The callbacks that have batch hooks now; some make theirs when an epoch begins."""
        return [one for one in self.others if _listens(one)]

    @property
    def strangers(self) -> list[str]:
        """The names of the callbacks with batch hooks that may look at more than results."""
        return [
            type(one).__name__
            for one in self.listening
            if isinstance(one, keras.callbacks.LambdaCallback)
            or type(one).__module__.split(".")[0] not in LOOK_AT_RESULTS
        ]

    def begin(self) -> None:
        """Begin an epoch."""
        self.done, self.saved = 0, 0
        self.iterations = int(optimizers.batches_seen(self.model))
        self.mark()
        if (self.listening or self.savers) and not self.announced:
            self._announce()

    def mark(self) -> None:
        """Take the weights that the model has now for those that hooks are to leave."""
        self.weights = keras_variables.digests(self.model.weights) if self.strangers else []

    def _announce(self) -> None:
        self.announced = True
        for saver in self.savers:
            logger.info(
                "%s(save_freq=%d) is called with weights of the workers after so many batches, or a little "
                "later, and at the end of each epoch.",
                type(saver).__name__,
                saver.save_freq,
            )
        if self.listening:
            logger.log(
                logging.WARNING if self.strangers else logging.INFO,
                "%s: batch hooks are called on the driver about twice a second, for each batch since the "
                "last time, with the results of all workers so far. Until the epoch ends, the model has "
                "the weights that it began with.",
                ", ".join(type(one).__name__ for one in self.listening),
            )

    def reach(self, done: int, results: dict[str, Any], *, ends: bool = False) -> None:
        """Call the hooks of each batch before ``done`` whose hooks were not called yet.

        A callback that stops training ends that, as in Keras, which calls hooks once for each
        ``steps_per_execution`` batches.

        Args:
            done: how many batches of the epoch are done.
            results: the results of all workers so far.
            ends: whether that are all batches of the epoch.
        """
        size = self.size
        callbacks, first = self.listening, self.done == 0
        rate = optimizers.learning_rate(self.model)
        while callbacks and self.done < done and not self.model.stop_training:
            if self.done + size > done and not ends:
                break
            begin, self.done = self.done, self.done + size
            optimizers.batches_seen(self.model).assign(self.iterations + min(self.done, done))
            self._call(callbacks, begin, self.done - 1, results)
        if isfinite(rate) and rate != optimizers.learning_rate(self.model) and not self.warned:
            self._warn_of_rate(callbacks)
        if first and self.done:
            self.check()

    def _warn_of_rate(self, callbacks: Sequence[Any]) -> None:
        self.warned = True
        logger.warning(
            "A batch hook of %s set the learning rate, which reaches workers some batches later than in "
            "Keras. Use a schedule in the optimizer or sparkdl.callbacks.LearningRateWarmup instead.",
            ", ".join(type(one).__name__ for one in callbacks),
        )

    @staticmethod
    def _call(callbacks: Sequence[Any], begin: int, end: int, results: dict[str, Any]) -> None:
        logs = dict(results)
        for callback in callbacks:
            callback.on_train_batch_begin(begin, logs={})
        for callback in callbacks:
            callback.on_train_batch_end(end, logs=logs)

    def check(self) -> None:
        """Check that no hook has set weights since the epoch began.

        Raises:
            ConfigError: one has.
        """
        if self.weights and self.weights != keras_variables.digests(self.model.weights):
            raise ConfigError(
                f"A batch hook of {', '.join(self.strangers)} set weights of the model, which executors have "
                "while an epoch runs. Set weights in on_epoch_begin or on_epoch_end, or give variables a "
                "constraint."
            )

    def test(self, batches: int, results: dict[str, Any]) -> None:
        """Call the hooks of each batch of an evaluation that is over, with its results."""
        callbacks = [one for one in self.all if any(overrides(one, hook) for hook in TEST_HOOKS)]
        for begin in range(0, batches if callbacks else 0, self.size):
            logs = dict(results)
            for callback in callbacks:
                callback.on_test_batch_begin(begin, logs={})
            for callback in callbacks:
                callback.on_test_batch_end(begin + self.size - 1, logs=logs)

    def is_due(self, done: int) -> bool:
        """Return whether a saver is to be called after so many batches of the epoch, or soon after."""
        return bool(self.savers) and self.unsaved + done - self.saved >= self.every

    def save(self, done: int, results: dict[str, Any]) -> None:
        """Call the savers for the last of so many batches of the epoch, whose weights the model has."""
        if not self.savers or done <= self.saved:
            return
        self.unsaved += done - self.saved
        if self.unsaved >= self.every:
            self.unsaved = 0
        self.saved = done
        self._call(self.savers, done - 1, done - 1, results)

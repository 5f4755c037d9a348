"""The batch hooks of the user's callbacks, called on the driver while executors train.

Executors do not wait for the driver after a batch. They report rows and metric states about twice a second.
At each report the driver calls the hooks of every batch since the last report, in order, with the merged
results so far. So an epoch has as many calls as in Keras, and the last one gets the final results.

A callback whose ``save_freq`` is a number of batches, such as a ModelCheckpoint, is a *saver*. Before it is
called, the driver requests the workers' weights and loads them into its model. Without savers, the driver's
model keeps the weights that the epoch began with until the epoch ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import isfinite
from typing import Any

import keras

from sparkdl.callbacks import LearningRateFactor
from sparkdl.config import Placement
from sparkdl.driver.display.progress import Results
from sparkdl.errors import ConfigError
from sparkdl.modeling import event_files, keras_internals, keras_variables, optimizers
from sparkdl.modeling.keras_types import Callback, Model

logger = logging.getLogger(__name__)
HOOKS = "on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"
TEST_HOOKS = "on_test_batch_begin", "on_test_batch_end"
SAVERS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, keras.callbacks.LambdaCallback
LOOK_AT_RESULTS = "keras", "tqdm", "wandb", "mlflow"  # packages whose batch hooks use only results


def overrides(callback: object, hook: str) -> bool:
    """Return True if a callback has its own version of a hook, in its class or as an attribute."""
    method = getattr(callback, hook, None)
    own = getattr(method, "__func__", method)
    return bool(own is not getattr(keras.callbacks.Callback, hook))


def saves(callback: object) -> bool:
    """Return True if a callback saves weights every few batches, as ModelCheckpoint can.

    A callback of the user's with a ``save_freq`` may count its calls, so it is called for each batch.
    """
    freq = getattr(callback, "save_freq", None)
    known = isinstance(callback, SAVERS) or type(callback).__module__.split(".")[0] in LOOK_AT_RESULTS
    return known and isinstance(freq, int) and not isinstance(freq, bool) and _listens(callback)


def require_usable(callback: Callback) -> None:
    """Refuse a TensorBoard that profiles batches, or whose packages are not installed.

    Raises:
        ConfigError: the callback is a TensorBoard with ``profile_batch``.
        ModuleNotFoundError: TensorFlow or TensorBoard is not installed. Keras would raise it in training.
    """
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return
    event_files.require_summaries("keras.callbacks.TensorBoard")
    if keras_internals.profiles_batches(callback):
        raise ConfigError(
            "TensorBoard(profile_batch=...) would profile the driver, but the executors train. Set "
            "profile_batch=0."
        )


def _listens(callback: object) -> bool:
    return any(overrides(callback, hook) for hook in HOOKS)


class BatchHooks:
    """The batch hooks of some callbacks.

    Args:
        callbacks: the callbacks.
        model: the user's model.

    Attributes:
        done: the number of batches of the epoch whose hooks were called.
        savers: the callbacks that are called with the workers' current weights.
    """

    def __init__(self, callbacks: Sequence[Callback], model: Model) -> None:
        self.model, self.done = model, 0
        self.all = callbacks
        kept = [one for one in callbacks if not isinstance(one, LearningRateFactor)]
        self.savers = [one for one in kept if saves(one)]
        self.others = [one for one in kept if one not in self.savers]
        self.every = min((one.save_freq for one in self.savers), default=0)
        self.saved, self.unsaved = 0, 0  # batches at the savers' last call, and since a save was last due
        self.iterations = 0
        self.weights: list[bytes] = []  # digests of weights that hooks must not change; empty: no check
        self.announced, self.warned = False, False

    @property
    def size(self) -> int:
        """The number of batches per call of a hook."""
        return getattr(self.model, "steps_per_execution", None) or 1

    @property
    def listening(self) -> list[Callback]:
        """The callbacks that have batch hooks now; some create their hooks when an epoch begins."""
        return [one for one in self.others if _listens(one)]

    @property
    def not_from_keras(self) -> list[str]:
        """The names of the callbacks whose batch hooks may use more than results."""
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
        """Record the model's current weights, which hooks must not change."""
        self.weights = keras_variables.digests(self.model.weights) if self.not_from_keras else []

    def _announce(self) -> None:
        self.announced = True
        for saver in self.savers:
            logger.info(
                "%s(save_freq=%d) runs with the merged weights after that many batches or a little later, "
                "and at the end of each epoch.",
                type(saver).__name__,
                saver.save_freq,
            )
        if self.listening:
            logger.log(
                logging.WARNING if self.not_from_keras else logging.INFO,
                "%s: batch hooks are called on the driver. About twice a second, they are called once for "
                "each new batch, with the results of all workers so far. The model on the driver keeps the "
                "weights from the start of the epoch until the epoch ends.",
                ", ".join(type(one).__name__ for one in self.listening),
            )

    def reach(self, done: int, results: Results, *, ends: bool = False) -> None:
        """Call the hooks of each batch before ``done`` whose hooks were not called yet.

        As in Keras, hooks are called once per ``steps_per_execution`` batches, until a callback stops
        training.

        Args:
            done: the number of batches of the epoch that are done.
            results: the results of all workers so far.
            ends: whether these are all batches of the epoch.
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

    def _warn_of_rate(self, callbacks: Sequence[Callback]) -> None:
        self.warned = True
        logger.warning(
            "A batch hook of %s set the learning rate. The new rate reaches workers some batches later than "
            "in Keras. Use a schedule in the optimizer or sparkdl.callbacks.LearningRateWarmup instead.",
            ", ".join(type(one).__name__ for one in callbacks),
        )

    @staticmethod
    def _call(callbacks: Sequence[Callback], begin: int, end: int, results: Results) -> None:
        logs = dict(results)
        for callback in callbacks:
            callback.on_train_batch_begin(begin, logs={})
        for callback in callbacks:
            callback.on_train_batch_end(end, logs=logs)

    def check(self) -> None:
        """Raise an error if a hook has set weights since the last call of ``mark``.

        Raises:
            ConfigError: a hook has set weights.
        """
        if self.weights and self.weights != keras_variables.digests(self.model.weights):
            raise ConfigError(
                f"A batch hook of {', '.join(self.not_from_keras)} set weights of the model during an epoch. "
                "The executors would overwrite them. Set weights in on_epoch_begin or on_epoch_end, or use "
                "constraints on the variables."
            )

    def test(self, batches: int, results: Results) -> None:
        """Call the hooks of each batch of a completed evaluation, with its results."""
        callbacks = [one for one in self.all if any(overrides(one, hook) for hook in TEST_HOOKS)]
        for begin in range(0, batches if callbacks else 0, self.size):
            logs = dict(results)
            for callback in callbacks:
                callback.on_test_batch_begin(begin, logs={})
            for callback in callbacks:
                callback.on_test_batch_end(begin + self.size - 1, logs=logs)

    def is_due(self, done: int) -> bool:
        """Return True if a saver is due after ``done`` batches of the epoch."""
        return bool(self.savers) and self.unsaved + done - self.saved >= self.every

    def save(self, done: int, results: Results) -> None:
        """Call the savers for batch ``done - 1``. The model must already hold that batch's weights."""
        if not self.savers or done <= self.saved:
            return
        self.unsaved += done - self.saved
        if self.unsaved >= self.every:
            self.unsaved = 0
        self.saved = done
        self._call(self.savers, done - 1, done - 1, results)


def require_savers_on_driver(savers: Sequence[Any], placement: Placement) -> None:
    """Require an endpoint on the driver if callbacks save weights after batches.

    Args:
        savers: these callbacks.
        placement: the place of the endpoint.

    Raises:
        ConfigError: the endpoint is not in this process.
    """
    if savers and placement is Placement.WORKER:
        raise ConfigError(
            f"{type(savers[0]).__name__}(save_freq={savers[0].save_freq}) saves weights within an "
            'epoch, which needs placement="driver" or "executors"; got placement="worker". Set '
            'save_freq="epoch".'
        )

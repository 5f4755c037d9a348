"""A fit that can be paused at the end of an epoch, and resumed later.

To pause a fit, its first callback raises an exception at the beginning of the next epoch. ``fit`` then
completes the checkpoint of the last epoch, and the next call of ``fit`` resumes from it. ``stop_training`` is
not suitable: a fit that it ends counts as complete, also in its checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkdl.api.spark_model import SparkModel
from sparkdl.config import CheckpointConfig
from sparkdl.errors import CheckpointError
from sparkdl.modeling.keras_types import Callback
from sparkdl.ui.history import History

ON_TRAIN_BEGIN = "on_train_begin"


class Paused(Exception):  # noqa: N818 - it is not an error
    """A fit was paused; its checkpoint folder has everything that it needs to resume."""


class Gate(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that lets a fit begin its next epoch, or pauses it.

    Attributes:
        ended: a function that gets the number of epochs done, at the end of each epoch.
        may_train: a function that returns True if the next epoch may begin. Its argument is True if this
            epoch is the first one since the start or the last pause.
        expected: the number of the next epoch, from 0; None before the first one.
        first: whether no epoch has begun since the start or the last pause.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: Callable[[int], object] = lambda done: None
        self.may_train: Callable[[bool], bool] = lambda first: True
        self.expected: int | None = None
        self.first = True

    def on_train_begin(self, logs: object = None) -> None:
        """Record that the next epoch is the first one since the start or the last pause."""
        self.first = True

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Pause the fit if the epoch may not begin.

        Raises:
            Paused: the epoch may not begin.
            CheckpointError: the fit does not continue where it was paused.
        """
        if self.first and self.expected not in (None, epoch):
            raise CheckpointError(
                f"A fit that was paused after epoch {self.expected} should continue there; its newest "
                f"checkpoint is of epoch {epoch}. The log says why a later checkpoint could not be written. "
                "Make room in the checkpoint folder, or pass another folder as checkpoint=."
            )
        if not self.may_train(self.first):
            raise Paused(f"The scheduler paused the fit before epoch {epoch + 1}; it continues later.")
        self.first = False

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Report the epoch."""
        self.expected = epoch + 1
        self.ended(epoch + 1)


class PausableFit:
    """A call of ``SparkModel.fit`` in one or several pieces.

    Args:
        spark_model: the model.
        arguments: the arguments of ``fit`` by name.
        callbacks: the callbacks among them, as a list.

    Attributes:
        spark_model: the model.
        callbacks: the callbacks of the user.
        gate: the callback that pauses the fit.
        pieces: the number of pieces so far.
    """

    def __init__(
        self, spark_model: SparkModel, arguments: dict[str, Any], callbacks: Sequence[Callback]
    ) -> None:
        self.spark_model, self.gate = spark_model, Gate()
        self.callbacks, self._arguments = list(callbacks), arguments
        self._own_folder: str | None = None
        self.pieces = 0

    @property
    def checkpoint(self) -> CheckpointConfig | None:
        """The user's own checkpoints; None if a temporary folder is used."""
        given = self._arguments.get("checkpoint")
        return None if given is None or self._own_folder else CheckpointConfig.of(given)

    def run(self) -> History:
        """Train to the end or to a pause; call it again after a pause.

        Raises:
            Paused: the gate paused the fit.
            SparkDLError: as ``SparkModel.fit``.
        """
        if self._arguments["checkpoint"] is None:
            self._own_folder = tempfile.mkdtemp(prefix="sparkdl-scheduling-")
            self._arguments["checkpoint"] = CheckpointConfig(self._own_folder)
        resumes = self.pieces > 0
        self.pieces += 1
        given = self._arguments | {"callbacks": [self.gate, *self.callbacks]}
        if resumes:
            given["resume"] = True
        try:
            with begun(self.callbacks if resumes else []):
                return self.spark_model.fit(**given)
        except Paused:
            del self.spark_model.training_histories[-1:]  # the last piece has the epochs of all pieces
            raise

    def close(self) -> None:
        """Remove the checkpoints, unless the user chose their folder, and forget the data."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        self._arguments, self.callbacks = {}, []


@contextmanager
def begun(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Keep the state of callbacks: ignore ``on_train_begin`` in a ``with`` block.

    In ``on_train_begin``, EarlyStopping resets its count, and CSVLogger empties its file.
    """
    callbacks = list({id(callback): callback for callback in callbacks}.values())
    own = [vars(callback).get(ON_TRAIN_BEGIN) for callback in callbacks]  # LambdaCallback sets one
    for callback in callbacks:
        setattr(callback, ON_TRAIN_BEGIN, _do_nothing)
    try:
        yield
    finally:
        for callback, hook in zip(callbacks, own, strict=True):
            delattr(callback, ON_TRAIN_BEGIN)
            if hook is not None:
                setattr(callback, ON_TRAIN_BEGIN, hook)


def _do_nothing(logs: object = None) -> None:
    """Stand in for ``on_train_begin``."""

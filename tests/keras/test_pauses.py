"""Callbacks of a fit that is paused and continued."""

import keras
import pytest

from sparkdl.errors import CheckpointError
from sparkdl.scheduling.pauses import Gate, Paused, begun


def test_callbacks_do_not_begin_again():
    """In the block a callback ignores ``on_train_begin``; afterwards its own hook is back."""
    calls = []
    patient = keras.callbacks.EarlyStopping(patience=3)
    patient.wait = 2
    spoken = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: calls.append("begin"))
    with begun([patient, spoken, patient]):  # Keras allows a callback twice
        for callback in (patient, spoken):
            callback.on_train_begin({})
    assert (2, []) == (patient.wait, calls)

    for callback in (patient, spoken):
        callback.on_train_begin({})
    assert (0, ["begin"]) == (patient.wait, calls)


def test_the_first_epoch_after_a_start_is_trained():
    """A fit is paused only before an epoch that is not the first one since its start."""
    gate = Gate()
    gate.may_train = lambda first: first
    gate.on_train_begin()
    gate.on_epoch_begin(0)
    gate.on_epoch_end(0)

    with pytest.raises(Paused, match="before epoch 2"):
        gate.on_epoch_begin(1)


def test_a_fit_that_lost_its_checkpoint_does_not_train_an_epoch_twice():
    """A fit whose newest checkpoint is older than its pause ends with an error."""
    gate = Gate()
    for hook in (gate.on_epoch_begin, gate.on_epoch_end):
        hook(4)
    gate.on_train_begin()

    with pytest.raises(CheckpointError, match="paused after epoch 5 should continue there"):
        gate.on_epoch_begin(3)

"""An interrupt of a trial run on the user's model is raised after the trial is undone."""

import os
import signal
import time
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.driver import preparation
from sparkdl.driver.fit import FitRun
from sparkdl.modeling import keras_variables, proof, serialization, trainability
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup

X = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


@pytest.fixture(autouse=True)
def python_handles_interrupts(monkeypatch):
    """Handle interrupts even if pytest runs in the background of a shell, which ignores them."""
    monkeypatch.setattr(interrupts, "SOON", 0.05)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    """Press Ctrl-C, and wait for longer than the interrupt is delayed."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.4)


@pytest.fixture
def model():
    """A model with randomness in training."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("what", ["generators", "weights"])
def test_a_step_that_is_tried_out_is_undone(model, what, monkeypatch):
    """An interrupted trial step restores weights, random generators and the optimizer."""
    again, optimizer = serialization.copy_of(model), model.optimizer
    variables = [*model.weights, *keras_variables.generators(model)]
    before = keras_variables.read(variables)
    moved = model.weights if what == "weights" else keras_variables.generators(model)
    write, places, pressed = keras_variables.write, set(map(id, moved)), []

    def interrupted(variables, values):
        for variable, value in zip(variables, values, strict=True):
            moves = not np.array_equal(keras_variables.read([variable])[0], value)
            if moves and id(variable) in places and not pressed:
                pressed.append(variable.path)
                press()
            write([variable], [value])

    monkeypatch.setattr(keras_variables, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(proof.require_same, model, again, (X, Y, None))

    assert pressed
    assert model.optimizer is optimizer
    for one, other in zip(before, keras_variables.read(variables), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_trainable_is_put_back(model, number, monkeypatch):
    """Trainable flags are restored if an interrupt comes while they are set, or while they are reset."""
    flags = trainability.Trainability(model)
    model.layers[1].trainable = False
    set_flags, calls = trainability.Trainability._set, []

    def interrupted(self, *values):
        calls.append(values)
        if len(calls) == number:
            press()
        set_flags(self, *values)

    def apply():
        with flags.applied():
            pass

    monkeypatch.setattr(trainability.Trainability, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(apply)

    assert [True, False, True] == [layer.trainable for layer in model.layers]
    assert not model.layers[1].kernel.trainable


@pytest.mark.parametrize("where", ["acquire", "release"])
def test_a_lease_is_released(monkeypatch, where):
    """An interrupt while a lease is acquired or started releases it, so the next fit need not wait."""
    calls = []

    def step(name):
        def call():
            if name == where:
                press()
            calls.append(name)

        return call

    lease = SimpleNamespace(**{name: step(name) for name in ("acquire", "start", "release")})
    monkeypatch.setattr(preparation, "lease_of", lambda *_: lease)

    def fit():
        with Cleanup() as stack:
            preparation.hold_lease(CheckpointConfig("folder"), TrainConfig(), stack)

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(fit)

    assert "release" == calls[-1]
    assert 1 == calls.count("release")


def test_a_run_that_cannot_be_stopped_has_its_last_snapshot():
    """If workers cannot be stopped, the model still gets the last snapshot that the driver has."""
    coordinator = mock.Mock(
        failure=None, reported=False, **{"stop.side_effect": OSError("Spark was stopped")}
    )

    run = mock.Mock(coordinator=coordinator)

    assert FitRun._interrupted(run, mock.Mock()) is coordinator.stopped_snapshot()

"""Exactly once, proved by counting: every step adds 1 to the only weight, while workers and executors die."""

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyspark import TaskContext

from sparkdl import SparkModel

MASTERS = ("local", "local-cluster", "standalone")
WORKERS, ROWS, BATCH, EPOCHS, DEATHS = 2, 128, 8, 6, 2
SETTINGS = [
    ("synchronous", "batch", {"recovery_every": 5}), ("asynchronous", 3, {}), ("hogwild", "batch", {}),
    ("synchronous", 3, {"recovery_every": 2}), ("asynchronous", "batch", {"staleness": 2}),
    ("hogwild", 3, {}),
    ("synchronous", "epoch", {}), ("asynchronous", "epoch", {}), ("synchronous", "batch", {}),
]  # fmt: skip
SEEDS = [pytest.param(seed, marks=pytest.mark.whole) for seed in range(20)]

pytestmark = pytest.mark.usefixtures("spark")


def kill_worker():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_executor():
    """Kill the JVM above this Python worker, and then the worker, which would train on for a while."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(daemon.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    kill_worker()


class Roulette:
    """Each process of a worker dies at a step drawn for it, until so many have died.

    Args:
        folder: where the dead have left their names.
        seed: what is drawn.
        deaths: how many die.
        act: how.
    """

    def __init__(self, folder, seed, deaths, act):
        self.folder, self.seed, self.deaths, self.act = str(folder), seed, deaths, act
        self.steps, self.fatal = 0, None

    def __call__(self):
        context = TaskContext.get()
        if context is not None:
            drawn = random.Random(f"{self.seed} {context.taskAttemptId()}")
            self.fatal = self.fatal or drawn.randrange(2, 30)
            self.steps += 1
            if self.steps == self.fatal:
                self._die()
        return np.float32(0)

    def _die(self):
        for number in range(self.deaths):
            with suppress(FileExistsError):
                Path(self.folder, str(number)).touch(exist_ok=False)
                self.act()


def count(folder, seed, setting, deaths, act):
    """Train while processes die; return the weight, what it has to be, and the history."""
    roulette = Roulette(folder, seed, deaths, act)

    def counting(y_true, y_pred):
        """Have a gradient of -1 where inputs are 1."""
        return tf.ensure_shape(tf.numpy_function(roulette, [], tf.float32), []) - tf.reduce_mean(y_pred)

    one = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), one])
    model.compile(keras.optimizers.SGD(1.0), counting)
    x = np.ones((ROWS, 1), np.float32)
    mode, frequency, more = setting
    averaged = mode == "synchronous" and frequency != "batch"
    merge = "average" if averaged else None if mode == "synchronous" else "sum"
    spark_model = SparkModel(
        model, mode=mode, frequency=frequency, merge=merge, num_workers=WORKERS, max_restarts=deaths,
        custom_objects={"counting": counting}, **more,
    )  # fmt: skip
    history = spark_model.fit(x, x, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    steps = EPOCHS * ROWS // BATCH // (WORKERS if averaged else 1)
    return float(model.get_weights()[0][0, 0]), steps, history


@pytest.mark.parametrize("seed", [0, 1, 2, *SEEDS[3:]])
def test_every_update_counts_once_where_workers_are_killed(tmp_path, seed):
    """SIGKILL of a random Python worker, again and again, in a mode and frequency in turn."""
    weight, steps, history = count(tmp_path, seed, SETTINGS[seed % len(SETTINGS)], DEATHS, kill_worker)

    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert 1 <= len(list(tmp_path.iterdir())) <= DEATHS
    assert history.training["restarts"] + history.training["superseded"] >= 1


@pytest.mark.apart
@pytest.mark.parametrize("seed", [1, *SEEDS[:1], *SEEDS[2:]])
def test_every_update_counts_once_where_executors_are_killed(tmp_path, seed):
    """SIGKILL of an executor's JVM, in a mode and frequency in turn."""
    weight, steps, history = count(tmp_path, seed, SETTINGS[seed % len(SETTINGS)], 1, kill_executor)

    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert history.training["restarts"] + history.training["superseded"] >= 1

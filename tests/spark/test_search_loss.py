"""A search loses no trial if processes of executors die."""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import keras
import pytest

from sparkdl import tune

MASTERS = ("local-cluster",)
TRIALS, EPOCHS = 5, 40


def build(rate):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
    return model


def processes_of(application):
    """Return the executors of an application and their Python workers, as two lists of process ids."""
    parents, commands = {}, {}
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(each.name)] = int((each / "stat").read_text().rsplit(")", 1)[1].split()[1])
            commands[int(each.name)] = (each / "cmdline").read_text()
    executors = [
        pid
        for pid, command in commands.items()
        if "CoarseGrainedExecutorBackend" in command and application in command
    ]
    daemons = [
        pid for pid, parent in parents.items() if parent in executors and "pyspark" in commands.get(pid, "")
    ]
    return executors, [pid for pid, parent in parents.items() if parent in daemons]


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(10))
def test_a_search_loses_no_trial_with_its_processes(spark, problem, seed):
    """A search loses no trial if workers and an executor are killed; each trial is recorded once."""
    application, dice = spark.sparkContext.applicationId, random.Random(seed)
    done, killed = threading.Event(), []

    def kill():
        while not done.wait(dice.uniform(0.5, 2.0)) and len(killed) < 3:
            executors, workers = processes_of(application)
            chosen = executors if len(killed) == 1 else workers
            if chosen:
                with contextlib.suppress(ProcessLookupError):
                    killed.append(dice.choice(chosen))
                    os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = tune.search(
            build,
            (problem.x, problem.y),
            {"rate": (1e-3, 0.5, "log")},
            metric="loss",
            num_trials=TRIALS,
            epochs=EPOCHS,
            sampler="random",
            pruner="none",
            seed=seed,
            verbose=0,
        )
    finally:
        done.set()
        killer.join()

    counted = result.trials[result.trials["state"] != "repeated"]
    repeats = [trial.user_attrs["repeats"] for trial in result.study.trials if "repeats" in trial.user_attrs]
    assert killed
    assert ["complete"] * TRIALS == list(counted["state"])
    assert [EPOCHS] * TRIALS == list(counted["epochs"])
    assert len(set(repeats)) == len(repeats) == len(result.trials) - TRIALS

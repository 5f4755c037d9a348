"""Updates count exactly once: every step adds 1 to the only weight while workers and executors die."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyspark import TaskContext

from sparkdl import SparkModel
from sparkdl.settings import grouped

MASTERS = ("local", "local-cluster", "standalone")
WORKERS, ROWS, BATCH, EPOCHS, DEATHS = 2, 128, 8, 6, 2
SETTINGS = [
    ("synchronous", "batch", {"recovery_every": 5}),
    ("asynchronous", 3, {}),
    ("hogwild", "batch", {}),
    ("synchronous", 3, {"recovery_every": 2}),
    ("asynchronous", "batch", {"staleness": 2}),
    ("hogwild", 3, {}),
    ("synchronous", "epoch", {}),
    ("asynchronous", "epoch", {}),
    ("synchronous", "batch", {}),
    ("hogwild", "epoch", {}),
    ("asynchronous", "batch", {}),
]
ORDINARY = [setting for setting in SETTINGS if setting[0] != "synchronous"]
SEEDS = range(20)

pytestmark = pytest.mark.usefixtures("spark")


def setting_of(seed):
    return SETTINGS[seed % len(SETTINGS)]


def name_of(setting):
    mode, frequency, more = setting
    return "-".join([mode, str(frequency), *more])


def name_of_seed(seed):
    return f"{seed}-{name_of(setting_of(seed))}"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kill(pid):
    os.kill(pid, signal.SIGKILL)


class Roulette:
    """A fault that befalls worker processes at a random step, until ``deaths`` of them have had it.

    Args:
        folder: the folder of the marker files.
        seed: the seed of the random steps.
        deaths: the number of processes to hit.
        act: the fault, by the name of a method.
        workers: the workers that may be hit.
    """

    def __init__(self, folder, seed, deaths, act, workers):
        self.folder, self.seed, self.deaths, self.act = str(folder), seed, deaths, act
        self.workers = workers
        self.steps, self.fatal = 0, None

    def __setstate__(self, state):
        self.__dict__ = state
        if (context := TaskContext.get()) is not None:
            Path(self.folder, f"begun-{context.partitionId()}-{context.taskAttemptId()}").touch()

    def __call__(self):
        context = TaskContext.get()
        if context is not None:
            drawn = random.Random(f"{self.seed} {context.taskAttemptId()}")
            self.fatal = self.fatal or drawn.randrange(2, 30)
            self.steps += 1
            if self.steps == self.fatal and context.partitionId() in self.workers:
                self._die()
        return np.float32(0)

    def _die(self):
        for number in range(self.deaths):
            with suppress(FileExistsError):
                Path(self.folder, f"died-{number}").touch(exist_ok=False)
                return getattr(self, self.act)()

    def kill_worker(self):
        kill(os.getpid())

    def kill_executor(self):
        """Kill the JVM above this Python worker, then the worker."""
        kill(parent_of(os.getppid()))
        self.kill_worker()

    def orphan(self):
        """Kill the processes above this Python worker, which continues once its replacement has started."""
        daemon = os.getppid()
        executor = parent_of(daemon)
        kill(daemon)  # it would take the worker along
        kill(executor)
        while not self._is_replaced():
            time.sleep(0.1)
        Path(self.folder, "outlived").touch()

    def _is_replaced(self):
        context = TaskContext.get()
        begun = Path(self.folder).glob(f"begun-{context.partitionId()}-*")
        return any(int(path.name.split("-")[2]) > context.taskAttemptId() for path in begun)


def count(folder, seed, setting, act, *, deaths=1, workers=range(WORKERS), rdd=None):
    """Train on an RDD or on arrays while processes die; return the weight, the steps and the history."""
    roulette = Roulette(folder, seed, deaths, act, workers)

    def counting(y_true, y_pred):
        """Return a loss whose gradient is -1 where inputs are 1."""
        return tf.ensure_shape(tf.numpy_function(roulette, [], tf.float32), []) - tf.reduce_mean(y_pred)

    one = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), one])
    model.compile(keras.optimizers.SGD(1.0), counting)
    x = np.ones((ROWS, 1), np.float32)
    mode, frequency, more = setting
    averaged = mode == "synchronous" and frequency != "batch"
    merge = "average" if averaged else None if mode == "synchronous" else "sum"
    spark_model = SparkModel(
        model,
        mode=mode,
        frequency=frequency,
        merge=merge,
        num_workers=WORKERS,
        custom_objects={"counting": counting},
        **grouped({"max_restarts": deaths, **more}),
    )
    rows = (x, x) if rdd is None else (rdd,)
    kept = rdd is not None  # the RDD's partitions are as even as split arrays
    history = spark_model.fit(*rows, batch_size=BATCH, epochs=EPOCHS, preserve_partitions=kept, verbose=0)
    assert [ROWS // WORKERS] * WORKERS == history.training["worker_rows"]
    steps = EPOCHS * ROWS // BATCH // (WORKERS if averaged else 1)
    return float(model.get_weights()[0][0, 0]), steps, history


@pytest.mark.one_case
@pytest.mark.parametrize("seed", SEEDS, ids=name_of_seed)
def test_every_update_counts_once_where_workers_are_killed(tmp_path, seed):
    """Each update counts once while random Python workers are killed, in each mode and frequency."""
    weight, steps, history = count(tmp_path, seed, setting_of(seed), "kill_worker", deaths=DEATHS)

    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert 1 <= len(list(tmp_path.glob("died-*"))) <= DEATHS
    assert history.training["restarts"] + history.training["superseded"] >= 1


@pytest.mark.whole
@pytest.mark.apart
@pytest.mark.parametrize("seed", SEEDS, ids=name_of_seed)
def test_every_update_counts_once_where_executors_are_killed(tmp_path, seed):
    """Each update counts once when an executor's JVM is killed, in each mode and frequency."""
    weight, steps, history = count(tmp_path, seed, setting_of(seed), "kill_executor")

    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert history.training["restarts"] + history.training["superseded"] >= 1


@pytest.mark.whole
@pytest.mark.apart
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_every_update_counts_once_where_a_worker_outlives_its_executor(tmp_path, setting):
    """Each update counts once if a worker that Spark believes dead trains on beside its replacement."""
    weight, steps, history = count(tmp_path, 0, setting, "orphan")

    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert Path(tmp_path, "outlived").exists()


@pytest.mark.whole
@pytest.mark.apart
@pytest.mark.parametrize("setting", ORDINARY, ids=name_of)
def test_every_update_counts_once_where_a_stage_is_run_again(spark, jobs, tmp_path, setting):
    """Each update counts once when a killed executor takes shuffle files with it and Spark reruns the stage.

    The first task to get the free slot is that of the dead worker; the other one waits.
    """
    one = np.ones(1, np.float32)
    pairs = spark.sparkContext.parallelize([(k, (one, one)) for k in range(ROWS)], WORKERS)
    rdd = pairs.partitionBy(WORKERS, int).values()
    before = set(jobs())

    weight, steps, history = count(tmp_path, 0, setting, "kill_executor", workers=[0], rdd=rdd)

    tracker = spark.sparkContext.statusTracker()
    stages = [stage for job in set(jobs()) - before for stage in tracker.getJobInfo(job).stageIds]
    assert weight == steps
    assert len(history.history["loss"]) == EPOCHS
    assert any(tracker.getStageInfo(stage).currentAttemptId > 0 for stage in stages)

"""A job whose every update adds exactly 1 to its one weight; runs in its own process.

Its arguments are the master, the mode, and pairs: settings of Spark, "workers", "frequency", and "stopped".
Workers are slow in Spark's first attempt, so that speculation starts another beside it. If "stopped" is a
path, the first attempt of worker 1 stops in the second epoch, until the attempt that replaced it wakes it and
waits for its end.

Prints a line for each epoch, and a line of JSON: the weight, the expected number of steps, and the counters
of the run.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from pyspark import TaskContext
from pyspark.sql import SparkSession

from sparkdl import SparkModel

BATCHES, BATCH, EPOCHS = 16, 4, 5  # of each worker

options = dict(pair.split("=", 1) for pair in sys.argv[3:])
workers, frequency = int(options.pop("workers", "1")), options.pop("frequency", "batch")
steps = []


def arrive(path):
    """Return the path; a later attempt of worker 1 first waits until the file exists."""
    context = TaskContext.get()
    if context is not None and context.partitionId() == 1 and context.attemptNumber() > 0:
        while not path.exists():
            time.sleep(0.1)
    return path


class Awaited:
    """A path pickled with the tasks; unpickling it waits, before the worker joins the group."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return arrive, (self.path,)


stopped = Awaited(Path(options.pop("stopped"))) if "stopped" in options else None


def pause():
    """Slow down Spark's first attempt of a worker, and stop it once; a later attempt wakes it."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0:
        time.sleep(0.1)
        steps.append(context.partitionId())
        if stopped and steps == [1] * (BATCHES + 2):
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    elif stopped and context is not None and context.partitionId() == 1:
        wake(int(stopped.read_text()))
    return np.float32(0)


def wake(process):
    """Resume a process and wait for its end."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.05)


def counting(y_true, y_pred):
    """Return a loss whose gradient is -1 where inputs are 1."""
    return tf.ensure_shape(tf.numpy_function(pause, [], tf.float32), []) - tf.reduce_mean(y_pred)


builder = SparkSession.builder.master(sys.argv[1])
for setting in options.items():
    builder = builder.config(*setting)
context = builder.getOrCreate().sparkContext
context.setLogLevel("OFF")

one = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((1,)), one])
model.compile(keras.optimizers.SGD(1.0), counting)
x = np.ones((workers * BATCHES * BATCH, 1), np.float32)
merge = None if sys.argv[2] == "synchronous" else "sum"
spark_model = SparkModel(
    model,
    mode=sys.argv[2],
    merge=merge,
    num_workers=workers,
    frequency=int(frequency) if frequency.isdigit() else frequency,
)


def tell(epoch, logs):
    """Print a line at the end of an epoch."""
    print("EPOCH", flush=True)  # noqa: T201 - the script's output


callback = keras.callbacks.LambdaCallback(on_epoch_end=tell)
history = spark_model.fit(x, x, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[callback])
report = {
    "weight": float(model.get_weights()[0][0, 0]),
    "steps": workers * EPOCHS * BATCHES,
    **{name: history.training[name] for name in ("version", "superseded", "duplicates", "restarts")},
}
print("REPORT " + json.dumps(report))  # noqa: T201 - the script's output

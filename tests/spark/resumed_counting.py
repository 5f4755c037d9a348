"""A driver that resumes from its checkpoints; every step of its model adds exactly 1 to the only weight.

Arguments: the checkpoint folder, mode, frequency, the file for the weight, the number of epochs. Each step of
any process appends a byte to the file ``steps`` next to that folder.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from pyspark import TaskContext
from pyspark.sql import SparkSession

from sparkdl import CheckpointConfig, SparkModel

ROWS, BATCH, EVERY = 240, 8, 20
folder, mode, frequency, weights, epochs = sys.argv[1:]
steps = str(Path(folder).with_name("steps"))


def count():
    """Record a step of a worker, slowed down so that few steps coincide with a checkpoint write."""
    if TaskContext.get() is not None:
        with open(steps, "ab") as file:
            file.write(b".")
        time.sleep(0.02)
    return np.float32(0)


def counting(y_true, y_pred):
    """Return a loss whose gradient is -1 where inputs are 1."""
    return tf.ensure_shape(tf.numpy_function(count, [], tf.float32), []) - tf.reduce_mean(y_pred)


spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
one = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((1,)), one])
model.compile(keras.optimizers.SGD(1.0), counting)
x = np.ones((ROWS, 1), np.float32)
history = SparkModel(model, mode=mode, frequency=int(frequency), merge="sum", num_workers=2).fit(
    x, x, BATCH, int(epochs), verbose=0, checkpoint=CheckpointConfig(folder, every=EVERY), resume=True
)
np.savez(weights, *model.get_weights(), np.array(history.training.get("resumed", 0)))

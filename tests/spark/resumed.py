"""A driver that resumes from its checkpoints and saves its weights to a file.

Arguments: the checkpoint folder, mode, frequency, the file, the number of epochs, and optionally

* "hadoop", which sends a URI of local files through Hadoop alone, as for a distributed file system;
* "again", with which a driver that another one keeps out of the folder tries again.
"""

import sys
import time

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import CheckpointConfig, SparkModel
from sparkdl.errors import CheckpointError
from sparkdl.spark import hadoop

folder, mode, frequency, weights, epochs, *options = sys.argv[1:]
if "hadoop" in options:
    hadoop.local_folder = lambda *_: None
frequency = frequency if frequency == "epoch" else int(frequency)
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
keras.utils.set_random_seed(1)
parts = [keras.Input((6,)), keras.layers.Dense(12, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
model = keras.Sequential(parts)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
x = np.random.default_rng(7).normal(size=(203, 6)).astype("float32")


def fit():
    return SparkModel(model, mode=mode, frequency=frequency, num_workers=2).fit(
        x,
        (x[:, 0] > 0).astype("int64"),
        16,
        int(epochs),
        verbose=0,
        seed=3,
        checkpoint=CheckpointConfig(folder, every=5),
        resume=True,
    )


while True:
    try:
        history = fit()
        break
    except CheckpointError as error:
        if "again" not in options:
            raise
        sys.stderr.write(f"CheckpointError: {error}\n")
        time.sleep(0.2)
assert len(history.history["loss"]) == int(epochs)
resumed = history.training.get("resumed", 0)
np.savez(weights, *model.get_weights(), np.array(history.history["loss"]), np.array(resumed))

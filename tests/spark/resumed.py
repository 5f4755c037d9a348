"""A driver that goes on from its checkpoints, and leaves its weights in a file.

Arguments: the folder of the checkpoints, mode, frequency, the file, how many epochs; and "hadoop", if a URI
of local files is to be used through Hadoop alone, as one of a distributed file system is.
"""

import sys

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import CheckpointConfig, SparkModel
from sparkdl.spark import hadoop

folder, mode, frequency, weights, epochs, *through = sys.argv[1:]
if through:
    hadoop.local_folder = lambda *_: None
frequency = frequency if frequency == "epoch" else int(frequency)
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
keras.utils.set_random_seed(1)
parts = [keras.Input((6,)), keras.layers.Dense(12, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
model = keras.Sequential(parts)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
x = np.random.default_rng(7).normal(size=(203, 6)).astype("float32")
history = SparkModel(model, mode=mode, frequency=frequency, num_workers=2).fit(
    x,
    (x[:, 0] > 0).astype("int64"),
    16,
    int(epochs),
    verbose=0,
    seed=3,
    checkpoint=CheckpointConfig(folder, every=5),
    resume=True,
)
assert len(history.history["loss"]) == int(epochs)
resumed = history.training.get("resumed", 0)
np.savez(weights, *model.get_weights(), np.array(history.history["loss"]), np.array(resumed))

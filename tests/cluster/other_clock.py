"""Fits a model on executors whose clock is another one, and prints the workers' clock and the weights.

Usage: python other_clock.py FOLDER DAY PLACEMENT, where DAY is an offset for faketime, or "" for none.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import Network, SparkModel

folder, day, placement = sys.argv[1:]
python = Path(folder, "python")
words = f'exec faketime -f "{day}"' if day else "exec"
python.write_text(f'#!/bin/sh\nFAKETIME_DONT_FAKE_MONOTONIC=1 {words} {sys.executable} "$@"\n')
python.chmod(0o755)
os.environ["PYSPARK_PYTHON"] = str(python)
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
session.sparkContext.setLogLevel("OFF")


def hours_ahead(_):
    """Yield the difference between a worker's clock and that of the driver, in whole hours."""
    yield round((time.time() - now) / 3600)


now = time.time()
ahead = session.sparkContext.parallelize([0], 1).mapPartitions(hours_ahead).first()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
spark_model = SparkModel(model, num_workers=2, placement=placement, network=Network(tls=True))
spark_model.fit(x, x[:, :1], batch_size=8, epochs=3, seed=0, verbose=0)
sys.stdout.write(f"{ahead} {np.concatenate([w.ravel() for w in model.get_weights()]).tobytes().hex()}\n")
session.stop()

"""A driver that searches with a study in a file; it may be killed and started again.

Arguments: the URL of the study, the folder for models, the file that gets a line for each build.
"""

import sys

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import tune

storage, folder, built = sys.argv[1:]
random = np.random.default_rng(3)
x = random.normal(size=(400, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32")


def build(trial):
    rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
    with open(built, "a") as file:
        file.write(f"{rate!r}\n")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
tune.search(
    build,
    (x, y),
    metric="loss",
    num_trials=8,
    epochs=8,
    pruner="none",
    seed=1,
    storage=storage,
    study_name="study",
    directory=folder,
)

"""Write the files of a version of sparkdl, which later versions have to load; README.md has the command."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from sparkdl import CheckpointConfig, SparkModel
from sparkdl.ml import KerasEstimator

FIT = {"batch_size": 2, "epochs": 2, "seed": 3, "verbose": 0}
ROUNDS = {"frequency": 2, "num_workers": 2}
RUNS = {  # the settings of a run, and the schedule of its checkpoints, of which the first is kept
    "gradients": ({"num_workers": 2}, "epoch"),
    "gradients-within-epoch": ({"num_workers": 2}, 20),
    "elastic-within-epoch": (ROUNDS | {"merge": "aeasgd"}, 20),
    "fedopt-within-epoch": (ROUNDS | {"merge": "fedopt"}, 5),
    "asynchronous": (ROUNDS | {"mode": "asynchronous"}, "epoch"),
}


def rows():
    """Return the features and the labels to train on."""
    x = np.random.default_rng(7).normal(size=(400, 4)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")


def model_of():
    """Return the compiled model of every file."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(2, "softmax")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="small")
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def frame_of(spark):
    """Return the rows as a DataFrame."""
    pairs = [(features.tolist(), int(label)) for features, label in zip(*rows(), strict=True)]
    return spark.createDataFrame(pairs, "features array<float>, label long")


def write(folder, spark):
    """Write two stages, a model with its settings, checkpoints, and the results to compare with."""
    x, y = rows()
    params = {"numWorkers": 2, "frequency": 2, "merge": "fedopt", "batchSize": 2, "seed": 3}
    estimator = KerasEstimator(model=model_of(), classWeight={0: 2.0}, **params)
    estimator.save(f"{folder}/estimator")
    fitted = estimator.fit(frame_of(spark))
    fitted.save(f"{folder}/fitted")
    trained = SparkModel(model_of(), merge="diloco", max_restarts=5, **ROUNDS)
    trained.fit(x, y, **FIT)
    trained.save(f"{folder}/model.keras")
    results = {
        "fitted": fitted.getModel().predict(x[:3], verbose=0),
        "model.keras": trained.predict(x[:3]),
    }
    for name, (settings, every) in RUNS.items():
        checkpoint = CheckpointConfig(f"{folder}/checkpoints/{name}", every=every, keep=1000)
        history = SparkModel(model_of(), **settings).fit(x, y, **FIT, checkpoint=checkpoint)
        results[name] = history.history["loss"]
        for path in sorted(Path(folder, "checkpoints", name).iterdir())[1:]:
            path.unlink()
    listed = {name: np.asarray(values).tolist() for name, values in results.items()}
    Path(folder, "results.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    write(sys.argv[1], SparkSession.builder.master("local[2]").getOrCreate())

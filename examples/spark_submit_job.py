"""A job for spark-submit: train on the shipped images and print the accuracy.

    spark-submit --master spark://HOST:7077 --archives environment.tar.gz#environment spark_submit_job.py

Set PYSPARK_PYTHON=./environment/bin/python and your own PYSPARK_DRIVER_PYTHON, as described in
docs/how-to/spark-submit.md.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from images import load_images
from pyspark.sql import SparkSession

from sparkdl import SparkModel


def build_model():
    """Return a compiled multilayer perceptron."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main():
    """Train, evaluate and save as the arguments specify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["shipped", "keras"], default="shipped")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--mode", default="synchronous")
    parser.add_argument("--frequency", default="batch")
    parser.add_argument("--save", default=None, help="a path or URI that ends with .keras")
    options = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl").getOrCreate()
    x, y = load_images(options.data)
    x, y = x[: options.rows], y[: options.rows]
    frequency = int(options.frequency) if options.frequency.isdigit() else options.frequency
    model = SparkModel(build_model(), mode=options.mode, frequency=frequency, num_workers=options.workers)
    history = model.fit(x, y, epochs=options.epochs, batch_size=64, validation_split=0.1, verbose=2)
    loss, accuracy = model.evaluate(x, y)
    print(f"{history.training['workers']} workers, loss {loss:.4f}, accuracy {accuracy:.4f}")
    if options.save:
        model.save(options.save, overwrite=True)
    spark.stop()


if __name__ == "__main__":
    main()

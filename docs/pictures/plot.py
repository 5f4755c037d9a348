"""Draw plot.png from a fit. `make pictures` leaves it out, because each run takes other times."""

import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import sparkdl

HERE = Path(__file__).parent
ROWS, CLASSES = 60_000, 6


def rows():
    """Return noisy rows of six classes."""
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    y = random.integers(CLASSES, size=ROWS)
    centers = random.normal(size=(CLASSES, 32))
    return (centers[y] + random.normal(scale=2.5, size=(ROWS, 32))).astype(
        "float32"
    ), y


def build_model():
    """Return a compiled classifier of these rows."""
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ],
        name="classifier",
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main():
    """Train on noisy rows of six classes, and draw the History."""
    x, y = rows()
    history = sparkdl.SparkModel(build_model(), num_workers=2).fit(
        x, y, epochs=8, batch_size=128, validation_split=0.1
    )
    sparkdl.plot(history).savefig(HERE / "plot.png", dpi=80)


if __name__ == "__main__":
    main()

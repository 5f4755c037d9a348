"""An image model on two workers: a multilayer perceptron or a convolutional network, in any mode.

    python examples/train_images.py --model cnn --mode asynchronous --frequency epoch

``--data keras`` takes the 60,000 images that keras.datasets downloads instead of the 10,000 shipped.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from images import load_images
from keras import layers
from pyspark.sql import SparkSession

from sparkdl import SparkModel

MODELS = {
    "mlp": [
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(128, activation="relu"),
    ],
    "cnn": [
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ],
}


def build_model(kind):
    """Return a compiled classifier for ten kinds of images."""
    keras.utils.set_random_seed(0)
    output = layers.Dense(10, activation="softmax")
    model = keras.Sequential([keras.Input((28, 28, 1)), *MODELS[kind], output])
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main():
    """Train on four of every five images and print the accuracy on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["shipped", "keras"], default="shipped")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--mode", choices=["synchronous", "asynchronous", "hogwild"], default="synchronous")
    parser.add_argument("--frequency", default="batch", help="batch, epoch or a number of batches")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    x, y = load_images(options.data)
    train = [True, True, True, True, False] * (len(x) // 5)
    test = [not used for used in train]

    frequency = int(options.frequency) if options.frequency.isdigit() else options.frequency
    model = SparkModel(build_model(options.model), mode=options.mode, frequency=frequency)
    model.fit(x[train], y[train], epochs=options.epochs, batch_size=64, validation_data=(x[test], y[test]))

    _, accuracy = model.evaluate(x[test], y[test])
    print(f"Accuracy on images that it did not train on: {accuracy:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()

"""Train on a Spark cluster of separate processes, and compare with plain Keras on the same data."""

import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

import keras
import matplotlib as mpl
import numpy as np
import pyspark
from images import load_images
from pyspark.sql import SparkSession

from sparkdl import SparkModel

EPOCHS, BATCH_SIZE = 8, 64
ARTIFACTS = Path("artifacts")


def build_model():
    """Return a small compiled convolutional network."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plot(ours, plain, path):
    """Draw both learning curves into a PNG."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, history in (("sparkdl, 2 workers", ours), ("plain Keras", plain)):
        axes.plot(range(1, EPOCHS + 1), history.history["val_accuracy"], marker="o", label=label)
    axes.set(xlabel="epoch", ylabel="accuracy on test images", title="Fashion-MNIST, 8,000 images")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    """Train both, print the results, and save a plot and a model."""
    x, y = load_images()
    train, test = (x[:8000], y[:8000]), (x[8000:], y[8000:])
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")

    print("Training on two executor processes.")
    model = build_model()
    started = time.monotonic()
    ours = SparkModel(model, num_workers=2).fit(
        *train, epochs=EPOCHS, batch_size=BATCH_SIZE, validation_data=test, seed=0
    )
    print(f"sparkdl took {time.monotonic() - started:.1f} s, the start of Python workers included.")

    print("Training the same with plain Keras.")
    reference = build_model()
    plain = reference.fit(*train, epochs=EPOCHS, batch_size=BATCH_SIZE, validation_data=test, verbose=2)

    right = model.predict(test[0], verbose=0).argmax(1) == test[1]
    plain_right = reference.predict(test[0], verbose=0).argmax(1) == test[1]
    difference = right.astype(float) - plain_right.astype(float)
    mean, half = difference.mean(), 1.96 * difference.std(ddof=1) / np.sqrt(len(difference))
    print(f"\nAccuracy on {len(right):,} test images:")
    print(f"sparkdl {right.mean():.4f}, plain Keras {plain_right.mean():.4f}")
    print(f"difference {mean:+.4f}, 95 % interval {mean - half:+.4f} to {mean + half:+.4f}")
    print("(over test images; another seed, or another order of the rows, moves it as well)")

    ARTIFACTS.mkdir(exist_ok=True)
    plot(ours, plain, ARTIFACTS / "learning_curve.png")
    SparkModel(model).save(str(ARTIFACTS / "fashion.keras"), overwrite=True)
    opened = keras.saving.load_model(ARTIFACTS / "fashion.keras")
    same = np.allclose(opened.predict(test[0][:8], verbose=0), model.predict(test[0][:8], verbose=0))
    print(f"\nLeft in {ARTIFACTS}: learning_curve.png and fashion.keras.")
    print(f"keras.saving.load_model opens it, and its predictions are {'the same' if same else 'DIFFERENT'}.")

    work, application = Path(pyspark.__file__).parent / "work", spark.sparkContext.applicationId
    spark.stop()
    shutil.rmtree(work / application, ignore_errors=True)


if __name__ == "__main__":
    main()

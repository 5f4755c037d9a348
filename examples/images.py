"""The images that the examples train on."""

import gzip
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "data"


def load_images(source="shipped"):
    """Return images of shape (rows, 28, 28, 1) from 0 to 1 as float32, and labels 0 to 9.

    Args:
        source: "shipped" for Fashion-MNIST's 10,000 test images beside this file, "keras" for the 60,000
            training images, which keras.datasets downloads.
    """
    if source == "keras":
        import keras

        (images, labels), _ = keras.datasets.fashion_mnist.load_data()
    else:
        with gzip.open(HERE / "t10k-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(HERE / "t10k-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return (images[..., None] / 255).astype("float32"), labels.astype("int64")

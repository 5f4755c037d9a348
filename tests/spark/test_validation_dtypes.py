"""Validation rows may have numbers of another dtype than the training rows, as in Keras."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import DataError

IMAGES = np.random.default_rng(2).integers(0, 255, (24, 4)).astype("uint8")
LABELS = np.arange(24) % 2
HELD = IMAGES[:6] / np.float32(7), np.array([0, 1, 0.25, 1, 0.5, 0])


def model():
    keras.utils.set_random_seed(1)
    layers = keras.layers.Rescaling(1 / 255), keras.layers.Dense(1, "sigmoid")
    made = keras.Sequential([keras.Input((4,)), *layers])
    made.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return made


def rows_of(spark, kind, x, y):
    """Return the arguments of fit for rows of a kind."""
    if kind == "arrays":
        return x, y
    pairs = [(row.tolist(), label.item()) for row, label in zip(x, y, strict=True)]
    if kind == "rdd":
        return (spark.sparkContext.parallelize(list(zip(x, y, strict=True)), 2),)
    names = "features array<int>, label int" if x.dtype == np.uint8 else "features array<float>, label double"
    return (spark.createDataFrame(pairs, names),)


@pytest.mark.parametrize("kind", ["arrays", "frame", pytest.param("rdd", marks=pytest.mark.whole)])
def test_floats_validate_a_model_that_is_trained_on_integers(spark, kind):
    """Float features and labels validate a fit on integers, and the loss is that of plain Keras."""
    training, held = rows_of(spark, kind, IMAGES, LABELS), rows_of(spark, kind, *HELD)
    settings = {"batch_size": 24, "epochs": 2, "verbose": 0}
    expected = model().fit(IMAGES, LABELS, validation_data=HELD, **settings).history

    history = SparkModel(model(), num_workers=1).fit(
        *training, validation_data=held if kind == "arrays" else held[0], **settings
    )

    assert expected["loss"] == pytest.approx(history.history["loss"], rel=1e-4)
    assert expected["val_loss"] == pytest.approx(history.history["val_loss"], rel=1e-4)


@pytest.mark.whole
def test_a_label_that_does_not_fit_is_of_the_validation_rows(spark):
    """The error for a label that does not fit the first validation row says that it is in validation rows."""
    rows = list(zip(IMAGES[:4], [0, 1, 0.5, 1], strict=True))
    held = spark.sparkContext.parallelize(rows, 1)
    message = "Expected y of the validation rows to be whole numbers .*; row 2 of partition 0 has 0.5"

    with pytest.raises(DataError, match=message):
        SparkModel(model(), num_workers=1).fit(IMAGES, LABELS, validation_data=held, verbose=0)

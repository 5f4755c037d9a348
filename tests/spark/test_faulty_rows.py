"""NaN, Inf and labels out of range are found before the first update, wherever rows come from."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

random = np.random.default_rng(1)
X, Y = random.normal(size=(48, 6)).astype("float32"), random.integers(0, 3, 48)
NAN, OUTSIDE = X.copy(), Y.copy()
NAN[[12, 40], 2] = np.nan
OUTSIDE[[7, 9]] = 3, -1
OPTIONS = {"batch_size": 16, "epochs": 1, "verbose": 0, "seed": 3}


def frame(spark, x, y):
    rows = [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label int")


MAKE = {
    "arrays": lambda spark, x, y: (x, y),
    "rdd": lambda spark, x, y: (spark.sparkContext.parallelize(list(zip(x, y, strict=True)), 3),),
    "frame": lambda spark, x, y: (frame(spark, x, y),),
    "function": lambda spark, x, y: (lambda worker, workers: (x[worker::workers], y[worker::workers]),),
}
FIRST = {  # rows 12 and 7 fall here, in partitions of 16 rows or in a function's rows
    "arrays": ("row 12", "row 7"),
    "rdd": ("row 12 of partition 0", "row 7 of partition 0"),
    "frame": ("of partition 0", "of partition 0"),
    "function": ("row 6 of worker 0", "row 3 of worker 1"),
}


def refused(problem, *data, **options):
    """Return the error of a fit that left the model unchanged."""
    model = problem.model()
    before = model.get_weights()
    with pytest.raises(DataError) as caught:
        SparkModel(model, num_workers=2).fit(*data, **OPTIONS, **options)
    for weights, kept in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weights, kept)
    return str(caught.value)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", MAKE)
def test_faulty_rows_are_counted_over_all_workers(spark, problem, kind):
    """The error has the column, the totals and the first row; no update was made."""
    name = "features" if kind == "frame" else "x"
    words = refused(problem, *MAKE[kind](spark, NAN, Y))
    assert f"{name} has NaN in 2 of 48 rows; the first is row" in words
    assert FIRST[kind][0] in words

    words = refused(problem, *MAKE[kind](spark, X, OUTSIDE))
    assert "has labels outside the range 0 to 2 in 2 of 48 rows; the first is row" in words
    assert FIRST[kind][1] in words


def test_validation_rows_and_weights_are_looked_at(spark, problem):
    """A fault in validation rows or in weights is reported as such."""
    words = refused(problem, X, Y, validation_data=(NAN[:20], Y[:20]))
    assert "x has NaN in 1 of 20 validation rows; the first is row 12." in words
    words = refused(problem, X, Y, sample_weight=NAN[:, 2])
    assert "sample_weight has NaN in 2 of 48 rows; the first is row 12." in words


@pytest.mark.parametrize(
    ("kind", "held"), [("arrays", "rdd"), ("rdd", "arrays")], ids=["arrays and an RDD", "an RDD and arrays"]
)
def test_each_faulty_row_is_reported_once(spark, problem, caplog, kind, held):
    """If training and validation rows are of different kinds, each fault has one warning with its place."""
    validation = MAKE[held](spark, NAN[:20], Y[:20])
    SparkModel(problem.model(), num_workers=2).fit(
        *MAKE[kind](spark, NAN, Y),
        validation_data=validation if held == "arrays" else validation[0],
        nan="warn",
        **OPTIONS,
    )

    words = " ".join(record.getMessage() for record in caplog.records)
    assert 1 == words.count(f"x has NaN in 2 of 48 rows; the first is {FIRST[kind][0]}.")
    place = {"arrays": "row 12", "rdd": "row 0 of partition 2"}[held]
    assert 1 == words.count(f"x has NaN in 1 of 20 validation rows; the first is {place}.")
    assert 2 == words.count("x has NaN")


def leaving_out():
    """Return a model whose loss ignores labels that are NaN."""

    def error(y, predicted):
        known = keras.ops.logical_not(keras.ops.isnan(y))
        apart = keras.ops.where(known, y, 0.0) - keras.ops.where(known, predicted, 0.0)
        return keras.ops.mean(keras.ops.square(apart), axis=-1)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", error)
    return model


@pytest.mark.whole
def test_a_fit_may_go_on_with_a_warning(spark, problem, caplog):
    """A custom loss may ignore NaN labels with a warning; labels of ignore_class are not reported."""
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=3)
    SparkModel(problem.model(loss=loss), num_workers=1).fit(X, np.where(Y == 0, 3, Y), **OPTIONS)
    assert "labels outside" not in "\n".join(caplog.messages)

    labels = np.where(Y == 1, np.nan, Y).astype("float32")[:, None]
    history = SparkModel(leaving_out, num_workers=1).fit(X, labels, nan="warn", **OPTIONS).history
    assert f"y has NaN in {int((Y == 1).sum())} of 48 rows" in "\n".join(caplog.messages)
    assert np.isfinite(history["loss"]).all()

    with pytest.raises(ConfigError, match="nan should be"):
        SparkModel(leaving_out).fit(X, labels, nan="skip")

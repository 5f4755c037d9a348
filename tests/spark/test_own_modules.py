"""Functions run on executors with modules that only the driver can import, wherever they are given."""

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import SparkModel, predict_udf
from sparkdl.ml import KerasEstimator

MASTERS = ("local-cluster", "standalone", "connect")
X = np.ones((32, 3), "float32")
SOURCE = """
import keras

class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

def twice(x):
    return 2 * x

def loss(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a module that only the driver can import."""
    (tmp_path / "only_here.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    return only_here


def net(*layers, loss="mse"):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), loss)
    return model


def frame_of(spark):
    return spark.createDataFrame([(row.tolist(), 1.0) for row in X], "features array<float>, label float")


def fitted(model, *data, **options):
    return SparkModel(model, num_workers=2).fit(*data, verbose=0, batch_size=16, **options).history["loss"][0]


PLACES = {
    "a model function": lambda here, spark: fitted(lambda: net(here.Twice()), frame_of(spark)),
    "a rows function": lambda here, spark: fitted(net(), lambda k, n: (here.twice(X[k::n]), X[k::n, 0])),
    "a layer": lambda here, spark: fitted(net(here.Twice()), frame_of(spark)),
    "a Lambda layer": lambda here, spark: fitted(
        net(keras.layers.Lambda(lambda x: here.twice(x))), frame_of(spark)
    ),
    "a loss": lambda here, spark: fitted(net(here.Twice(), loss=here.loss), frame_of(spark)),
    "decode": lambda here, spark: fitted(
        net(), frame_of(spark), decode={"features": lambda value: here.twice(np.array(value, "float32"))}
    ),
    "an estimator": lambda here, spark: (
        KerasEstimator(model=net(here.Twice()), numWorkers=2, verbose=0)
        .fit(frame_of(spark))
        .summary.history["loss"][0]
    ),
    "predict_udf": lambda here, spark: (
        (frame_of(spark).select(predict_udf(net(here.Twice()))("features")).first()[0] - 1.0) ** 2
    ),
    "run": lambda here, spark: sparkdl.run(lambda worker: (here.twice(3.0) - 1) ** 2, num_workers=2)[0],
}


@pytest.mark.whole
@pytest.mark.parametrize("place", PLACES)
def test_a_module_of_the_driver_travels_with_a_function(spark, here, place):
    """A function that uses a driver's module computes its result: 2 * 3 inputs of 1, and a label of 1."""
    if place in ("a rows function", "run") and not hasattr(spark, "sparkContext"):
        pytest.skip("over Spark Connect rows are DataFrames")

    assert PLACES[place](here, spark) == pytest.approx(25.0)

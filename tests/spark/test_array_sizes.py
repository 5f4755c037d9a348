"""Arrays reach the tasks without the driver's JVM, whatever their size."""

import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.settings import Network

# Arrays of 700 MB, and a JVM that has 512 MB. They are zeros, which take no memory on the driver.
LARGE = """
import keras
import numpy as np
from pyspark.sql import SparkSession
from sparkdl import SparkModel

builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "512m")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
x, y = np.zeros((437_500, 400), np.float32), np.zeros(437_500, np.int32)
model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(2, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
spark_model = SparkModel(model, num_workers=2, frequency="epoch")
history = spark_model.fit(x, y, batch_size=4096, verbose=0)
assert history.training["epoch_rows"] == [437_500]
assert len(spark_model.predict(x, batch_size=4096)) == 437_500
assert spark_model.evaluate(x, y, batch_size=4096) < 1
spark.stop()
"""


def network():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@pytest.mark.whole
def test_arrays_may_be_larger_than_the_memory_of_the_jvm():
    """Arrays that only Python's memory can hold train, predict and evaluate."""
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", LARGE],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )

    assert 0 == done.returncode, done.stderr[-3000:]


def test_large_arrays_predict_and_evaluate_as_in_keras(spark):
    """Predictions and results of arrays that the endpoint serves equal those of Keras."""
    random = np.random.default_rng(0)
    x = random.normal(size=(12_001, 64)).astype(np.float32)  # 3 MB
    y = random.normal(size=(12_001, 1)).astype(np.float32)
    model = network()
    spark_model = SparkModel(model, num_workers=2)

    np.testing.assert_allclose(model.predict(x, verbose=0), spark_model.predict(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), spark_model.evaluate(x, y), rtol=1e-5)


def test_rows_travel_in_the_tasks_if_the_only_port_is_in_use(spark):
    """A port that another fit uses does not prevent a prediction."""
    x = np.ones((12_001, 64), np.float32)
    model = network()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spark_model = SparkModel(model, num_workers=2, network=Network(port=taken.getsockname()[1]))
        found = spark_model.predict(x)

    np.testing.assert_allclose(model.predict(x, verbose=0), found, rtol=1e-5, atol=1e-6)

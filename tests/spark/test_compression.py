"""Fits whose updates are compressed: accuracy, bytes and exactness."""

import keras
import numpy as np
import phases
import pytest
from phases import Act, call
from pyspark import cloudpickle

from sparkdl import SparkModel
from sparkdl.core.codecs import CODECS
from sparkdl.errors import ConfigError

MASTERS = ("local", "local-cluster")
WIDTH = 200


@pytest.fixture(autouse=True)
def pickled_by_value():
    """Pickle the helpers by value: executors cannot import the tests."""
    cloudpickle.register_pickle_by_value(phases)
    yield
    cloudpickle.unregister_pickle_by_value(phases)


def trained(compression=None, **settings):
    """Return the weights, the last loss and the counts of a fit."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(256, 20)).astype(np.float32)
    spark_model = SparkModel(model, num_workers=2, compression=compression, **settings)
    history = spark_model.fit(
        x, x[:, :5].sum(axis=1), batch_size=32, epochs=4, seed=1, verbose=0, shuffle=True
    )
    return model.get_weights(), history.history["loss"][-1], history.training


SETTINGS = {
    "batch": {},
    "executors": {"placement": "executors"},
    "rounds": {"frequency": 2},
    "executors-2": {"frequency": 2, "placement": "executors"},
    "asynchronous": {"mode": "asynchronous", "frequency": 2},
    "hogwild": {"mode": "hogwild"},
}
SHORT = ("batch", "bf16"), ("executors-2", "int8"), ("asynchronous", "fp16")  # in the default suite


CASES = [
    pytest.param(setting, name, marks=() if (setting, name) in SHORT else pytest.mark.whole)
    for setting in SETTINGS
    for name in CODECS
]


@pytest.mark.parametrize(("setting", "compression"), CASES)
def test_a_compressed_fit_learns_with_fewer_bytes(spark, setting, compression):
    """The loss is near that without compression, and the endpoint receives fewer bytes."""
    _, plain, counts = trained(**SETTINGS[setting])
    _, loss, fewer = trained(compression, **SETTINGS[setting])

    assert loss < 1.3 * plain + 0.05
    if "executors" not in setting:  # where updates do not pass through the endpoint
        assert fewer["bytes_received"] < 0.85 * counts["bytes_received"]


@pytest.mark.parametrize("setting", ["executors-2", pytest.param("batch", marks=pytest.mark.whole)])
@pytest.mark.parametrize("compression", ["int8", pytest.param("bf16", marks=pytest.mark.whole)])
def test_a_compressed_fit_repeats_bit_for_bit(spark, setting, compression):
    """Rounding at random depends only on the place in the run, so a run repeats bit for bit."""
    once, again = (trained(compression, **SETTINGS[setting])[0] for _ in range(2))
    for one, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(one, other)


def recommended(compression=None):
    """Return the weights, the last loss and the counts of a fit of embeddings with an adaptive optimizer."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(40, 64), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).integers(0, 40, (256, 3)).astype(np.int32)
    spark_model = SparkModel(model, num_workers=2, compression=compression)
    history = spark_model.fit(x, (x[:, 0] % 4).astype(np.float32), batch_size=16, epochs=4, seed=1, verbose=0)
    return model.get_weights(), history.history["loss"][-1], history.training


@pytest.mark.parametrize("compression", ["int8", pytest.param("bf16", marks=pytest.mark.whole)])
def test_the_slices_of_embeddings_are_compressed(spark, compression):
    """Sparse gradients are compressed as dense ones are, and the run repeats bit for bit."""
    _, plain, counts = recommended()
    (weights, loss, fewer), (again, *_) = (recommended(compression) for _ in range(2))

    assert loss < 1.3 * plain + 0.05
    assert fewer["bytes_received"] < 0.85 * counts["bytes_received"]
    assert fewer["slices"] == counts["slices"]
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.whole
@pytest.mark.classic
def test_a_compressed_fit_that_loses_a_worker_ends_with_the_same_bits(spark, tmp_path):
    """A restart from a snapshot sends the same bits again."""
    expected = call(spark.sparkContext, "int8", tmp_path / "undisturbed", phase="exchange")
    act = Act(tmp_path, "exchange", "worker", "kill")
    result = call(spark.sparkContext, "int8", tmp_path / "checkpoints", act, phase="exchange")

    assert (tmp_path / "done").exists()
    assert expected == result


@pytest.mark.parametrize("value", ["zip", "BF16", 16, True])
def test_an_unknown_codec_is_refused_by_name(value):
    """A codec that does not exist raises ConfigError when the SparkModel is made."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="compression should be one of 'bf16', 'fp16', 'int8'; got "):
        SparkModel(model, compression=value)

"""Workers that reduce updates among themselves train as with an endpoint on the driver, bit for bit."""

import keras
import numpy as np
import phases
import pytest
from phases import Act, call
from pyspark import cloudpickle

from sparkdl import FaultTolerance, Network, SparkModel, Stragglers
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.rules import FedOpt
from sparkdl.rules.outer import Adam

MASTERS = ("local", "local-cluster")
ROWS, FEATURES = 200, 12


@pytest.fixture(autouse=True)
def pickled_by_value():
    """Pickle the helpers by value: executors cannot import the tests."""
    cloudpickle.register_pickle_by_value(phases)
    yield
    cloudpickle.unregister_pickle_by_value(phases)


def table():
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def network(optimizer="adam"):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(16, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def trained(
    placement, *, optimizer="adam", workers=2, epochs=2, fits=1, frequency="batch", merge=None, **options
):
    """Return the weights, the optimizer's variables and the logs of the last one of some fits."""
    spark_model = SparkModel(
        network(optimizer),
        placement=placement,
        num_workers=workers,
        frequency=frequency,
        merge=merge,
        network=options.pop("network_settings", Network()),
    )
    fit = {"batch_size": 32, "validation_split": 0.2, "verbose": 0, "seed": 1, **options}
    for _ in range(fits):
        history = spark_model.fit(*table(), epochs=epochs, **fit)
    model = spark_model.model
    variables = [variable.numpy() for variable in model.optimizer.variables]
    return [*model.get_weights(), *variables], history


def require_equal(ours, theirs):
    for one, other in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert ours[1].history == theirs[1].history
    assert ours[1].training["losses"] == theirs[1].training["losses"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 1},
        {"workers": 2, "optimizer": "sgd", "steps_per_epoch": 3},
        {"network_settings": Network(tls=True)},
        {"class_weight": None, "validation_split": 0.0, "batch_size": 5},
        {"frequency": 2, "fits": 2},
        {"frequency": "epoch", "epochs": 3, "workers": 1},
        {"frequency": 3, "merge": "diloco", "network_settings": Network(tls=True)},
        {"frequency": "epoch", "merge": "fedopt", "optimizer": "sgd"},
        {"frequency": 2, "merge": "aeasgd", "optimizer": "sgd", "fits": 2},
        {"frequency": 2, "merge": FedOpt(Adam()), "optimizer": "rmsprop", "epochs": 3},
    ],
    ids=["two", "one", "steps", "tls", "small", "bmuf", "epoch", "diloco", "fedopt", "elastic", "moments"],
)
def test_the_bits_are_those_of_an_endpoint_on_the_driver(spark, options):
    """Weights, optimizer, logs and losses are the same with either placement."""
    require_equal(trained("executors", **options), trained("driver", **options))


@pytest.mark.parametrize("frequency", ["batch", 2])
def test_callbacks_have_the_same_effect(spark, frequency):
    """Learning rates and weights that callbacks set reach the workers, and a callback can stop training."""

    def callbacks():
        def rate(epoch, rate):
            return rate / (epoch + 1)

        def change(epoch, logs):
            stop.model.set_weights([0.5 * values for values in stop.model.get_weights()])
            stop.model.stop_training = epoch == 1

        stop = keras.callbacks.LambdaCallback(on_epoch_end=change)
        return [keras.callbacks.LearningRateScheduler(rate), stop]

    ours, theirs = (
        trained(placement, epochs=4, callbacks=callbacks(), frequency=frequency)
        for placement in ("executors", "driver")
    )
    assert 2 == len(ours[1].epoch)
    require_equal(ours, theirs)


@pytest.mark.classic
@pytest.mark.parametrize("setting", ["executors", "executors-2"])
def test_a_killed_worker_restarts_the_group_with_new_shards(spark, tmp_path, setting):
    """After the loss of a worker, and with it of a shard, the run repeats from its snapshot exactly."""
    expected = call(spark.sparkContext, setting, tmp_path / "undisturbed", phase="exchange")
    act = Act(tmp_path, "exchange", "worker", "kill")
    result = call(spark.sparkContext, setting, tmp_path / "checkpoints", act, phase="exchange")

    assert (tmp_path / "done").exists()
    assert expected == result


def test_the_slices_of_an_embedding_are_refused(spark):
    """Sparse gradients whose sum changes an adaptive step are refused by name; others are summed."""
    x = np.arange(64, dtype=np.int32)[:, None] % 8

    def fit(optimizer):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(8, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        model.compile(optimizer, "mse")
        SparkModel(model, placement="executors", num_workers=2).fit(
            x, x.astype(np.float32), batch_size=16, verbose=0
        )

    fit("sgd")
    with pytest.raises(SparkDLError, match="sparse gradients.*placement=.driver."):
        fit("adam")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "asynchronous"}, 'needs mode="synchronous".*got mode="asynchronous"'),
        ({"frequency": 4, "merge": "adasum"}, 'merge="adasum" needs all deltas in one place'),
        ({"stragglers": Stragglers(quorum=1)}, "needs all workers in each round"),
        ({"fault_tolerance": FaultTolerance(on_worker_loss="continue")}, "needs all workers in each round"),
        ({"placement": "executor"}, "executor"),
    ],
)
def test_settings_that_need_an_endpoint_on_the_driver_are_refused(settings, words):
    """Settings that need an endpoint on the driver are refused when the SparkModel is made."""
    with pytest.raises(ConfigError, match=words):
        SparkModel(network(), **{"placement": "executors", **settings})

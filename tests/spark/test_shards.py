"""Workers that reduce updates among themselves train as with an endpoint on the driver, bit for bit."""

import keras
import numpy as np
import phases
import pytest
from phases import Act, call
from pyspark import cloudpickle

from sparkdl import FaultTolerance, Network, SparkModel, Stragglers
from sparkdl.errors import ConfigError, ModelError, RuleError
from sparkdl.rules import Average, FedOpt
from sparkdl.rules.outer import Adam

MASTERS = ("local", "local-cluster")
ROWS, FEATURES = 200, 12


@pytest.fixture(autouse=True)
def pickled_by_value():
    """Pickle the helpers by value: executors cannot import the tests."""
    cloudpickle.register_pickle_by_value(phases)
    yield
    cloudpickle.unregister_pickle_by_value(phases)


def whole(values):
    """Return the values of a case that only the whole product has."""
    values = values if isinstance(values, tuple) else (values,)
    return pytest.param(*values, marks=pytest.mark.whole)


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
        whole({"frequency": "epoch", "epochs": 3, "workers": 1}),
        {"frequency": 3, "merge": "diloco", "network_settings": Network(tls=True)},
        whole({"frequency": "epoch", "merge": "fedopt", "optimizer": "sgd"}),
        whole({"frequency": 2, "merge": "aeasgd", "optimizer": "sgd", "fits": 2}),
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
@pytest.mark.parametrize(
    ("setting", "phase"),
    [
        whole(("executors", "exchange")),
        ("executors-2", "exchange"),
        whole(("elastic", "evaluation")),
        whole(("elastic", "feed")),
    ],
)
def test_a_killed_worker_restarts_the_group_with_new_shards(spark, tmp_path, setting, phase):
    """After the loss of a worker, and with it of a shard, the run repeats from its snapshot exactly."""
    expected = call(spark.sparkContext, setting, tmp_path / "undisturbed", phase=phase)
    act = Act(tmp_path, phase, "worker", "kill")
    result = call(spark.sparkContext, setting, tmp_path / "checkpoints", act, phase=phase)

    assert (tmp_path / "done").exists()
    assert expected == result


@pytest.mark.parametrize("placement", ["driver", pytest.param("executors", marks=pytest.mark.whole)])
def test_an_elastic_fit_evaluates_the_center(spark, placement):
    """The validation results of an elastic rule are those of the center, which the model gets."""
    x, y = table()
    spark_model = SparkModel(network("sgd"), placement=placement, num_workers=2, frequency=2, merge="aeasgd")
    held_out = x[:50], y[:50]
    history = spark_model.fit(x, y, batch_size=32, epochs=2, validation_data=held_out, verbose=0, seed=1)

    expected = spark_model.model.evaluate(*held_out, verbose=0, return_dict=True)
    assert expected["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-4)


def test_a_fit_that_is_interrupted_keeps_the_last_merge(spark, monkeypatch):
    """Ctrl-C in the middle of an epoch leaves the center of the last round in the model."""
    monkeypatch.setattr("sparkdl.driver.fit.STOP_SECONDS", 60.0)
    spark_model = SparkModel(network("sgd"), placement="executors", num_workers=2, frequency=2)
    before = spark_model.model.get_weights()

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 6:  # after some rounds
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spark_model.fit(*table(), batch_size=4, epochs=50, verbose=0, callbacks=[Interrupt()])
    assert not np.array_equal(before[0], spark_model.model.get_weights()[0])


@pytest.mark.whole
def test_deltas_that_are_not_finite_are_not_merged(spark):
    """A worker whose delta has NaN continues from the center, as with an endpoint on the driver."""
    x, y = table()
    y[:8] = np.nan
    results = []
    for placement in ("executors", "driver"):
        spark_model = SparkModel(network("sgd"), placement=placement, num_workers=2, frequency=2)
        history = spark_model.fit(x, y, batch_size=16, epochs=2, verbose=0, seed=1, nan="warn")
        results.append((spark_model.model.get_weights(), history))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert results[0][1].training["not_finite"] == results[1][1].training["not_finite"] > 0


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (object, ConfigError, 'placement="executors" sends the state of the merge rule, and that of'),
        (list, RuleError, "should keep the structure that init gave it"),
    ],
)
def test_states_of_rules_that_cannot_be_sent_are_named(spark, state, error, words):
    """A rule's state that cannot be sent, or that changes its structure, ends the fit by name."""

    class Own(Average):
        name = "own"

        def init(self, center):
            return state()

        def update(self, delta, kept, merge):
            return delta, [*kept, 1.0]

    with pytest.raises(error, match=words):
        trained("executors", frequency=2, merge=Own())


def fit_embedding(optimizer, num_workers=2, **settings):
    """Train a model with an embedding, with shards on the executors."""
    x = np.arange(64, dtype=np.int32)[:, None] % 8
    layers = [keras.layers.Embedding(8, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
    model.compile(optimizer, "mse")
    spark_model = SparkModel(model, placement="executors", num_workers=num_workers, **settings)
    spark_model.fit(x, x.astype(np.float32), batch_size=16, verbose=0)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"frequency": "auto"}])
def test_the_slices_of_an_embedding_are_refused(spark, jobs, settings):
    """Sparse gradients whose sum changes an adaptive step are refused before a job."""
    before = jobs()
    with pytest.raises(ModelError, match="sparse gradients.*placement=.driver."):
        fit_embedding("adam", **settings)

    assert before == jobs()


@pytest.mark.whole
def test_the_slices_of_an_embedding_are_summed(spark):
    """Sparse gradients are summed for an optimizer that adds them up; windows exchange weights."""
    fit_embedding("sgd")
    fit_embedding("adam", frequency=2)


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

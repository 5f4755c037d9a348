"""One call to fit trains a model: the same tests on threads, on executor processes and on a real cluster."""

import logging
import threading

import keras
import numpy as np
import pytest
from pyspark import TaskContext

from sparkdl import SparkModel, to_simple_rdd
from sparkdl.errors import WorkerError

MASTERS = ("local", "local-cluster", "standalone")
MODES = ("synchronous", "asynchronous", "hogwild")


@pytest.mark.each_master
def test_synchronous_batches_give_the_answer_of_plain_keras(spark, problem):
    """An RDD of unequal partitions with a ragged last batch gives the weights and losses of `model.fit`."""
    counts = 140, 63
    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    history = SparkModel(model, num_workers=2).fit(
        problem.rdd(spark, *counts), batch_size=16, epochs=4, shuffle=False, verbose=0
    )

    expected = reference.fit(*problem.interleaved(*counts), batch_size=16, epochs=4, shuffle=False, verbose=0)
    assert problem.distance(model, reference, start) <= 1
    assert expected.history["loss"] == pytest.approx(history.history["loss"], rel=1e-5)
    assert expected.history["accuracy"] == pytest.approx(history.history["accuracy"], rel=1e-6)


@pytest.mark.parametrize("frequency", ["batch", 3, "epoch"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_frequency_learns(spark, problem, mode, frequency):
    """Every mode and frequency lowers the loss, fills a Keras History and trains the model in place."""
    model = problem.model(keras.optimizers.Adam(0.02))
    optimizer = model.optimizer
    spark_model = SparkModel(model, mode=mode, frequency=frequency, num_workers=2)

    history = spark_model.fit(problem.x, problem.y, batch_size=16, epochs=6, verbose=0, seed=1)

    losses = history.history["loss"]
    assert isinstance(history, keras.callbacks.History)
    assert {name: len(values) for name, values in history.history.items()} == {"loss": 6, "accuracy": 6}
    assert losses[-1] < 0.8 * losses[0]
    assert spark_model.model is model
    assert model.optimizer is optimizer
    assert spark_model.evaluate(problem.x, problem.y) == pytest.approx(
        model.evaluate(problem.x, problem.y, verbose=0), rel=1e-5
    )
    counts = {name: history.training[name] for name in ("workers", "rows", "worker_rows", "restarts")}
    assert counts == {"workers": 2, "rows": 203, "worker_rows": [102, 101], "restarts": 0}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["vector", "array"])
def test_a_frame_trains_is_evaluated_and_gets_its_predictions(spark, problem, frames, kind):
    """Fit, evaluate and predict take DataFrames with vector or array columns."""
    model, data = problem.model(), frames[kind]
    spark_model = SparkModel(model, num_workers=2)

    history = spark_model.fit(data, batch_size=16, epochs=3, verbose=0, seed=1)
    predicted = spark_model.predict(data)

    assert history.training["rows"] == 203
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert spark_model.evaluate(data, return_dict=True) == pytest.approx(
        model.evaluate(problem.x, problem.y, verbose=0, return_dict=True), rel=1e-5
    )
    assert [*data.columns, "prediction"] == predicted.columns
    rows = predicted.collect()
    features = np.asarray([list(row.features) for row in rows], "float32")
    np.testing.assert_allclose(
        model.predict(features, verbose=0), [row.prediction for row in rows], rtol=1e-5, atol=1e-6
    )


@pytest.mark.whole
def test_an_rdd_is_evaluated_and_predicted_in_its_order(spark, problem, jobs):
    """Predictions are a lazy RDD with the order and the partitions of its input."""
    model, rdd = problem.model(), problem.rdd(spark, 100, 0, 103)
    spark_model = SparkModel(model)
    before = jobs()

    predicted = spark_model.predict(rdd)

    assert before == jobs()
    parts = predicted.glom().collect()
    assert [len(part) for part in parts] == [100, 0, 103]
    np.testing.assert_allclose(model.predict(problem.x, verbose=0), sum(parts, []), rtol=1e-5, atol=1e-6)
    assert spark_model.evaluate(rdd) == pytest.approx(
        model.evaluate(problem.x, problem.y, verbose=0), rel=1e-5
    )


@pytest.mark.whole
def test_more_and_fewer_partitions_than_workers(spark, problem, caplog):
    """Two workers share five partitions, one of them empty, or a single partition, without losing a row."""
    caplog.set_level(logging.INFO, "sparkdl")
    for counts in [(50, 3, 0, 100, 50), (203,)]:
        history = SparkModel(problem.model(), num_workers=2).fit(
            problem.rdd(spark, *counts), epochs=2, verbose=0, seed=1
        )

        assert 203 == history.training["rows"] == sum(history.training["worker_rows"])
        assert min(history.training["worker_rows"]) > 0
    assert [line for line in caplog.messages if "without rows" in line] == ["Partitions without rows: 1."]
    line = "2 workers (as requested) on 203 rows, batch_size=32 over all workers: 7 steps per epoch."
    assert line in caplog.messages


def test_an_empty_partition_is_said_with_counts(spark, problem, caplog):
    """A worker without rows joins every step; the driver logs how many such workers there are."""
    history = SparkModel(problem.model(), num_workers=2).fit(
        problem.rdd(spark, 203, 0), epochs=1, shuffle=False, verbose=0
    )

    assert history.training["worker_rows"] == [203, 0]
    assert "Workers without rows: 1 of 2." in caplog.messages


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["arrays", "rdd", "array"])
def test_held_out_rows_are_evaluated_on_the_workers(spark, problem, frames, kind):
    """`validation_data` of each kind gives the loss that plain Keras has on those rows."""
    model = problem.model()
    if kind == "arrays":
        data, validation = (problem.x[:150], problem.y[:150]), (problem.x[150:], problem.y[150:])
    elif kind == "rdd":
        data = (to_simple_rdd(spark.sparkContext, problem.x[:150], problem.y[:150]),)
        validation = to_simple_rdd(spark.sparkContext, problem.x[150:], problem.y[150:])
    else:
        data, validation = (frames[kind].filter("row < 150"),), frames[kind].filter("row >= 150")

    history = SparkModel(model, num_workers=2).fit(
        *data, epochs=2, verbose=0, validation_data=validation, seed=1
    )

    expected = model.evaluate(problem.x[150:], problem.y[150:], verbose=0)
    assert sorted(history.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert history.training["rows"] == 150
    assert expected == pytest.approx(
        [history.history["val_loss"][-1], history.history["val_accuracy"][-1]], rel=1e-5
    )


@pytest.mark.whole
def test_training_goes_on_where_the_last_fit_ended(spark, problem):
    """Two fits equal one of as many epochs, momentum included, even with another model's fit between."""
    model, other, reference = problem.model(), problem.model(seed=2), problem.model()
    start = model.get_weights()
    spark_model = SparkModel(model, num_workers=2)
    data = problem.x, problem.y
    settings = {"batch_size": 32, "shuffle": False, "verbose": 0}

    spark_model.fit(*data, epochs=1, **settings)
    SparkModel(other, num_workers=2).fit(*data, epochs=1, **settings)
    spark_model.fit(*data, epochs=2, **settings)

    reference.fit(*data, epochs=3, **settings)
    assert problem.distance(model, reference, start) <= 1
    assert [len(history["loss"]) for history in spark_model.training_histories] == [1, 2]
    assert int(reference.optimizer.iterations) == int(model.optimizer.iterations)


@pytest.mark.whole
def test_two_fits_at_once_take_turns_for_the_slots(spark, problem):
    """Two concurrent fits that each need every slot both finish, each with its own answer."""
    models = [problem.model(seed=1), problem.model(seed=2)]
    starts = [model.get_weights() for model in models]
    settings = {"batch_size": 32, "shuffle": False, "epochs": 3, "verbose": 0}
    spark_models = [SparkModel(model, num_workers=2) for model in models]
    threads = [
        threading.Thread(target=spark_model.fit, args=(problem.x, problem.y), kwargs=settings)
        for spark_model in spark_models
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed, model, start in zip((1, 2), models, starts, strict=True):
        reference = problem.model(seed=seed)
        reference.fit(problem.x, problem.y, **settings)
        assert problem.distance(model, reference, start) <= 1


@pytest.mark.whole
def test_what_fails_on_a_worker_is_raised_on_the_driver(spark, problem):
    """An exception in the user's code is raised on the driver with the worker's traceback and host."""

    def picky_loss(y_true, y_pred):
        context = TaskContext.get()
        if context is not None and context.partitionId() == 1:
            raise ArithmeticError("partition one is not to my taste")
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    model = problem.model(loss=picky_loss)
    start = model.get_weights()
    spark_model = SparkModel(model, num_workers=2, custom_objects={"picky_loss": picky_loss})

    with pytest.raises(WorkerError, match="partition one is not to my taste") as caught:
        spark_model.fit(problem.x, problem.y, verbose=0)

    assert caught.value.worker == 1
    assert caught.value.host
    assert "in picky_loss" in caught.value.traceback
    assert all(np.array_equal(a, b) for a, b in zip(start, model.get_weights(), strict=True))
    assert spark_model.history.history == {}


def test_custom_objects_travel_with_the_model(spark, problem):
    """A custom layer and a custom metric, defined next to the fit, reach the executors."""

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, inputs):
            return inputs * self.scale

    def doubt(y_true, y_pred):
        return 1.0 - keras.ops.max(y_pred, axis=-1)

    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), Scale(), keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=[doubt])
    spark_model = SparkModel(model, num_workers=2, custom_objects={"Scale": Scale, "doubt": doubt})

    history = spark_model.fit(problem.x, problem.y, epochs=1, verbose=0)

    assert {"loss", "doubt"} == set(history.history)
    assert model.evaluate(problem.x, problem.y, verbose=0) == pytest.approx(
        spark_model.evaluate(problem.x, problem.y), rel=1e-5
    )

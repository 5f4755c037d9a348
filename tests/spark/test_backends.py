"""A fit on Spark keeps the same promises on every backend of Keras.

``KERAS_BACKEND`` chooses the backend. ``make test-backends`` runs this file on JAX and on torch; with
TensorFlow, which all other tests use, it is part of the full test suite.
"""

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import SparkModel

pytestmark = [pytest.mark.usefixtures("spark")]
if keras.backend.backend() == "tensorflow":
    pytestmark.append(pytest.mark.whole)


def test_two_workers_train_as_one_process_does(problem):
    """Weights, history, scores and predictions of two workers are those of plain Keras."""
    model, reference = problem.model(), problem.model()
    options = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    spark_model = SparkModel(model, num_workers=2)
    history = spark_model.fit(problem.x, problem.y, **options).history
    expected = reference.fit(problem.x, problem.y, **options).history

    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert expected.keys() == history.keys()
    for name, values in expected.items():
        assert values == pytest.approx(history[name], rel=1e-4)
    scores = spark_model.evaluate(problem.x, problem.y)
    assert reference.evaluate(problem.x, problem.y, verbose=0) == pytest.approx(scores, rel=1e-4)
    np.testing.assert_allclose(
        spark_model.predict(problem.x), reference.predict(problem.x, verbose=0), atol=1e-5
    )


FREE = [("asynchronous", "epoch"), ("hogwild", "batch")]


def halves(problem):
    """Return rows to train on, and fit options with the rows to validate on."""
    held = problem.x[150:], problem.y[150:]
    return (problem.x[:150], problem.y[:150], 16), {"verbose": 0, "seed": 1, "validation_data": held}


@pytest.mark.parametrize(("mode", "frequency"), FREE)
def test_workers_that_wait_for_nobody_train(problem, mode, frequency):
    """Asynchronous training lowers the loss on training and validation rows, and records every epoch."""
    rows, options = halves(problem)
    model = problem.model(keras.optimizers.Adam(0.02))
    before = model.evaluate(problem.x[150:], problem.y[150:], verbose=0)[0]
    spark_model = SparkModel(model, mode=mode, frequency=frequency, num_workers=2)
    history = spark_model.fit(*rows, epochs=6, **options).history

    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == history.keys()
    assert [6] * 4 == [len(values) for values in history.values()]
    assert history["loss"][-1] < 0.75 * history["loss"][0]
    assert history["val_loss"][-1] < 0.75 * before


@pytest.mark.parametrize(("mode", "frequency"), FREE)
def test_rows_to_validate_on_do_not_count_as_rows_of_an_epoch(problem, mode, frequency):
    """Workers validate an epoch during the next one; a model with learning rate 0 scores the same in each."""
    rows, options = halves(problem)
    model = problem.model(keras.optimizers.SGD(0.0))
    loss, accuracy = model.evaluate(*rows[:2], verbose=0)
    val_loss, val_accuracy = model.evaluate(*options["validation_data"], verbose=0)
    spark_model = SparkModel(model, mode=mode, frequency=frequency, num_workers=2)
    history = spark_model.fit(*rows, epochs=6, **options).history

    assert [loss] * 6 == pytest.approx(history["loss"], rel=1e-5)
    assert [accuracy] * 6 == pytest.approx(history["accuracy"], rel=1e-5)
    assert [val_loss] * 6 == pytest.approx(history["val_loss"], rel=1e-5)
    assert [val_accuracy] * 6 == pytest.approx(history["val_accuracy"], rel=1e-5)


def test_tensors_are_reduced():
    """A variable, which on torch requires a gradient, and a bfloat16 tensor are reduced as arrays."""

    def reduced(worker):
        variable = keras.Variable([1.0, 2.0])
        return worker.all_reduce((variable.value, keras.ops.ones(2, "bfloat16")), "sum")

    for variable, half in sparkdl.run(reduced, num_workers=2):
        np.testing.assert_array_equal(np.float32([2, 4]), variable, strict=True)
        np.testing.assert_array_equal(np.float32([2, 2]), half, strict=True)


def test_tensors_are_rows(spark, problem):
    """Rows of an RDD may be tensors of the backend, which on torch may require a gradient."""
    x = keras.Variable(problem.x[:20])
    rows = [(row, label) for row, label in zip(x.value, problem.y[:20].tolist(), strict=True)]
    model = problem.model()
    expected = model.evaluate(problem.x[:20], problem.y[:20], verbose=0)

    found = SparkModel(model).evaluate(spark.sparkContext.parallelize(rows, 2))

    assert expected == pytest.approx(found, rel=1e-4)

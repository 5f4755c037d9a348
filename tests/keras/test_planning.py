"""``sparkdl.plan``: its table, its recommendation, and bad input."""

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl.errors import ConfigError, ModelError


def model_of(width: int = 1000) -> keras.Model:
    """Return a built model with two layers of ``width`` units and a BatchNormalization."""
    layers = [keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(width)]
    return keras.Sequential([keras.Input((width,)), *layers])


def test_the_bytes_are_those_of_the_trained_weights_and_the_moving_statistics():
    """Each exchanged weight takes four bytes, sent and received; frozen weights are not exchanged."""
    model = model_of(10)
    weights = 2 * (10 * 10 + 10) + 4 * 10
    assert sparkdl.plan(model, num_workers=2).rows[0].traffic == 2 * 4 * weights
    model.layers[0].trainable = False
    assert sparkdl.plan(model, num_workers=2).rows[0].traffic == 2 * 4 * (weights - 110)


def test_a_fast_network_needs_no_change_and_a_slow_one_fewer_exchanges():
    """The default is recommended where exchanges are cheap, then placement="executors", then a frequency."""
    model = model_of()  # 8 MB
    (fast,) = sparkdl.plan(model, num_workers=4, bandwidth=100e9, batch_seconds=1).advice
    assert 'placement="driver"' in fast
    assert "Faster" not in fast
    (middle,) = sparkdl.plan(model, num_workers=8, bandwidth=10e9, batch_seconds=1).advice
    assert 'placement="executors"' in middle
    assert "Faster" not in middle
    (slow,) = sparkdl.plan(model, num_workers=8, bandwidth=1e9, batch_seconds=0.1).advice
    assert "larger batches" in slow
    assert 'frequency=8 with placement="executors"' in slow
    assert "lose accuracy" in slow


def test_the_text_and_the_html_have_a_row_for_each_estimate():
    """Both show each number of workers with its settings, times with units, and the recommendation."""
    plan = sparkdl.plan(model_of(), num_workers=(1, 1000), batch_seconds=0.1)
    text = str(plan)
    assert text.count("\n") == 3 + len(plan.rows) + len(plan.advice)
    assert "8.02 MB per exchange" in text
    assert " ms" in text
    assert "the driver's link" in text
    assert plan._repr_html_().count("<tr>") == 1 + len(plan.rows)
    assert "1,000 workers" in text
    assert "1 worker:" in text


def test_without_the_time_of_a_batch_it_says_what_time_would_be_enough():
    """Such a plan shows no speed-up, but from which time of a batch on exchanges are cheap."""
    plan = sparkdl.plan(model_of(), num_workers=8)
    assert "speed-up" not in str(plan)
    assert "cheap for batches from" in str(plan)
    needed = [row.needed for row in plan.rows[:2]]
    again = sparkdl.plan(model_of(), num_workers=8, batch_seconds=needed[1])
    assert "Faster" not in again.advice[0]


def test_a_spark_model_is_planned_as_its_model():
    """A SparkModel gives the rows of its Keras model."""
    model = model_of(10)
    model.compile("sgd", "mse")
    assert sparkdl.plan(sparkdl.SparkModel(model), num_workers=2) == sparkdl.plan(model, num_workers=2)


def test_the_number_of_workers_may_be_one_of_numpy():
    """An integer of NumPy is a number of workers."""
    assert sparkdl.plan(model_of(10), num_workers=np.int64(2)) == sparkdl.plan(model_of(10), num_workers=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers should be a whole number of at least 1; got 0."),
        ({"num_workers": True}, "num_workers should be a whole number of at least 1; got True."),
        ({"num_workers": 2.0}, "num_workers should be a whole number of at least 1, or several; got 2.0."),
        ({"num_workers": "2"}, "num_workers should be a whole number of at least 1, or several; got '2'."),
        ({"num_workers": []}, r"num_workers should be a whole number of at least 1, or several; got \[\]."),
        ({"num_workers": (2, 8), "hosts": 4}, r"hosts should be at most num_workers \(2\); got 4."),
        ({"hosts": 0}, "hosts should be a whole number of at least 1; got 0."),
        ({"bandwidth": 0}, "bandwidth should be a positive number of bits per second; got 0."),
        ({"bandwidth": "10 Gbit/s"}, "bandwidth should be a positive number of bits per second; got '10 Gb"),
        ({"bandwidth": float("nan")}, "bandwidth should be a positive number of bits per second; got nan."),
        ({"latency": -1}, "latency should be a positive number of seconds, or 0; got -1."),
        ({"batch_seconds": 0}, "batch_seconds should be a positive number of seconds; got 0."),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    """An invalid argument raises ConfigError with the expected and the received value."""
    with pytest.raises(ConfigError, match=message):
        sparkdl.plan(model_of(10), **{"num_workers": 2, **arguments})


def test_a_model_that_is_not_built_has_no_sizes():
    """A model without an input shape raises ModelError, with the remedy."""
    with pytest.raises(ModelError, match="is not built. Give it an Input layer"):
        sparkdl.plan(keras.Sequential([keras.layers.Dense(1)]), num_workers=2)


@pytest.mark.parametrize("thing", [None, 10, "model"])
def test_something_else_than_a_model_is_named(thing):
    """An argument that is no model raises ModelError."""
    with pytest.raises(ModelError, match="plan needs a keras.Model or a SparkModel; got "):
        sparkdl.plan(thing, num_workers=2)


def test_a_setting_that_a_fit_refuses_is_not_recommended():
    """Workers cannot average the sparse gradients of embeddings per batch if the optimizer is adaptive."""
    found = {}
    for optimizer in ("sgd", "adam"):
        layers = [keras.layers.Embedding(100_000, 20), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(optimizer, "mse")
        plan = sparkdl.plan(model, num_workers=8, bandwidth=10e9, batch_seconds=1)
        found[optimizer] = plan.advice[0], {(row.frequency, row.placement) for row in plan.rows}

    assert 'frequency="batch", placement="executors"' in found["sgd"][0]
    assert 'frequency="batch", placement="driver"' in found["adam"][0]
    assert (1, "executors") not in found["adam"][1]

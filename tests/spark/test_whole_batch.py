"""Layers with statistics of the whole batch train as in plain Keras, or are refused by name."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ModelError


def synchronized(*, nested=False, trainable=True):
    """Return a model with a synchronized BatchNormalization, at the top or in a nested model."""
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(synchronized=True, name="norm", trainable=trainable)
    middle = keras.Sequential([keras.Input((8,)), norm]) if nested else norm
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), middle, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


@pytest.mark.parametrize("nested", [False, True])
def test_synchronized_statistics_of_a_divided_batch_are_refused(spark, problem, jobs, nested):
    """Synchronized statistics of a batch that several workers share raise an error before any job."""
    before = jobs()
    with pytest.raises(ModelError, match="norm: synchronized=True needs the statistics of the whole batch"):
        SparkModel(synchronized(nested=nested), num_workers=2).fit(problem.x, problem.y, verbose=0)
    assert before == jobs()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "settings"),
    [({"num_workers": 1}, {}), ({"num_workers": 2}, {"trainable": False})],
    ids=["one worker", "frozen"],
)
def test_synchronized_statistics_are_plain_keras_where_no_batch_is_divided(problem, options, settings):
    """Synchronized statistics are those of plain Keras with one worker, or in a frozen layer."""
    plain, model = synchronized(**settings), synchronized(**settings)
    arguments = {"batch_size": 16, "shuffle": False, "verbose": 0}
    plain.fit(problem.x, problem.y, **arguments)

    SparkModel(model, **options).fit(problem.x, problem.y, **arguments)

    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_workers_with_batches_of_their_own_train_synchronized_statistics(spark, problem):
    """With frequency="epoch" each worker's batches are whole, so synchronized statistics train."""
    history = SparkModel(synchronized(), num_workers=2, frequency="epoch").fit(
        problem.x, problem.y, batch_size=16, epochs=2, verbose=0
    )

    assert history.history["loss"][1] < history.history["loss"][0]

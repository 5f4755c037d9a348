"""Training a recommender with embeddings, whose gradients travel as slices where the backend supports it."""

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl import SparkModel

pytestmark = pytest.mark.usefixtures("spark")
ROWS, BATCH_SIZE, EPOCHS = 200, 32, 2
USERS, ITEMS, WIDTH = 4000, 40, 4
RANDOM = np.random.default_rng(0)
X = [RANDOM.integers(0, count, (ROWS, 1)).astype("int32") for count in (USERS, ITEMS)]
RATINGS = RANDOM.normal(size=(ROWS, 1)).astype("float32")


def recommender(optimizer):
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((1,), dtype="int32") for _ in X]
    found = [
        layers.Flatten()(layers.Embedding(count, WIDTH)(each))
        for count, each in zip((USERS, ITEMS), inputs, strict=True)
    ]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(found)))
    model.compile(optimizer, "mse")
    return model


def moved(model, start):
    """Return the change of each weight since the start, and its overall norm."""
    change = [after - before for after, before in zip(model.get_weights(), start, strict=True)]
    return change, np.sqrt(sum(np.square(each).sum() for each in change))


WHOLE = [
    pytest.param(name, workers, marks=pytest.mark.whole)
    for name in ("AdamW", "RMSprop", "Adagrad", "Nadam", "Adamax", "Ftrl", "Adadelta", "Lion", "SGD")
    for workers in (1, 2)
]


@pytest.mark.parametrize(("name", "workers"), [("Adam", 1), ("Adam", 2), *WHOLE])
def test_a_recommender_equals_model_fit(name, workers):
    """A recommender trained without a shuffle has the weights of model.fit, and counts the slices moved."""
    model, reference = (recommender(getattr(keras.optimizers, name)(0.01)) for _ in range(2))
    start = model.get_weights()
    options = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = SparkModel(model, num_workers=workers).fit(X, RATINGS, **options)
    expected = reference.fit(X, RATINGS, **options)
    ours, (theirs, way) = moved(model, start)[0], moved(reference, start)
    apart = np.sqrt(sum(np.square(a - b).sum() for a, b in zip(ours, theirs, strict=True)))

    assert apart <= 1e-5 * way
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    if keras.backend.backend() == "tensorflow":
        slices = EPOCHS * ROWS * len(X)
        report = 4 * (USERS + ITEMS) * WIDTH * 4 * EPOCHS  # weights and optimizer, at each epoch's end
        assert history.training["slices"] == slices
        assert history.training["bytes_received"] < 2 * slices * (WIDTH + 1) * 4 + report + (1 << 16)

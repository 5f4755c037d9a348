"""Checks of the reference implementation against results known from theory."""

import keras
import numpy as np
import pytest
import reference

ROWS, BATCH, EPOCHS = 50, 8, 3  # seven batches an epoch, the last of two rows


def make_model():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, run_eagerly=True)
    return model


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = rng.integers(0, 3, ROWS).astype("int32")
    keras.utils.set_random_seed(0)
    return make_model, make_model().get_weights(), x, y


def plain(problem):
    _, weights, x, y = problem
    model = make_model()
    model.set_weights(weights)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights()


def simulate(how, problem, **settings):
    return how(*problem, batch_size=BATCH, epochs=EPOCHS, **settings).get_weights()


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_batch_split_over_workers_is_one_large_batch(problem, workers):
    """Synchronous/batch equals `model.fit` for any number of workers."""
    actual = simulate(reference.synchronous_batch, problem, workers=workers)

    close(actual, plain(problem))


@pytest.mark.one_case
@pytest.mark.parametrize("frequency", ["batch", 3, "epoch"])
def test_one_synchronous_worker_is_plain_keras(problem, frequency):
    """One worker that averages with itself equals `model.fit`."""
    actual = simulate(reference.synchronous, problem, workers=1, frequency=frequency)

    close(actual, plain(problem))


@pytest.mark.parametrize("rule", reference.RULES)
@pytest.mark.parametrize("frequency", ["batch", 3, "epoch"])
def test_one_asynchronous_worker_is_plain_keras(problem, frequency, rule):
    """A single asynchronous worker is never stale, so every rule adds its whole delta."""
    actual = simulate(reference.asynchronous, problem, workers=1, frequency=frequency, rule=rule)

    close(actual, plain(problem))


def test_two_workers_with_a_stale_sum_are_what_the_hand_computes(problem):
    """Two turns from one center, by hand: the second delta is one version stale, and dynsgd halves it."""
    factory, weights, x, y = problem
    deltas = []
    for k in range(2):
        model = factory()
        model.set_weights(weights)
        model.train_on_batch(x[k::2], y[k::2])
        deltas.append([a - b for a, b in zip(model.get_weights(), weights, strict=True)])

    actual = reference.asynchronous(
        *problem, workers=2, batch_size=ROWS, epochs=1, frequency="epoch", rule="dynsgd"
    )

    close(actual.get_weights(), [w + a + b / 2 for w, a, b in zip(weights, *deltas, strict=True)])


def test_a_seed_decides_the_order_of_rows(problem):
    """The same seed repeats a run; another seed differs."""
    runs = [
        simulate(reference.synchronous, problem, workers=2, frequency="epoch", seed=seed)
        for seed in (1, 1, 2)
    ]

    close(runs[0], runs[1])
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(runs[0], runs[2], strict=True))

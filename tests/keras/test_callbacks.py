"""Learning-rate callbacks work in a worker group as in plain Keras."""

from functools import partial

import keras
import numpy as np
import pytest
from worker_threads import even_split, train

from sparkdl.callbacks import LearningRateScaling, LearningRateWarmup
from sparkdl.driver import batch_hooks
from sparkdl.driver.epochs import check_callbacks
from sparkdl.errors import ConfigError

ROWS, BATCH, EPOCHS, RATE = 70, 8, 3, 0.2


def make_model(rate=RATE):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), loss)
    return model


def problem():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 4)).astype("float32"), rng.integers(0, 3, ROWS).astype("int32")


def fitted(callback):
    model = make_model()
    model.fit(*problem(), BATCH, EPOCHS, shuffle=False, verbose=0, callbacks=[callback])
    return model


def trained(callback, workers, **settings):
    model = make_model()
    factor = partial(callback.factor, num_workers=workers)
    settings = {"rows": even_split(ROWS, workers), "batch_size": BATCH, "epochs": EPOCHS} | settings
    train(model, *problem(), factor=factor, **settings)
    return model


def check_close(expected, actual):
    for e, a in zip(expected.get_weights(), actual.get_weights(), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("epochs", [2, 0.5])
def test_a_warm_up_trains_as_plain_keras_does(epochs):
    """Every update has the warm-up's rate at that moment, whatever the number of workers."""
    plain = fitted(LearningRateWarmup(epochs, start=0.1))

    check_close(plain, trained(LearningRateWarmup(epochs, start=0.1), 3))
    with pytest.raises(AssertionError):
        check_close(plain, fitted(keras.callbacks.Callback()))


def test_one_worker_that_exchanges_after_some_batches_has_the_rate_of_the_window():
    """With an exchange every few batches, a worker uses the rate at the window's beginning."""
    model, (x, y), factor = make_model(), problem(), LearningRateWarmup(2, 0.1).factor
    for epoch in range(EPOCHS):
        for start in range(0, ROWS, 3 * BATCH):
            model.optimizer.learning_rate = RATE * factor(epoch + start / BATCH / 9, 1)
            stop = start + 3 * BATCH
            model.fit(x[start:stop], y[start:stop], BATCH, shuffle=False, verbose=0)

    check_close(model, trained(LearningRateWarmup(2, 0.1), 1, window=3))


def test_several_factors_multiply_and_leave_the_rate_as_it_was():
    """Several factors multiply in any order of callbacks, and the optimizer's rate is restored."""
    model, halves = make_model(), [LearningRateWarmup(9, 0.5), LearningRateWarmup(99, 0.5)]
    reference = make_model(RATE / 4)
    for callbacks, each in [(halves, model), ([], reference)]:
        each.fit(*problem(), ROWS, 1, shuffle=False, verbose=0, callbacks=callbacks)

    check_close(reference, model)
    assert pytest.approx(RATE) == float(model.optimizer.learning_rate)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2)])
def test_scaling_multiplies_by_the_workers_or_their_root(rule, factor):
    """Scaling multiplies by K or its root, and changes nothing for one worker or in plain Keras."""
    assert factor == LearningRateScaling(rule).factor(0.5, 4)
    check_close(fitted(keras.callbacks.Callback()), fitted(LearningRateScaling(rule)))


def test_a_warm_up_begins_with_the_rate_of_one_worker():
    """A warm-up is linear from 1 / K to 1."""
    assert [0.25, 0.625, 1, 1] == [LearningRateWarmup(2).factor(epoch, 4) for epoch in (0, 1, 2, 3)]


def test_the_model_keeps_its_rate():
    """Callbacks multiply the rate of a step; other callbacks and the next fit see the model's own rate."""
    assert pytest.approx(RATE) == float(fitted(LearningRateWarmup(9, 0.0)).optimizer.learning_rate)


def test_executors_are_no_place_for_batch_hooks_but_for_these():
    """The package's callbacks pass the check for batch hooks: they work by their return values."""
    kept = [LearningRateScaling(), LearningRateWarmup()]

    assert kept == check_callbacks(kept)


def test_a_callback_of_the_users_that_counts_batches_is_called_for_each():
    """A save_freq makes a saver only of Keras's callbacks: another callback may count its calls."""

    class Counts(keras.callbacks.Callback):
        save_freq = 10

        def on_train_batch_end(self, batch, logs=None):
            pass

    class Kept(keras.callbacks.ModelCheckpoint):
        pass

    assert not batch_hooks.saves(Counts())
    assert batch_hooks.saves(Kept("model.keras", save_freq=10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateWarmup(0), "epochs should be a positive number; got 0."),
        (lambda: LearningRateWarmup(1, 1.5), "start should be a number from 0 to 1, or None; got 1.5."),
        (lambda: LearningRateScaling("log"), "rule should be one of 'linear', 'sqrt'; got 'log'."),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    """Invalid settings are refused by name, with the valid range."""
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("rate", "kind"),
    [(keras.optimizers.schedules.CosineDecay(0.1, 10), "schedule"), (lambda: 0.1, "function")],
)
@pytest.mark.parametrize("make", [LearningRateWarmup, LearningRateScaling])
def test_only_a_number_is_multiplied(make, rate, kind):
    """A factor is refused if a schedule or a function gives the learning rate."""
    message = f"{make.__name__} needs an optimizer whose learning rate is a number; got a {kind}. Scale"
    with pytest.raises(ConfigError, match=message):
        make_model(rate).fit(*problem(), verbose=0, callbacks=[make()])


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_the_rate_is_restored_where_keras_begins_a_batch_too_many():
    """Keras begins a batch too many of rows of unknown number; the factor of that batch is not kept."""
    tf = pytest.importorskip("tensorflow")
    x, y = problem()
    rates = []

    def generate():
        yield from ((x[start : start + 8], y[start : start + 8]) for start in range(0, 32, 8))

    def note(epoch, logs):
        rates.append(float(model.optimizer.learning_rate))

    model = make_model()
    rate = float(model.optimizer.learning_rate)
    kinds = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32)
    rows = tf.data.Dataset.from_generator(generate, output_signature=kinds)
    after = keras.callbacks.LambdaCallback(on_epoch_end=note)
    model.fit(rows, epochs=3, shuffle=False, verbose=0, callbacks=[LearningRateWarmup(4, start=0.5), after])

    assert [rate] * 3 == pytest.approx(rates)

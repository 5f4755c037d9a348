"""AverageWeights ends training with the mean of the weights, unless its validation result is worse."""

import logging

import keras
import numpy as np
import pytest

from sparkdl.callbacks import AverageWeights
from sparkdl.errors import ConfigError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype("float32")
Y = X @ np.array([[1.0], [2.0], [0.0], [-1.0]]) + 0.1 * RNG.normal(size=(60, 1))
HELD_OUT = X[40:], Y[40:]
EPOCHS, START = 5, 2


def linear():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(
        keras.optimizers.SGD(0.02), "mse", run_eagerly=True
    )  # tracing would take longer than these few batches
    return model


class Record(keras.callbacks.Callback):
    """The weights at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())


def fitted(callback, validation=HELD_OUT):
    model, record = linear(), Record()
    history = model.fit(X[:40], Y[:40], 8, EPOCHS, 0, [callback, record], validation_data=validation)
    return model, record.weights, history.history


def means_of(weights, first=START):
    return [np.mean(parts, axis=0) for parts in zip(*weights[first:], strict=True)]


@pytest.mark.parametrize("validation", [HELD_OUT, None])
def test_training_ends_with_the_mean(validation):
    """The model ends with the mean of the weights, while training itself continued without averaging."""
    callback = AverageWeights(START)
    model, weights, history = fitted(callback, validation)
    _, plain, _ = fitted(keras.callbacks.Callback(), validation)

    assert callback.averaged
    for expected, found in zip(means_of(plain), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for expected, found in zip(plain, weights, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))
    if validation:
        assert pytest.approx(model.evaluate(*validation, verbose=0), rel=1e-4) == history["val_loss"][-1]


def test_a_mean_that_is_worse_is_not_taken(caplog):
    """The model keeps the weights of training if the validation rows show a worse result of the mean."""
    callback = AverageWeights(START, "val_loss", mode="max")  # training lowers the loss
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model, weights, _ = fitted(callback)

    assert not callback.averaged
    assert all(np.array_equal(*pair) for pair in zip(weights[-1], model.get_weights(), strict=True))
    assert "so the model keeps the weights of the last epoch" in caplog.text


def test_a_result_that_is_nan_is_no_measure_of_the_mean():
    """A first result that is NaN does not count as better than that of the mean."""
    callback = AverageWeights(START, "val_loss")

    def spoil(epoch, logs):
        if epoch == 0:
            logs["val_loss"] = float("nan")

    model, first = linear(), keras.callbacks.LambdaCallback(on_epoch_end=spoil)
    model.fit(X[:40], Y[:40], 8, EPOCHS, 0, [first, callback], validation_data=HELD_OUT)

    assert callback.averaged


def test_one_epoch_is_no_mean(caplog):
    """The model is left as it is if fewer than two epochs can be averaged."""
    callback = AverageWeights(EPOCHS - 1)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model, weights, _ = fitted(callback)

    assert not callback.averaged
    assert all(np.array_equal(*pair) for pair in zip(weights[-1], model.get_weights(), strict=True))
    assert "training ended before there were two epochs to average" in caplog.text


def test_only_an_evaluated_mean_is_taken():
    """If the last epoch is not evaluated, the model gets the mean that was evaluated last."""
    model, record = linear(), Record()
    options = {"validation_data": HELD_OUT, "validation_freq": [3, 4]}
    model.fit(X[:40], Y[:40], 8, EPOCHS, 0, [AverageWeights(START), record], **options)

    for expected, found in zip(means_of(record.weights[:4]), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AverageWeights(-1), "start should be a whole number of at least 0; got -1."),
        (lambda: AverageWeights(1, "loss"), "monitor should be a result of the validation rows"),
        (lambda: AverageWeights(1, mode="least"), "mode should be one of 'auto', 'min', 'max'; got 'least'."),
        (lambda: fitted(AverageWeights(1, "val_mae")), "monitor should be one of val_loss; got 'val_mae'."),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    """The error for an invalid setting names it and its valid range."""
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("monitor", "mode"), [("val_mae", "min"), ("val_accuracy", "max"), ("val_loss", "min")]
)
def test_the_direction_of_a_result_follows_from_its_name(monitor, mode):
    """With "auto" errors are better if smaller and scores if larger; other names need a mode."""
    assert mode == AverageWeights(1, monitor).mode
    with pytest.raises(
        ConfigError, match='Whether a smaller val_mine is better is not known. Set mode="min"'
    ):
        AverageWeights(1, "val_mine")
    assert "max" == AverageWeights(1, "val_mine", "max").mode

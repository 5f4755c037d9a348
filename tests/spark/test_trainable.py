"""Changes of `trainable` give the results of plain Keras, or an error with the remedy."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ModelError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
SETTINGS = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2}


def deep(optimizer):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4, "tanh") for _ in range(2)]
    middle = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers, *middle])
    model.compile(optimizer, "mse")
    return model


def freeze_first(model):
    model.layers[0].trainable = False


def freeze_statistics(model):
    model.layers[2].trainable = False


def freeze_bias(model):
    model.layers[0].bias.trainable = False


def compile_again(model):
    freeze_first(model)
    model.compile(keras.optimizers.Adam(0.01), "mse")


def compile_with_the_same(model):
    freeze_first(model)
    model.compile(model.optimizer, "mse")


class AtEpoch(keras.callbacks.Callback):
    """A callback that changes `trainable` during a fit."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.change(self.model)


BETWEEN = [
    pytest.param(before, change, id=f"{getattr(before, '__name__', None)}-{change.__name__}", marks=marks)
    for before, change, marks in [
        (None, freeze_first, ()),
        (None, compile_with_the_same, ()),
        (freeze_first, compile_again, ()),
        *((None, change, pytest.mark.whole) for change in (freeze_statistics, freeze_bias, compile_again)),
        *((before, freeze_first, pytest.mark.whole) for before in (freeze_first, freeze_bias)),
        (freeze_bias, compile_again, pytest.mark.whole),
    ]
]


def same(ours, theirs):
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other), rtol=1e-4, atol=1e-5
        )


@pytest.mark.whole
@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(("before", "change"), BETWEEN)
def test_a_change_between_two_fits_counts_as_in_keras(spark, before, change):
    """Until the model is compiled again, a second fit trains the variables that the first one trained."""
    models = [deep(keras.optimizers.Adam(0.01)) for _ in range(2)]
    for model in models:
        if before is not None:
            before(model)
        fitter = SparkModel(model, num_workers=1) if model is models[0] else model
        fitter.fit(X, Y, **SETTINGS)
        change(model)
        fitter.fit(X, Y, **SETTINGS)

    same(*models)


@pytest.mark.whole
@pytest.mark.backend("tensorflow")
def test_a_change_in_a_callback_is_ignored_as_in_keras(spark):
    """A change in a callback during a fit is ignored: all variables are trained and none is mixed up."""
    ours, theirs = (deep("adam") for _ in range(2))
    settings = SETTINGS | {"epochs": 3, "callbacks": [AtEpoch(freeze_first)]}
    history = SparkModel(ours, num_workers=1).fit(X, Y, **settings)
    plain = theirs.fit(X, Y, **settings)

    same(ours, theirs)
    assert not ours.layers[0].trainable
    np.testing.assert_allclose(history.history["loss"], plain.history["loss"], rtol=1e-4)


class AtBegin(keras.callbacks.Callback):
    """A callback that freezes a layer before the first batch."""

    def on_train_begin(self, logs=None):
        freeze_first(self.model)


def test_a_change_before_the_first_batch_is_refused_by_name(spark):
    """A change in on_train_begin is refused by name: workers already have the trainable variables."""
    model = deep("adam")

    with pytest.raises(ModelError, match='A callback changed trainable of the layer "dense.*"'):
        SparkModel(model, num_workers=1).fit(X, Y, **SETTINGS, callbacks=[AtBegin()])


@pytest.mark.whole
def test_an_optimizer_of_other_variables_is_refused_by_name(spark):
    """An optimizer built for other variables is refused by name; Keras refuses it at the first step."""
    model = deep("adam")
    freeze_first(model)
    SparkModel(model, num_workers=1).fit(X, Y, **SETTINGS)
    model.layers[0].trainable = True
    model.compile(model.optimizer, "mse")

    with pytest.raises(
        ModelError, match="was built for variables other than .* Compile the model with a new optim"
    ):
        SparkModel(model, num_workers=1).fit(X, Y, **SETTINGS)


@pytest.mark.whole
@pytest.mark.parametrize(
    "change", [freeze_first, freeze_statistics, freeze_bias], ids=lambda each: each.__name__
)
def test_inference_does_not_ask_what_is_trainable(spark, change):
    """Prediction and evaluation work after a change of `trainable`, whatever the optimizer's slots."""
    model = deep("adam")
    spark_model = SparkModel(model, num_workers=2)
    model.fit(X, Y, **SETTINGS)
    change(model)

    np.testing.assert_allclose(model.predict(X, verbose=0), spark_model.predict(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), spark_model.evaluate(X, Y), rtol=1e-4)

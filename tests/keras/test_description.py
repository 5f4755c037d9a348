"""The description of a training run: the changes it detects, without touching the model."""

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.driver.description import describe
from sparkdl.modeling import keras_metrics, keras_variables
from sparkdl.modeling.backends.choice import with_keras_optimizer
from sparkdl.rules import FedOpt

SCHEMA = Schema((Column("x", (8,), "float32"), Column("y", (1,), "float32")), (0, 1))


@keras.saving.register_keras_serializable("tests")
class Scaled(layers.Layer):
    """A layer whose configuration omits an argument."""

    factor = 1.0

    def call(self, x):
        return self.factor * x


def scaled(factor):
    layer = Scaled()
    layer.factor = factor
    return layer


def described(*parts, optimizer=None, loss="mse", metrics=(), weights=None, **others):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="hidden"), *parts, layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=0.9), loss, weights, list(metrics))
    keras_metrics.build_metrics(model, np.zeros((1, 8), "float32"), np.zeros((1, 1), "float32"))
    return describe(model, SCHEMA, others)


# The models before and after, and the setting named by the refusal or the warning.
MEANING = {
    "activation": ([layers.ReLU()], [layers.Activation("tanh")], "activation of layer 2"),
    "argument": ([layers.LeakyReLU(0.1)], [layers.LeakyReLU(0.3)], "negative_slope of layer 2"),
    "attribute": ([scaled(1.0)], [scaled(2.0)], "factor of layer 2"),
    "order": ([layers.ReLU(), layers.BatchNormalization()], [layers.BatchNormalization(), layers.ReLU()], ""),
    "epsilon": (
        [layers.LayerNormalization()],
        [layers.LayerNormalization(epsilon=0.3)],
        "epsilon of layer 2",
    ),
    "lambda": ([layers.Lambda(lambda x: x)], [layers.Lambda(lambda x: x * x)], ""),
}
TRAINING = {
    "rate": ([layers.Dropout(0.1)], [layers.Dropout(0.4)], "rate of layer 2 (Dropout) is 0.4 instead of 0.1"),
    "noise": ([layers.GaussianNoise(0.1)], [layers.GaussianNoise(0.4)], "stddev of layer 2"),
    "momentum": (
        [layers.BatchNormalization()],
        [layers.BatchNormalization(momentum=0.5)],
        "momentum of layer 2",
    ),
    "regularizer": (
        [layers.Dense(3)],
        [layers.Dense(3, kernel_regularizer="l2")],
        "L2(l2=0.01) instead of not",
    ),
    "constraint": (
        [layers.Dense(3)],
        [layers.Dense(3, bias_constraint="non_neg")],
        "bias_constraint of layer 2",
    ),
}


def constant_rate():
    return 0.1


COMPILED = {
    "loss": ({}, {"loss": "mae"}, "loss of compile is 'mae' instead of 'mse'"),
    "argument of a loss": (
        {"loss": keras.losses.Huber(0.5)},
        {"loss": keras.losses.Huber(0.3)},
        "delta=0.3, fn=huber",
    ),
    "loss weight": ({}, {"weights": [2.0]}, "loss_weights of compile is (2.0) instead of not set"),
    "metric": ({}, {"metrics": ["mae"]}, "mae of metrics"),
    "momentum": ({}, {"optimizer": keras.optimizers.SGD(0.01)}, "momentum of optimizer is 0.0"),
    "schedule": (
        {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))},
        {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20))},
        "decay_steps=20",
    ),
    "function as rate": (
        {"optimizer": keras.optimizers.SGD(0.1)},
        {"optimizer": keras.optimizers.SGD(constant_rate)},
        "learning_rate of optimizer is constant_rate instead of not set",
    ),
    "class weights": ({"class_weight": {0: 1.0}}, {"class_weight": {0: 2.0}}, "class_weight of fit"),
    "optimizer of the center": (
        {"merge": with_keras_optimizer(FedOpt(keras.optimizers.SGD(0.5, momentum=0.9)))},
        {"merge": with_keras_optimizer(FedOpt(keras.optimizers.SGD(0.5, momentum=0.1)))},
        "FedOpt(optimizer=SGD(ema_momentum=0.99, momentum=0.1",
    ),
    "rule": ({"merge": FedOpt()}, {"merge": None}, "not set instead of FedOpt(optimizer=Adam("),
}


@pytest.mark.parametrize("kind", MEANING)
def test_a_layer_that_computes_something_else_is_noticed(kind):
    """A changed activation, argument, attribute, order or function changes the meaning of saved weights."""
    before, after, words = MEANING[kind]

    refusal = described(*before).refusal(described(*after), mid_epoch=False)

    assert refusal is not None
    assert words in refusal


@pytest.mark.parametrize("kind", TRAINING)
def test_a_layer_that_only_trains_in_another_way_is_named(kind):
    """A changed rate, noise, regularizer or constraint keeps the meaning of saved weights."""
    before, after, words = TRAINING[kind]
    first, second = described(*before), described(*after)

    assert first.refusal(second, mid_epoch=False) is None
    assert any(words in change for change in first.changes(second))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_changed_argument_of_compile_or_fit_is_named(kind):
    """Loss, metrics, optimizer settings, schedules, class weights and rules are compared in words."""
    before, after, words = COMPILED[kind]

    assert any(words in change for change in described(**before).changes(described(**after)))


def test_the_same_program_has_the_same_description():
    """Two runs of one program have equal descriptions, although Keras numbers the names of its objects."""
    parts = [
        [layers.Dense(3, "gelu", kernel_regularizer="l2"), layers.BatchNormalization(), layers.Dropout(0.2)]
        for _ in range(2)
    ]
    first, second = (described(*each, optimizer=keras.optimizers.AdamW(), loss="huber") for each in parts)

    assert first.changes(second) == []
    assert first.refusal(second, mid_epoch=True) is None
    assert first.outputs


def test_other_weights_of_a_frozen_layer_are_noticed():
    """A frozen layer's weights are not part of a checkpoint, so they must be equal."""

    def frozen(value):
        return layers.Dense(4, trainable=False, kernel_initializer=keras.initializers.Constant(value))

    assert "frozen layers" in described(frozen(1.0)).refusal(described(frozen(2.0)), mid_epoch=False)


@pytest.mark.backend("tensorflow")
def test_another_vocabulary_is_noticed():
    """A vocabulary is not part of a checkpoint, so it must be equal."""
    schema = Schema((Column("x", (1,), "string", 256), Column("y", (1,), "float32")), (0, 1))

    def of_words(*words):
        lookup = layers.StringLookup(output_mode="multi_hot")
        lookup.adapt(words)
        model = keras.Sequential([keras.Input((1,), dtype="string"), lookup, layers.Dense(1)])
        model.compile("sgd", "mse")
        return describe(model, schema, {})

    assert of_words("a", "b").refusal(of_words("b", "a"), mid_epoch=False) is None
    assert "vocabularies" in of_words("a", "b").refusal(of_words("a", "c"), mid_epoch=False)


def test_describing_a_model_changes_nothing():
    """A description leaves weights, statistics, optimizer and random generators unchanged."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((8,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile("adam", "mse")
    model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    before = keras_variables.read(variables)

    describe(model, SCHEMA, {})

    for array, now in zip(before, keras_variables.read(variables), strict=True):
        np.testing.assert_array_equal(array, now)

"""A restored model is run next to the live one, which finds differences hidden from comparison."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from sparkdl.errors import ModelError
from sparkdl.modeling import keras_metrics, keras_variables, proof, serialization

X = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Hidden:
    """A number that cannot be compared as an attribute, as in objects of other languages."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class HidingLayer(keras.layers.Layer):
    def __init__(self, value=1.0, **settings):
        super().__init__(**settings)
        self.hidden = Hidden(value)

    def get_config(self):
        return {"name": self.name}

    def call(self, inputs):
        return self.hidden.value * inputs


class HidingGradient(HidingLayer):
    """A layer that returns its inputs and scales their gradient."""

    def call(self, inputs):
        scaled = super().call(inputs)
        return scaled + ops.stop_gradient(inputs - scaled)


class HidingInTraining(HidingLayer):
    def call(self, inputs, training=None):
        return super().call(inputs) if training else inputs


class HidingLoss(keras.losses.Loss):
    def __init__(self, value=1.0, **settings):
        super().__init__(name="hiding")
        self.hidden = Hidden(value)

    def call(self, y_true, y_pred):
        return self.hidden.value * ops.mean(ops.square(y_true - y_pred), -1)


class HidingMetric(keras.metrics.MeanMetricWrapper):
    def __init__(self, value=1.0, **settings):
        super().__init__(lambda y, predicted: self.hidden.value * ops.abs(y - predicted), name="far")
        self.hidden = Hidden(value)

    def get_config(self):
        return {}


class HidingConstraint(keras.constraints.Constraint):
    def __init__(self, value=1.0):
        self.hidden = Hidden(value)

    def __call__(self, w):
        return self.hidden.value * w


class HidingOptimizer(keras.optimizers.SGD):
    def __init__(self, value=1.0, **settings):
        super().__init__(0.1)
        self.hidden = Hidden(value)

    def get_config(self):
        return {}

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.hidden.value * gradient, variable, learning_rate)


class HidingModel(keras.Model):
    """A model with a factor in its graph, while Keras records the default value as its argument."""

    def __init__(self, value=1.0, **settings):
        inputs = keras.Input((4,))
        super().__init__(inputs, value * keras.layers.Dense(1, kernel_initializer="ones")(inputs), **settings)


def net(*layers, loss="mse", optimizer="sgd", metrics=(), **settings):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, **settings)])
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def compiled(model):
    model.compile("sgd", "mse")
    return model


HIDING = {
    "the prediction": lambda: net(HidingLayer(2.0)),
    '"loss"': lambda: net(loss=HidingLoss(2.0)),
    '"far"': lambda: net(metrics=[HidingMetric(2.0)]),
    "the constraint of": lambda: net(kernel_constraint=HidingConstraint(2.0)),
    "an update of the optimizer": lambda: net(optimizer=HidingOptimizer(2.0)),
    "the training step of": lambda: net(keras.layers.Dense(4), HidingGradient(2.0)),
    "step of": lambda: net(HidingInTraining(2.0)),
    "prediction": lambda: compiled(HidingModel(2.0)),
}


@pytest.mark.parametrize("what", HIDING)
def test_what_comes_back_as_something_else_is_named(what):
    """A restored model with other results is refused; the error names the difference and its size."""
    if what == "prediction" and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15):
        pytest.skip("older versions cannot restore such a model, which raises a ModelError too")
    model = HIDING[what]()

    with pytest.raises(
        ModelError, match=rf"gives different results .* {what}.* is .* in the original and .* in the copy"
    ):
        serialization.freeze(model, check=functools.partial(proof.require_same, model, first=(X, Y, None)))


class Noise(keras.layers.Layer):
    """A layer that is random in prediction."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs))


class Nameless(keras.layers.Layer):
    """A layer whose weights Keras names by a counter of the process."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", constraint="non_neg")

    def call(self, inputs):
        return inputs * self.scale


class Broken(keras.Model):
    """A model whose test_step raises an error outside a fit."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(inputs)

    def test_step(self, *_):
        raise RuntimeError("not here")


@pytest.mark.parametrize("make", [lambda: net(Noise()), lambda: net(Nameless()), lambda: compiled(Broken())])
def test_what_is_random_or_nameless_or_fails_here_too_is_taken(make):
    """A difference that the live model has from itself is accepted."""
    model = make()
    keras_metrics.build_metrics(model, X, Y)

    serialization.freeze(model, check=functools.partial(proof.require_same, model, first=(X, Y, None)))


@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_weights_without_weight_decay_are_taken(by):
    """Variables excluded from weight decay are accepted, although their ids differ in the restored model."""
    model = net(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.5))
    excluded = {"var_list": model.weights[:1], "var_names": ["kernel"]}[by]
    model.optimizer.exclude_from_weight_decay(**{by: excluded})

    serialization.freeze(model, check=functools.partial(proof.require_same, model, first=(X, Y, None)))


@pytest.mark.parametrize("loss_scale", [False, True])
def test_the_live_model_is_left_as_it_was(loss_scale):
    """The check leaves the live model's weights and optimizer unchanged."""
    adam = keras.optimizers.Adam()
    model = net(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), optimizer=adam)
    if loss_scale:
        model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse")
    before, optimizer = model.get_weights(), model.optimizer

    serialization.freeze(model, check=functools.partial(proof.require_same, model, first=(X, Y, None)))

    assert model.optimizer is optimizer
    assert not any(np.any(value) for value in keras_variables.read(adam.variables) if value.size > 1)
    assert int(ops.convert_to_numpy(adam.iterations)) == 0
    for ours, theirs in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_states_of_recurrent_layers_are_left_as_they_are():
    """The check leaves states of recurrent layers unchanged, since a fit begins with them."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input(batch_shape=(1, 4, 1)), keras.layers.GRU(2, stateful=True), keras.layers.Dense(1)]
    model = compiled(keras.Sequential(layers))
    first = X[..., None], Y, None
    keras_metrics.build_metrics(model, *first)

    serialization.freeze(model, check=functools.partial(proof.require_same, model, first=first))

    assert not np.any(keras_variables.read(model.layers[0].states)[0])


def test_no_variable_gets_a_new_name():
    """The check creates no named variables: TensorFlow keeps memory for each name."""
    model, again = (keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in range(2))
    for each in (model, again):
        each.compile(keras.optimizers.Adam(), "mse")
    again.set_weights(model.get_weights())
    names = []
    for _ in range(2):
        proof.require_same(model, again, (X, Y, None))
        names.append(keras.Variable(0.0).name)

    number = int(names[0].rpartition("_")[2])
    assert f"variable_{number + 1}" == names[1]


def test_memory_that_runs_out_is_no_difference(monkeypatch):
    """Running out of memory during the check is reported as such, not as a difference."""
    model, again = (keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in range(2))
    for each in (model, again):
        each.compile("sgd", "mse")
    again.set_weights(model.get_weights())
    read = keras_variables.read

    def fail(variables):
        if variables and variables[0] is again.weights[0]:
            raise MemoryError("too much")
        return read(variables)

    monkeypatch.setattr(keras_variables, "read", fail)

    with pytest.raises(MemoryError, match="too much"):
        proof.require_same(model, again, (X, Y, None))

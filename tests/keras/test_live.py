"""State of live objects that their configuration omits is sent to workers, or named in an error."""

import functools
import threading

import cloudpickle
import keras
import numpy as np
import pytest
from keras import ops

from sparkdl.core import pickling
from sparkdl.errors import ModelError
from sparkdl.modeling import (
    differences,
    keras_metrics,
    keras_variables,
    object_pickling,
    proof,
    serialization,
)
from sparkdl.modeling.differences import PATCH

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
NUMBERS_ONCE = tuple(map(int, keras.__version__.split(".")[:2])) >= (
    3,
    15,
)  # Keras numbers operations once, not again in a copy


class Asymmetric(keras.losses.Loss):
    """A loss whose configuration omits an argument."""

    def __init__(self, weight=1.0, **settings):
        super().__init__(**settings)
        self.weight = weight

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.where(error > 0, self.weight, 1.0) * ops.square(error), -1)


class Wanting(Asymmetric):
    """A loss that cannot be made from its configuration."""

    def __init__(self, weight):
        super().__init__(weight)


class Powered(keras.losses.Loss):
    """A loss with an array in its configuration, which Keras turns into a dict that its class cannot read."""

    def __init__(self, powers, **settings):
        super().__init__(**settings)
        self.powers = np.asarray(powers, np.float32)

    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) ** self.powers, -1)

    def get_config(self):
        return {**super().get_config(), "powers": self.powers}


class Within(keras.metrics.Metric):
    """A metric whose configuration omits an argument."""

    def __init__(self, limit=0.5, **settings):
        super().__init__(name="within", **settings)
        self.limit = limit
        self.hits, self.rows = (self.add_weight(name=each, initializer="zeros") for each in ("hits", "rows"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.hits.assign_add(ops.sum(ops.cast(ops.abs(y_true - y_pred) < self.limit, "float32")))
        self.rows.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self):
        return self.hits / self.rows


class WithinWanted(Within):
    """A metric that cannot be made from its configuration."""

    def __init__(self, limit):
        super().__init__(limit)


class Clip(keras.constraints.Constraint):
    """A constraint whose configuration omits an argument."""

    def __init__(self, limit=10.0):
        self.limit = limit

    def __call__(self, weights):
        return ops.clip(weights, -self.limit, self.limit)


class Pull(keras.regularizers.Regularizer):
    """A regularizer without a configuration."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self, weights):
        return self.strength * ops.sum(ops.abs(weights))


class Late(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate / (1 + ops.cast(step, "float32"))


class Slow(keras.optimizers.SGD):
    """An optimizer whose configuration omits an argument."""

    def __init__(self, learning_rate=0.1, factor=1.0, **settings):
        super().__init__(learning_rate, **settings)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)


class SlowWanted(Slow):
    """An optimizer that cannot be made from its configuration."""

    def __init__(self, factor):
        super().__init__(0.05, factor, momentum=0.9)


class Scale(keras.layers.Layer):
    """A layer with an attribute that may be set later."""

    factor = 1.0

    def call(self, inputs):
        return self.factor * inputs


class Bare(keras.layers.Layer):
    """A layer whose constructor takes no arguments."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3, "relu")

    def call(self, inputs):
        return self.inner(inputs)


class Narrow(keras.layers.Layer):
    """A layer whose configuration lacks an argument that its constructor needs."""

    def __init__(self, units, scale=1.0):
        super().__init__()
        self.inner, self.scale = keras.layers.Dense(units), scale

    def get_config(self):
        return {"scale": self.scale}

    def call(self, inputs):
        return self.scale * self.inner(inputs)


class BareModel(keras.Model):
    """A model whose constructor takes no arguments."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = Bare(), keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(self.inner(inputs))


class BareSequential(keras.Sequential):
    """A Sequential model whose constructor takes no arguments."""

    def __init__(self):
        super().__init__([keras.Input((4,)), Bare(), keras.layers.Dense(1)])


class BareFunctional(keras.Model):
    """A functional model whose constructor takes no arguments."""

    def __init__(self):
        inputs = keras.Input((4,))
        super().__init__(inputs, keras.layers.Dense(1)(Narrow(2, 2.0)(inputs)))


def compiled(model):
    keras.utils.set_random_seed(0)
    model.compile(keras.optimizers.Adam(0.1), Wanting(3.0), metrics=[WithinWanted(2.0)])
    return model


class Callable:
    """A callable loss that is not a Keras object."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, y_true, y_pred):
        return self.weight * ops.mean(ops.square(y_true - y_pred), -1)

    def method(self, y_true, y_pred):
        return self(y_true, y_pred)


def net(loss="mse", metrics=(), optimizer="sgd", **settings):
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(3, "tanh", **settings),
        Scale(),
        keras.layers.Dropout(0.5),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def closure():
    held = keras.losses.Huber(0.3)
    return lambda y_true, y_pred: 2 * held(y_true, y_pred)


def adamw(exclude=None, names=None):
    model = net(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(exclude and [model.weights[exclude]], names)
    return model


def changed(change, **settings):
    model = net(**settings)
    change(model)
    return model


def compiled_again(*, fitted, first, **settings):
    """Return a model that was compiled, perhaps trained, and compiled again; omitted settings are kept."""
    model = net()
    model.compile("sgd", **first)
    if fitted:
        model.fit(X, Y, verbose=0)
    model.compile("sgd", **settings)
    return model


def weights_of(**settings):
    return lambda model: [setattr(model.layers[0].kernel, key, value) for key, value in settings.items()]


def set_on(place, **settings):
    return lambda model: [setattr(model.layers[place], key, value) for key, value in settings.items()]


def set_on_optimizer(**settings):
    return lambda model: [setattr(model.optimizer, key, value) for key, value in settings.items()]


def set_on_loss(**settings):
    return lambda model: [setattr(model.loss, key, value) for key, value in settings.items()]


def set_on_model(**settings):
    return lambda model: [setattr(model, key, value) for key, value in settings.items()]


CASES = {
    "Huber": lambda: net(keras.losses.Huber(0.3)),
    "CosineSimilarity": lambda: net(metrics=[keras.metrics.CosineSimilarity(axis=0)]),
    "a loss": lambda: net(Asymmetric(5.0)),
    "a loss without a default": lambda: net(Wanting(5.0)),
    "a loss that was changed": lambda: changed(set_on_loss(weight=7.0), loss=Asymmetric()),
    "a callable loss": lambda: net(Callable(3.0)),
    "a method as a loss": lambda: net(Callable(3.0).method),
    "a closure as a loss": lambda: net(closure()),
    **{
        f"{part} of an earlier compile{', fitted' * fitted}": functools.partial(
            compiled_again, fitted=fitted, first=first, **settings
        )
        for fitted in (False, True)
        for part, first, settings in [
            ("metrics", {"loss": "mse", "metrics": ["mae", Within(2.0)]}, {"loss": "mse"}),
            ("weighted metrics", {"loss": "mse", "weighted_metrics": [Within(2.0)]}, {"loss": "mse"}),
            ("the loss", {"loss": Asymmetric(5.0)}, {"metrics": ["mae"]}),
        ]
    },
    "a metric": lambda: net(metrics=[Within(2.0)]),
    "a metric without a default": lambda: net(metrics=[WithinWanted(2.0)]),
    "a wrapped metric": lambda: net(
        metrics=[keras.metrics.MeanMetricWrapper(keras.losses.huber, "huber", delta=0.2)]
    ),
    "a constraint": lambda: net(kernel_constraint=Clip(0.2)),
    "an array in a configuration": lambda: net(Powered([1.5, 2.5])),
    "the dtype of a loss": lambda: net(keras.losses.Huber(dtype="float64")),
    "a regularizer": lambda: net(kernel_regularizer=Pull(0.2)),
    "a schedule": lambda: net(optimizer=keras.optimizers.SGD(Late(0.05))),
    "an optimizer": lambda: net(optimizer=Slow(0.05, 0.1)),
    "an optimizer without a default": lambda: net(optimizer=SlowWanted(0.1)),
    "a scaled optimizer": lambda: net(optimizer=keras.optimizers.LossScaleOptimizer(Slow(0.05, 0.1))),
    "excluded by name": lambda: adamw(names=["bias"]),
    "excluded variables": lambda: adamw(exclude=2),
    "variable.constraint": lambda: changed(weights_of(constraint=Clip(0.2))),
    "variable.regularizer": lambda: changed(weights_of(regularizer=keras.regularizers.L2(0.3))),
    "no variable.constraint": lambda: changed(weights_of(constraint=None), kernel_constraint="max_norm"),
    "variable.trainable": lambda: changed(weights_of(trainable=False)),
    "variable.overwrite_with_gradient": lambda: changed(weights_of(overwrite_with_gradient=True)),
    "layer.rate": lambda: changed(set_on(2, rate=0.25)),
    "layer.activation": lambda: changed(set_on(0, activation=keras.activations.softplus)),
    "layer.kernel_constraint": lambda: changed(set_on(0, kernel_constraint=Clip(0.1))),
    "an attribute of a layer": lambda: changed(set_on(1, factor=3.0)),
    "an array of a layer": lambda: changed(set_on(1, factor=np.array([1.0, 2.0, 3.0], np.float32))),
    "optimizer.clipnorm": lambda: changed(set_on_optimizer(clipnorm=0.01)),
    "optimizer.momentum": lambda: changed(set_on_optimizer(momentum=0.5)),
    "another optimizer": lambda: changed(set_on_model(optimizer=keras.optimizers.Adam(0.01))),
    "a layer without arguments": lambda: compiled(keras.Sequential([Bare(), keras.layers.Dense(1)])),
    "a layer without a default": lambda: compiled(keras.Sequential([Narrow(2, 0.5), keras.layers.Dense(1)])),
    "a model without arguments": lambda: compiled(BareModel()),
    "a Sequential without arguments": lambda: compiled(BareSequential()),
    "a Functional without arguments": lambda: compiled(BareFunctional()),
    "a model in a model": lambda: compiled(keras.Sequential([BareFunctional(), keras.layers.Dense(1)])),
    "model.run_eagerly": lambda: changed(set_on_model(run_eagerly=True)),
}


def step(model):
    """Return the outputs of a model for some rows, and its weights after a step on them."""
    model.reset_metrics()
    model.run_eagerly = True
    logs = model.train_on_batch(X, Y, return_dict=True)
    return [*logs.values(), *model.evaluate(X, Y, verbose=0, return_dict=True).values(), *model.get_weights()]


@pytest.mark.parametrize("case", CASES)
def test_a_worker_computes_what_the_live_model_computes(case):
    """A worker's loss, metrics and step are those of the live objects, whatever their configuration."""
    model = CASES[case]()
    first = X[:1], Y[:1], None
    keras_metrics.build_metrics(model, *first)
    spec, objects = serialization.freeze(
        model, check=functools.partial(proof.require_same, model, first=first)
    )
    again = serialization.freeze(model)[0].key
    arrived = cloudpickle.loads(pickling.pickled(objects, cloudpickle))
    worker = serialization.thaw(spec, arrived)

    assert [] == differences.differences(model, worker)
    assert spec.key == again
    for ours, theirs in zip(step(model), step(worker), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    layouts = [keras_variables.layout_of(keras_variables.metric_variables(each)) for each in (model, worker)]
    assert layouts[0] == layouts[1]


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_what_a_configuration_leaves_out_makes_another_model(case):
    """A cached model is not reused for one whose objects compute different results."""
    plain = serialization.freeze(net())[0].key

    assert plain != serialization.freeze(CASES[case]())[0].key


def test_two_objects_may_have_the_same_settings():
    """Two losses of one class each keep the argument that their configuration omits."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("sgd", [Asymmetric(5), Asymmetric(5)])
    worker = serialization.thaw(*serialization.freeze(model))

    assert [5, 5] == [loss.weight for loss in worker.loss]


def test_the_dtype_of_a_loss_is_its_own():
    """The dtype of a loss does not change Keras's shared default dtype."""
    worker = serialization.thaw(*serialization.freeze(net(keras.losses.Huber(dtype="float64"))))

    assert worker.loss.dtype == "float64"
    assert keras.config.dtype_policy().compute_dtype == "float32"
    assert keras.losses.Huber().dtype == keras.layers.Dense(1).compute_dtype == "float32"


def functional():
    left, right = keras.Input((4,), name="left"), keras.Input((3, 2), name="right")
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    seen = keras.layers.Bidirectional(keras.layers.GRU(2))(keras.layers.Masking()(right))
    heads = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(right, right)
    joined = keras.layers.Concatenate()([inner(left), seen, keras.layers.Flatten()(heads)])
    model = keras.Model({"left": left, "right": right}, {"out": keras.layers.Dense(1, name="out")(joined)})
    model.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 9)), {"out": "mse"})
    return model, {"left": X, "right": np.ones((8, 3, 2), np.float32)}, {"out": Y}


def images():
    layers = [
        keras.layers.RandomFlip(),
        keras.layers.Conv2D(2, 3, kernel_regularizer="l2"),
        keras.layers.MaxPooling2D(),
        keras.layers.GroupNormalization(1),
        keras.layers.SpatialDropout2D(0.2),
        keras.layers.GlobalAveragePooling2D(),
    ]
    model = keras.Sequential(
        [keras.Input((8, 8, 2)), *layers, keras.layers.Dense(1, kernel_constraint="non_neg")]
    )
    model.compile("adagrad", "mse", weighted_metrics=[keras.metrics.R2Score()])
    return model, np.ones((8, 8, 8, 2), np.float32), Y


class Subclassed(keras.Model):
    """A subclassed model with its layers as attributes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.parts = [keras.layers.Dense(2), keras.layers.LayerNormalization()]
        self.out = keras.layers.Dense(1)
        self.lock = threading.Lock()
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, inputs):
        self.seen = inputs
        for part in self.parts:
            inputs = part(inputs)
        return self.out(inputs)


def subclassed():
    model = Subclassed()
    model.compile("rmsprop", keras.losses.Huber(), metrics=["mae", keras.metrics.AUC(multi_label=True)])
    return model, X, (Y > 0).astype(np.float32)


@pytest.mark.whole
@pytest.mark.parametrize("make", [functional, images, subclassed])
def test_a_plain_model_needs_nothing_beside_its_configuration(make):
    """A plain model is serialized by its configuration alone and has the same key every time."""
    model, x, y = make()
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    first = *keras.tree.map_structure(lambda part: part[:1], (x, y)), None
    weights = model.get_weights()
    spec, objects = serialization.freeze(
        model, check=functools.partial(proof.require_same, model, first=first)
    )

    assert PATCH not in objects
    assert spec.key == serialization.freeze(model)[0].key
    if NUMBERS_ONCE:
        assert spec.key == serialization.freeze(serialization.copy_of(model))[0].key
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    assert not any(np.any(value) for value in keras_variables.read(model.metrics_variables))


def test_what_cannot_travel_is_named():
    """The error for an attribute that cannot be pickled names it and its object."""
    model = net(Asymmetric(5.0))
    model.loss.lock = threading.Lock()

    with pytest.raises(
        ModelError, match="loss.lock of the loss is not in its configuration and cannot be pickled"
    ):
        serialization.freeze(model)


def test_a_function_that_builds_may_be_followed_by_changes():
    """Changes made to a model after a function built it reach workers too."""
    model = net()
    model.layers[2].rate = 0.25
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.5), keras.losses.Huber(0.3), metrics=["mae"])
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    spec, objects = serialization.freeze(model, net)
    worker = serialization.thaw(spec, objects, net)

    assert [] == differences.differences(model, worker)
    for ours, theirs in zip(step(model), step(worker), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


FACTOR = 1.0


class Scaled(keras.losses.Loss):
    """A loss without a configuration that reads a global variable."""

    def call(self, y_true, y_pred):
        return FACTOR * keras.ops.mean(keras.ops.square(y_true - y_pred), -1)


def test_freezing_a_model_leaves_the_code_of_its_objects_alone(monkeypatch):
    """A method of the user's class still reads its module's variables after a fit."""
    loss = Scaled()
    model = net(loss=loss)
    method = Scaled.call
    serialization.freeze(model)
    object_pickling.copied(loss)

    monkeypatch.setitem(globals(), "FACTOR", 3.0)

    assert Scaled.call is method
    assert float(loss(np.ones((2, 1)), np.zeros((2, 1)))) == 3.0

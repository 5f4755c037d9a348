"""The epoch results of a run are those of `model.fit`, number for number."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from worker_threads import even_split, fit

from sparkdl.driver.epochs import Metrics
from sparkdl.modeling import keras_metrics, keras_variables, losses

TOTAL, BATCH_SIZE, EPOCHS = 50, 16, 2  # four batches, the last of two rows: of three workers one has none
SETTINGS = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "shuffle": False, "verbose": 0}


def numbers(*shape):
    return np.random.default_rng(3).normal(size=(TOTAL, *shape)).astype("float32")


X = numbers(6)
Y = X.sum(axis=1, keepdims=True)
Z = (X[:, 0] > 0).astype("int64")


def compiled(model, *arguments, **named):
    model.compile(keras.optimizers.SGD(0.02), *arguments, **named)
    return model


def heads(**named):
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, "tanh")(inputs)
    outputs = [layers.Dense(1, name="a")(hidden), layers.Dense(2, "softmax", name="b")(hidden)]
    losses = ["mse", "sparse_categorical_crossentropy"]
    return compiled(keras.Model(inputs, outputs), losses, metrics=[["mae"], ["accuracy"]], **named)


@keras.saving.register_keras_serializable("history")
class Prior(layers.Layer):
    """A layer with its own loss, a mean over rows, and metrics of its inputs."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.divergence = keras.metrics.Mean(name="divergence")
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, inputs):
        divergence = 0.1 * ops.mean(ops.sum(ops.square(inputs), axis=-1))
        self.add_loss(divergence)
        self.divergence.update_state(divergence)
        self.largest.update_state(ops.max(ops.abs(inputs), axis=-1))
        return inputs


@keras.saving.register_keras_serializable("history")
class Coded(keras.Model):
    """A model of two layers around a prior."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.encode, self.prior, self.decode = layers.Dense(3), Prior(name="prior"), layers.Dense(6)

    def call(self, inputs):
        return self.decode(self.prior(self.encode(inputs)))


@keras.saving.register_keras_serializable("history")
class Tracked(Coded):
    """A model with a custom loss whose metrics are updated per batch or per row."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.reconstruction = keras.metrics.Mean(name="reconstruction")
        self.by_rows = keras.metrics.Mean(name="by_rows")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        errors = ops.sum(ops.square(y - y_pred), axis=-1)
        self.reconstruction.update_state(ops.mean(errors))
        self.by_rows.update_state(errors)
        return ops.mean(errors) + sum(self.losses)


def coded(kind=Coded):
    model = kind()
    model(X[:1])
    return model


@keras.saving.register_keras_serializable("history")
class Autoencoder(Tracked):
    """A model with custom steps for training and testing, as in Keras's variational autoencoder."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.whole = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.whole, self.reconstruction, self.by_rows]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred)
        self.whole.update_state(loss)
        return loss

    def results(self):
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, *arguments):
        return getattr(self, f"on_{keras.backend.backend()}")(*arguments)

    def test_step(self, *arguments):
        if keras.backend.backend() != "jax":
            x, y = arguments[0]
            self.compute_loss(x, y, self(x, training=False))
            return self.results()
        (trainable, fixed, metrics), (x, y) = arguments
        _, (_, metrics) = self.loss_of(trainable, fixed, metrics, x, y, training=False)
        return self.results(), (trainable, fixed, metrics)

    def on_tensorflow(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.results()

    def on_torch(self, data):
        import torch

        x, y = data
        self.zero_grad()
        self.compute_loss(x, y, self(x, training=True)).backward()
        with torch.no_grad():
            variables = self.trainable_weights
            self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return self.results()

    def loss_of(self, trainable, fixed, metrics, x, y, training):
        variables = self.trainable_variables, self.non_trainable_variables, self.metrics_variables
        state = zip(sum(variables, []), [*trainable, *fixed, *metrics], strict=True)
        with keras.StatelessScope(state_mapping=list(state)) as scope:
            loss = self.compute_loss(x, y, self(x, training=training))
        parts = self.non_trainable_variables, self.metrics_variables
        return loss, [[scope.get_current_value(variable) for variable in part] for part in parts]

    def on_jax(self, state, data):
        import jax

        trainable, fixed, optimizer, metrics = state
        grad = jax.value_and_grad(self.loss_of, has_aux=True)
        (_, (fixed, metrics)), gradients = grad(trainable, fixed, metrics, *data, training=True)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        state = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=state):
            logs = self.results()
        return logs, (trainable, fixed, optimizer, metrics)


@keras.saving.register_keras_serializable("history")
class Renamed(Autoencoder):
    """An autoencoder that reports a metric under another name, as Keras's example does."""

    def results(self):
        named = {metric.name: metric.result() for metric in self.metrics[1:]}
        return {"loss": self.whole.result(), **named}


def mean_error(y_true, y_pred):
    """Return the mean absolute error as one number for a batch."""
    return ops.mean(ops.abs(y_true - y_pred))


def sequence(reduction="sum_over_batch_size", *, masked=False):
    parts = [
        keras.Input((4, 3)),
        layers.Masking() if masked else layers.Identity(),
        layers.SimpleRNN(5, return_sequences=True),
        layers.Dense(1, kernel_regularizer="l2"),
    ]
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return compiled(keras.Sequential(parts), loss, metrics=["mae"], weighted_metrics=["mse"])


S = numbers(4, 3) * (np.random.default_rng(5).integers(1, 5, TOTAL)[:, None, None] > np.arange(4)[:, None])
T = S.sum(axis=-1, keepdims=True)
WEIGHTS = np.linspace(0, 3, TOTAL, dtype="float32")


def dense(*arguments, **named):
    return compiled(keras.Sequential([keras.Input((6,)), layers.Dense(1)]), *arguments, **named)


CASES = {
    "two outputs": (heads, X, [Y, Z]),
    "weights of losses": (lambda: heads(loss_weights=[0.3, 2.0]), X, [Y, Z]),
    "a layer's trackers": (lambda: compiled(coded(), "mse"), X, X),
    "a model's trackers": (lambda: compiled(coded(Tracked)), X, X),
    "an autoencoder": (lambda: compiled(coded(Autoencoder)), X, X),
    "another name": (lambda: compiled(coded(Renamed)), X, X),
    "one number a batch": (lambda: dense("mse", metrics=[mean_error]), X, Y),
    "masks": (lambda: sequence(masked=True), S, T),
    "weighted rows": (lambda: dense("mse", weighted_metrics=["mae"]), X, Y, WEIGHTS),
    "a mean by weights": (
        lambda: dense(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        X,
        Y,
        WEIGHTS,
    ),
    "masks and weights": (
        lambda: sequence("mean_with_sample_weight", masked=True),
        S,
        T,
        np.repeat(WEIGHTS[:, None], 4, 1),
    ),
    "a sum": (lambda: dense(keras.losses.MeanSquaredError(reduction="sum")), X, Y),
}

if (
    keras.backend.backend() == "jax"
):  # on JAX, plain Keras cannot update a layer's metric within a training step either
    CASES = {
        name: case for name, case in CASES.items() if name not in ("a layer's trackers", "a model's trackers")
    }


def reported(case, **settings):
    """Return the history of workers, and Keras's."""
    make, x, y, *weights = case
    keras.utils.set_random_seed(1)
    reference = make()
    keras.utils.set_random_seed(1)
    model = make()
    expected = reference.fit(x, y, sample_weight=weights[0] if weights else None, **SETTINGS).history
    return fit(model, x, y, *weights, batch_size=BATCH_SIZE, epochs=EPOCHS, **settings), expected


def same(expected, found):
    assert set(expected) == set(found)
    for name, values in expected.items():
        assert values == pytest.approx(found[name], rel=1e-5, abs=1e-7), name


@pytest.mark.one_case
@pytest.mark.parametrize("workers", [3, *(pytest.param(k, marks=pytest.mark.whole) for k in (1, 2))])
@pytest.mark.parametrize("name", CASES)
def test_the_metrics_of_workers_together_are_those_of_one_process(name, workers):
    """Losses by output, layer metrics, and losses divided by masks or weights are those of Keras."""
    found, expected = reported(CASES[name], rows=even_split(TOTAL, workers))

    same(expected, found)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "window"),
    [
        ("asynchronous", 1),
        pytest.param("synchronous", None, marks=pytest.mark.whole),
        pytest.param("hogwild", 2, marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize("name", ["two outputs", "an autoencoder", "masks and weights"])
def test_the_metrics_of_one_worker_are_keras_s_in_every_mode(name, mode, window):
    """A single worker has the metrics of one process, whatever it exchanges."""
    found, expected = reported(CASES[name], rows=(TOTAL,), mode=mode, window=window)

    same(expected, found)


@keras.saving.register_keras_serializable("history")
class Sampled(Coded):
    """A model that draws random numbers and counts calls at every call."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.random = keras.random.SeedGenerator(4)
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return super().call(inputs + keras.random.normal(ops.shape(inputs), seed=self.random))


@pytest.mark.parametrize("built", [True, False])
def test_a_look_at_the_first_row_leaves_a_model_as_it_was(built):
    """Checks on the first row leave random generators, statistics and metrics unchanged."""
    model = compiled(coded(Sampled) if built else Sampled(), "mse", metrics=["mae"])
    kept = [model.random.state, model.calls]
    before = keras_variables.read(kept) if built else [np.array([4, 0]), np.zeros(())]
    predicted = keras_metrics.build_metrics(model, X[:1], X[:1])
    losses.check(model, X[:1], X[:1], None, predicted)
    metrics = Metrics(model, X[:1], predicted)

    for was, now in zip(before, keras_variables.read(kept), strict=True):
        np.testing.assert_array_equal(now, was)
    assert len(metrics.initial) == 8
    assert not any(map(np.any, metrics.initial))

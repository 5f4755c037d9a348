"""Models of every kind that model.fit takes, in every mode, on the current backend.

``KERAS_BACKEND`` chooses it; ``make test-all`` runs this file on each of TensorFlow, JAX and torch.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers
from worker_threads import OneDropped, merging_of, take, train

from sparkdl.data.batch import Batch
from sparkdl.data.batch_plan import BatchPlan, ranks
from sparkdl.errors import ModelError
from sparkdl.modeling import checks, keras_metrics, optimizers
from sparkdl.modeling.backends.base import Center, RoundMeans
from sparkdl.modeling.backends.choice import make_replica
from sparkdl.server.aggregation import GradientRounds
from sparkdl.worker.loop import Loop

ROWS, BATCH_SIZE, EPOCHS = (61, 35), 16, 5  # six updates an epoch, 30 in all
TOTAL = sum(ROWS)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(TOTAL, *shape)).astype("float32")


def dense():
    x = numbers(6)
    parts = [keras.Input((6,)), layers.Dense(12, "tanh"), layers.Dense(3, "softmax")]
    model = keras.Sequential(parts)
    return model, "sparse_categorical_crossentropy", x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)


def recurrent():
    random = np.random.default_rng(3)
    tokens = random.integers(1, 20, (TOTAL, 8)) * (np.arange(8) < random.integers(1, 9, TOTAL)[:, None])
    parts = [
        keras.Input((8,), dtype="int32"),
        layers.Embedding(20, 5, mask_zero=True),
        layers.LSTM(6, return_sequences=True),
        layers.LayerNormalization(),
        layers.Dense(2, "softmax"),
    ]
    return keras.Sequential(parts), "sparse_categorical_crossentropy", tokens.astype("int32"), tokens % 2


def two_by_two():
    x = {"words": np.random.default_rng(4).integers(0, 7, (TOTAL, 3)).astype("int32"), "points": numbers(4)}
    y = {"sign": (x["points"][:, :1] > 0).astype("float32"), "sum": x["points"].sum(1)[:, None]}
    weights = {"sign": np.linspace(0.2, 2, TOTAL, dtype="float32"), "sum": np.ones(TOTAL, "float32")}
    words, points = keras.Input((3,), dtype="int32", name="words"), keras.Input((4,), name="points")
    read = layers.Flatten()(layers.Embedding(7, 4)(words))
    both = layers.Dense(8, "tanh")(layers.Concatenate()([read, points]))
    kinds = {"sign": "sigmoid", "sum": None}
    outputs = {name: layers.Dense(1, kind, name=name)(both) for name, kind in kinds.items()}
    model = keras.Model({"words": words, "points": points}, outputs)
    return model, {"sign": "binary_crossentropy", "sum": "mse"}, x, y, weights


def attentive():
    x = numbers(5, 4)
    points = keras.Input((5, 4))
    seen = layers.MultiHeadAttention(2, 3)(points, points)
    flat = layers.Flatten()(layers.LayerNormalization()(layers.Add()([points, seen])))
    return keras.Model(points, layers.Dense(2)(flat)), "mse", x, x[:, 0, :2]


class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


def shared():
    """Make a model with one layer used twice, one frozen, and a variable of rank 0."""
    x = numbers(6)
    points, twice, frozen = keras.Input((6,)), layers.Dense(6, "tanh"), layers.Dense(6, trainable=False)
    both = layers.Add()([twice(points), twice(frozen(points))])
    return keras.Model(points, layers.Dense(2)(Scaled()(both))), "mse", x, x[:, :2]


def paired():
    """Make a model with inputs in a tuple, of unequal shapes, one of them a sequence."""
    x = numbers(5, 3), numbers(2, seed=1)
    inputs = keras.Input((5, 3)), keras.Input((2,))
    read = layers.GRU(4)(inputs[0])
    return (
        keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([read, inputs[1]]))),
        "mse",
        x,
        x[1][:, :1],
    )


CASES = {
    "dense": dense,
    "recurrent": recurrent,
    "two by two": two_by_two,
    "attentive": attentive,
    "shared": shared,
    "paired": paired,
}
WINDOWS = [
    ("synchronous", 1),
    ("synchronous", 3),
    ("synchronous", None),
    ("asynchronous", 1),
    ("asynchronous", None),
    ("hogwild", 1),
    ("hogwild", 3),
]


def problem(case, optimizer=None):
    """Return a fresh compiled model, always the same, and its rows."""
    keras.utils.set_random_seed(1)
    model, loss, *data = case()
    model.compile(optimizer or keras.optimizers.Adam(3e-3), loss)
    return model, (*data, None)[:3]


def vector(model):
    return np.concatenate([np.ravel(np.asarray(w, "float32")) for w in model.get_weights()])


def distance(model, reference, start):
    """Return a model's distance from a reference, relative to how far the reference moved."""
    return np.linalg.norm(vector(model) - vector(reference)) / np.linalg.norm(vector(reference) - start)


def fit_and_train(case, rows=ROWS, problem=problem, **options):
    """Train with model.fit and with workers; return the distance between the results."""
    (model, data), (reference, _) = problem(case), problem(case)
    start = vector(reference)
    x, y, weights = data
    reference.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0, sample_weight=weights)
    train(model, x, y, weights, rows=rows, batch_size=BATCH_SIZE, epochs=EPOCHS, **options)
    return distance(model, reference, start)


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_two_workers_train_as_one_process_does(case):
    """Two workers' mean gradient is that of all rows, for masks, weights and several inputs or outputs."""
    assert fit_and_train(CASES[case]) < 1e-3


def some(*combinations, of):
    """Return parameters: these combinations, and all others for the full test suite."""
    return [pytest.param(*one, marks=[] if one in combinations else pytest.mark.whole) for one in of]


TURNS = [(list(CASES)[index % len(CASES)], *window) for index, window in enumerate(WINDOWS)]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("case", "mode", "window"), some(*TURNS, of=[(case, *window) for case in CASES for window in WINDOWS])
)
def test_one_worker_trains_as_keras_does(case, mode, window):
    """One worker gives the result of model.fit in every mode and frequency."""
    assert fit_and_train(CASES[case], rows=(TOTAL,), mode=mode, window=window) < 1e-3


@pytest.mark.whole
@pytest.mark.parametrize("window", [2, pytest.param(None, marks=pytest.mark.whole)])
def test_a_schedule_is_scaled_as_a_number_is(window):
    """A learning-rate schedule is scaled like a number if workers train separately."""
    trained = []
    for rate in (0.05, keras.optimizers.schedules.PiecewiseConstantDecay([9999], [0.05, 0.0])):
        model, (x, y, weights) = problem(dense, keras.optimizers.SGD(rate, momentum=0.5))
        start = vector(model)
        train(model, x, y, weights, window=window, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)
        trained.append(vector(model))

    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)
    assert np.abs(trained[0] - start).max() > 0.01


class ByRows(GradientRounds):
    """A mutant that weighs a gradient by rows, whatever its loss was divided by."""

    def _add(self, update):
        update.normalizer = 0.0
        super()._add(update)


class Unweighted(Loop):
    """A mutant that drops sample weights."""

    def __init__(self, *arguments, rows, **options):
        rows.schema = rows.schema.without_weights()
        super().__init__(*arguments, rows=rows, **options)


MUTANTS = {
    "by rows": (recurrent, merging_of(ByRows)),
    "one dropped": (attentive, merging_of(OneDropped)),
    "unweighted": (two_by_two, {"loop": Unweighted}),
}


@pytest.mark.whole
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_mistakes(mutant):
    """Workers with a wrong weight or a dropped gradient fail the comparison."""
    case, options = MUTANTS[mutant]

    assert fit_and_train(case, **options) > 1e-3


# -- what a model was compiled with ---------------------------------------------------------------

TOLD = [
    {"clipvalue": 0.01},
    {"clipnorm": 0.05},
    {"global_clipnorm": 0.05},
    {"weight_decay": 0.5},
    {"gradient_accumulation_steps": 3},
]


@pytest.mark.whole
@pytest.mark.parametrize("told", TOLD, ids=lambda told: next(iter(told)))
def test_an_optimizer_does_with_gradients_what_it_was_told(told):
    """An optimizer clips, decays or accumulates the mean gradient of all workers."""

    def told_problem(case, **options):
        return problem(case, keras.optimizers.SGD(0.05, momentum=0.9, **options))

    other, (x, y, _) = told_problem(dense)
    start, (model, _) = vector(other), told_problem(dense, **told)
    for each in (other, model):
        each.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)

    assert distance(other, model, start) > 0.1
    assert fit_and_train(dense, problem=lambda case: told_problem(case, **told)) < 1e-3


ADAMS = [
    keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.99, epsilon=1e-3),
    keras.optimizers.Adam(amsgrad=True),
    keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1),
]


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("adam", ADAMS, ids=["its own numbers", "amsgrad", "decay"])
def test_adam_is_keras_s(adam, mode):
    """Adam takes Keras's steps on workers, also for variables of which only some rows move."""
    rows = ROWS if mode == "synchronous" else (TOTAL,)
    copies = lambda case: problem(case, type(adam).from_config(adam.get_config()))  # noqa: E731

    assert fit_and_train(dense, rows=rows, mode=mode, problem=copies) < 1e-3
    assert fit_and_train(two_by_two, rows=(TOTAL,), mode="asynchronous", problem=copies) < 1e-3


class Spare(layers.Layer):
    def build(self, shape):
        self.spare = self.add_weight(shape=(6,), initializer="ones")

    def call(self, inputs):
        return inputs


def sparing():
    """Make a model with a variable that the loss does not depend on, like an output without a loss."""
    model, loss, x, y = dense()
    return keras.Sequential([keras.Input((6,)), Spare(), *model.layers]), loss, x, y


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("rows", [ROWS, (TOTAL, 0)])
def test_what_no_gradient_moves_is_left_alone_where_keras_does(rows):
    """Weights without a gradient decay only if they do in model.fit: on JAX, where the gradient is zero."""

    def decaying(case):
        return problem(case, keras.optimizers.AdamW(0.01, weight_decay=0.5))

    assert fit_and_train(sparing, rows, decaying) < 1e-3


# On torch, Keras itself runs one step at a time.
ON_TORCH = keras.backend.backend() == "torch"
HOW = [{"run_eagerly": True}, *[{"jit_compile": True}, {"steps_per_execution": 3}] * (not ON_TORCH)]


@pytest.mark.whole
@pytest.mark.parametrize("how", HOW)
def test_how_steps_are_run_changes_nothing(how):
    """Steps compiled by XLA, several per call or run eagerly give the same result."""

    def compiled(case):
        model, data = problem(case)
        model.compile(keras.optimizers.Adam(3e-3), model.loss, **how)
        return model, data

    assert fit_and_train(dense, problem=compiled) < 1e-3


def test_workers_on_torch_do_not_compile_and_say_so():
    """On torch, jit_compile=True is refused, because workers there do not compile."""
    model, (x, y, *_) = problem(dense)
    model.compile("sgd", model.loss, jit_compile=True)
    refused = pytest.raises(ModelError, match="jit_compile=True, which is not supported on torch")

    with refused if ON_TORCH else nullcontext():
        checks.require_honoured(model)


# -- losses that are divided by other things than rows --------------------------------------------


def reduced(reduction, *, masked=False, weighted=False, penalty=None):
    """Return a function that makes a problem with a loss of this reduction."""

    def case():
        x = numbers(4, 3)
        if masked:
            x *= np.random.default_rng(5).integers(1, 5, TOTAL)[:, None, None] > np.arange(4)[:, None]
        parts = [
            keras.Input((4, 3)),
            layers.Masking() if masked else layers.Identity(),
            layers.SimpleRNN(5, return_sequences=True),
            layers.Dense(1, kernel_regularizer=penalty),
        ]
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        weights = [np.linspace(0, 3, 4 * TOTAL, dtype="float32").reshape(TOTAL, 4) ** 2] * weighted
        return keras.Sequential(parts), loss, x, x.sum(axis=-1, keepdims=True), *weights

    return case


def plain_sgd(case):
    return problem(case, keras.optimizers.SGD(2e-3))


def in_this_keras(reduction):
    """Return True if this Keras has the reduction; Keras 3.5 has no mean_with_sample_weight."""
    try:
        keras.losses.MeanSquaredError(reduction=reduction)
    except ValueError:
        return False
    return True


REDUCTIONS = tuple(filter(in_this_keras, ("sum_over_batch_size", "mean_with_sample_weight", "sum")))
MASKED = [
    ("sum_over_batch_size", True, False),
    ("mean_with_sample_weight", True, True),
    ("mean_with_sample_weight", False, True),
    ("sum", False, False),
]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("reduction", "masked", "weighted"),
    some(*MASKED, of=[(r, m, w) for r in REDUCTIONS for m in (False, True) for w in (False, True)]),
)
def test_a_gradient_weighs_by_what_its_loss_was_divided_by(reduction, masked, weighted):
    """A gradient weighs by its loss's divisor: rows, mask entries, weights or 1; regularizers count once."""
    case = reduced(reduction, masked=masked, weighted=weighted, penalty=keras.regularizers.L2(0.1))

    assert fit_and_train(case, problem=plain_sgd) < 1e-3


# -- models that one process computes otherwise ---------------------------------------------------


def convolutional():
    x = numbers(8, 8, 2)
    parts = [
        keras.Input((8, 8, 2)),
        layers.Conv2D(4, 3, activation="tanh"),
        layers.BatchNormalization(),
        layers.Conv2D(4, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ]
    return keras.Sequential(parts), "mse", x, x.mean(axis=(1, 2, 3))[:, None]


def apart(case, rows):
    """Train one worker after the other, each with BatchNormalization over its own rows."""
    model, (x, y, _) = problem(case)
    probe, _ = problem(case, keras.optimizers.SGD(1.0))
    trained = {id(variable) for variable in model.trainable_variables}
    model.optimizer.build(model.trainable_variables)
    for step in range(EPOCHS * -(-TOTAL // BATCH_SIZE)):
        before = model.get_weights()
        after = [np.zeros_like(weight) for weight in before]
        plans = [BatchPlan(rows, worker, BATCH_SIZE, 1, True, False, 0) for worker in range(len(rows))]
        spans = [next(plan.spans(*divmod(step, plan.steps))) for plan in plans]
        count = sum(span.stop - span.start for span in spans)
        for plan, span in zip(plans, spans, strict=True):
            share = ranks(rows, plan.worker)[span.start : span.stop]
            probe.set_weights(before)
            probe.train_on_batch(x[share], y[share])
            for total, weight in zip(after, probe.get_weights(), strict=True):
                total += weight * (len(share) / count)
        gradients = []
        for variable, old, new in zip(model.weights, before, after, strict=True):
            if id(variable) in trained:
                gradients.append(keras.ops.convert_to_tensor(old - new))
            else:
                variable.assign(new)
        model.optimizer.apply(gradients, model.trainable_variables)
    return model


@pytest.mark.whole
def test_batch_normalization_sees_its_own_worker():
    """Each worker normalizes batches by its own rows; moving statistics are averaged by rows."""
    model, (x, y, _) = problem(convolutional)
    start, reference = vector(model), apart(convolutional, ROWS)
    train(model, x, y, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)

    assert distance(model, reference, start) < 1e-3


FREE = [("asynchronous", 1), ("hogwild", 1), ("asynchronous", None)]


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "window"), FREE)
@pytest.mark.parametrize("rows", [(96,), (64, 32)])
def test_moving_statistics_take_in_every_batch_of_every_worker(rows, mode, window):
    """Moving statistics move as far as in one process with as many batches, whatever the staleness."""
    x, momentum = 3 + 2 * numbers(3), 0.95
    model = keras.Sequential(
        [keras.Input((3,)), layers.BatchNormalization(momentum=momentum), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
    train(model, x, x[:, :1], mode=mode, window=window, rows=rows, batch_size=16, epochs=EPOCHS)
    kept = momentum ** (6 * EPOCHS)

    mean, variance = (v.numpy() for v in model.layers[0].non_trainable_variables)
    np.testing.assert_allclose(mean, (1 - kept) * x.mean(axis=0), rtol=0.15)
    np.testing.assert_allclose(variance, kept + (1 - kept) * x.var(axis=0), rtol=0.15)


@pytest.mark.whole
@pytest.mark.parametrize(("mode", "window"), FREE)
def test_a_moving_variance_is_never_negative(mode, window):
    """Moving variances stay positive, because statistics are averaged and not added."""
    model, (x, y, _) = problem(convolutional)
    train(model, x, y, mode=mode, window=window, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)
    variances = [v.numpy() for v in model.non_trainable_variables if "variance" in v.name]

    assert len(variances) == 1
    assert all((variance > 0).all() for variance in variances)


@pytest.mark.backend("jax")
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_may_spread_a_model_over_its_devices(mode):
    """A model spread over four devices of one process by data parallelism gives the result of one device."""
    devices = keras.distribution.list_devices("cpu")

    def spread():
        return keras.distribution.DataParallel(devices=devices)

    assert len(devices) == 4  # tests/conftest.py provides them
    assert fit_and_train(attentive, rows=(TOTAL,), mode=mode, distribution=spread) < 1e-3


def wide():
    x = numbers(6)
    return (
        keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh", name="wide"), layers.Dense(2)]),
        "mse",
        x,
        x[:, :2],
    )


@pytest.mark.backend("jax")
def test_a_worker_may_divide_a_layer_among_its_devices():
    """A layer divided among devices by a user's layout gives the result of one device."""
    seen = []

    def divided():
        mesh = keras.distribution.DeviceMesh(
            (2, 2), ["rows", "units"], keras.distribution.list_devices("cpu")
        )
        layout = keras.distribution.LayoutMap(mesh)
        layout["wide/kernel"] = (None, "units")
        return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="rows")

    class Looking(Loop):
        def run(self, notes):
            super().run(notes)
            seen.append(self.replica.model.get_layer("wide").kernel.value.sharding.spec)

    assert fit_and_train(wide, rows=(TOTAL,), distribution=divided, loop=Looking) < 1e-3
    assert [(None, "units")] == [tuple(spec) for spec in seen]


class Sure(keras.Model):
    """A model that adds a penalty to Keras's loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.3 * keras.ops.mean(keras.ops.square(y_pred))


class Stepping(keras.Model):
    """A custom training step, as in the guide of each backend, that halves gradients."""

    def train_step(self, *arguments):
        return getattr(self, f"on_{keras.backend.backend()}")(*arguments)

    def on_tensorflow(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = [0.5 * part for part in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def on_torch(self, data):
        import torch

        x, y = data
        self.zero_grad(set_to_none=True)
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        gradients = [0.5 * variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}

    def on_jax(self, state, data):
        import jax

        trainable, fixed, optimizer, metrics = state
        x, y = data

        def loss_of(variables):
            predicted, moved = self.stateless_call(variables, fixed, x, training=True)
            return self.compute_loss(x, y, predicted), moved

        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        gradients = [0.5 * part for part in gradients]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, moved, optimizer, metrics)


keras.saving.register_keras_serializable("contract")(Sure)
keras.saving.register_keras_serializable("contract")(Stepping)


@pytest.mark.whole
@pytest.mark.parametrize("kind", [Sure, Stepping])
@pytest.mark.parametrize(("mode", "rows"), [("synchronous", ROWS), ("asynchronous", (TOTAL,))])
def test_steps_and_losses_of_ones_own_are_honoured(kind, mode, rows):
    """Workers run a custom train_step and a custom compute_loss."""

    def owned():
        x = numbers(6)
        points = keras.Input((6,))
        return kind(points, layers.Dense(2)(layers.Dense(8, "tanh")(points))), "mse", x, x[:, :2]

    assert fit_and_train(owned, rows=rows, mode=mode) < 1e-3


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_scaled_loss_may_have_a_schedule(mode):
    """A scaled loss with a learning-rate schedule inside ends with the rate of plain Keras."""
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 40)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        (model, (x, y, _)), (reference, _) = (problem(dense, keras.optimizers.SGD(schedule)) for _ in "12")
        reference.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)
        train(model, x, y, mode=mode, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)
    finally:
        keras.config.set_dtype_policy("float32")

    rates = [float(each.optimizer.learning_rate) for each in (model, reference)]
    assert rates[1] == pytest.approx(float(schedule(30)))
    assert rates[0] == pytest.approx(rates[1], abs=float(schedule(29) - schedule(30)))


@pytest.mark.whole
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision_stays_close(policy):
    """In low precision a step's gradient is within 2 % of one process's, the final loss within 1 %."""
    keras.config.set_dtype_policy(policy)
    try:
        (model, (x, y, _)), (reference, _) = problem(dense), problem(dense)
        start = vector(reference)
        first = take(x, slice(0, BATCH_SIZE)), take(y, slice(0, BATCH_SIZE))
        (one, _), (other, _) = (problem(dense, keras.optimizers.SGD(0.1)) for _ in range(2))
        other.fit(*first, BATCH_SIZE, shuffle=False, verbose=0)
        train(one, *first, rows=(9, 7), batch_size=BATCH_SIZE, epochs=1)
        reference.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)
        losses = train(model, x, y, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)
        ours, theirs = (m.evaluate(x, y, verbose=0) for m in (model, reference))
    finally:
        keras.config.set_dtype_policy("float32")

    assert distance(one, other, start) < 0.02
    assert len(losses) == 30
    assert abs(ours - theirs) < 0.01 * theirs


@pytest.mark.one_case
@pytest.mark.parametrize("window", [1, None])
def test_variables_of_low_precision_train(window):
    """With bfloat16 weights, two workers lower the loss about as far as one process."""
    keras.config.set_dtype_policy("bfloat16")
    try:
        (model, (x, y, _)), (reference, _) = (problem(dense, keras.optimizers.SGD(0.1)) for _ in range(2))
        before = reference.evaluate(x, y, verbose=0)
        reference.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)
        train(model, x, y, window=window, rows=ROWS, batch_size=BATCH_SIZE, epochs=EPOCHS)
        ours, theirs = (m.evaluate(x, y, verbose=0) for m in (model, reference))
    finally:
        keras.config.set_dtype_policy("float32")

    assert theirs < 0.97 * before
    assert before - ours > (0.8 if window == 1 else 0.4) * (before - theirs)


@pytest.mark.parametrize("joint", [True, False])
def test_metrics_take_in_every_step(joint):
    """A replica's metrics equal those of model.fit for the same steps."""
    (model, (x, y, _)), (reference, _) = problem(dense), problem(dense)
    for each in (model, reference):
        each.compile(keras.optimizers.SGD(0.1), each.loss, metrics=["accuracy"])
    replica = make_replica(model, joint=joint)
    history = reference.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0).history
    for start in range(0, TOTAL, BATCH_SIZE):
        batch = Batch(*(part[start : start + BATCH_SIZE] for part in (x, y)))
        if joint:
            gradient = replica.gradient(batch)
            replica.apply(RoundMeans(gradient.vector, gradient.statistics))
        else:
            replica.step(batch)
    assert results(replica) == pytest.approx([history["loss"][0], history["accuracy"][0]], rel=1e-5)

    replica.model.reset_metrics()
    replica.test(Batch(x, y))
    assert results(replica) == pytest.approx(reference.evaluate(x, y, TOTAL, verbose=0), rel=1e-5)


def test_a_step_tells_how_far_it_went():
    """A step returns its movement since the given weights, and the loss as the metric has summed it."""
    model, (x, y, _) = problem(dense)
    replica = make_replica(model, joint=False)
    batch = Batch(x[:BATCH_SIZE], y[:BATCH_SIZE])
    before = replica.read()
    center = Center(before.vector + np.float32(0.125), before.statistics)

    for start, since in ((center, center.parameters), (None, before.vector), (center, before.vector)):
        moved = replica.step(batch, start, since)
        assert moved.vector == pytest.approx(replica.read().vector - since, abs=1e-6)
        loss = replica.model.metrics[0]
        assert moved.loss == pytest.approx([float(loss.total), float(loss.count)], rel=1e-6)
    assert moved.loss[1] == 3 * BATCH_SIZE
    assert replica.step(batch, center) is None
    taken = replica.loss()
    loss = replica.model.metrics[0]
    assert taken == pytest.approx([float(loss.total), float(loss.count)], rel=1e-6)
    assert taken[1] == 4 * BATCH_SIZE


def results(replica):
    return [float(metric.result()) for metric in keras_metrics.metrics_of(replica.model)]


class LostError(Exception):
    """An error of a lost worker, which it does not report."""


class Lost(Loop):
    """A loop of a worker that is lost before an exchange of the second epoch."""

    def _exchange(self, sequence):
        if sequence == self.plan.sequence(1) + 3:
            raise LostError
        return super()._exchange(sequence)


def dropping(optimizer):
    """Make a model with dropout, moving statistics, and metrics over every batch."""
    x = numbers(6)
    parts = [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3, seed=5)]
    model = keras.Sequential([*parts, layers.Dense(2, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, x, (x[:, 0] > 0).astype("int64")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("window", "merge"),
    [(1, None), (2, None), (2, "eamsgd"), pytest.param(2, "diloco", marks=pytest.mark.whole)],
)
def test_a_run_goes_on_from_the_middle_of_an_epoch(window, merge):
    """A run resumed in the middle of an epoch has the weights, losses and metrics of an undisturbed run."""
    options = {"window": window, "merge": merge, "rows": ROWS, "batch_size": 8, "epochs": 3, "seed": 5}

    def run(**more):
        keras.utils.set_random_seed(1)
        sgd = keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)
        model, x, y = dropping(sgd if merge == "eamsgd" else keras.optimizers.Adam(3e-3))
        reports = []
        return train(model, x, y, recovery=2, reports=reports, **options, **more), reports, vector(model)

    losses, reports, weights = run()
    coordinators = []
    with pytest.raises(LostError):
        run(loop=Lost, coordinators=coordinators)
    snapshot = coordinators[0].snapshot
    assert (1, 2) == (snapshot.epoch, snapshot.place)
    later, resumed, after = run(snapshot=snapshot)

    np.testing.assert_array_equal(weights, after)
    assert losses[-len(later) :] == later
    assert reports[1:] == resumed


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_without_rounds_a_run_goes_on_with_the_optimizers_of_the_middle_of_an_epoch(mode):
    """Without rounds, a resumed worker's optimizer is that of its last counted update or the one before."""
    keras.utils.set_random_seed(1)
    model, x, y = dropping(keras.optimizers.Adam(3e-3))
    options = {"mode": mode, "rows": (TOTAL // 2,) * 2, "batch_size": 8, "epochs": 3, "seed": 5}
    coordinators, began = [], {}

    class Begins(Loop):
        def _restore(self):
            resumed = super()._restore()
            began[self.worker] = int(optimizers.batches_seen(self.replica.model))
            return resumed

    with pytest.raises(LostError):
        train(model, x, y, loop=Lost, recovery=1, coordinators=coordinators, **options)
    coordinators[0].request_snapshot()
    snapshot = coordinators[0].newest_snapshot
    train(model, x, y, loop=Begins, snapshot=snapshot, **options)

    behind = {snapshot.ledger.get(worker, -1) + 1 - steps for worker, steps in began.items()}
    assert behind <= {0, 1}

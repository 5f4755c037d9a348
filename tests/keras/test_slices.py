"""Embeddings move as in model.fit: slices of their gradients reach the optimizer unchanged.

On TensorFlow, Keras's optimizers square or clip the gradients of a repeated row one by one. JAX and torch add
them up, as do workers there, so all tests hold on each backend.
"""

import keras
import numpy as np
import pytest
from keras import layers
from simulator import World
from worker_threads import train

from sparkdl.core.sparse_gradients import decode
from sparkdl.data.batch import Batch
from sparkdl.errors import ModelError
from sparkdl.modeling.backends.base import RoundMeans
from sparkdl.modeling.backends.choice import make_replica, require_averageable, sliced_tables
from sparkdl.modeling.keras_variables import Layouts
from sparkdl.server.aggregation import Hybrid
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.worker.loop import Loop

ROWS, BATCH_SIZE, EPOCHS = 90, 16, 3
SLICED = keras.backend.backend() == "tensorflow"
RANDOM = np.random.default_rng(0)
USERS, ITEMS = RANDOM.integers(0, 30, (ROWS, 1)), RANDOM.integers(0, 50, (ROWS, 4))
RATINGS = RANDOM.normal(size=(ROWS, 1)).astype("float32")
X = USERS.astype("int32"), ITEMS.astype("int32")


def recommender(optimizer, **options):
    """Return a model with two embeddings, one of which is used for several items of a row."""
    keras.utils.set_random_seed(1)
    user, items = keras.Input((1,), dtype="int32"), keras.Input((4,), dtype="int32")
    read = layers.Flatten()(layers.Embedding(30, 3)(user))
    liked = layers.GlobalAveragePooling1D()(layers.Embedding(50, 3)(items))
    hidden = layers.Dense(4, "tanh")(layers.Concatenate()([read, liked]))
    model = keras.Model([user, items], layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", **options)
    return model


def vector(model):
    return np.concatenate([np.ravel(np.asarray(w, "float32")) for w in model.get_weights()])


def distance(build, x=X, rows=(50, 40), **options):
    """Return the workers' distance from model.fit, relative to its movement, and the coordinator."""
    model, reference, coordinators = build(), build(), []
    start = vector(reference)
    reference.fit(x, RATINGS, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)
    train(
        model,
        x,
        RATINGS,
        rows=rows,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        coordinators=coordinators,
        **options,
    )
    way = np.linalg.norm(vector(reference) - start)
    return np.linalg.norm(vector(model) - vector(reference)) / way, coordinators[0]


# MultiOptimizer raises ModelError. docs/explanation/modes.md says how ScheduleFreeAdamW differs, whatever
# the layers.
LEFT_OUT = "Optimizer", "LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"
OPTIMIZERS = {
    name: kind
    for name, kind in sorted(vars(keras.optimizers).items())
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and name not in LEFT_OUT
}
SETTINGS = [
    {"clipnorm": 0.01},
    {"clipvalue": 0.001},
    {"global_clipnorm": 0.01},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]
MADE = {
    **{name: lambda kind=kind: kind(0.01) for name, kind in OPTIMIZERS.items()},
    "SGD with momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    **{f"Adam {told}": lambda told=told: keras.optimizers.Adam(0.01, **told) for told in SETTINGS},
    **{f"SGD {told}": lambda told=told: keras.optimizers.SGD(0.05, **told) for told in SETTINGS},
}
OFTEN = {"Adam", "Adagrad", "SGD {'clipnorm': 0.01}"}
TIMES = [(ROWS,), (50, 40), (30, 0, 60)]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[] if name in OFTEN and rows == TIMES[1] else pytest.mark.whole)
        for name in MADE
        for rows in TIMES
    ],
    ids=str,
)
def test_every_optimizer_moves_embeddings_as_in_keras(name, rows):
    """Every optimizer moves embeddings as in Keras with any number of workers, one of them without rows."""
    apart, _ = distance(lambda: recommender(MADE[name]()), rows=rows)

    assert apart < 1e-5


@pytest.mark.skipif(not SLICED, reason="gradients are dense on this backend")
def test_the_comparison_sees_gradients_that_are_added_up():
    """Dense gradients, which an adaptive optimizer squares after the sum, give another model."""
    apart, coordinator = distance(lambda: recommender(keras.optimizers.Adam(0.01)), slices=0)

    assert apart > 0.05
    assert coordinator.summary()["slices"] == 0


ON_TORCH = keras.backend.backend() == "torch"
HOW = [
    {"run_eagerly": True},
    *[pytest.param({"jit_compile": True}, marks=pytest.mark.whole), {"steps_per_execution": 2}]
    * (not ON_TORCH),
]


@pytest.mark.whole
@pytest.mark.parametrize("how", HOW, ids=str)
def test_slices_survive_however_steps_are_run(how):
    """Slices are exchanged with steps compiled by XLA, several per call, or run eagerly."""
    apart, coordinator = distance(lambda: recommender(keras.optimizers.RMSprop(0.01), **how))

    assert apart < 1e-5
    assert coordinator.summary()["slices"] == SLICED * EPOCHS * ROWS * 5


class Lookup(layers.Layer):
    """A custom layer whose table has any rank, and which has no other variable."""

    def __init__(self, shape, **options):
        super().__init__(**options)
        self.shape = shape

    def build(self, _):
        self.table = self.add_weight(shape=self.shape, initializer="random_uniform")

    def call(self, places):
        found = keras.ops.take(self.table, places, axis=0)
        return keras.ops.sum(keras.ops.reshape(found, (-1, 4 * int(np.prod(self.shape[1:])))), 1)[:, None]


@pytest.mark.one_case
@pytest.mark.parametrize("shape", [(50,), (50, 2, 3)], ids=str)
def test_a_table_may_have_any_rank(shape):
    """A table may have any rank, also in a model without dense variables."""

    def build():
        keras.utils.set_random_seed(1)
        places = keras.Input((4,), dtype="int32")
        model = keras.Model(places, Lookup(shape)(places))
        model.compile(keras.optimizers.Adagrad(0.01), "mse")
        return model

    apart, _ = distance(build, X[1])

    assert apart < 1e-5


WHOLE = [pytest.param(policy, marks=pytest.mark.whole) for policy in ("mixed_bfloat16", "float64")]


@pytest.mark.one_case
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16", *WHOLE])
def test_slices_have_the_precision_of_their_variable(policy):
    """Slices of one worker keep Keras's dtype; the optimizer unscales a scaled loss."""
    keras.config.set_dtype_policy(policy)
    try:
        apart, _ = distance(lambda: recommender(keras.optimizers.RMSprop(0.01)), rows=(ROWS,))
    finally:
        keras.config.set_dtype_policy("float32")

    assert apart < (1e-5 if SLICED else 0.05)


def test_an_optimizer_that_cannot_unscale_slices_gets_dense_gradients():
    """With loss_scale_factor, workers exchange dense gradients; Keras on TensorFlow fails there."""
    model, coordinators = recommender(keras.optimizers.SGD(0.05, loss_scale_factor=4.0)), []
    start = vector(model)
    train(model, X, RATINGS, rows=(50, 40), batch_size=BATCH_SIZE, epochs=1, coordinators=coordinators)
    reference = recommender(keras.optimizers.SGD(0.05))
    reference.fit(X, RATINGS, BATCH_SIZE, shuffle=False, verbose=0)

    assert np.linalg.norm(vector(model) - vector(reference)) < 1e-5 * np.linalg.norm(
        vector(reference) - start
    )
    assert coordinators[0].summary()["slices"] == 0


@pytest.mark.whole
@pytest.mark.skipif(not SLICED, reason="gradients are dense on this backend")
def test_a_step_by_slices_is_keras_s_bit_for_bit():
    """A step with a batch's own gradient as the mean equals train_on_batch bit for bit."""
    model, reference = (recommender(keras.optimizers.RMSprop(0.01)) for _ in range(2))
    replica = make_replica(model, joint=True)
    replica.slices = 1 << 20
    last = None
    for start in (0, 16, 32):
        batch = Batch(tuple(part[start : start + 16] for part in X), RATINGS[start : start + 16])
        reading = replica.gradient(batch, last)
        last = RoundMeans(reading.vector, reading.statistics, reading.sliced)
        reference.train_on_batch(batch.x, batch.y)
    replica.apply(last)
    tables = sliced_tables(Layouts.of(model).trainable, joint=True)

    assert decode(reading.vector, tables).num_slices == 16 * 5
    assert vector(replica.model).tobytes() == vector(reference).tobytes()


@pytest.mark.skipif(not SLICED, reason="gradients are dense on this backend")
@pytest.mark.parametrize(("optimizer", "words"), [("sgd", 0), ("adam", 1)])
def test_more_slices_than_are_exchanged_are_added_up(optimizer, words, caplog):
    """Beyond the limit, slices are added up, with a warning if that changes the optimizer's steps."""
    model = recommender(optimizer)
    replica = make_replica(model, joint=True)
    replica.slices = 100
    for _ in range(2):
        reading = replica.gradient(Batch(X, RATINGS))

    assert not reading.sliced
    assert len(reading.vector) == Layouts.of(model).trainable.size
    assert "\n".join(caplog.messages).count("more than workers exchange") == words


class Mean(keras.Model):
    """A model whose weights are a table, of which it averages rows."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(50, 1)

    def call(self, places):
        return keras.ops.mean(self.table(places), axis=1)


class MeanInTraining(Mean):
    """A model that looks up rows in training only."""

    def call(self, places, training=False):
        if training:
            return super().call(places)
        return keras.ops.mean(keras.ops.one_hot(places, 50) @ self.table.embeddings, axis=1)


class MeanWithStep(Mean):
    """A model with a training step of its own, which computes the loss itself."""

    def train_step(self, data):
        import tensorflow as tf

        places, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(places, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [each.value for each in variables]), variables)
        return {"loss": loss}


@pytest.mark.skipif(not SLICED, reason="gradients are dense on this backend")
@pytest.mark.parametrize("kind", [Mean, MeanInTraining, MeanWithStep])
def test_slices_that_cannot_be_averaged_are_found_on_the_driver(kind):
    """Slices of the training gradients are found from a single row, and the model stays unchanged."""
    for optimizer in ("sgd", "adam"):
        model = kind()
        model.compile(optimizer, "mse" if kind is not MeanWithStep else None)
        model(X[1], training=True)
        before, row = vector(model), (X[1][:1], RATINGS[:1], None)
        if optimizer == "sgd":
            require_averageable(model, row)
        else:
            with pytest.raises(ModelError, match="cannot average the sparse gradients of embeddings"):
                require_averageable(model, row)

        assert vector(model).tobytes() == before.tobytes()
        assert type(model.optimizer).__name__.lower() == optimizer


class Kept(Loop):
    """A loop that records itself for inspection, and may restart in the middle of the run."""

    begins_again = None  # the worker and its exchange

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loops[self.worker] = self

    def run(self, notes):
        try:
            super().run(notes)
        except GoneError:
            coordinator = self.exchange.coordinator
            with coordinator.changed:
                coordinator.lose(self.worker, f"Worker {self.worker} died.")
            self.exchange = LocalExchange(coordinator, self.worker, attempt=1)
            self.replica.model.set_weights([0 * weight for weight in self.replica.model.get_weights()])
            self.speaks = self.worker == 0
            super().run(notes)

    def _exchange(self, sequence):
        if self.begins_again == (self.worker, sequence) and not self.exchange.attempt:
            raise GoneError
        return super()._exchange(sequence)


class GoneError(BaseException):
    """An error that ends a loop as the kernel ends a process."""


def kept(**fields):
    return type("Kept", (Kept,), {"loops": {}, **fields})


def check_alike(loops):
    """Assert equal weights and optimizer state of all replicas."""
    first, *others = (loop.replica.model for _, loop in sorted(loops.items()))
    for other in others:
        for a, b in zip(first.variables, other.variables, strict=True):
            if "metric" not in a.path:
                np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


@pytest.mark.whole
def test_a_replica_that_is_late_takes_up_the_slices_that_it_missed():
    """With a quorum, late replicas take up missed slices, and all end with the same weights and optimizer."""
    coordinators, loop = [], kept()
    train(
        recommender(keras.optimizers.RMSprop(0.01)),
        X,
        RATINGS,
        rows=(30, 30, 30),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        hybrid=Hybrid(2),
        world=World(),
        paces=[lambda: 1.0, lambda: 1.1, lambda: 4.0],
        loop=loop,
        coordinators=coordinators,
    )

    check_alike(loop.loops)
    assert coordinators[0].summary()["late_dropped"] > 0
    assert bool(coordinators[0].summary()["slices"]) == SLICED


def test_a_replica_that_comes_back_takes_up_slices():
    """A restarted worker of the middle of an epoch ends with the weights of the others."""
    coordinators, loop = [], kept(begins_again=(1, 8))
    train(
        recommender(keras.optimizers.Adam(0.01)),
        X,
        RATINGS,
        rows=(50, 40),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        goes_on=True,
        loop=loop,
        coordinators=coordinators,
    )

    check_alike(loop.loops)
    assert coordinators[0].counters["returned"] == 1


@pytest.mark.whole
def test_a_run_goes_on_from_a_snapshot_with_slices():
    """A run resumed from an epoch's snapshot equals an undisturbed run."""
    snapshots = []
    whole, resumed = (recommender(keras.optimizers.Adam(0.01)) for _ in range(2))
    options = {"rows": (50, 40), "batch_size": BATCH_SIZE, "epochs": EPOCHS}
    train(whole, X, RATINGS, seen=snapshots.append, **options)
    train(resumed, X, RATINGS, snapshot=snapshots[0], **options)

    assert vector(whole).tobytes() == vector(resumed).tobytes()

"""Promise 1: synchronous/batch gives the result of one Keras process, and so does one worker in any mode."""

import time

import keras
import numpy as np
import pytest
from worker_threads import OneDropped, even_split, merging_of, train

from sparkdl.server.aggregation import GradientRounds
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.worker import loop
from sparkdl.worker.loop import Loop

ROWS, BATCH_SIZE, EPOCHS = 310, 32, 5  # ten updates an epoch, the last of 22 rows; 50 in all


def problem():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6)).astype("float32")
    return x, ((x[:, 0] > 0).astype("int64") + (x[:, 1] * x[:, 2] > 0))


def model_with(optimizer):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(12, "tanh"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(layers)
    model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def schedule():
    return keras.optimizers.schedules.CosineDecay(2e-2, 60)


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.3), 1e-5),
    "momentum": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), 1e-5),
    "adam": (lambda: keras.optimizers.Adam(1e-2), 1e-4),
    "adamw": (lambda: keras.optimizers.AdamW(schedule()), 1e-4),
}


class Losses(keras.callbacks.Callback):
    """A callback that records the loss of each batch, from Keras's running mean over an epoch's rows."""

    def __init__(self):
        super().__init__()
        self.losses, self.sum, self.rows = [], 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.sum, self.rows = 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        rows = min(BATCH_SIZE, ROWS - batch * BATCH_SIZE)
        total = logs["loss"] * (self.rows + rows)
        self.losses.append((total - self.sum) / rows)
        self.sum, self.rows = total, self.rows + rows


def check_equal(optimizer, rows, **mutant):
    """Train with workers and with model.fit, and compare every variable and the loss of every step."""
    make, tolerance = OPTIMIZERS[optimizer]
    x, y = problem()
    model, reference = model_with(make), model_with(make)
    before = reference.get_weights()
    kept = Losses()
    reference.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0, callbacks=[kept])
    losses = train(model, x, y, rows=rows, batch_size=BATCH_SIZE, epochs=EPOCHS, **mutant)
    moved = [w - b for w, b in zip(reference.get_weights(), before, strict=True)]

    assert 50 == len(losses) == len(kept.losses)
    assert sum(map(norm, moved)) >= 0.05 * sum(map(norm, before))
    np.testing.assert_allclose(losses, kept.losses, rtol=1e-3, atol=1e-4)
    for ours, theirs, move in zip(model.get_weights(), reference.get_weights(), moved, strict=True):
        assert norm(ours - theirs) <= tolerance * norm(move) + 1e-7 * np.sqrt(ours.size)


def norm(array):
    return float(np.linalg.norm(array))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_together_train_as_one_process_does(optimizer, workers):
    """Any number of workers gives one process's weights, for every optimizer."""
    check_equal(optimizer, even_split(ROWS, workers))


@pytest.mark.one_case
@pytest.mark.parametrize("rows", [(250, 60), (200, 0, 110), (309, 1)], ids=str)
def test_uneven_and_empty_partitions_change_nothing(rows):
    """Each update consists of the same rows, however uneven or empty the partitions are."""
    check_equal("adam", rows)


class PlainMean(GradientRounds):
    """A mutant that weighs workers equally, whatever their rows."""

    def _add(self, update):
        if update.rows:
            update.rows = 1
        super()._add(update)


class Stale(GradientRounds):
    """A mutant in which each round answers with the previous mean."""

    def _conclude(self, parameters, statistics, reply):
        kept = getattr(self, "kept", parameters)
        self.kept = parameters
        return super()._conclude(kept, statistics, reply)


class LastDropped(Loop):
    """A mutant that drops the last batch of an epoch."""

    def _exchange(self, sequence):
        if (sequence + 1) % self.plan.windows == 0:
            self.strategy.rows = 0
        return super()._exchange(sequence)


class Forgetful(Loop):
    """A mutant whose optimizer starts anew in every epoch."""

    def _train_epoch(self, sequence, seen_rows):
        for variable in self.replica.model.optimizer.variables[2:]:
            variable.assign(0 * variable)
        super()._train_epoch(sequence, seen_rows)


MUTANTS = {
    "plain mean": merging_of(PlainMean),
    "one worker dropped": merging_of(OneDropped),
    "stale gradient": merging_of(Stale),
    "last batch dropped": {"loop": LastDropped},
    "optimizer state reset": {"loop": Forgetful},
}


@pytest.mark.one_case
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_each_of_five_mistakes(mutant):
    """A trainer with a known mistake fails the comparison."""
    with pytest.raises(AssertionError):
        check_equal("momentum", (200, 110), **MUTANTS[mutant])


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
@pytest.mark.parametrize("window", [1, 4, None], ids=["batch", "4", "epoch"])
def test_one_worker_trains_as_keras_does_in_every_mode(mode, window):
    """One worker, any mode with its default rule, equals model.fit without shuffle."""
    x, y = problem()
    make, tolerance = OPTIMIZERS["adamw"]
    model, reference = model_with(make), model_with(make)
    before = reference.get_weights()
    reference.fit(x, y, BATCH_SIZE, 3, shuffle=False, verbose=0)
    train(model, x, y, mode=mode, window=window, rows=(ROWS,), batch_size=BATCH_SIZE, epochs=3)

    for ours, theirs, start in zip(model.get_weights(), reference.get_weights(), before, strict=True):
        assert norm(ours - theirs) <= tolerance * norm(theirs - start) + 1e-7 * np.sqrt(ours.size)


@pytest.mark.one_case
@pytest.mark.parametrize("rows", [(200, 110), (100, 0, 210)], ids=str)
def test_units_that_may_flip_are_compared_a_step_at_a_time(rows):
    """ReLU units may flip by rounding, which moves weights by 1e-3, so each step starts at common weights."""

    def rectified():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6,)), keras.layers.Dense(12, "relu"), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.3), "sparse_categorical_crossentropy")
        return model

    x, y = problem()
    reference = rectified()
    for step in range(3):
        model, start = rectified(), reference.get_weights()
        model.set_weights(start)
        reference.train_on_batch(x, y)
        train(model, x, y, rows=rows, batch_size=ROWS, epochs=1)

        assert step + 1 == int(reference.optimizer.iterations)
        for ours, theirs, before in zip(model.get_weights(), reference.get_weights(), start, strict=True):
            assert norm(ours - theirs) <= 1e-5 * norm(theirs - before) + 1e-7 * np.sqrt(ours.size)


@pytest.mark.one_case
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("mode", "window"), [("synchronous", 1), ("synchronous", 4), ("asynchronous", 1), ("hogwild", None)]
)
def test_a_schedule_ends_where_plain_keras_ends(mode, window, workers):
    """The learning rate after the last epoch is plain Keras's within one step, for any number of workers.

    A worker's own rate is that times the default rule's factor.
    """
    x, y = problem()
    model, own = model_with(OPTIMIZERS["adamw"][0]), []

    class Watched(Loop):
        def run(self, notes):
            super().run(notes)
            own.append(float(self.replica.model.optimizer.learning_rate) / self.settings.scale)

    train(
        model,
        x,
        y,
        mode=mode,
        window=window,
        rows=even_split(ROWS, workers),
        batch_size=BATCH_SIZE,
        epochs=3,
        loop=Watched,
    )
    rates = [float(schedule()(step)) for step in (29, 30, 31)]

    assert rates[2] <= float(model.optimizer.learning_rate) <= rates[0]
    assert workers == len(own)
    assert rates[2] <= min(own) <= max(own) <= rates[0]


@pytest.mark.whole
def test_exchanges_that_take_most_of_an_epoch_are_said_once(monkeypatch, caplog):
    """Slow exchanges are logged once, by worker 0, with a frequency that exchanges less often."""
    finish = LocalExchange.finish

    def slowly(self, ticket):
        time.sleep(0.05)
        return finish(self, ticket)

    monkeypatch.setattr(LocalExchange, "finish", slowly)
    monkeypatch.setattr(loop, "LONG_SECONDS", 0.3)
    x, y = problem()
    model = model_with(OPTIMIZERS["sgd"][0])
    train(model, x, y, rows=even_split(ROWS, 2), batch_size=BATCH_SIZE, epochs=4)

    said = [line for line in caplog.messages if line.startswith("Exchanging updates")]
    assert 1 == len(said)
    assert "frequency=16 exchanges less often, at the cost of some accuracy per epoch." in said[0]

"""Batch hooks of callbacks run on the driver, for every batch, in the order of Keras."""

import logging
import re
import threading

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.config import Mode
from sparkdl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("spark")
SETTINGS = {"batch_size": 32, "shuffle": False, "verbose": 0}
STEPS = 7  # of 203 rows


class Noting(keras.callbacks.Callback):
    """A callback that records each call of its hooks and the thread it came in."""

    def __init__(self):
        super().__init__()
        self.calls, self.threads, self.params_seen = [], set(), []

    def _note(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def on_epoch_begin(self, epoch, logs=None):
        self._note("epoch", epoch)
        self.params_seen.append(dict(self.params))

    def on_train_batch_begin(self, batch, logs=None):
        self._note("begin", batch)

    def on_train_batch_end(self, batch, logs=None):
        self._note("end", batch, int(self.model.optimizer.iterations), logs)

    def on_test_begin(self, logs=None):
        self._note("test", 0)

    def on_test_batch_begin(self, batch, logs=None):
        self._note("begin test", batch)

    def on_test_batch_end(self, batch, logs=None):
        self._note("end test", batch, logs)

    def on_test_end(self, logs=None):
        self._note("tested", 0, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("over", epoch, logs)


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "steps"), [*((mode, 1) for mode in Mode), (Mode.SYNCHRONOUS, 3)])
def test_batch_hooks_are_called_for_each_batch_of_each_epoch(problem, mode, steps):
    """Batch hooks get the calls that Keras makes, except for the logs; the last has the epoch's results."""
    ours, theirs = Noting(), Noting()
    settings = SETTINGS | {"epochs": 2, "validation_split": 0.4}
    SparkModel(problem.model(steps_per_execution=steps), mode=mode, num_workers=2).fit(
        problem.x, problem.y, callbacks=[ours], **settings
    )
    problem.model(steps_per_execution=steps).fit(problem.x, problem.y, callbacks=[theirs], **settings)

    assert [call[:2] for call in theirs.calls] == [call[:2] for call in ours.calls]
    assert theirs.params_seen == ours.params_seen
    assert {threading.current_thread()} == ours.threads
    ends = [call for call in ours.calls if call[0] == "end"]
    tests = [call[2] for call in ours.calls if call[0] == "end test"]
    overs = [call[2] for call in ours.calls if call[0] == "over"]
    for epoch, over in enumerate(overs):
        trained = ends[len(ends) // 2 * (epoch + 1) - 1][3]
        tested = {f"val_{name}": value for name, value in tests[len(tests) // 2 * epoch].items()}
        assert over == trained | tested
    if mode is Mode.SYNCHRONOUS:
        assert [call[2] for call in theirs.calls if call[0] == "end"] == [call[2] for call in ends]


class AtBatch(keras.callbacks.Callback):
    """A callback that acts at each batch of an epoch with more batches than a test can wait for."""

    def __init__(self, act):
        super().__init__()
        self.act, self.batches, self.logs = act, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.logs.append(logs)
        self.act(self)

    def reports(self):
        """Return the number of distinct results so far."""
        return len({logs["loss"] for logs in self.logs})

    def on_epoch_end(self, epoch, logs=None):
        self.rate = float(self.model.optimizer.learning_rate)


ENDLESS = SETTINGS | {"batch_size": 1, "steps_per_epoch": 1_000_000}


def slow_model(problem):
    """Return the problem's model with a learning rate at which it never diverges."""
    return problem.model(keras.optimizers.SGD(0.01))


def stop(callback):
    if callback.reports() > 2:
        callback.model.stop_training = True


@pytest.mark.whole
@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        ({}, True),
        ({"mode": "asynchronous"}, True),
        ({"mode": "hogwild"}, False),
        pytest.param({"frequency": 4}, False, marks=pytest.mark.whole),
    ],
)
def test_a_batch_hook_that_stops_training_ends_the_epoch(problem, caplog, settings, watched):
    """An epoch that a batch hook stops has the results of its batches so far and of its validation."""
    callback, tests = AtBatch(stop), []
    watch = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: tests.append("begun"))

    history = SparkModel(slow_model(problem), num_workers=2, **settings).fit(
        problem.x,
        problem.y,
        epochs=3,
        callbacks=[callback, *[watch] * watched],
        validation_split=0.2,
        **ENDLESS,
    )

    assert [0] == history.epoch
    assert ["begun"] * watched == tests
    assert list(range(len(callback.batches))) == callback.batches
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(history.history)
    assert all({"loss", "accuracy"} == set(logs) for logs in callback.logs)
    assert 0 < len(callback.batches) < 1_000_000
    heard = [entry for entry in caplog.records if "batch hooks are called on the driver" in entry.message]
    assert [logging.WARNING] == [entry.levelno for entry in heard]
    assert "AtBatch" in heard[0].message


@pytest.mark.whole
def test_a_learning_rate_that_a_batch_hook_sets_reaches_the_workers(problem, caplog):
    """A learning rate of 0 set by a batch hook stops the weights from moving, and a warning is logged."""
    weights = []

    def act(callback):
        callback.model.optimizer.learning_rate = 0.0
        callback.model.stop_training = len(weights) > 3

    callback = AtBatch(act)
    saver = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(callback.model.get_weights())
    )
    saver.save_freq = 1
    SparkModel(slow_model(problem), num_workers=2).fit(
        problem.x, problem.y, callbacks=[callback, saver], **ENDLESS
    )

    assert 0.0 == callback.rate
    assert 1 == sum("A batch hook of AtBatch set the learning rate" in line for line in caplog.messages)
    assert all(map(np.array_equal, weights[-1], weights[-2]))


@pytest.mark.whole
@pytest.mark.parametrize("settings", [{}, {"frequency": 2}, {"mode": "asynchronous"}])
def test_a_checkpoint_after_batches_has_the_weights_of_the_workers(problem, tmp_path, settings):
    """Each checkpoint written within an epoch holds the workers' current weights, not those of its start."""
    model = slow_model(problem)
    begun = model.get_weights()
    kept = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{batch:07d}.keras", save_freq=3)
    ended = keras.callbacks.ModelCheckpoint(tmp_path / "end.keras")

    def act(callback):
        if len(list(tmp_path.glob("1-*.keras"))) > 1:
            callback.model.stop_training = True

    SparkModel(model, num_workers=2, **settings).fit(
        problem.x, problem.y, epochs=2, callbacks=[kept, AtBatch(act), ended], **ENDLESS
    )

    first, *others = [keras.saving.load_model(path) for path in sorted(tmp_path.glob("1-*.keras"))]
    assert others
    assert not np.array_equal(first.get_weights()[0], begun[0])
    assert not np.array_equal(first.get_weights()[0], others[0].get_weights()[0])
    if not settings:
        batch = int(sorted(tmp_path.glob("1-*.keras"))[0].stem.split("-")[1])
        assert batch == int(first.optimizer.iterations)


def test_a_batch_hook_that_sets_weights_is_refused_by_name(problem):
    """A batch hook that sets weights is refused by name: the executors would overwrite them."""

    class Clip(AtBatch):
        pass

    clip = Clip(lambda callback: callback.model.set_weights([w * 0.5 for w in callback.model.get_weights()]))

    with pytest.raises(
        ConfigError, match="A batch hook of Clip set weights .* Set weights in on_epoch_begin"
    ):
        SparkModel(slow_model(problem), num_workers=2).fit(problem.x, problem.y, callbacks=[clip], **ENDLESS)


@pytest.mark.whole
def test_weights_that_the_last_batch_hook_sets_are_those_that_training_goes_on_from(problem):
    """Weights set at the last batch of an epoch are those that training continues from."""

    class AtLast(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == STEPS - 1:
                self.model.set_weights([w * 0.5 for w in self.model.get_weights()])

    ours, theirs, begun = problem.model(), problem.model(), problem.model().get_weights()
    SparkModel(ours, num_workers=2).fit(problem.x, problem.y, epochs=2, callbacks=[AtLast()], **SETTINGS)
    theirs.fit(problem.x, problem.y, epochs=2, callbacks=[AtLast()], **SETTINGS)

    assert problem.distance(ours, theirs, begun) <= 1


@pytest.mark.whole
def test_the_results_so_far_are_beside_the_bar(problem, capsys, monkeypatch):
    """The terminal shows loss and metrics while an epoch runs, and the final ones at its end."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    SparkModel(slow_model(problem), num_workers=2).fit(
        problem.x, problem.y, callbacks=[AtBatch(stop)], **ENDLESS | {"verbose": 1}
    )

    drawn, _, ended = capsys.readouterr().out.rpartition("Epoch 1/1 - ")
    assert re.search(r"Epoch 1/1 .*rows/s.* loss: [\d.]+ - accuracy: [\d.]+", drawn)
    assert re.match(r"[\d.]+ s - [\d,]+ rows/s - (accuracy|loss): [\d.]+", ended)

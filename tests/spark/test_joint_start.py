"""frequency="auto": a fit that begins joint and continues in windows is one fit for callbacks and History."""

import keras
import numpy as np
import pytest
from bombs import Bomb, kill

from sparkdl import SparkModel, Stragglers

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.one_case]
EPOCHS = 24  # two of them joint with two workers
SWITCH = 2
FIT = {"batch_size": 4, "epochs": EPOCHS, "seed": 3, "verbose": 0}


class Calls(keras.callbacks.Callback):
    """A callback that records its hooks, and ends the call before an epoch with an error if it should.

    The learning rate falls with each epoch, as ReduceLROnPlateau would let it.
    """

    def __init__(self, fails_before=None):
        super().__init__()
        self.calls, self.fails_before = [], fails_before

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.fails_before:
            raise RuntimeError("fails as asked")
        self.calls.append(epoch)
        self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    def on_train_end(self, logs=None):
        self.calls.append("end")


def bits(model):
    variables = [*model.weights, *model.optimizer.variables]
    return b"".join(np.asarray(variable).tobytes() for variable in variables)


def model_of(problem):
    """Return a model with state beside its weights: moments of Adam, moving statistics and a generator."""
    model = keras.Sequential(
        [
            keras.Input(problem.x.shape[1:]),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fitted(problem, *, frequency="auto", merge=None, num_workers=2, callbacks=(), model=None, **arguments):
    """Train the problem's model; return it and its History."""
    keras.utils.set_random_seed(0)
    model = model_of(problem) if model is None else model
    spark_model = SparkModel(model, frequency=frequency, merge=merge, num_workers=num_workers)
    history = spark_model.fit(problem.x, problem.y, callbacks=list(callbacks), **FIT | arguments)
    return model, history


@pytest.fixture(scope="module")
def undisturbed(problem, spark):
    model, history = fitted(problem, callbacks=[calls := Calls()])
    return bits(model), history, calls.calls


def test_it_is_a_joint_fit_and_then_one_in_windows(problem, undisturbed):
    """The weights are those of two fits, the first with "batch", the second with 16 and "diloco"."""
    model, first = fitted(problem, frequency="batch", epochs=SWITCH, callbacks=[Calls()])
    _, second = fitted(
        problem,
        model=model,
        frequency=16,
        merge="diloco",
        initial_epoch=SWITCH,
        callbacks=[Calls()],
    )

    weights, history, _ = undisturbed
    assert bits(model) == weights
    assert first.history["loss"] + second.history["loss"] == history.history["loss"]


def test_callbacks_and_history_see_one_fit(undisturbed):
    """Each hook is called once for each epoch, and History has every epoch and the counts of both parts."""
    _, history, calls = undisturbed
    training = history.training
    steps = -(-training["rows"] // FIT["batch_size"])
    windows = -(-max(training["worker_rows"]) // FIT["batch_size"] // 16)

    assert ["begin", *range(EPOCHS), "end"] == calls
    assert list(range(EPOCHS)) == history.epoch
    assert {EPOCHS} == {len(training[name]) for name in ("epoch_rows", "epoch_seconds", "losses")}
    assert SWITCH == training["joint_start"]["epochs"]
    assert SWITCH * steps == training["joint_start"]["version"]
    assert SWITCH * steps + (EPOCHS - SWITCH) * windows == training["version"]
    assert EPOCHS == len(history.run["epochs"])
    assert "diloco" == training["merge"]


@pytest.mark.parametrize("epoch", [SWITCH - 1, SWITCH, SWITCH + 1])
def test_a_fit_that_resumes_ends_with_the_same_bits(problem, tmp_path, undisturbed, epoch):
    """A fit that fails before, at or after the switch, and resumes, ends as if it had not failed."""
    with pytest.raises(RuntimeError, match="fails as asked"):
        fitted(problem, checkpoint=str(tmp_path / "kept"), callbacks=[Calls(epoch)])
    model, history = fitted(
        problem, checkpoint=str(tmp_path / "kept"), resume=True, callbacks=[calls := Calls()]
    )

    weights, whole, _ = undisturbed
    assert bits(model) == weights
    assert whole.history == history.history
    assert ["begin", *range(epoch, EPOCHS), "end"] == calls.calls
    assert EPOCHS == len(history.training["epoch_rows"])
    for name in ("version", "exchanges"):
        assert whole.training[name] == history.training[name]
        assert whole.training["joint_start"][name] == history.training["joint_start"][name]
    assert 1 == sum("Resuming at" in event["text"] for event in history.run["events"])


@pytest.mark.whole
def test_a_complete_fit_is_not_continued(problem, tmp_path, undisturbed):
    """Resuming a fit that ended, in either part, trains nothing."""
    kept = {"checkpoint": str(tmp_path / "kept"), "epochs": 12}

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    stopped, history = fitted(problem, callbacks=[Stop()], **kept)
    resumed, again = fitted(problem, resume=True, **kept)

    assert [0] == history.epoch == again.epoch
    assert bits(stopped) == bits(resumed)


@pytest.mark.whole
@pytest.mark.parametrize("batch", [10, 60])
def test_a_lost_worker_changes_no_bit(problem, tmp_path, batch):
    """A worker that dies in the first part or in the second is replaced, and the weights are the same."""
    arguments = FIT | {"epochs": 4}
    weights = []
    for marker, number in (("never", 0), ("killed", batch)):
        model, objects = Bomb(tmp_path / marker, number, kill).model(problem)
        spark_model = SparkModel(model, frequency="auto", num_workers=2, custom_objects=objects)
        history = spark_model.fit(problem.x, problem.y, **arguments)
        weights.append(bits(model))

    assert 1 == history.training["restarts"]
    assert weights[0] == weights[1]


@pytest.mark.whole
def test_a_later_fit_goes_on_with_the_windows(problem):
    """A second fit from an epoch after the switch has the state of the rule, and no joint start."""
    bits_of = []
    for first, second in (({"frequency": "auto"}, None), ({}, {"frequency": 16, "merge": "diloco"})):
        keras.utils.set_random_seed(0)
        spark_model = SparkModel(model := model_of(problem), num_workers=2, **first)
        if second is not None:
            spark_model.fit(problem.x, problem.y, **FIT | {"epochs": 1})
            spark_model = SparkModel(model, num_workers=2, **second)
        for begin, end in ((second is not None, 3), (3, 5)):
            history = spark_model.fit(problem.x, problem.y, **FIT | {"epochs": end}, initial_epoch=int(begin))
        bits_of.append(bits(model))
        assert "joint_start" not in history.training

    assert bits_of[0] == bits_of[1]


@pytest.mark.whole
def test_the_record_of_a_fit_counts_both_parts(problem):
    """The counts and events of the live page are those of both parts, also with a quorum."""
    stragglers = Stragglers(quorum=1, late_updates="merge")
    model = SparkModel(model_of(problem), frequency="auto", num_workers=2, stragglers=stragglers)
    history = model.fit(problem.x, problem.y, **FIT | {"epochs": 4})
    texts = [event["text"] for event in history.run["events"]]

    assert history.training["exchanges"] == history.run["counts"]["exchanges"]
    assert history.training["late_merged"] == history.run["counts"].get("late_merged", 0)
    assert not [text for text in texts if "-" in text]
    assert "finished" == history.run["state"]


def test_an_error_at_the_switch_is_in_the_record(problem):
    """The record of a fit that fails between its parts says so."""
    spark_model = SparkModel(model_of(problem), frequency="auto", num_workers=2)
    with pytest.raises(RuntimeError, match="fails as asked"):
        spark_model.fit(problem.x, problem.y, callbacks=[Calls(1)], **FIT | {"epochs": 4})
    found = spark_model.history.run

    assert "failed" == found["state"]
    assert "fails as asked" in found["reason"]


@pytest.mark.whole
def test_one_worker_trains_as_plain_keras(problem):
    """With one worker no part has windows, and the weights are those of frequency="batch"."""
    automatic, history = fitted(problem, num_workers=1, epochs=3)
    batch, _ = fitted(problem, num_workers=1, epochs=3, frequency="batch")

    assert bits(batch) == bits(automatic)
    assert "joint_start" not in history.training


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (1, 'frequency="auto": workers exchange after every batch in the only epoch.'),
        (
            11,
            'frequency="auto": workers exchange after every batch up to epoch 1, and from then on after '
            'every 16 batches, with merge="average".',
        ),
    ],
)
def test_a_fit_says_what_it_does(problem, caplog, epochs, said):
    """The lines at the start of a fit name its parts, and no shortfalls of fits without a joint start."""
    caplog.set_level("INFO", "sparkdl")
    fitted(problem, epochs=epochs, merge="average")

    assert said in caplog.messages
    assert not [line for line in caplog.messages if "convergence study" in line]

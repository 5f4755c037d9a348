"""frequency="auto": a fit that begins joint and continues in windows is one fit for callbacks and History."""

import keras
import numpy as np
import pytest
from bombs import Bomb, kill

from sparkdl import CheckpointConfig, SparkModel, Stragglers
from sparkdl.errors import ConfigError, DataError
from sparkdl.rules import Average

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.one_case]
EPOCHS = 24  # two of them joint with two workers
SWITCH = 2
FIT = {"batch_size": 4, "epochs": EPOCHS, "seed": 3, "verbose": 0}


class Calls(keras.callbacks.Callback):
    """A callback that records its hooks, and ends the call before an epoch with an error if it should.

    The learning rate falls with each epoch, as ReduceLROnPlateau would let it.
    """

    def __init__(self, fails_before=None, fails_at_batch=None):
        super().__init__()
        self.calls, self.fails_before, self.fails_at_batch = [], fails_before, fails_at_batch

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.fails_before:
            raise RuntimeError("fails as asked")
        self.calls.append(epoch)
        self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch, logs=None):
        if (self.calls[-1], batch) == self.fails_at_batch:
            raise RuntimeError("fails as asked")

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

    kept["checkpoint"] = str(tmp_path / "whole")
    _, history = fitted(problem, **kept)
    _, again = fitted(problem, resume=True, **kept)

    for name in ("version", "exchanges", "joint_start"):
        assert history.training[name] == again.training[name]


@pytest.mark.parametrize("changed", ["values", "order"])
def test_rows_that_change_at_the_switch_are_found(problem, spark, tmp_path, caplog, changed):
    """Spark computes the rows again after the switch; they are compared with those of the joint start."""
    marker = tmp_path / "changed"
    x, y = problem.x, problem.y

    def row(index):
        if changed == "order" and marker.exists():
            index = len(y) - 1 - index
        return x[index] + (changed == "values" and marker.exists()), int(y[index])

    rows = spark.sparkContext.parallelize(range(len(y)), 2).map(row)
    model = SparkModel(model_of(problem), frequency="auto", num_workers=2)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: marker.touch())
    if changed == "values":
        with pytest.raises(DataError, match="the joint start had .* differ"):
            model.fit(rows, callbacks=[callback], **FIT | {"epochs": 2})
        assert [0] == model.history.epoch
    else:
        model.fit(rows, callbacks=[callback], **FIT | {"epochs": 2})
        assert "The workers have the same rows as before, but in a different order" in caplog.text


@pytest.mark.whole
def test_checkpoints_are_as_many_batches_apart_in_windows(problem, tmp_path):
    """A checkpoint is made at the switch, and every=32 then means two rounds of 16 batches."""
    config = CheckpointConfig(str(tmp_path / "kept"), every=10_000)
    with pytest.raises(RuntimeError, match="fails as asked"):
        fitted(problem, checkpoint=config, callbacks=[Calls(SWITCH + 2)])
    _, history = fitted(problem, checkpoint=config, resume=True, callbacks=[calls := Calls()])
    assert ["begin", *range(SWITCH, EPOCHS), "end"] == calls.calls

    config = CheckpointConfig(str(tmp_path / "often"), every=32)
    _, history = fitted(problem, checkpoint=config, epochs=12)
    texts = [event["text"] for event in history.run["events"]]
    assert 11 <= sum("Checkpoint at" in text for text in texts)


@pytest.mark.whole
def test_an_epoch_that_began_joint_ends_joint(problem, tmp_path):
    """A fit that resumes within an epoch completes it, also if it has fewer joint epochs than before."""
    kept = {"checkpoint": CheckpointConfig(str(tmp_path / "kept"), every=5), "steps_per_epoch": 2_000}
    with pytest.raises(RuntimeError, match="fails as asked"):
        fitted(problem, epochs=36, callbacks=[Calls(fails_at_batch=(1, 1_000))], **kept)
    _, history = fitted(problem, epochs=3, resume=True, **kept)

    assert 2 == history.training["joint_start"]["epochs"]
    assert 2 * 2_000 == history.training["joint_start"]["version"]


def test_many_workers_take_smaller_batches_after_the_start(problem, tmp_path, monkeypatch, caplog):
    """After the start each worker takes smaller batches, also in a fit that resumes."""
    monkeypatch.setattr("sparkdl.api.joint_start.MANY_WORKERS", 2)
    monkeypatch.setattr("sparkdl.api.joint_start.BATCHES_OF_MANY", 1)
    caplog.set_level("INFO", "sparkdl")
    whole, history = fitted(problem, epochs=4, callbacks=[Calls()])
    kept = {"checkpoint": str(tmp_path / "kept"), "epochs": 4}
    with pytest.raises(RuntimeError, match="fails as asked"):
        fitted(problem, callbacks=[Calls(2)], **kept)
    resumed, _ = fitted(problem, resume=True, callbacks=[Calls()], **kept)

    training, small = history.training, FIT["batch_size"] // 2
    windows = -(-max(training["worker_rows"]) // small // 16)
    steps = sum(-(-rows // small) for rows in training["worker_rows"])
    assert training["joint_start"]["version"] + 3 * windows == training["version"]
    assert f"batch_size={small} per worker: {steps} steps per epoch." in caplog.text
    assert f"from then on after every 16 batches of {small} rows" in caplog.text
    assert bits(whole) == bits(resumed)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frequency": "batch"}, "frequency='auto' instead of 'batch'"),
        ({"merge": "average"}, "merge='diloco' instead of 'average'"),
    ],
)
def test_a_fit_does_not_resume_with_other_settings(problem, tmp_path, settings, message):
    """The refusal names the settings that the user wrote, also if the checkpoint is of the joint start."""
    kept = {"checkpoint": str(tmp_path / "kept"), "epochs": 12}
    with pytest.raises(RuntimeError, match="fails as asked"):
        fitted(problem, callbacks=[Calls(1)], **kept)
    with pytest.raises(ConfigError, match=message):
        fitted(problem, resume=True, **kept, **settings)


class Odd(Average):
    """A rule whose state no checkpoint can hold."""

    def init(self, parameters):
        return {1, 2}


@pytest.mark.parametrize("placement", ["driver", "executors"])
def test_a_rule_whose_state_cannot_be_kept_is_refused_first(problem, tmp_path, placement):
    """A rule that only the windows need is refused before the joint start trains."""
    spark_model = SparkModel(
        model_of(problem), frequency="auto", merge=Odd(), num_workers=2, placement=placement
    )
    with pytest.raises(ConfigError, match="Use only dicts, lists"):
        spark_model.fit(problem.x, problem.y, checkpoint=str(tmp_path / "kept"), **FIT)

    assert [] == spark_model.history.epoch


@pytest.mark.whole
def test_without_joint_epochs_the_windows_are_traced_and_named(problem, caplog):
    """A fit that begins after the switch says so, and traces batches of its windows."""
    caplog.set_level("INFO", "sparkdl")
    _, history = fitted(problem, initial_epoch=3, epochs=4, profile=(2, 4))

    assert "joint_start" not in history.training
    assert history.intervals
    expected = (
        'frequency="auto": from epoch 4 on, workers exchange after every 16 batches, with merge="diloco".'
    )
    assert expected in caplog.messages


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
            'every 16 batches, with merge="diloco".',
        ),
    ],
)
def test_a_fit_says_what_it_does(problem, caplog, epochs, said):
    """The lines at the start of a fit name its parts, and no shortfalls of fits without a joint start."""
    caplog.set_level("INFO", "sparkdl")
    fitted(problem, epochs=epochs)

    assert said in caplog.messages
    assert not [line for line in caplog.messages if "convergence study" in line]


@pytest.mark.whole
def test_a_rule_that_fell_short_is_warned_of_before_the_joint_start(problem, caplog):
    """The study has joint starts with the default rule only, so other rules are judged by their windows."""
    fitted(problem, epochs=2, merge="adasum", callbacks=[calls := Calls()])

    (warning,) = [line for line in caplog.messages if "convergence study" in line]
    assert 'frequency=N (batches) and merge="adasum"' in warning
    assert ["begin", 0, 1, "end"] == calls.calls

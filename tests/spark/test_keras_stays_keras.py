"""A fit keeps the services of `model.fit`: callbacks, History, progress and files."""

import contextlib
import errno
import json
import logging
import re

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark import TaskContext

from sparkdl import FaultTolerance, SparkModel, load_spark_model
from sparkdl.config import Mode
from sparkdl.errors import ModelError
from sparkdl.settings import grouped
from sparkdl.spark import files

pytestmark = pytest.mark.usefixtures("spark")
SETTINGS = {"batch_size": 32, "shuffle": False, "verbose": 0}


def train(problem, *, epochs=4, **arguments):
    """Return a model trained on two workers, its History, and plain Keras's model and History."""
    model, reference = problem.model(), problem.model()
    arguments = {**SETTINGS, **arguments}
    callbacks = arguments.pop("callbacks", list)
    history = SparkModel(model, num_workers=2).fit(
        problem.x, problem.y, epochs=epochs, callbacks=callbacks(), **arguments
    )
    expected = reference.fit(problem.x, problem.y, epochs=epochs, callbacks=callbacks(), **arguments)
    return model, history, reference, expected


def same(expected, history, rel=1e-4):
    """Assert equal keys and, up to rounding, equal values of two histories."""
    assert set(expected.history) == set(history.history)
    for name, values in expected.history.items():
        assert values == pytest.approx(history.history[name], rel=rel), name


def test_a_history_is_a_table_of_epochs(problem):
    """History has Keras's keys and values, `validation_split` takes the last rows, and pandas reads it."""
    model, history, reference, expected = train(problem, validation_split=0.25)

    same(expected, history)
    table = pd.DataFrame(history.history)
    assert list(range(4)) == history.epoch == list(table.index)
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(table.columns)
    assert problem.distance(model, reference, problem.model().get_weights()) <= 1
    assert history.training["rows"] == 152
    assert [5] * 4 == [len(losses) for losses in history.training["losses"]]
    assert len(history.training["epoch_seconds"]) == 4


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["rdd", "frame"])
def test_the_same_rows_are_held_out_in_every_epoch(spark, problem, frames, kind):
    """With learning rate 0 every epoch scores the same, so the same rows are held out in each."""
    data = problem.rdd(spark, 100, 103) if kind == "rdd" else frames["array"]
    fits = [
        SparkModel(problem.model(keras.optimizers.SGD(0.0)), num_workers=2).fit(
            data, epochs=3, validation_split=0.3, seed=5, verbose=0
        )
        for _ in range(2)
    ]

    held, again = (fit.history["val_loss"] for fit in fits)
    assert held == pytest.approx([held[0]] * 3, rel=1e-6)
    assert again == pytest.approx(held, rel=1e-6)
    assert held[0] != fits[0].history["loss"][0]
    assert 203 * 0.55 < fits[0].training["rows"] < 203 * 0.85


@pytest.mark.whole
def test_callbacks_of_keras_do_what_they_say(problem, tmp_path):
    """A schedule, checkpoints and a CSV log give the results of plain Keras."""
    files = []

    def callbacks():
        folder = tmp_path / str(len(files))
        folder.mkdir()
        files.append(folder)
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1)),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
            keras.callbacks.CSVLogger(folder / "log.csv"),
        ]

    model, history, reference, expected = train(problem, callbacks=callbacks)

    same(expected, history)
    ours, theirs = files
    assert [0.3, 0.15, 0.05, 0.0125] == pytest.approx(history.history["learning_rate"])
    assert {f"{epoch}.keras" for epoch in (1, 2, 3, 4)} | {"log.csv"} == {
        path.name for path in ours.iterdir()
    }
    saved = keras.saving.load_model(ours / "4.keras")
    assert all(np.array_equal(a, b) for a, b in zip(saved.get_weights(), model.get_weights(), strict=True))
    pd.testing.assert_frame_equal(pd.read_csv(theirs / "log.csv"), pd.read_csv(ours / "log.csv"), rtol=1e-4)
    assert problem.distance(model, reference, problem.model().get_weights()) <= 1


class Zeroed(keras.callbacks.Callback):
    """A callback that has the model evaluated without its biases and records its calls with their logs."""

    def __init__(self, *, restores=True):
        super().__init__()
        self.calls, self.restores = [], restores

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch begins", {}))

    def on_test_begin(self, logs=None):
        self.calls.append(("test begins", dict(logs or {})))
        self.weights = self.model.get_weights()
        self.model.set_weights([weight * (weight.ndim > 1) for weight in self.weights])

    def on_test_end(self, logs=None):
        self.calls.append(("test ends", dict(logs or {})))
        if self.restores:
            self.model.set_weights(self.weights)

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch ends", dict(logs or {})))


ALL = {"mode": "synchronous", "num_workers": 2}
ALONE = {"mode": "asynchronous", "frequency": "epoch", "num_workers": 1}
whole = pytest.mark.whole


SWAPPING = {
    "averages": lambda: keras.callbacks.SwapEMAWeights(),
    "averages by epoch": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "own weights": Zeroed,
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("averages by epoch", ALL),
        ("averages", ALONE),
        ("own weights", ALL),
        pytest.param("averages", ALL, marks=whole),
        pytest.param("averages by epoch", ALONE, marks=whole),
        pytest.param("own weights", ALONE, marks=whole),
        pytest.param("averages by epoch", {"frequency": 2, "num_workers": 1}, marks=whole),
        pytest.param("averages", {"mode": "hogwild", "frequency": 2, "num_workers": 1}, marks=whole),
    ],
)
def test_validation_is_of_the_weights_that_a_callback_swaps_in(problem, kind, settings):
    """Validation uses the weights that SwapEMAWeights swaps in; training continues from the original ones."""
    ours, reference = (
        problem.model(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.9)) for _ in range(2)
    )
    fits = {"epochs": 3, "validation_data": (problem.x[:50], problem.y[:50]), **SETTINGS}
    callbacks = [SWAPPING[kind]() for _ in range(2)]
    history = SparkModel(ours, **settings).fit(problem.x, problem.y, callbacks=callbacks[:1], **fits)
    expected = reference.fit(problem.x, problem.y, callbacks=callbacks[1:], **fits)

    same(expected, history, rel=1e-5)
    assert problem.distance(ours, reference, problem.model().get_weights()) <= 1
    ours_called, theirs_called = (getattr(callback, "calls", []) for callback in callbacks)
    assert [name for name, _ in theirs_called] == [name for name, _ in ours_called]
    for (_, theirs), (_, logs) in zip(theirs_called, ours_called, strict=True):
        assert theirs == pytest.approx(logs, rel=1e-5)


def test_weights_that_a_callback_leaves_after_a_test_are_trained_on(problem):
    """The next epoch begins with the weights of `on_test_begin` unless `on_test_end` sets them back."""
    _, history, _, expected = train(
        problem, epochs=3, validation_split=0.25, callbacks=lambda: [Zeroed(restores=False)]
    )

    same(expected, history, rel=1e-5)


def sequences():
    """Return a function that makes a model with a mask and a loss weighted per step, and its rows."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(75, 5, 3)).astype("float32")
    x[np.arange(5)[None] >= generator.integers(1, 6, 75)[:, None]] = 0
    weights = np.linspace(0, 3, 75 * 5, dtype="float32").reshape(75, 5)

    def make():
        keras.utils.set_random_seed(1)
        layers = [
            keras.Input((5, 3)),
            keras.layers.Masking(),
            keras.layers.SimpleRNN(4, return_sequences=True),
            keras.layers.Dense(1, kernel_regularizer="l2"),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["mae"])
        return model

    return make, x, x.sum(axis=-1, keepdims=True), weights


def heads():
    """Return a function that makes a model of two outputs, and its rows."""
    x = np.random.default_rng(0).normal(size=(75, 6)).astype("float32")

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh")(inputs)
        outputs = [keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"], metrics=[["mae"], []])
        return model

    return make, x, [x[:, :1], x[:, 1:2]], None


@pytest.mark.whole
@pytest.mark.parametrize("kind", [sequences, heads])
@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=whole)])
def test_losses_and_metrics_of_batches_are_keras_s(spark, kind, workers):
    """Losses and metrics match Keras for masks, weights and outputs, in fit, validation and evaluate."""
    make, x, y, weights = kind()
    ours, reference = SparkModel(make(), num_workers=workers), make()
    arguments = {"sample_weight": weights, "epochs": 2, **SETTINGS, "batch_size": 16}
    fits = [
        model.fit(x, y, validation_split=0.4, validation_batch_size=7, **arguments)
        for model in (ours, reference)
    ]
    results = [
        model.evaluate(x, y, batch_size=10, sample_weight=weights, verbose=0, return_dict=True)
        for model in (ours, reference)
    ]

    same(fits[1], fits[0], rel=1e-5)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.whole
def test_a_run_that_was_backed_up_goes_on_where_it_was(problem, tmp_path):
    """BackupAndRestore resumes with the remaining epochs, as in Keras, or with none."""

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("the power is gone")

    def fit(*more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        spark_model = SparkModel(problem.model(), num_workers=2)
        with contextlib.suppress(RuntimeError):
            spark_model.fit(problem.x, problem.y, epochs=4, callbacks=[backup, *more], **SETTINGS)
        return spark_model

    fit(Interrupted())
    finished = fit()
    again = fit()
    plain = problem.model()
    plain.fit(problem.x, problem.y, epochs=4, **SETTINGS)

    assert [2, 3] == finished.history.epoch
    assert problem.distance(finished.model, plain, problem.model().get_weights()) <= 1
    assert [] == again.history.epoch


@pytest.mark.whole
def test_early_stopping_ends_training_and_restores_the_best_weights(problem):
    """EarlyStopping ends training at the epoch of plain Keras and restores the best weights."""

    def callbacks():
        reduce = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.1, min_delta=10.0)
        stop = keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=10.0, restore_best_weights=True
        )
        return [reduce, stop]

    model, history, reference, expected = train(
        problem, epochs=50, callbacks=callbacks, validation_split=0.25
    )

    same(expected, history)
    assert len(history.epoch) == 3
    assert problem.distance(model, reference, problem.model().get_weights()) <= 1
    assert float(model.optimizer.learning_rate) == float(reference.optimizer.learning_rate)


@pytest.mark.one_case
@pytest.mark.parametrize("mode", list(Mode))
def test_terminate_on_nan_stops_each_mode(problem, caplog, mode):
    """TerminateOnNaN ends training after the first epoch with a non-finite loss, which is logged."""
    x = problem.x.copy()
    x[120] = np.inf
    spark_model = SparkModel(problem.model(), mode=mode, num_workers=2)

    history = spark_model.fit(
        x, problem.y, epochs=20, callbacks=[keras.callbacks.TerminateOnNaN()], nan="warn", **SETTINGS
    )

    assert len(history.epoch) == 1
    assert any("had a non-finite loss" in line for line in caplog.messages)
    assert any("sent an update with NaN" in event["text"] for event in history.run["events"])


DIVISION = r"2 workers \(as requested\) on 203 rows, batch_size=32 over all workers: 7 steps per epoch\.\n"
PAGE = r"Live page: http://\S+/\?key=[\w-]{32} \(works once\)\n"
EPOCH = r"Epoch \d/2 - [\d.]+ s - [\d,]+ rows/s( - (loss|accuracy): [\d.e-]+){2}\n"


@pytest.mark.one_case
@pytest.mark.parametrize(("verbose", "expected"), [(2, f"{PAGE}{DIVISION}({EPOCH}){{2}}"), (0, "")])
def test_progress_is_a_line_per_epoch_or_nothing(problem, capsys, verbose, expected):
    """verbose=2 prints the page, the workers and each epoch; 0 prints nothing; "auto" is 2 in a file."""
    for setting in [verbose, *(["auto"] if verbose else [])]:
        SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, epochs=2, verbose=setting)

        assert re.fullmatch(expected, capsys.readouterr().out)


def test_progress_is_a_bar_in_a_terminal(problem, capsys, monkeypatch):
    """verbose="auto" in a terminal draws rows per second, then leaves a line for the epoch."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")

    SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, epochs=2)

    out = capsys.readouterr().out
    assert "rows/s" in out
    assert "\x1b[" in out
    assert re.search(r"Epoch 2/2 - [\d.]+ s - [\d,]+ rows/s - ", out)


@pytest.mark.whole
def test_what_workers_log_is_heard_on_the_driver(problem, caplog):
    """A line that user code logs on an executor comes out of the driver's logger, with its worker's name."""

    def talking_loss(y_true, y_pred):
        if TaskContext.get() is not None:
            logging.getLogger("my.loss").warning("traced")
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    model = problem.model(loss=talking_loss)

    history = SparkModel(model, num_workers=2, custom_objects={"talking_loss": talking_loss}).fit(
        problem.x, problem.y, verbose=0
    )

    heard = {(entry.name, entry.getMessage()) for entry in caplog.records}
    lines = {f"worker {worker}: traced" for worker in (0, 1)}
    assert {("sparkdl.workers.my.loss", line) for line in lines} <= heard
    assert lines <= {event["text"] for event in history.run["events"]}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["path", "uri"])
def test_a_model_is_saved_with_its_settings(problem, tmp_path, kind):
    """A model saved to a path or a Hadoop URI is a plain Keras file with a settings file next to it."""
    folder = tmp_path / "models"
    target = f"{folder.as_uri() if kind == 'uri' else folder}/m.keras"
    spark_model = SparkModel(
        problem.model(), mode="asynchronous", frequency=3, fault_tolerance=FaultTolerance(stall_timeout=9)
    )

    spark_model.save(target)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        spark_model.save(target)
    spark_model.save(target, overwrite=True)
    loaded = load_spark_model(target)

    assert {"m.keras", "m.json"} == {path.name for path in folder.iterdir() if path.suffix != ".crc"}
    assert spark_model.config == loaded.config
    plain = keras.saving.load_model(folder / "m.keras")
    for model in (plain, loaded.model):
        np.testing.assert_array_equal(
            spark_model.model.predict(problem.x, verbose=0), model.predict(problem.x, verbose=0)
        )
    with pytest.raises(FileNotFoundError):
        SparkModel.load(target.replace("m.keras", "n.keras"))


@pytest.mark.parametrize("failing", ["m.keras", "m.json"])
def test_a_model_that_cannot_be_saved_leaves_one_that_can_be_loaded(problem, tmp_path, monkeypatch, failing):
    """A failed save leaves the old model with its settings, or the new one without, never a mixture."""
    target, put = str(tmp_path / "m.keras"), files.put
    old, new = (
        SparkModel(problem.model(), fault_tolerance=FaultTolerance(stall_timeout=seconds))
        for seconds in (7, 9)
    )
    new.model.set_weights([weight + 1 for weight in new.model.get_weights()])
    old.save(target)

    def full(local, path, **options):
        if path.endswith(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        put(local, path, **options)

    monkeypatch.setattr(files, "put", full)
    with pytest.raises(OSError, match="No space left"):
        new.save(target, overwrite=True)
    loaded = load_spark_model(target)

    model, config = (old, old.config) if failing == "m.keras" else (new, SparkModel(problem.model()).config)
    assert config == loaded.config
    for expected, found in zip(model.model.get_weights(), loaded.model.get_weights(), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_where_the_endpoint_is_is_neither_saved_nor_loaded(problem, tmp_path, caplog):
    """Endpoint addresses are not saved: a file must not redirect the token and weights of a fit."""
    place = {
        "bind_address": "127.0.0.1",
        "advertised_host": "127.0.0.2",
        "port": 40001,
        "tls": False,
        "placement": "worker",
    }
    path = tmp_path / "m.json"
    SparkModel(problem.model(), **grouped(place)).save(str(tmp_path / "m.keras"))
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | place))
    loaded = load_spark_model(str(tmp_path / "m.keras"))

    assert not saved.keys() & place.keys()
    assert loaded.config == SparkModel(problem.model()).config
    assert f" sets {', '.join(place)}. These settings depend on the machine" in "\n".join(caplog.messages)


def test_code_in_a_saved_model_is_refused_unless_it_is_trusted(problem, tmp_path):
    """Loading a Lambda layer runs code, so it requires `safe_mode=False`, as in Keras."""
    parts = [keras.Input((6,)), keras.layers.Lambda(lambda x: 2 * x), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(parts)
    model.compile("sgd", "sparse_categorical_crossentropy")
    target = str(tmp_path / "lambda.keras")
    SparkModel(model).save(target)

    with pytest.raises(ModelError, match="lambda.keras cannot be loaded: .*unsafe|safe_mode"):
        SparkModel.load(target)
    loaded = SparkModel.load(target, safe_mode=False).model
    np.testing.assert_array_equal(model.predict(problem.x, verbose=0), loaded.predict(problem.x, verbose=0))


@pytest.mark.whole
def test_pandas_and_columns_of_numbers_train(spark, problem, frames):
    """Pandas with y trains as arrays do; a scalar column of a DataFrame is a feature of one number."""
    model = problem.model()
    frame = pd.DataFrame(problem.x, columns=list("abcdef"))
    history = SparkModel(model, num_workers=2).fit(frame, pd.Series(problem.y), **SETTINGS)
    reference = problem.model()
    same(reference.fit(problem.x, problem.y, **SETTINGS), history)

    one = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    one.compile("sgd", "mse")
    spark_model = SparkModel(one, num_workers=2)
    history = spark_model.fit(
        frames["array"], features_col="first", label_col="sum", epochs=2, verbose=0, seed=1
    )
    predicted = spark_model.predict(frames["array"], features_col="first", output_col="guess").collect()

    assert history.history["loss"][1] < history.history["loss"][0]
    np.testing.assert_allclose(
        one.predict(problem.x[:, :1], verbose=0)[:, 0],
        [row.guess for row in sorted(predicted, key=lambda row: row.row)],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.whole
def test_a_partition_smaller_than_a_batch_trains(spark, problem):
    """With three rows on one worker and a batch size of 64, every row is used once an epoch."""
    counts = 200, 3
    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    history = SparkModel(model, num_workers=2).fit(
        problem.rdd(spark, *counts), batch_size=64, epochs=2, shuffle=False, verbose=0
    )

    reference.fit(*problem.interleaved(*counts), batch_size=64, epochs=2, shuffle=False, verbose=0)
    assert [200, 3] == history.training["worker_rows"]
    assert problem.distance(model, reference, start) <= 1


def test_a_seed_repeats_a_synchronous_run(problem):
    """The same seed gives the same weights bit for bit; another seed does not."""
    weights = []
    for seed in (1, 1, 2):
        model = problem.model()
        SparkModel(model, num_workers=2).fit(problem.x, problem.y, epochs=2, verbose=0, seed=seed)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))

    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_a_function_that_builds_the_model_is_sent_instead_of_it(problem):
    """A model that Keras cannot serialize trains if a function builds it."""

    def build():
        class Plain(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(3, activation="softmax")

            def call(self, inputs):
                return self.dense(inputs)

        keras.utils.set_random_seed(1)
        model = Plain()
        model(np.zeros((1, 6), "float32"))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    spark_model, reference = SparkModel(build, num_workers=2), build()

    history = spark_model.fit(problem.x, problem.y, epochs=2, **SETTINGS)

    same(reference.fit(problem.x, problem.y, epochs=2, **SETTINGS), history)
    assert problem.distance(spark_model.model, reference, build().get_weights()) <= 1

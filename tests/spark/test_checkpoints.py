"""A run that died resumes from its last checkpoint, also in the middle of an epoch."""

import contextlib
import functools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import CheckpointConfig, SparkModel
from sparkdl.driver import checkpoints
from sparkdl.errors import ConfigError, DataError
from sparkdl.rules import Rule

HERE = Path(__file__).parent
PATIENCE = 250  # seconds for a driver to finish
SETTINGS = {"batch_size": 16, "epochs": 5, "seed": 3, "verbose": 0}


class Die(keras.callbacks.Callback):
    """A callback that ends a run at the end of its third epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise LookupError("the driver dies")


class StopAtOnce(keras.callbacks.Callback):
    """A callback that stops training before the first batch of an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = True


@dataclass
class Driven:
    """A run of a script in its own folder, each driver of which may be killed.

    Attributes:
        killed: the number of killed drivers.
        resumed: the number of drivers known to have resumed: they wrote a newer checkpoint, or finished.
    """

    folder: Path
    script: str
    mode: str
    frequency: str
    epochs: int
    killed: int = 0
    resumed: int = 0

    def live(self, seconds):
        """SIGKILL a driver, its JVM and its workers after a time; return True if it had finished."""
        before, process = self.newest(), self.start()
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            self.killed += 1
            self.resumed += 0 < before < self.newest()
            return False
        assert process.returncode == 0, out[-5000:]
        self.resumed += before > 0
        return True

    def start(self):
        paths = [str(Path(sparkdl.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        arguments = self.folder / "checkpoints", self.mode, self.frequency, self.folder / "end.npz"
        return subprocess.Popen(
            [sys.executable, HERE / self.script, *arguments, str(self.epochs)],
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def newest(self):
        """Return the number of the newest checkpoint, 0 if there is none."""
        found = (self.folder / "checkpoints").glob("checkpoint-*.sparkdl")
        return max((int(path.name[11:19]) for path in found), default=0)

    def outcome(self):
        """Return the arrays that the driver saved when it finished."""
        with np.load(self.folder / "end.npz") as found:
            *arrays, resumed = [found[name] for name in found.files]
        assert self.resumed == int(resumed)
        return arrays


def runs(path, moments, kills, seconds, *arguments):
    """Kill ``kills`` drivers, each at a random moment of its life; yield the runs they belonged to.

    A run continues until one of its drivers finishes; then the next run begins.
    """
    while kills > 0:
        run = Driven(Path(tempfile.mkdtemp(dir=path)), *arguments)
        while not run.live(moments.uniform(0, seconds) if run.killed < kills else PATIENCE):
            assert run.killed <= kills
        kills -= run.killed
        yield run


@pytest.fixture
def moments():
    """A random generator for moments; its seed is logged and can be set."""
    seed = int(os.environ.get("MOMENTS_SEED", random.randrange(1 << 32)))
    logging.getLogger(__name__).warning("MOMENTS_SEED=%d", seed)
    return random.Random(seed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns a run of a script without faults, and the seconds it took."""

    @functools.cache
    def undisturbed(*arguments):
        run, began = Driven(tmp_path_factory.mktemp("undisturbed"), *arguments), time.monotonic()
        assert run.live(PATIENCE)
        return run, time.monotonic() - began

    return undisturbed


for_long = [pytest.mark.whole, pytest.mark.timeout(3600)]


@pytest.mark.whole
@pytest.mark.spark
@pytest.mark.parametrize(
    ("frequency", "epochs", "kills"),
    [
        ("1", 25, 1),
        pytest.param("2", 25, 2, marks=pytest.mark.whole),
        pytest.param("1", 300, 20, marks=for_long),
        pytest.param("epoch", 300, 20, marks=for_long),
    ],
)
def test_a_driver_that_was_killed_goes_on_to_the_same_weights(
    tmp_path, moments, undisturbed, frequency, epochs, kills
):
    """A driver killed at any moment resumes; weights and losses match an undisturbed run bit for bit."""
    arguments = "resumed.py", "synchronous", frequency, epochs
    whole, seconds = undisturbed(*arguments)

    for run in runs(tmp_path, moments, kills, seconds, *arguments):
        for mine, theirs in zip(run.outcome(), whole.outcome(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.whole
@pytest.mark.spark
@pytest.mark.parametrize(
    ("mode", "frequency", "epochs", "kills"),
    [
        ("asynchronous", "1", 8, 1),
        pytest.param("asynchronous", "1", 30, 20, marks=for_long),
        pytest.param("hogwild", "1", 30, 20, marks=for_long),
        pytest.param("asynchronous", "2", 20, 4, marks=pytest.mark.whole),
    ],
)
def test_a_driver_that_was_killed_loses_no_more_than_what_came_after_its_last_checkpoint(
    tmp_path, moments, undisturbed, mode, frequency, epochs, kills
):
    """Without rounds, a killed driver repeats few steps, and the weight counts every step once.

    The repeated steps are those since the last checkpoint, one interval of them, and those until the next one
    was on disk, which here are fewer than an interval. Over many moments, one interval per kill is more than
    enough.
    """
    arguments = "resumed_counting.py", mode, frequency, epochs
    alike = (
        arguments if kills > 1 else ("resumed.py", "synchronous", "1", 25)
    )  # an equally long run, already cached
    _, seconds = undisturbed(*alike)
    needed, interval, twice = epochs * 240 // 8, 20 * int(frequency), 0  # as in the script

    for run in runs(tmp_path, moments, kills, seconds, *arguments):
        steps = (run.folder / "steps").stat().st_size
        assert [needed] == run.outcome()
        assert 0 <= steps - needed <= run.killed * 2 * interval
        twice += steps - needed
    assert kills == 1 or twice <= kills * interval


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mode", "frequency", "merge"),
    [("synchronous", "batch", None), ("synchronous", 3, "diloco"), ("asynchronous", "batch", None)],
)
def test_a_run_goes_on_after_the_last_epoch(spark, problem, tmp_path, mode, frequency, merge):
    """A run that failed after an epoch resumes with all epochs in its history.

    In synchronous mode its weights are those of an undisturbed run.
    """
    options = {"mode": mode, "frequency": frequency, "merge": merge, "num_workers": 2}
    whole, model, again = (problem.model(keras.optimizers.Adam(0.01)) for _ in range(3))
    expected = SparkModel(whole, **options).fit(problem.x, problem.y, **SETTINGS)
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(LookupError, match="the driver dies"):
        SparkModel(model, **options).fit(
            problem.x, problem.y, checkpoint=folder, callbacks=[Die()], **SETTINGS
        )
    model = problem.model(keras.optimizers.Adam(0.01), seed=2)
    history = SparkModel(model, **options).fit(
        problem.x, problem.y, checkpoint=folder, resume=True, **{**SETTINGS, "seed": None}
    )

    assert history.epoch == list(range(5))
    assert history.training["resumed"] == 1
    assert len(history.training["losses"]) == 5
    if mode == "synchronous":
        for mine, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert history.history == expected.history
    else:
        assert history.history["loss"][-1] < history.history["loss"][0]
    done = SparkModel(again, **options).fit(problem.x, problem.y, checkpoint=folder, resume=True, **SETTINGS)
    assert done.history == history.history  # and nothing is trained
    for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(params=["file", "viewfs"])
def shared(spark, request, tmp_path):
    """A folder and its Hadoop URI, of local files or of a viewfs mount."""
    folder = tmp_path / "shared"
    folder.mkdir()
    if request.param == "file":
        return folder, folder.as_uri()
    mounted = f"fs.viewfs.mounttable.{tmp_path.name}.link./shared"
    spark.sparkContext._jsc.hadoopConfiguration().set(mounted, folder.as_uri())
    return folder, f"viewfs://{tmp_path.name}/shared"


@pytest.mark.one_case
def test_what_hadoop_cannot_read_is_named_and_the_one_before_it_used(problem, shared, caplog):
    """A truncated checkpoint at a Hadoop URI is logged and the one before it is used.

    Only the newest checkpoints are kept, and no partial files.
    """
    folder, uri = shared
    options = {**SETTINGS, "checkpoint": f"{uri}/checkpoints"}
    SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, **{**options, "epochs": 3})
    made = [f"checkpoint-0000000{number}.sparkdl" for number in (2, 3)]
    found = [path.name for path in (folder / "checkpoints").iterdir()]
    assert made == sorted(name for name in found if not name.startswith("."))  # not Hadoop's checksum files
    assert not [name for name in found if "begun" in name or "00000001" in name]
    os.truncate(folder / "checkpoints" / made[-1], 1000)

    history = SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, resume=True, **options)

    assert any(f"{made[-1]} is not used: it is damaged" in line for line in caplog.messages)
    assert (1, list(range(5))) == (history.training["resumed"], history.epoch)


def test_a_run_that_was_stopped_is_over(spark, problem, tmp_path):
    """Resuming a run that EarlyStopping ended trains nothing and returns the restored best weights."""
    stop = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    config = CheckpointConfig(str(tmp_path / "checkpoints"), keep=1, keep_best=1, monitor="loss")
    model, again = problem.model(), problem.model()
    first = SparkModel(model, num_workers=2).fit(
        problem.x, problem.y, checkpoint=config, callbacks=[stop], **SETTINGS
    )
    assert len(first.history["loss"]) == 2

    history = SparkModel(again, num_workers=2).fit(
        problem.x, problem.y, checkpoint=config, resume=True, **SETTINGS
    )

    assert history.history == first.history
    assert 0 == history.training["checkpoints_failed"]
    for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.one_case
@pytest.mark.parametrize("settings", [{}, {"mode": "asynchronous"}, {"placement": "executors"}])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_complete_run_does_not_resume_with_other_rows(spark, problem, tmp_path, settings, stopped):
    """A complete run that resumes returns its model for the same rows only."""
    options = {**SETTINGS, "epochs": 2, "checkpoint": str(tmp_path / "kept"), "validation_split": 0.25}
    callbacks = [StopAtOnce()] if stopped else []
    first, again = problem.model(), problem.model(seed=2)
    SparkModel(first, num_workers=2, **settings).fit(problem.x, problem.y, callbacks=callbacks, **options)
    for x, y, message in (
        (problem.x, problem.y[::-1], "the values in these rows or in the validation rows differ"),
        (problem.x[:100], problem.y[:100], "Resume with the same data"),
    ):
        with pytest.raises(DataError, match=message):
            SparkModel(again, num_workers=2, **settings).fit(x, y, resume=True, **options)
    history = SparkModel(again, num_workers=2, **settings).fit(problem.x, problem.y, resume=True, **options)

    assert 1 == history.training["resumed"]
    for mine, theirs in zip(again.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_resumed_run_names_its_checkpoint(spark, problem, tmp_path, capsys, caplog):
    """A run that resumes prints, logs and records once from which checkpoint, and at which place."""
    caplog.set_level(logging.INFO, "sparkdl")
    trainer, folder = SparkModel(problem.model(), num_workers=2), str(tmp_path)
    new = trainer.fit(problem.x, problem.y, epochs=1, verbose=2, checkpoint=folder)
    assert "Resuming" not in capsys.readouterr().out + "".join(caplog.messages)

    resumed = trainer.fit(problem.x, problem.y, epochs=2, verbose=2, checkpoint=folder, resume=True)

    line = "Resuming at the end of epoch 1, from checkpoint-00000001.sparkdl."
    assert 1 == capsys.readouterr().out.count(f"{line}\n") == caplog.messages.count(line)
    found = [[event["text"] for event in history.run["events"]] for history in (new, resumed)]
    assert [["Checkpoint at the end of epoch 1."], [line, "Checkpoint at the end of epoch 2."]] == found


def test_a_resumed_run_that_is_stopped_before_its_first_batch_ends(spark, problem, tmp_path):
    """An asynchronous run that a callback stops as it resumes ends with the epoch under way."""
    trainer = SparkModel(problem.model(), mode="asynchronous", num_workers=2)
    settings = {"verbose": 0, "checkpoint": CheckpointConfig(str(tmp_path))}
    trainer.fit(problem.x, problem.y, epochs=1, **settings)

    history = trainer.fit(problem.x, problem.y, epochs=5, **settings, callbacks=[StopAtOnce()], resume=True)

    assert [0, 1] == history.epoch


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"num_workers": 1}, {}, "num_workers=2 instead of 1"),
        ({"frequency": 2}, {}, "frequency='batch' instead of 2"),
        ({}, {"batch_size": 8}, "batch_size=16 instead of 8"),
        ({}, {"seed": 4}, "seed=3 instead of 4"),
        ({}, {"validation_data": (np.ones((8, 6)), np.ones(8))}, "validation_data=None instead of 'given'"),
        ({}, {"sample_weight": np.ones(203)}, "sample_weight=None instead of 'given'"),
        ({}, {"resume": False}, "has checkpoints of an earlier run"),
    ],
)
def test_a_run_with_other_settings_is_refused(
    spark, problem, tmp_path_factory, jobs, options, settings, words
):
    """Resuming with a different setting raises a ConfigError that names it, before any job."""
    folder = tmp_path_factory.getbasetemp() / "settings"
    if not folder.exists():
        SparkModel(problem.model(), num_workers=2).fit(
            problem.x, problem.y, checkpoint=str(folder), **{**SETTINGS, "epochs": 1}
        )
    before = jobs()
    with pytest.raises(ConfigError, match=words):
        SparkModel(problem.model(), **{"num_workers": 2, **options}).fit(
            problem.x, problem.y, checkpoint=str(folder), **{**SETTINGS, "resume": True, **settings}
        )
    assert before == jobs()


def half_way_through(folder):
    """Leave only the newest checkpoint from the middle of an epoch, and return its snapshot."""
    snapshots = {path: checkpoints._read(str(path), None).snapshot for path in sorted(folder.iterdir())}
    newest = max(path for path, snapshot in snapshots.items() if snapshot.place)
    for path in snapshots.keys() - {newest}:
        path.unlink()
    return snapshots[newest]


@pytest.fixture(scope="module")
def half_way(spark, problem, tmp_path_factory):
    """A checkpoint from the middle of an epoch of a run with momentum."""
    folder = tmp_path_factory.mktemp("half-way")
    config = CheckpointConfig(str(folder), every=8, keep=100)
    SparkModel(problem.model(), num_workers=2).fit(
        problem.x, problem.y, checkpoint=config, **{**SETTINGS, "batch_size": 1, "epochs": 2}
    )
    half_way_through(folder)
    return folder


def resumed(problem, model, source, folder, compression=None, **options):
    """Resume a copy of a checkpoint with another model."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    options = {**SETTINGS, "batch_size": 1, "checkpoint": str(folder), "resume": True, **options}
    spark_model = SparkModel(model, num_workers=2, compression=compression)
    return spark_model.fit(problem.x, problem.y, **options)


def with_tanh_for_softmax(model):
    model.layers[-1].activation = keras.activations.tanh
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.model(keras.optimizers.RMSprop(0.1)), "optimizer='SGD' instead of 'RMSprop'"),
        (lambda p: p.model(keras.optimizers.SGD(0.3)), "the optimizer's variables differ"),
        (
            lambda p: with_tanh_for_softmax(p.model()),
            "the model computes different outputs with the same weights",
        ),
        (
            lambda p: p.model(weighted_metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)]),
            "written within an epoch, and the metrics of the model have changed",
        ),
    ],
    ids=["optimizer", "momentum", "activation", "metrics"],
)
def test_a_model_that_gives_saved_state_another_meaning_is_refused(
    problem, half_way, tmp_path, jobs, change, words
):
    """Another optimizer, momentum, activation or metrics make resuming raise ConfigError, before any job."""
    before = jobs()
    with pytest.raises(ConfigError, match=words):
        resumed(problem, change(problem), half_way, tmp_path)
    assert before == jobs()


@pytest.mark.whole
@pytest.mark.parametrize("every", ["epoch", 8])
def test_a_learning_rate_that_is_asked_for_is_taken(spark, problem, tmp_path, every):
    """A resumed run uses the new learning rate: at almost 0 it keeps the saved weights."""
    config = CheckpointConfig(str(tmp_path), every=every, keep=100)
    options = {**SETTINGS, "batch_size": 1, "checkpoint": config}
    SparkModel(problem.model(keras.optimizers.SGD(0.01)), num_workers=2).fit(
        problem.x, problem.y, **{**options, "epochs": 2}
    )
    newest = max(tmp_path.iterdir())
    snapshot = (
        checkpoints._read(str(newest), None).snapshot if every == "epoch" else half_way_through(tmp_path)
    )
    model = problem.model(keras.optimizers.SGD(1e-30))

    SparkModel(model, num_workers=2).fit(problem.x, problem.y, resume=True, **{**options, "epochs": 3})

    assert float(model.optimizer.learning_rate) == pytest.approx(1e-30)
    weights = np.concatenate([array.ravel() for array in model.get_weights()])
    np.testing.assert_array_equal(snapshot.parameters, weights)


@pytest.mark.whole
def test_a_learning_rate_that_callbacks_made_is_restored(spark, problem, tmp_path):
    """A resumed run with an unchanged initial learning rate restores the rate that a callback had set."""
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch < 2 else rate)
    options = {**SETTINGS, "checkpoint": str(tmp_path), "callbacks": [halve]}
    SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, **{**options, "epochs": 2})
    model = problem.model()

    SparkModel(model, num_workers=2).fit(problem.x, problem.y, resume=True, **{**options, "epochs": 3})

    assert float(model.optimizer.learning_rate) == pytest.approx(0.3 / 4)


@pytest.mark.whole
def test_a_setting_that_keeps_the_meaning_is_named(problem, half_way, tmp_path, caplog):
    """A resumed run with another loss, a smaller momentum and a codec logs all, and trains."""
    model = problem.model(
        keras.optimizers.SGD(0.3, momentum=0.5), loss=keras.losses.SparseCategoricalCrossentropy()
    )

    history = resumed(problem, model, half_way, tmp_path, compression="int8")

    (line,) = [line for line in caplog.messages if "The resumed run differs from the original run" in line]
    assert "momentum of optimizer is 0.5 instead of 0.9" in line
    assert "loss of compile is SparseCategoricalCrossentropy(" in line
    assert "compression of fit is 'int8' instead of not set" in line
    assert history.epoch == list(range(5))


@pytest.mark.whole
def test_other_rows_are_refused(spark, problem, tmp_path):
    """Resuming with other rows raises a DataError with both row counts."""
    options = {"checkpoint": f"file://{tmp_path}/checkpoints", **SETTINGS}  # through Hadoop
    SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, **{**options, "epochs": 1})

    with pytest.raises(DataError, match=r"have \(100, 100\) training rows; those of the checkpoint"):
        SparkModel(problem.model(), num_workers=2).fit(
            problem.x[:200], problem.y[:200], resume=True, **options
        )


class Remembering(Rule):
    """A rule whose state can be stored neither as JSON nor as arrays."""

    name = "remembering"

    def init(self, center):
        return {1, 2}

    def update(self, delta, state, merge):
        return delta, state


def test_a_rule_whose_state_cannot_be_kept_is_refused(spark, problem, tmp_path, jobs):
    """A rule whose state cannot be saved is refused before training, not when a checkpoint is due."""
    before = jobs()
    spark_model = SparkModel(problem.model(), mode="asynchronous", merge=Remembering(), num_workers=2)

    with pytest.raises(ConfigError, match="state of the rule 'remembering' cannot be saved in a checkpoint"):
        spark_model.fit(problem.x, problem.y, checkpoint=str(tmp_path / "folder"), **SETTINGS)
    assert before == jobs()


@pytest.mark.whole
def test_checkpoints_are_kept_after_a_time_too(spark, problem, tmp_path):
    """A checkpoint that is due by time is made in the middle of an epoch."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(len(list((tmp_path / "folder").glob("checkpoint-*"))))

    config = CheckpointConfig(str(tmp_path / "folder"), every=timedelta(milliseconds=20), keep=1000)
    settings = {**SETTINGS, "batch_size": 1, "epochs": 3}
    rows = np.tile(problem.x, (10, 1)), np.tile(problem.y, 10)  # epochs take much longer than the interval
    history = SparkModel(problem.model(), num_workers=2).fit(
        *rows, checkpoint=config, callbacks=[Look()], **settings
    )

    assert seen[0] == 0
    assert seen[2] > 2  # more than the epochs that had ended
    assert history.training["checkpoints_failed"] == 0

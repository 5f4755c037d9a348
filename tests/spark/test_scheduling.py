"""Several fits in one Spark application, with the slots of a scheduler."""

import os
import shutil
import signal
import tempfile
import threading

import keras
import numpy as np
import pytest

from sparkdl import CheckpointConfig, SparkModel
from sparkdl.errors import CheckpointError, ClusterError, ConfigError, DataError
from sparkdl.scheduling import Scheduler
from sparkdl.scheduling.scheduler import cancel_all
from sparkdl.spark.application import SparkApplication

pytestmark = pytest.mark.classic
SETTINGS = {"batch_size": 32, "epochs": 4, "seed": 3}


class Recorder(keras.callbacks.Callback):
    """A callback that records the calls of its hooks."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(epoch)

    def on_train_end(self, logs=None):
        self.calls.append("end")


class Hold(keras.callbacks.Callback):
    """A callback that holds its fit at the end of an epoch until it is released.

    Args:
        epoch: the epoch, from 0.
    """

    def __init__(self, epoch=0):
        super().__init__()
        self.epoch, self.reached, self.released = epoch, threading.Event(), threading.Event()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.reached.set()
            assert self.released.wait(120)


class Fail(keras.callbacks.Callback):
    """A callback that fails at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        raise LookupError("the callback fails")


class Call(keras.callbacks.Callback):
    """A callback that calls a function at the end of an epoch.

    Args:
        function: the function.
        epoch: the epoch, from 0.
    """

    def __init__(self, function, epoch=0):
        super().__init__()
        self.function, self.epoch = function, epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.function()


class Note(keras.callbacks.Callback):
    """A callback that records a value when its fit begins."""

    def __init__(self, look):
        super().__init__()
        self.look, self.found = look, None

    def on_train_begin(self, logs=None):
        self.found = self.look()


def require_same_weights(model, expected):
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.whole
def test_an_urgent_fit_starts_within_an_epoch_and_all_fits_end_with_the_same_bits(spark, problem, tmp_path):
    """Two fits make room for an urgent one at the end of their epoch, and end with the same bits."""
    kinds = (
        (lambda: problem.model(keras.optimizers.Adam(0.01)), {"num_workers": 1}),
        (problem.model, {"num_workers": 1, "frequency": 3}),
        (problem.model, {"num_workers": 2}),
    )
    expected = []
    for make, options in kinds:
        alone = SparkModel(make(), **options)
        expected.append((alone, alone.fit(problem.x, problem.y, validation_split=0.2, verbose=0, **SETTINGS)))
    holds, recorders, jobs = [Hold(1), Hold(1)], [Recorder(), Recorder()], []
    urgent_note = Note(lambda: [job.epochs_done for job in jobs[:2]])
    with Scheduler(2) as scheduler:
        for number, (make, options) in enumerate(kinds[:2]):
            job = scheduler.submit(
                SparkModel(make(), **options),
                problem.x,
                problem.y,
                name=f"long {number}",
                validation_split=0.2,
                callbacks=[holds[number], recorders[number]],
                checkpoint=str(tmp_path / "kept") if number else None,
                **SETTINGS,
            )
            jobs.append(job)
        assert all(hold.reached.wait(120) for hold in holds)
        make, options = kinds[2]
        urgent = scheduler.submit(
            SparkModel(make(), **options),
            problem.x,
            problem.y,
            name="urgent",
            priority=1,
            validation_split=0.2,
            callbacks=[urgent_note],
            **SETTINGS,
        )
        jobs.append(urgent)
        plan = {row.name: row.state for row in scheduler.plan()}
        for hold in holds:
            hold.released.set()
    whole = [job.result() for job in jobs]

    assert {"long 0": "running, to be paused", "long 1": "running, to be paused", "urgent": "waiting"} == plan
    assert [2, 2] == urgent_note.found
    assert ["finished"] * 3 == [job.state for job in jobs]
    for job, history, (alone, other) in zip(jobs, whole, expected, strict=True):
        require_same_weights(job.fit.spark_model.model, alone.model)
        assert other.history == history.history
        assert other.epoch == history.epoch
        assert 1 == len(job.fit.spark_model.training_histories)
    for recorder in recorders:
        assert ["begin", 0, 1, 2, 3, "end"] == recorder.calls
    assert list((tmp_path / "kept").glob("checkpoint-*"))


@pytest.mark.parametrize("mode", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.whole)])
def test_a_paused_fit_trains_each_epoch_once(spark, problem, mode, tmp_path, monkeypatch):
    """A fit that makes room for another one trains all epochs, in synchronous mode with the same bits."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = SETTINGS | {"epochs": 2}
    alone = SparkModel(problem.model(), num_workers=1, mode=mode)
    expected = alone.fit(problem.x, problem.y, verbose=0, **settings)
    hold, recorder = Hold(), Recorder()
    with Scheduler(1) as scheduler:
        paused = SparkModel(problem.model(), num_workers=1, mode=mode)
        job = scheduler.submit(paused, problem.x, problem.y, callbacks=[hold, recorder], **settings)
        assert hold.reached.wait(120)
        other = SparkModel(problem.model(), num_workers=1)
        urgent = scheduler.submit(other, problem.x, problem.y, epochs=1, priority=1)
        hold.released.set()

    assert [0] == urgent.result().epoch
    assert [0, 1] == job.result().epoch
    assert 2 == job.fit.pieces
    assert ["begin", 0, 1, "end"] == recorder.calls
    assert [] == list(tmp_path.glob("sparkdl-scheduling-*"))
    if mode == "synchronous":
        require_same_weights(paused.model, alone.model)
        assert expected.history == job.history.history


@pytest.mark.whole
def test_fits_that_are_paused_often_end_with_the_same_bits(spark, problem):
    """Fits that take turns of a few epochs train as if they were alone."""

    def callbacks():
        lower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)
        return [lower, keras.callbacks.EarlyStopping("loss", patience=4, min_delta=0.5)]

    settings = SETTINGS | {"epochs": 6}
    kinds = [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 1, "frequency": "epoch"}]
    alone = [SparkModel(problem.model(), **options) for options in kinds]
    expected = [
        model.fit(problem.x, problem.y, verbose=0, callbacks=callbacks(), **settings) for model in alone
    ]
    with Scheduler(2, time_slice=0.01) as scheduler:
        models = [SparkModel(problem.model(), **options) for options in kinds]
        jobs = [
            scheduler.submit(model, problem.x, problem.y, callbacks=callbacks(), **settings)
            for model in models
        ]

    assert all(history.history == job.result().history for history, job in zip(expected, jobs, strict=True))
    assert all(rates[-1] < rates[0] for rates in (each.history["learning_rate"] for each in expected))
    assert len(jobs) < sum(job.fit.pieces for job in jobs)
    for model, other in zip(models, alone, strict=True):
        require_same_weights(model.model, other.model)


@pytest.mark.whole
def test_the_page_of_a_scheduler_ends_as_its_jobs_do(spark, problem):
    """If the end of the with block raises the error of a job, the record of the live page says "failed"."""
    scheduler = Scheduler(1)

    def fail():
        with scheduler:
            one = SparkModel(problem.model(), num_workers=1)
            scheduler.submit(one, problem.x, problem.y, callbacks=[Fail()], **SETTINGS)

    with pytest.raises(LookupError, match="the callback fails"):
        fail()

    assert "failed" == scheduler._record.values()["state"]


@pytest.mark.whole
def test_a_fit_that_fails_or_is_cancelled_leaves_the_others_alone(spark, problem):
    """After a failure the waiting jobs go on, a job that is cancelled ends, and the error is raised once."""
    hold, scheduler = Hold(), Scheduler(1)

    def submit(name, *callbacks):
        one = SparkModel(problem.model(), num_workers=1)
        return scheduler.submit(one, problem.x, problem.y, name=name, callbacks=callbacks, **SETTINGS)

    running, failing = submit("running", hold), submit("failing", Fail())
    dropped, last = submit("dropped"), submit("last")
    assert hold.reached.wait(120)
    dropped.cancel()
    assert ("cancelled", None) == (dropped.state, dropped.history)
    with pytest.raises(TimeoutError, match="it is running, with 1 of 4 epochs done"):
        running.result(timeout=0.01)
    threading.Timer(0.3, hold.released.set).start()
    running.cancel()
    with pytest.raises(LookupError, match="the callback fails"):
        scheduler.wait()

    assert ["cancelled", "failed", "cancelled", "finished"] == [job.state for job in scheduler.jobs]
    assert 4 == len(last.result().epoch)
    assert all(np.isfinite(weight).all() for weight in running.fit.spark_model.model.get_weights())
    assert isinstance(failing.error, LookupError)
    with pytest.raises(ClusterError, match="was cancelled after 0 of 4 epochs"):
        dropped.result()
    with scheduler:
        scheduler.wait()
    with pytest.raises(ConfigError, match="scheduler is closed"):
        submit("late")


@pytest.mark.whole
def test_a_job_that_a_callback_submits_outlives_its_parent(spark, problem):
    """The scheduler waits for jobs that callbacks submit, and the end of one job does not cancel another."""
    hold, children = Hold(), []

    def submit(name, **arguments):
        one = SparkModel(problem.model(), num_workers=1)
        return scheduler.submit(one, problem.x, problem.y, name=name, **arguments)

    def submit_child():
        children.append(submit("child", epochs=2, callbacks=[hold, Call(submit_grandchild, epoch=1)]))

    def submit_grandchild():
        children.append(submit("grandchild"))

    with Scheduler(2) as scheduler:
        parent = submit("parent", epochs=10000, callbacks=[Call(submit_child)])
        assert hold.reached.wait(120)
        parent.cancel()
        hold.released.set()

    assert "cancelled" == parent.state
    assert ["finished", "finished"] == [job.state for job in children]


@pytest.mark.whole
def test_the_end_of_the_program_cancels_jobs(spark, problem, tmp_path, monkeypatch):
    """Without a ``with`` block, jobs end with the program, and their folders are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reached = threading.Event()
    model = SparkModel(problem.model(), num_workers=1)
    job = Scheduler(1).submit(model, problem.x, problem.y, epochs=10000, callbacks=[Call(reached.set)])
    assert reached.wait(120)
    assert list(tmp_path.glob("sparkdl-scheduling-*"))
    cancel_all()

    assert "cancelled" == job.state
    assert [] == list(tmp_path.glob("sparkdl-scheduling-*"))


@pytest.mark.whole
def test_a_job_keeps_its_own_history(spark, problem):
    """A job has the History of its own epochs, also after another job has trained its model."""
    model = SparkModel(problem.model(), num_workers=1)
    with Scheduler(1) as scheduler:
        first = scheduler.submit(model, problem.x, problem.y)
        assert [0] == first.result().epoch
        second = scheduler.submit(model, problem.x, problem.y[:1])
        with pytest.raises(DataError, match="equal numbers of rows"):
            second.result()

    assert [0] == first.history.epoch
    assert second.history is None
    assert model is first.spark_model


@pytest.mark.whole
def test_a_job_whose_checkpoint_is_lost_fails_with_its_weights(spark, problem, tmp_path):
    """A paused job without a checkpoint fails, and keeps its History and its weights."""
    model = SparkModel(problem.model(), num_workers=1)
    alone = SparkModel(problem.model(), num_workers=1)
    alone.fit(problem.x, problem.y, **SETTINGS | {"epochs": 1})

    def make_room():
        other = SparkModel(problem.model(), num_workers=1)
        scheduler.submit(other, problem.x, problem.y, name="other", priority=1)
        shutil.rmtree(tmp_path / "kept")

    scheduler = Scheduler(1)
    settings = SETTINGS | {"checkpoint": str(tmp_path / "kept"), "callbacks": [Call(make_room)]}
    job = scheduler.submit(model, problem.x, problem.y, **settings)
    with pytest.raises(CheckpointError, match="paused after epoch 1 should continue there"):
        scheduler.wait()

    assert ["failed", "finished"] == [each.state for each in scheduler.jobs]
    assert [0] == job.history.epoch
    require_same_weights(model.model, alone.model)


def test_a_job_does_not_start_another_application(spark, problem, monkeypatch):
    """After Spark was stopped, a job that waits fails, and no other is accepted."""
    hold = Hold()

    def submit(*callbacks):
        one = SparkModel(problem.model(), num_workers=1)
        return scheduler.submit(one, problem.x, problem.y, callbacks=callbacks, seed=0)

    with Scheduler(1) as scheduler:
        submit(hold)
        waiting = submit()
        assert hold.reached.wait(120)
        monkeypatch.setattr(SparkApplication, "stopped", True)
        hold.released.set()
        with pytest.raises(ClusterError, match="was stopped before the job could run"):
            waiting.result()
        with pytest.raises(ClusterError, match="was stopped before the job could run"):
            submit()


@pytest.mark.whole
def test_ctrl_c_cancels_all_jobs(spark, problem):
    """An interrupt while the program waits for its jobs ends them, with the weights of their last merge."""

    class Press(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    scheduler = Scheduler(1)
    for callbacks in ([Press()], []):
        model = SparkModel(problem.model(), num_workers=1)
        scheduler.submit(model, problem.x, problem.y, callbacks=callbacks, epochs=10000, seed=0)
    with pytest.raises(KeyboardInterrupt):
        scheduler.wait()

    assert all(job.wait(60) for job in scheduler.jobs)
    assert ["cancelled", "cancelled"] == [job.state for job in scheduler.jobs]
    assert 2 <= scheduler.jobs[0].epochs_done


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({"num_workers": 3}, {}, "num_workers should be at most 2, the slots that jobs share; .* has 3"),
        ({}, {}, "num_workers should be a number from 1 to 2"),
        ({"num_workers": 1}, {"priority": 0.5}, "priority should be a whole number; got 0.5"),
        ({"num_workers": 1}, {"share": 7}, "share should be a string; got 7"),
        ({"num_workers": 1}, {"name": 7}, "name should be a string; got 7"),
        ({"num_workers": 1}, {"seconds_per_epoch": 0}, "seconds_per_epoch should be a positive number"),
        ({"num_workers": 1}, {"epochs": -1}, "epochs should be a whole number of at least 0; got -1"),
        ({"num_workers": 1}, {"callbacks": ["x"]}, "callbacks should be keras.callbacks.Callback objects"),
        ({"num_workers": 1}, {"resume": True}, "resume=True needs a folder of checkpoints"),
        ({"num_workers": 1}, {"checkpoint": CheckpointConfig("x", every=5)}, 'every should be "epoch"'),
        ({"num_workers": 1, "placement": "worker"}, {}, "needs checkpoints, which placement="),
    ],
)
def test_what_cannot_be_scheduled_is_refused_at_once(spark, problem, jobs, options, arguments, words):
    """A job that cannot run is refused when it is submitted, before any Spark job."""
    before = jobs()
    with Scheduler(2) as scheduler:
        with pytest.raises(ConfigError, match=words):
            scheduler.submit(SparkModel(problem.model(), **options), problem.x, problem.y, **arguments)
        assert [] == scheduler.jobs

    assert before == jobs()


@pytest.mark.whole
def test_a_model_a_name_and_a_folder_belong_to_one_job(spark, problem, tmp_path):
    """A job with the model, the name or the checkpoint folder of a job that has not ended is refused."""
    with Scheduler(1) as scheduler:
        folder, held = str(tmp_path / "one"), Hold()
        first = SparkModel(problem.model(), num_workers=1)
        scheduler.submit(first, problem.x, problem.y, checkpoint=folder, callbacks=[held], name="first")
        second = SparkModel(problem.model(), num_workers=1)
        for model, arguments, words in (
            (first, {}, 'The model "network" belongs to the job "first"'),
            (second, {"name": "first"}, 'The name "first" belongs to another job'),
            (second, {"callbacks": [held]}, 'The callback Hold belongs to the job "first"'),
            (second, {"checkpoint": folder + "/"}, 'belongs to the job "first", which has not ended'),
            (problem.model(), {}, "spark_model should be a sparkdl.SparkModel; got Sequential"),
        ):
            with pytest.raises(ConfigError, match=words):
                scheduler.submit(model, problem.x, problem.y, **arguments)
        with pytest.raises(TypeError, match="epoch_s"):
            scheduler.submit(second, problem.x, problem.y, epoch_s=3)
        held.released.set()


@pytest.mark.parametrize("slots", [0, 3, "2"])
def test_slots_that_the_application_does_not_have_are_refused(spark, slots):
    """A scheduler has at most the slots of the application, which are its default."""
    with pytest.raises(ConfigError, match="slots should be"):
        Scheduler(slots)

    assert 2 == Scheduler().slots

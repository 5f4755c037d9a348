"""A fit leaves nothing behind: when it returns, fails, loses a worker or is interrupted."""

import gc
import os
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
from bombs import Bomb, hang, kill, kill_executor
from leaks import in_the_workers, kept_since, objects_of_fits, on_the_driver
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError

from sparkdl import FaultTolerance, SparkModel
from sparkdl.core.vectors import LARGE
from sparkdl.errors import ClusterError, WorkerError, WorkerLostError
from sparkdl.spark.application import application_of

MASTERS = ("local", "local-cluster")

if not Path("/proc/self/net/tcp").exists():
    pytest.skip("finds sockets and processes in /proc, which only Linux has", allow_module_level=True)


def blocks(spark):
    """Return the files of broadcasts and shuffles in the local directories of driver and executors."""
    local = Path(spark.conf.get("spark.local.dir"))
    files = {path.name for pattern in ("broadcast_*", "shuffle_*") for path in local.rglob(pattern)}
    return {name for name in files if "python" in name or name.startswith("shuffle")}


@pytest.fixture(scope="session")
def warm(spark, problem):
    """Run a first fit, so that its lasting resources, such as JVM threads, exist before all tests."""
    SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, verbose=0)


@pytest.fixture(autouse=True)
def nothing_is_left(warm, spark, problem, eventually):
    """Compare driver, application and workers before and after each test; then a fit must work.

    Yields the files of broadcasts and shuffles that may stay.
    """
    model = SparkModel(problem.model(), num_workers=2)
    before, held, objects = on_the_driver(spark), blocks(spark), objects_of_fits()
    yield held

    def left():
        now = on_the_driver(spark)
        return {
            name: set(now[name]) - set(before[name]) for name in now if set(now[name]) - set(before[name])
        }

    eventually(lambda: not left(), 10)
    assert left() == {}
    eventually(lambda: not blocks(spark) - held, 10)
    assert blocks(spark) - held == set()
    assert in_the_workers(spark) == []
    assert kept_since(objects) == []
    assert eventually(
        lambda: application_of().slots() >= 2
    )  # after an executor was killed, another one starts
    assert len(model.fit(problem.x, problem.y, verbose=0).history["loss"]) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", ["arrays", "rdd", "frame"])
def test_after_a_fit(spark, problem, frames, kind, mode):
    """The thread, socket, job, broadcast and files, also those of shuffles, are gone when fit returns."""
    frame = frames["array"].repartition(3, "row")
    data = {"arrays": (problem.x, problem.y), "rdd": (problem.rdd(spark, 100, 3, 100),), "frame": (frame,)}
    SparkModel(problem.model(), mode=mode, num_workers=2).fit(
        *data[kind], epochs=2, verbose=0, validation_split=0.2
    )


@pytest.mark.whole
def test_after_a_fit_with_shards(problem):
    """The shards of workers end with their fit."""
    SparkModel(problem.model(), num_workers=2, placement="executors").fit(problem.x, problem.y, verbose=0)


def test_after_a_fit_that_fails(problem):
    """A callback that raises on the driver ends the run; model and history are those of the last epoch."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise LookupError("the disk is full")

    model, reference = problem.model(), problem.model()
    start = model.get_weights()
    spark_model = SparkModel(model, num_workers=2)

    with pytest.raises(LookupError, match="the disk is full"):
        spark_model.fit(problem.x, problem.y, epochs=5, shuffle=False, verbose=0, callbacks=[Fail()])

    reference.fit(problem.x, problem.y, epochs=2, shuffle=False, verbose=0)
    assert problem.distance(model, reference, start) <= 1
    assert len(spark_model.history.history["loss"]) in (1, 2)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mode", "frequency", "every"),
    [("synchronous", "batch", 2), ("synchronous", 2, None), ("asynchronous", "batch", None)],
)
def test_after_a_worker_was_killed(problem, tmp_path, caplog, mode, frequency, every):
    """After SIGKILL in the third epoch, the run resumes from the last snapshot with the same result."""
    settings = {"batch_size": 16, "epochs": 5, "shuffle": False, "verbose": 0}
    batches = 13 if frequency == "batch" and mode == "synchronous" else 7
    fits = []
    for exists in (True, False):
        marker = tmp_path / f"done-{exists}"  # a new bomb each time: workers cache a model they know
        if exists:
            marker.touch()
        model, objects = Bomb(marker, 2 * batches + 3, kill).model(problem)
        spark_model = SparkModel(
            model,
            mode=mode,
            frequency=frequency,
            fault_tolerance=FaultTolerance(recovery_every=every),
            num_workers=2,
            custom_objects=objects,
        )
        fits.append((model, spark_model.fit(problem.x, problem.y, **settings)))

    (whole, undisturbed), (model, history) = fits
    counts = history.training
    assert marker.exists()
    assert counts["restarts"] + counts["superseded"] == 1  # Spark itself may restart a single task
    assert len(history.history["loss"]) == 5
    if mode == "synchronous":
        place = "round 2 of epoch 3" if every else "the end of epoch 2"
        text = f"restart (1 of 3) and continue from the snapshot at {place}:"
        assert any(text in line for line in caplog.messages)
        assert history.history == undisturbed.history
        assert all(
            np.array_equal(a, b) for a, b in zip(whole.get_weights(), model.get_weights(), strict=True)
        )
    else:
        assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.whole
@pytest.mark.parametrize("frequency", ["batch", 2])
def test_after_a_worker_was_killed_in_an_evaluation(problem, tmp_path, caplog, frequency):
    """A worker killed during validation does not repeat the epoch; weights and History are the same."""
    batches, epochs = (13 if frequency == "batch" else 7), 3
    settings = {"batch_size": 16, "epochs": epochs, "shuffle": False, "verbose": 0}
    fits = []
    for exists in (True, False):
        marker = tmp_path / f"done-{exists}"
        if exists:
            marker.touch()
        model, objects = Bomb(marker, batches + 3, kill).model(problem)
        spark_model = SparkModel(model, frequency=frequency, num_workers=2, custom_objects=objects)
        history = spark_model.fit(problem.x, problem.y, validation_data=(problem.x, problem.y), **settings)
        fits.append((model, history))

    (whole, undisturbed), (model, history) = fits
    assert marker.exists()
    assert history.training["restarts"] == 1
    text = "restart (1 of 3) and continue from the snapshot at the end of epoch 1:"
    assert any(text in line for line in caplog.messages)
    assert history.training["exchanges"] == undisturbed.training["exchanges"]
    assert history.history == undisturbed.history
    assert all(np.array_equal(a, b) for a, b in zip(whole.get_weights(), model.get_weights(), strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_after_a_worker_hung(problem, tmp_path, caplog, mode):
    """A hung worker is named after stall_timeout; the run resumes from the last snapshot without it."""
    model, objects = Bomb(tmp_path / "done", 2 * 13 + 3, hang).model(problem)
    spark_model = SparkModel(
        model,
        mode=mode,
        num_workers=2,
        custom_objects=objects,
        fault_tolerance=FaultTolerance(stall_timeout=3),
    )

    history = spark_model.fit(problem.x, problem.y, batch_size=16, epochs=5, shuffle=False, verbose=0)

    assert any("Worker 1 on" in line and "has sent no heartbeat for 3 s" in line for line in caplog.messages)
    assert history.training["restarts"] == 1
    assert len(history.history["loss"]) == 5
    if mode == "synchronous":
        reference, start = problem.model(), problem.model().get_weights()
        reference.fit(problem.x, problem.y, batch_size=16, epochs=5, shuffle=False, verbose=0)
        assert problem.distance(model, reference, start) <= 1


@pytest.mark.whole
def test_after_workers_were_killed_too_often(problem, tmp_path):
    """A worker that dies at every start ends the run; the model keeps the last merge before that."""
    model, objects = Bomb(tmp_path / "done", 9, kill).model(problem)
    start = model.get_weights()
    spark_model = SparkModel(
        model, num_workers=2, custom_objects=objects, fault_tolerance=FaultTolerance(max_restarts=0)
    )

    with pytest.raises(WorkerLostError, match="crashed or was killed.* because memory ran out") as raised:
        spark_model.fit(problem.x, problem.y, epochs=3, verbose=0)
    assert "faulthandler" not in str(raised.value)

    moved = any(not np.array_equal(a, b) for a, b in zip(start, model.get_weights(), strict=True))
    assert moved == bool(spark_model.history.history)


@pytest.mark.whole
@pytest.mark.apart
@pytest.mark.parametrize("restarts", [0, pytest.param(3, marks=pytest.mark.whole)])
def test_after_an_executor_was_killed(spark, problem, tmp_path, restarts, nothing_is_left):
    """The run continues on a replacement executor; with max_restarts=0 the error names the setting."""
    model, objects = Bomb(tmp_path / "done", 13 + 3, kill_executor).model(problem)
    spark_model = SparkModel(
        model, num_workers=2, custom_objects=objects, fault_tolerance=FaultTolerance(max_restarts=restarts)
    )
    settings = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}

    if restarts:
        history = spark_model.fit(problem.x, problem.y, **settings)
        assert history.training["restarts"] == 1
        assert len(history.history["loss"]) == 3
    else:
        with pytest.raises(WorkerLostError, match=r"137.* Set spark\.executor\.memoryOverhead to 1024m"):
            spark_model.fit(problem.x, problem.y, **settings)

    # files of the killed executor, which Spark keeps until the session ends
    nothing_is_left.update(blocks(spark))


@pytest.mark.whole
def test_after_a_worker_raised(problem, tmp_path):
    """An exception in the middle of an epoch ends the run; the model is that of the last epoch."""

    def refuse():
        raise ArithmeticError("not a number that I like")

    model, objects = Bomb(tmp_path / "done", 13 + 3, refuse).model(problem)
    reference = problem.model()
    start = model.get_weights()
    spark_model = SparkModel(model, num_workers=2, custom_objects=objects)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0}

    with pytest.raises(WorkerError, match="not a number that I like"):
        spark_model.fit(problem.x, problem.y, epochs=3, **settings)

    reference.fit(problem.x, problem.y, epochs=1, **settings)
    assert len(spark_model.history.history["loss"]) == 1
    assert problem.distance(model, reference, start) <= 1


@pytest.mark.whole
def test_after_the_job_was_cancelled(spark, problem):
    """A job that is cancelled, for example in Spark's UI, is not restarted."""
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch == 1 and spark.sparkContext.cancelAllJobs()
    )
    spark_model = SparkModel(problem.model(), num_workers=2)

    with pytest.raises(ClusterError, match="Job .* cancelled"):
        spark_model.fit(problem.x, problem.y, epochs=100_000, callbacks=[callback], verbose=0)

    assert len(spark_model.history.history["loss"]) >= 2
    assert spark_model.history.training["restarts"] == 0


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


class Interrupt(keras.callbacks.Callback):
    """A callback that sends SIGINT some time after an epoch's end."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            threading.Timer(0.2, press_ctrl_c).start()


# Ctrl-C occasionally interrupts a finalizer of py4j.
FINALIZER = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.whole
@FINALIZER
@pytest.mark.parametrize("frequency", ["batch", "epoch"])
def test_after_an_interrupt(problem, frequency):
    """After Ctrl-C in the main thread, the model holds whole updates, as many as its optimizer counts."""
    model = problem.model()
    start = model.get_weights()
    spark_model = SparkModel(model, frequency=frequency, num_workers=2)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0}

    with pytest.raises(KeyboardInterrupt):
        spark_model.fit(problem.x, problem.y, epochs=100_000, callbacks=[Interrupt()], **settings)

    epochs = len(spark_model.history.history["loss"])
    steps = int(model.optimizer.iterations)
    assert epochs >= 2
    assert steps >= 13 * epochs if frequency == "batch" else steps > 0
    assert len(spark_model.history.training["epoch_seconds"]) in (epochs, epochs + 1)
    if frequency == "batch":
        reference = problem.model()
        for step in range(steps):
            rows = slice(step % 13 * 16, step % 13 * 16 + 16)
            reference.train_on_batch(problem.x[rows], problem.y[rows])
        assert problem.distance(model, reference, start) <= 10


@FINALIZER
def test_an_interrupt_in_the_middle_of_a_finalizer(problem):
    """Ctrl-C ends the fit even if Python drops its exception in a finalizer, and the handler is restored."""
    handler = signal.getsignal(signal.SIGINT)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch == 1 and weakref.finalize(set(), press_ctrl_c)
    )
    spark_model = SparkModel(problem.model(), num_workers=2)

    with pytest.raises(KeyboardInterrupt):
        spark_model.fit(problem.x, problem.y, epochs=100_000, callbacks=[callback], verbose=0)

    assert len(spark_model.history.history["loss"]) == 2
    assert spark_model.history.training["restarts"] == 0
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.whole
def test_the_rows_of_earlier_calls_are_freed(problem):
    """The JVM keeps the rows of the last call only, even with garbage collection disabled."""

    def kept():
        found = set()
        for item in [item for item in gc.get_objects() if isinstance(item, JavaObject)]:
            with suppress(Py4JError):  # the JVM has dropped the object, or it is an entry point
                found.add(item.toString())
        return {text for text in found if text.startswith("ParallelCollectionRDD")}

    model = SparkModel(problem.model(), num_workers=2)
    x = np.zeros((1 + LARGE // 4 // problem.x.shape[1], problem.x.shape[1]), "float32")
    gc.collect()
    before = kept()
    gc.disable()
    try:
        for _ in range(2):
            model.predict(x, batch_size=1 << 20, verbose=0)
        assert len(kept() - before) == 1
    finally:
        gc.enable()

"""WorkerScalars writes each worker's figures of an epoch; TensorBoard's own reader finds them."""

import sys

import keras
import numpy as np
import pytest

from sparkdl.callbacks import WorkerScalars
from sparkdl.driver.epochs import check_callbacks
from sparkdl.transport.messages import ACTIVITIES

pytestmark = pytest.mark.backend("tensorflow")
SECONDS = [f"worker/seconds_{activity}" for activity in ACTIVITIES]


@pytest.fixture
def callback(tmp_path):
    callback = WorkerScalars(tmp_path)
    callback.on_train_begin()
    yield callback
    callback.on_train_end()


@pytest.fixture
def written(tmp_path):
    """Return a function that reads the values of a worker by tag, each with its epoch."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorflow = pytest.importorskip("tensorflow")

    def read(worker):
        events = reader.EventAccumulator(str(tmp_path / f"worker-{worker}"), {"tensors": 0}).Reload()
        return {
            tag: {
                each.step: float(tensorflow.make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)
            }
            for tag in events.Tags()["tensors"]
        }

    return read


def state(worker, *, epoch, seen=0, times=(), staleness=None):
    """Return a worker of 100 rows as the run's record has it; its first epoch is 1."""
    return {
        "worker": worker,
        "epoch": epoch,
        "rows": 100,
        "seen": seen,
        "times": list(times),
        "staleness": staleness,
    }


def end(callback, epoch, *workers, **results):
    callback.observe(workers, {each["worker"]: results for each in workers})
    callback.on_epoch_end(epoch)


def test_each_worker_has_its_seconds_and_its_speed_of_the_epoch(callback, written):
    """An epoch has the rows and the seconds since the end of the epoch before."""
    end(callback, 0, state(0, epoch=1, seen=100, times=[1.0, 2.0, 0.5, 0.5, 0.0]))
    end(callback, 1, state(0, epoch=2, seen=50, times=[1.5, 4.0, 1.0, 1.25, 0.25]))

    values = written(0)
    assert {*SECONDS, "worker/rows_per_second"} == values.keys()
    assert [{0: 1.0, 1: 0.5}, {0: 2.0, 1: 2.0}] == [values[tag] for tag in SECONDS[:2]]
    assert {0: 25.0, 1: 12.5} == values["worker/rows_per_second"]  # 100 rows in 4 s, then 50 in 4 s


def test_each_worker_has_its_results_and_its_staleness(callback, written):
    """Results have the tags of keras.callbacks.TensorBoard, in a folder of each worker."""
    end(callback, 3, state(0, epoch=4, staleness=2), loss=0.5, accuracy=0.75)
    callback.observe([state(1, epoch=4), state(2, epoch=4)], {1: {"loss": 0.25}})
    callback.on_epoch_end(4)

    assert {"epoch_loss": {3: 0.5}, "epoch_accuracy": {3: 0.75}, "worker/staleness": {3: 2.0}} == written(0)
    assert {"epoch_loss": {4: 0.25}} == written(1)
    assert not (callback.log_dir / "worker-2").exists()


def test_a_board_that_leaves_batches_out_leaves_no_epoch_out(callback, written):
    """TensorBoard(update_freq=n) suppresses the summaries of other batches, but not those of workers."""
    with pytest.importorskip("tensorflow").summary.record_if(False):
        end(callback, 0, state(0, epoch=1), loss=0.5)

    assert {"epoch_loss": {0: 0.5}} == written(0)


def test_an_epoch_without_a_heartbeat_has_no_speed(callback, written):
    """A worker that has reported no new times has no seconds and no speed for the epoch."""
    for epoch in range(2):
        end(callback, epoch, state(0, epoch=1, seen=100, times=[1.0] * 5), loss=1.0)

    values = written(0)
    assert {0: 20.0} == values["worker/rows_per_second"]
    assert [0, 1] == list(values["epoch_loss"])


def test_a_worker_that_was_restarted_counts_from_zero(callback, written):
    """After a restart the seconds are those since then, and rows that are trained again count once."""
    end(callback, 0, state(0, epoch=1, seen=100, times=[9.0] * 5))
    end(callback, 1, state(0, epoch=1, seen=40, times=[2.0] * 5))
    end(callback, 2, state(0, epoch=2, seen=0, times=[3.0] * 5))

    values = written(0)
    assert [{0: 9.0, 1: 2.0, 2: 1.0}] * 5 == [values[tag] for tag in SECONDS]
    assert [0, 2] == list(values["worker/rows_per_second"])


def test_plain_keras_writes_nothing(tmp_path):
    """In plain ``model.fit`` there are no workers, and no file."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[WorkerScalars(tmp_path / "logs")])

    assert not (tmp_path / "logs").exists()


INSTALL = {
    "tensorboard": "Install it on the driver: pip install tensorboard.",
    "tensorflow": "Install them on the driver: pip install 'sparkdl-keras[tensorflow-cpu]' tensorboard.",
}
CALLS = {
    "WorkerScalars": WorkerScalars("logs").on_train_begin,
    "keras.callbacks.TensorBoard": lambda: check_callbacks(keras.callbacks.TensorBoard("logs")),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("package", INSTALL)
def test_a_missing_package_is_named_before_training(package, name, monkeypatch):
    """Without TensorFlow or TensorBoard, a callback's error names it before training begins."""
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ModuleNotFoundError) as raised:
        CALLS[name]()

    assert str(raised.value) == (
        f"{name} needs TensorFlow and TensorBoard, with any backend; {package} is not installed. "
        f"{INSTALL[package]}"
    )

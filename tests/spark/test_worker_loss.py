"""With on_worker_loss="continue" a run survives a worker that dies or hangs, and takes it back."""

import logging

import numpy as np
import pytest
from bombs import Bomb, hang, kill

from sparkdl import SparkModel
from sparkdl.settings import grouped

MASTERS = ("local-cluster",)
BATCHES, EPOCHS = 13, 6

pytestmark = pytest.mark.usefixtures("spark")


def whole(*values):
    return pytest.param(*values, marks=pytest.mark.whole)


def fit(problem, marker, act, *, worker=1, **settings):
    """Train while a worker sabotages itself in the second epoch; return the model and its history."""
    model, objects = Bomb(marker, BATCHES + 3, act, worker=worker, pause=0.1).model(problem)
    spark_model = SparkModel(
        model,
        num_workers=2,
        custom_objects=objects,
        **grouped({"on_worker_loss": "continue", **settings}),
    )
    history = spark_model.fit(
        problem.x,
        problem.y,
        batch_size=16,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=(problem.x, problem.y),
        validation_freq=EPOCHS,
    )
    assert marker.exists()
    return model, history


def counts_of(history):
    return tuple(history.training[name] for name in ("lost", "returned", "restarts"))


def texts_of(history):
    """Return the events of a run."""
    return [event["text"] for event in history.run["events"]]


@pytest.mark.whole
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "worker"),
    [("synchronous", 0), ("asynchronous", 1), whole("synchronous", 1), whole("hogwild", 0)],
)
def test_a_run_goes_on_without_a_worker_that_hangs(problem, tmp_path, caplog, mode, worker):
    """A hung worker is named and left out of training and evaluation; the model is that of the others."""
    model, history = fit(problem, tmp_path / "done", hang, worker=worker, mode=mode, stall_timeout=3)

    assert (1, 0, 0) == counts_of(history)
    assert EPOCHS == len(history.history["loss"])
    assert history.history["loss"][-1] < history.history["loss"][0]
    named = [line for line in caplog.messages if "The run continues without this worker." in line]
    assert 1 == len(named)
    assert f"Worker {worker} on" in named[0]
    assert 1 == texts_of(history).count(named[0])
    assert "has sent no heartbeat for 3 s" in named[0]
    if mode == "synchronous":
        assert EPOCHS * BATCHES == int(model.optimizer.iterations)
        rows = np.arange(len(problem.x)) // 16 % 2 != worker  # dealt in whole batches
        loss = model.evaluate(problem.x[rows], problem.y[rows], verbose=0)[0]
        assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("settings", "worker"),
    [
        ({"mode": "synchronous"}, 1),
        whole({"mode": "synchronous"}, 0),
        whole({"mode": "synchronous", "frequency": 2}, 0),
        ({"mode": "asynchronous", "staleness": 2, "stall_timeout": 1}, 1),
    ],
)
def test_a_worker_that_was_killed_comes_back(problem, tmp_path, caplog, settings, worker):
    """Spark restarts the task of a killed worker, which continues where the others are."""
    caplog.set_level(logging.INFO, "sparkdl.workers")
    _, history = fit(problem, tmp_path / "done", kill, worker=worker, **settings)

    assert (1, 1, 0) == counts_of(history)
    assert EPOCHS == len(history.history["loss"])
    assert history.history["loss"][-1] < history.history["loss"][0]
    for lines in (caplog.messages, texts_of(history)):
        assert any(line.startswith(f"Worker {worker} on") and "is back" in line for line in lines)
        assert any("The run continues without this worker." in line for line in lines)

"""Spark may recompute other rows, or another order, after a worker is lost; a fit detects both."""

import copy
import os
import time

import numpy as np
import pytest
from bombs import Bomb, kill, kill_executor

from sparkdl import CheckpointConfig, FaultTolerance, SparkModel
from sparkdl.driver.checkpoints import _read
from sparkdl.errors import DataError, WorkerError

MASTERS = ("local-cluster",)
SIZES = 100, 103
SETTINGS = {"batch_size": 16, "epochs": 4, "shuffle": False, "verbose": 0}  # an epoch has 13 batches


def source(spark, problem, marker, later):
    """Return an RDD whose partitions change once a marker file exists."""
    pairs, first = list(zip(problem.x, problem.y, strict=True)), SIZES[0]
    parts, marker = [pairs[:first], pairs[first:]], str(marker)
    rdd = spark.sparkContext.parallelize(parts, 2)
    return rdd.flatMap(lambda part: later(part) if os.path.exists(marker) else part)


def turned(problem):
    """Return the problem with the rows of each partition reversed."""
    places = np.arange(sum(SIZES))
    order = np.concatenate([places[: SIZES[0]][::-1], places[SIZES[0] :][::-1]])
    other = copy.copy(problem)
    other.x, other.y = problem.x[order], problem.y[order]
    return other


def expected(problem, before=2):
    """Return plain Keras's model after ``before`` epochs in one order and the others in the other."""
    reference = problem.model()
    for rows, epochs in ((problem, before), (turned(problem), SETTINGS["epochs"] - before)):
        x, y = rows.interleaved(*SIZES)
        reference.fit(x, y, **{**SETTINGS, "epochs": epochs})
    return reference


@pytest.mark.whole
@pytest.mark.parametrize("every", [4, pytest.param(None, marks=pytest.mark.whole)])
def test_an_epoch_whose_rows_come_in_another_order_begins_again(spark, problem, tmp_path, caplog, every):
    """An epoch whose rows come back in another order restarts and continues with that order."""
    marker = tmp_path / "done"
    model, objects = Bomb(marker, 2 * 13 + 7, kill).model(problem)
    start = model.get_weights()
    spark_model = SparkModel(
        model, num_workers=2, custom_objects=objects, fault_tolerance=FaultTolerance(recovery_every=every)
    )

    history = spark_model.fit(source(spark, problem, marker, lambda part: part[::-1]), **SETTINGS)

    assert history.training["restarts"] == 1
    assert len(history.history["loss"]) == 4
    assert any(
        "but in a different order; the run continues from the end of epoch 2." in m for m in caplog.messages
    )
    assert problem.distance(model, expected(problem), start) <= 1


@pytest.mark.whole
def test_rows_that_move_to_other_workers_are_gone_on_with(spark, problem, tmp_path, caplog):
    """Shuffled rows that come back in another order move to other workers; training continues."""
    marker = tmp_path / "done"
    model, objects = Bomb(marker, 2 * 13 + 7, kill).model(problem)
    spark_model = SparkModel(
        model, num_workers=2, custom_objects=objects, fault_tolerance=FaultTolerance(recovery_every=4)
    )
    rows = source(spark, problem, marker, lambda part: part[::-1])

    history = spark_model.fit(rows, validation_split=0.2, **{**SETTINGS, "shuffle": True})

    assert history.training["restarts"] == 1
    assert len(history.history["val_loss"]) == 4
    (warning,) = [message for message in caplog.messages if "but in a different order" in message]
    assert "With validation_split, different rows may now be held out." in warning


@pytest.mark.whole
@pytest.mark.parametrize(
    ("later", "words"),
    [
        (
            lambda part: [(x + 1, y) for x, y in part],
            "but the values in these rows or in the validation rows",
        ),
        (
            lambda part: part[1:],
            r"have \(99, 102\) training rows; those of the previous worker group had \(100, 103\)",
        ),
    ],
)
def test_other_rows_end_the_fit(spark, problem, tmp_path, later, words):
    """After a restart, changed rows end the fit with an error that describes the change."""
    marker = tmp_path / "done"
    model, objects = Bomb(marker, 13 + 7, kill).model(problem)
    spark_model = SparkModel(model, num_workers=2, custom_objects=objects)

    with pytest.raises(DataError, match=words):
        spark_model.fit(source(spark, problem, marker, later), **SETTINGS)
    assert len(spark_model.history.history["loss"]) == 1


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mode", "columns", "preserve"),
    [
        ("synchronous", (), False),
        pytest.param("synchronous", ("label",), True, marks=pytest.mark.whole),
        pytest.param("synchronous", ("label",), False, marks=pytest.mark.whole),
        pytest.param("synchronous", (), True, marks=pytest.mark.whole),
        pytest.param("asynchronous", (), False, marks=pytest.mark.whole),
    ],
)
def test_a_shuffle_that_is_made_again_ends_no_fit(spark, problem, frames, tmp_path, mode, columns, preserve):
    """A fit survives an executor killed with its shuffle files, whatever order the recomputed rows have."""
    model, objects = Bomb(tmp_path / "done", 13 + 7, kill_executor).model(problem)
    every = 3 if mode == "synchronous" else None
    spark_model = SparkModel(
        model,
        mode=mode,
        num_workers=2,
        custom_objects=objects,
        fault_tolerance=FaultTolerance(recovery_every=every),
    )
    frame = frames["array"].repartition(8, *columns)

    history = spark_model.fit(frame, preserve_partitions=preserve, **{**SETTINGS, "shuffle": True})

    assert (tmp_path / "done").exists()
    assert len(history.history["loss"]) == 4


@pytest.mark.whole
@pytest.mark.parametrize("before", [2, pytest.param(0, marks=pytest.mark.whole)])
def test_a_run_that_is_taken_up_in_the_middle_of_an_epoch_begins_it_again(
    spark, problem, tmp_path, caplog, before
):
    """A run resumed in the middle of an epoch restarts the epoch if the rows come in another order."""
    folder = tmp_path / "checkpoints"

    def refuse():
        """Fail once there is a checkpoint from the middle of the epoch."""
        snapshots = [_read(str(path), None).snapshot for path in folder.glob("checkpoint-*")]
        while not any(snapshot.epoch == before and snapshot.place for snapshot in snapshots):
            time.sleep(0.05)
            snapshots = [_read(str(path), None).snapshot for path in folder.glob("checkpoint-*")]
        raise ArithmeticError("not a number that I like")

    config = CheckpointConfig(str(folder), every=5, keep=1000)
    model, objects = Bomb(tmp_path / "done", before * 13 + 12, refuse).model(problem)
    start = model.get_weights()
    first = source(spark, problem, tmp_path / "never", None)
    with pytest.raises(WorkerError, match="not a number that I like"):
        SparkModel(model, num_workers=2, custom_objects=objects).fit(first, checkpoint=config, **SETTINGS)
    model = problem.model(seed=2)

    second = source(spark, problem, tmp_path / "done", lambda part: part[::-1])
    history = SparkModel(model, num_workers=2).fit(second, checkpoint=config, resume=True, **SETTINGS)

    point = f"the end of epoch {before}" if before else "the beginning of epoch 1"
    says = f"but in a different order; the run continues from {point}."
    assert history.epoch == list(range(4))
    assert any(says in message for message in caplog.messages)
    assert problem.distance(model, expected(problem, before), start) <= 1
    other = source(spark, problem, tmp_path / "done", lambda part: [(x, 2 - y) for x, y in part])
    with pytest.raises(DataError, match="Resume with the same data, or start a new run"):
        SparkModel(model, num_workers=2).fit(
            other, checkpoint=config, resume=True, **{**SETTINGS, "epochs": 5}
        )

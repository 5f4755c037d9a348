"""Slots that other jobs hold are waited for, and the driver says so; not for ever."""

import threading

import pytest
from pyspark import InheritableThread

from sparkdl import SparkModel, launch
from sparkdl.errors import ClusterError


@pytest.fixture
def held_slot(spark, tmp_path, eventually):
    """Another job on one of the two slots; a function that ends it."""
    begun, over = tmp_path / "begun", tmp_path / "over"

    def hold(rows):
        import time

        begun.touch()
        while not over.exists():
            time.sleep(0.05)
        return rows

    job = InheritableThread(target=lambda: spark.sparkContext.parallelize([1], 1).mapPartitions(hold).count())
    job.start()
    assert eventually(begun.exists)
    yield over.touch
    over.touch()
    job.join()


def test_slots_that_another_job_holds_are_waited_for_and_said(problem, held_slot, monkeypatch, caplog):
    """One of two workers starts, the other when the slot is free."""
    monkeypatch.setattr(launch, "NOTICE_SECONDS", 0.2)
    spark_model = SparkModel(problem.model(), mode="asynchronous", num_workers=2)
    fit = threading.Thread(target=spark_model.fit, args=(problem.x, problem.y), kwargs={"verbose": 0})
    waiting = "Waiting for 1 of 2 workers to start since"
    fit.start()
    while fit.is_alive() and not any(line.startswith(waiting) for line in caplog.messages):
        fit.join(0.1)
    held_slot()
    fit.join()

    assert 1 == len(spark_model.history.epoch)
    assert any(line.startswith(waiting) for line in caplog.messages)


def test_a_gang_that_does_not_form_in_time_names_who_is_missing(problem, held_slot):
    """The error says how many came, which did not, and what to do."""
    spark_model = SparkModel(problem.model(), mode="asynchronous", num_workers=2, start_timeout=1)

    with pytest.raises(
        ClusterError, match=r"Only 1 of 2 workers started within 1 s; missing: [01]\. .*fewer"
    ):
        spark_model.fit(problem.x, problem.y, verbose=0)

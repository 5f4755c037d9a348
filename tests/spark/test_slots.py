"""A fit waits for slots that other jobs hold, up to a timeout, and logs it."""

import re
import threading

import pytest
from pyspark import InheritableThread

from sparkdl import FaultTolerance, SparkModel
from sparkdl.driver import worker_group
from sparkdl.errors import ClusterError
from sparkdl.spark import jobs


@pytest.fixture
def held_slot(spark, tmp_path, eventually):
    """Another job on one of the two slots; yields a function that ends it."""
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


@pytest.mark.whole
def test_slots_that_another_job_holds_are_waited_for_and_said(problem, held_slot, monkeypatch, caplog):
    """With one slot taken, one of two workers starts, and the other once the slot is free."""
    monkeypatch.setattr(worker_group, "NOTICE_SECONDS", 0.2)
    spark_model = SparkModel(problem.model(), mode="asynchronous", num_workers=2)
    fit = threading.Thread(target=spark_model.fit, args=(problem.x, problem.y), kwargs={"verbose": 0})
    waiting = re.compile(
        r"Still waiting for 1 of 2 workers to start after \d+ s: other jobs may occupy the slots "
        r"\(job \d+\)\."
    )
    fit.start()
    while fit.is_alive() and not any(map(waiting.fullmatch, caplog.messages)):
        fit.join(0.1)
    held_slot()
    fit.join()

    assert 1 == len(spark_model.history.epoch)
    assert any(map(waiting.fullmatch, caplog.messages))


@pytest.mark.whole
def test_a_worker_group_that_does_not_form_in_time_names_who_is_missing(problem, held_slot):
    """A worker group that does not form in time raises an error with the missing worker and the remedy."""
    spark_model = SparkModel(
        problem.model(), mode="asynchronous", num_workers=2, fault_tolerance=FaultTolerance(start_timeout=1)
    )

    with pytest.raises(
        ClusterError, match=r"Only 1 of 2 workers started within 1 s; missing: [01]\. .*fewer"
    ):
        spark_model.fit(problem.x, problem.y, verbose=0)


def test_worker_groups_of_one_process_have_all_their_slots_or_wait_in_line(eventually):
    """Worker groups of one process get all their slots at once, in order of arrival, or wait."""
    claims, begun, over = jobs.Claims(), [], {name: threading.Event() for name in "abc"}

    def worker_group(name, wanted):
        with claims.claim(wanted, 3):
            begun.append(name)
            over[name].wait()

    threads = []
    for name, wanted in (("a", 2), ("b", 2), ("c", 1)):
        threads.append(threading.Thread(target=worker_group, args=(name, wanted)))
        threads[-1].start()
        assert eventually(lambda: len(claims._waiting) + len(begun) == len(threads))

    assert ["a"] == begun  # c would fit, but came after b
    over["a"].set()
    assert eventually(lambda: len(begun) == 3)
    assert ["a", "b", "c"] == begun
    for name, thread in zip("abc", threads, strict=True):
        over[name].set()
        thread.join()
    with (
        claims.claim(2, 3),
        pytest.raises(ClusterError, match="needs 2 free slots; got 3 slots, of which 2 are in use"),
    ):
        claims.claim(2, 3).__enter__()
    with claims.claim(1, 3), claims.claim(2, 3):  # which fits
        pass
    with claims.claim(5, 3):  # more than there are, with none claimed: Spark has to report it
        pass

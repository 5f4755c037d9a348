"""User functions run on every worker, know their rank and add arrays; no model is needed."""

import functools
import os
import signal
import threading

import numpy as np
import pytest

import sparkdl
from sparkdl.errors import ClusterError, ConfigError, WorkerError, WorkerLostError

MASTERS = ("local", "local-cluster", "standalone")


class Answer:
    """A class that executors cannot import."""

    def __init__(self, value):
        self.value = value


def descend(worker, x, y):
    """Return the weights of a logistic regression that the workers train together, each on its rows."""
    mine = slice(worker.rank, None, worker.size)
    weights = np.zeros(x.shape[1])
    for _ in range(20):
        residual = 1 / (1 + np.exp(-x[mine] @ weights)) - y[mine]
        weights -= worker.all_reduce(x[mine].T @ residual, "sum") / len(x)
    return weights


def test_a_function_trains_on_all_workers_and_returns_in_the_order_of_ranks(spark, problem):
    """Results equal those of one process, and each other bit for bit on all workers and in the next run."""
    x, y = problem.x.astype("float64"), (problem.y > 0).astype("float64")
    alone = np.zeros(6)
    for _ in range(20):
        alone -= x.T @ (1 / (1 + np.exp(-x @ alone)) - y) / len(x)

    first, second = (sparkdl.run(functools.partial(descend, x=x, y=y), num_workers=2) for _ in range(2))

    for other in (first[1], *second):
        np.testing.assert_array_equal(first[0], other)
    np.testing.assert_allclose(alone, first[0], rtol=1e-10)


def test_a_worker_knows_itself_and_brings_what_is_the_users_own(spark, caplog):
    """A worker knows its rank, size and device, returns custom classes, and logs to the driver."""

    def work(worker):
        import logging

        worker.barrier()
        logging.getLogger("mine").warning("worker %d is here", worker.rank)
        return Answer((worker.rank, worker.size, worker.device))

    answers = sparkdl.run(work)

    assert [(0, 2, "cpu:0"), (1, 2, "cpu:0")] == [answer.value for answer in answers]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert {"worker 0 is here", "worker 1 is here"} <= set(caplog.messages)


@pytest.mark.whole
def test_what_a_function_does_wrong_is_an_error_of_the_driver(spark):
    """An exception, an early return of a worker and unequal arrays raise WorkerError on the driver."""

    def broken(worker):
        if worker.rank == 1:
            raise LookupError("no such file")
        worker.barrier()

    def leaves(worker):
        return worker.rank or worker.all_reduce(1.0)

    def unlike(worker):
        worker.all_reduce(np.zeros(2 + worker.rank))

    with pytest.raises(WorkerError, match=r"^LookupError: no such file \(worker 1 on \S+\)\. ") as caught:
        sparkdl.run(broken, num_workers=2)
    assert 1 == caught.value.worker
    assert "in broken" in caught.value.traceback
    with pytest.raises(WorkerError, match="Worker 1 returned, and worker 0 waits for it in all_reduce"):
        sparkdl.run(leaves, num_workers=2)
    with pytest.raises(WorkerError, match=r"arrays that worker \d passed to all_reduce do not match"):
        sparkdl.run(unlike, num_workers=2)
    with pytest.raises(WorkerError, match=r"cannot pickle .*generator"):
        sparkdl.run(lambda worker: (step for step in range(3)), num_workers=2)


def test_what_cannot_be_run_is_refused_before_a_job(spark, jobs):
    """An invalid function, and more workers than slots, are refused before any job."""
    before = jobs()
    with pytest.raises(ConfigError, match="function should take one argument"):
        sparkdl.run(lambda: 1)
    with pytest.raises(ConfigError, match="num_workers should be a whole number of at least 1; got 0"):
        sparkdl.run(lambda worker: 1, num_workers=0)
    with pytest.raises(ClusterError, match="num_workers=3 needs 3 slots; the application has 2"):
        sparkdl.run(lambda worker: 1, num_workers=3)
    assert jobs() == before


@pytest.mark.whole
def test_a_worker_that_dies_or_a_job_that_is_cancelled_ends_the_run(spark, tmp_path, eventually):
    """A dead worker or a cancelled job ends the run for all workers, and the next run works."""
    started = str(tmp_path / "started")

    def dies(worker):
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.barrier()

    def waits(worker):
        if worker.rank == 0:
            open(started, "w").close()
            while True:
                signal.pause()
        worker.barrier()

    with pytest.raises(WorkerLostError):
        sparkdl.run(dies, num_workers=2)
    cancel = threading.Thread(
        target=lambda: eventually(lambda: os.path.exists(started)) and spark.sparkContext.cancelAllJobs()
    )
    cancel.start()
    with pytest.raises(ClusterError, match="The Spark job was cancelled"):
        sparkdl.run(waits, num_workers=2)
    cancel.join()
    assert [1, 1] == sparkdl.run(lambda worker: int(worker.all_reduce(worker.rank, "sum")), num_workers=2)

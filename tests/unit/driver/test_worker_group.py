"""The worker group of a run: its restarts, and the logs of its workers."""

import logging
from unittest import mock

import pytest
from coordinators import begun, coordinator_of

from sparkdl.driver.remote_server import RemoteCoordinator
from sparkdl.driver.worker_group import WorkerGroup
from sparkdl.errors import ClusterError, WorkerLostError
from sparkdl.server.hosted_run import HostedRun
from sparkdl.server.http_app import Traffic
from sparkdl.transport.log_lines import LINES_OF_ALL, LINES_OF_WORKER
from sparkdl.worker.hosted_server import HostedDriver


@pytest.fixture
def events():
    return []


@pytest.fixture
def relayed(events, caplog):
    """Return a function that ends a group with a coordinator; it returns each line: level, logger, text."""
    caplog.set_level(logging.INFO, "sparkdl.workers")

    def relay(coordinator):
        group = WorkerGroup(
            cluster=None,
            coordinator=coordinator,
            submit=None,
            barrier=False,
            restarts=0,
            start_timeout=1.0,
            on_event=lambda text, level: events.append((level, text)),
        )
        group.finish()
        return [(entry.levelname, entry.name, entry.getMessage()) for entry in caplog.records]

    return relay


def say(coordinator, worker, *messages, level=logging.WARNING):
    log = [{"name": "my.loss", "level": level, "message": message} for message in messages]
    coordinator.heartbeat(worker, 1, 1, epoch=0, rows=0, retries=0, log=log)


def test_what_workers_log_names_them_on_the_driver(relayed, events):
    """The driver logs the lines of workers with their names, and they are events of the run's record."""
    coordinator = begun(coordinator_of(workers=2))
    say(coordinator, 0, "100 % done", level=logging.INFO)
    say(coordinator, 1, "slow disk")

    logged = relayed(coordinator)

    name = "sparkdl.workers.my.loss"
    assert [("INFO", name, "worker 0: 100 % done"), ("WARNING", name, "worker 1: slow disk")] == logged
    assert [("info", "worker 0: 100 % done"), ("warning", "worker 1: slow disk")] == events


def test_many_chatty_workers_are_bounded_together(relayed):
    """The driver takes a limited number of lines of all workers, and states the number that it left out."""
    workers = 2 * LINES_OF_ALL // LINES_OF_WORKER
    coordinator = begun(coordinator_of(workers=workers))
    for worker in range(workers):
        say(coordinator, worker, *map(str, range(LINES_OF_WORKER)))
    coordinator.state.warn("The endpoint's own line.")

    *_, own, last = texts = [text for _, _, text in relayed(coordinator)]

    assert LINES_OF_ALL + 2 == len(texts)
    assert "The endpoint's own line." == own
    limit = "the driver takes from all workers together at most 1,000 of them per minute."
    assert f"Left out 1,000 log lines at WARNING or above: {limit}" == last


def test_a_hosted_run_brings_its_log_once(relayed):
    """The lines of a hosted run come with its records, each once."""
    coordinator = begun(coordinator_of(workers=2, size=1))
    hosted = HostedRun(coordinator.shape, None, None, None, None, "secret", False, None)
    client, served = RemoteCoordinator(hosted, None), HostedDriver(coordinator, Traffic(), None)
    for message in "first", "second":
        say(coordinator, 1, message)
        client._read(served.record())

    assert ["worker 1: first", "worker 1: second"] == [text for _, _, text in relayed(client)]


def test_a_hosted_run_has_no_snapshot_within_an_epoch_and_carries_nothing_on():
    """The client of a hosted run ignores a request for a snapshot, and leaves no state behind."""
    client = RemoteCoordinator(
        HostedRun(coordinator_of().shape, None, None, None, None, "secret", False, None), None
    )

    client.request_snapshot()

    assert client.newest_snapshot is client.snapshot
    assert client.carried() is None


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("synchronous", "from the snapshot at the beginning of epoch 1"),
        ("asynchronous", "after each worker's last counted update"),
        ("hogwild", "after each worker's last counted update"),
    ],
)
def test_a_restart_is_logged_with_the_point_that_workers_continue_from(caplog, mode, point):
    """In rounds workers continue from the snapshot, and without rounds after their own last updates."""
    coordinator = coordinator_of(mode)
    group = WorkerGroup(
        cluster=mock.Mock(stopped=False),
        coordinator=coordinator,
        submit=lambda generation, barrier: mock.Mock(),
        barrier=False,
        restarts=3,
        start_timeout=60,
    )
    coordinator.fail(1, WorkerLostError("Worker 0 died."))

    group.check()

    text = f"A worker was lost; the workers restart (1 of 3) and continue {point}: Worker 0 died."
    assert [text] == caplog.messages
    assert (2, 1) == (coordinator.generation, coordinator.restarts)


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_worker_that_is_lost_because_spark_was_stopped_does_not_restart(restarts):
    """Stopping Spark ends the executors; the loss of their workers is reported as a stop."""
    coordinator = coordinator_of("synchronous")
    group = WorkerGroup(
        cluster=mock.Mock(stopped=True),
        coordinator=coordinator,
        submit=mock.Mock(),
        barrier=False,
        restarts=restarts,
        start_timeout=60,
    )
    coordinator.fail(1, WorkerLostError("Worker 0 died."))

    with pytest.raises(ClusterError, match="Spark was stopped") as raised:
        group.check()

    assert "Worker 0 died." == str(raised.value.cause)
    assert (1, 0) == (coordinator.generation, coordinator.restarts)
    group.submit.assert_not_called()

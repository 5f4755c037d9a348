"""The driver's half of a run, hosted in worker 0."""

import socket
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
from coordinators import begun, coordinator_of, give, report_of, status_of

from sparkdl.server.hosted_run import endpoint_at
from sparkdl.server.http_app import Traffic, add_hosted_driver, make_app
from sparkdl.transport.client import Connection
from sparkdl.worker import hosted_server
from sparkdl.worker.hosted_server import HostedDriver


@pytest.mark.parametrize("worker", [-1, 0, 2])
def test_only_a_worker_that_the_endpoint_waits_for_can_leave(worker):
    """Only a worker that the endpoint waits for can leave; otherwise worker 0 could end too early."""
    coordinator, traffic = coordinator_of(workers=2), Traffic()
    app = make_app(coordinator, "secret", traffic)
    add_hosted_driver(app, HostedDriver(coordinator, traffic, None))
    headers = {"Authorization": "Bearer secret"}
    leave = partial(app.test_client().post, "/v1/leave", headers=headers)

    assert 400 == leave(json={"worker": worker, "generation": 1, "attempt": 1}).status_code


@pytest.mark.parametrize(
    "stale", [{"attempt": 0}, {"attempt": 2}, {"generation": 0}, {"generation": 2}], ids=str
)
def test_only_the_current_attempt_of_a_worker_can_leave(stale):
    """A worker's older attempt does not end the wait for its current one."""
    coordinator, traffic = begun(coordinator_of(workers=2)), Traffic()
    app, hosted_driver = make_app(coordinator, "secret", traffic), HostedDriver(coordinator, traffic, None)
    add_hosted_driver(app, hosted_driver)
    leave = partial(app.test_client().post, "/v1/leave", headers={"Authorization": "Bearer secret"})
    current = {"worker": 1, "generation": 1, "attempt": 1}

    assert 409 == leave(json=current | stale).status_code
    assert set() == hosted_driver._left
    assert 200 == leave(json=current).status_code
    assert {1} == hosted_driver._left


def test_weights_that_come_late_are_refused():
    """Weights for an epoch are refused once the next one is released: they would undo its training."""
    coordinator, traffic = coordinator_of("asynchronous", workers=2, size=2, epochs=3), Traffic()
    app = make_app(coordinator, "secret", traffic)
    add_hosted_driver(app, HostedDriver(coordinator, traffic, None))
    send = partial(app.test_client().post, headers={"Authorization": "Bearer secret"}, data=b"\1" * 8)
    coordinator.release(0, 0.1)

    assert 200 == send("/v1/replace/0").status_code
    version = coordinator.aggregation.version
    coordinator.release(1, 0.1)
    assert 409 == send("/v1/replace/0").status_code
    assert version == coordinator.aggregation.version


@pytest.mark.parametrize("given", ["127.0.0.1:7077", "[::1]:7077"])
def test_worker_0_listens_on_the_address_that_spark_gives(given):
    """Spark puts an IPv6 address into brackets, which a socket does not take."""
    host = given.rpartition(":")[0].strip("[]")
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("no IPv6 here")
    hosted = mock.Mock(learning_rate=None, token="secret", tls=False)
    hosted.coordinator.return_value = coordinator = coordinator_of(workers=1)
    hosted.shape = coordinator.shape
    context = mock.Mock()
    context.getTaskInfos.return_value = [mock.Mock(address=given)]
    context.partitionId.return_value = 0

    with ExitStack() as stack:
        _, address = hosted_server._host(stack, hosted, None, 1, context)
        connection = Connection(endpoint_at(address, hosted), 0)
        stack.callback(connection.close)

        assert b"" == connection.get("/v1/ping")


@pytest.mark.parametrize("part", ["release", "wait_epoch", "commit"])
def test_an_error_of_the_hosted_driver_fails_the_run_by_name(part, monkeypatch):
    """If the driver's part of a hosted run fails, the error is named, and no worker waits for an epoch."""
    monkeypatch.setattr(hosted_server, "LINGER_SECONDS", 0)
    coordinator = begun(coordinator_of("asynchronous", workers=1, epochs=2))
    coordinator.release(1, 0.1)
    give(coordinator, report_of(coordinator, 0))
    monkeypatch.setattr(coordinator, part, mock.Mock(side_effect=MemoryError("no room")))
    HostedDriver(coordinator, Traffic(), 0.1).run()

    assert "The parameter endpoint failed: Memory ran out" in str(coordinator.failure)
    assert "no room" in str(coordinator.failure)
    assert 410 == status_of(lambda: give(coordinator, report_of(coordinator, 0)))

"""Heartbeats carry a worker's log to the driver, also if some get lost."""

import logging
from contextlib import closing
from unittest import mock

import pytest
from coordinators import LAYOUT, begun, coordinator_of
from standalone import eventually

from sparkdl.errors import RefusedError, TransportError, WorkerError
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import heartbeat as heartbeats
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.heartbeat import Heartbeat
from sparkdl.transport.log_lines import LINES_OF_WORKER, LogBuffer
from sparkdl.worker.session import Attempt, membership

LONG = [f"{number} {'漢' * 4000}"[:4000] for number in range(60)]  # 24 KB each as JSON


@pytest.fixture
def coordinator():
    return begun(coordinator_of("asynchronous", workers=2))


@pytest.fixture
def log():
    return LogBuffer()


@pytest.fixture
def heartbeat(coordinator, log):
    """The heartbeat of worker 0 with a served endpoint; its thread is not started."""
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port:
        exchange = HttpExchange(
            Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b""), 0, 1, 1, LAYOUT
        )
        heartbeat = Heartbeat(exchange, log, pytest.fail)
        with closing(exchange), closing(heartbeat._connection):
            yield heartbeat


def note(log, *messages):
    for message in messages:
        log.handle(logging.makeLogRecord({"name": "n", "levelno": logging.WARNING, "msg": message}))


def arrived(coordinator):
    """Return the messages that arrived from worker 0, without its name."""
    return [entry["message"].removeprefix("worker 0: ") for entry in coordinator.take_log()]


def test_a_long_log_arrives_in_several_heartbeats(coordinator, log, heartbeat):
    """A long log is split into heartbeats that the endpoint reads, and keeps its order."""
    note(log, *LONG)
    beats = 0
    while log.lines:
        assert heartbeat._beat()
        beats += 1

    assert LONG == arrived(coordinator)
    assert 60 * 24_000 / heartbeats.LOG_BYTES < beats < 12


def test_the_last_heartbeats_bring_all_that_is_left(coordinator, log, heartbeat):
    """The last heartbeats of a worker carry all remaining log records."""
    with heartbeat:
        note(log, *LONG)

    assert LONG == arrived(coordinator)


def failing(heartbeat, error, *, sent):
    """Return a call of a heartbeat's connection whose first request or answer is replaced by an error."""
    call, failures = heartbeat._connection.call, [error]

    def once(path, **fields):
        if not failures or sent:
            answer = call(path, **fields)
        if failures:
            raise failures.pop()
        return answer

    return once


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (TransportError("no answer"), False),
        (TransportError("no answer"), True),
        (RefusedError(503, "busy"), False),
        (RefusedError(413, "too large"), False),
    ],
)
def test_records_of_a_heartbeat_without_an_answer_are_sent_again(
    coordinator, log, heartbeat, monkeypatch, error, sent
):
    """Unanswered or refused log records are sent again: they arrive twice if only the answer was lost."""
    monkeypatch.setattr(heartbeat._connection, "call", failing(heartbeat, error, sent=sent))
    note(log, "first", "second")
    assert heartbeat._beat()
    note(log, "third")
    assert heartbeat._beat()

    assert ["first", "second"] * sent + ["first", "second", "third"] == arrived(coordinator)


def test_a_last_heartbeat_whose_connection_broke_is_sent_again(coordinator, log, heartbeat, monkeypatch):
    """The last heartbeat is sent again if its connection broke."""
    request, failures = heartbeat._connection._http.request, [ConnectionResetError()]

    def broken_once(*arguments):
        if failures:
            raise failures.pop()
        request(*arguments)

    monkeypatch.setattr(heartbeat._connection._http, "request", broken_once)
    with heartbeat:
        note(log, "last")

    assert ([], ["last"]) == (failures, arrived(coordinator))


def test_the_last_heartbeat_states_what_was_left_out(coordinator, log, heartbeat):
    """A worker that logs without end sends a limited number of lines, and how many others there were."""
    with heartbeat:
        note(log, *map(str, range(LINES_OF_WORKER + 1234)))

    *lines, last = arrived(coordinator)
    assert list(map(str, range(LINES_OF_WORKER))) == lines
    assert last.startswith("Left out 1,234 log lines at WARNING or above: a worker sends at most 100 ")


def test_a_line_names_its_worker_once(coordinator, log, heartbeat):
    """A line begins with its worker on the driver, also if the worker's own text does."""
    note(log, "ready", "Worker 0 is ready", "worker 1 is not")
    assert heartbeat._beat()

    expected = ["worker 0: ready", "Worker 0 is ready", "worker 0: worker 1 is not"]
    assert expected == [entry["message"] for entry in coordinator.take_log()]


@pytest.mark.parametrize("status", [400, 401, 409, 410, 413, 500])
def test_only_the_end_of_an_attempt_or_a_run_ends_its_heartbeats(status, heartbeat, monkeypatch):
    """Only the end of an attempt or run stops heartbeats: without them a healthy worker counts as lost."""
    refusing = mock.Mock(side_effect=RefusedError(status, "no"))
    monkeypatch.setattr(heartbeat._connection, "call", refusing)

    assert (status not in (409, 410)) is heartbeat._beat()


def test_a_heartbeat_that_fails_fails_its_worker_by_name(coordinator):
    """If the heartbeat's thread fails, the driver gets the reason, and the worker does not count as lost."""
    loop = mock.Mock()
    loop.position.side_effect = MemoryError("no room")
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port:
        attempt = Attempt(0, 1, 1, 1, Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b""))
        with membership(attempt, LAYOUT) as (_, heartbeat):
            heartbeat.follow(loop)
            assert eventually(lambda: coordinator.failure is not None, 10)

    assert isinstance(coordinator.failure, WorkerError)
    assert "no room (worker 0 on " in str(coordinator.failure)

"""Promises of the Exchange interface, checked for each implementation."""

import socket
import time
from contextlib import ExitStack

import numpy as np
import pytest
from coordinators import EMPTY, LAYOUT, NEVER, RUN, coordinator_of, impatient, together, vector
from standalone import eventually

from sparkdl.core import buffer_pool
from sparkdl.core.vectors import aligned
from sparkdl.errors import RefusedError, TransportError
from sparkdl.server import http_server
from sparkdl.server.aggregation import limits
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.transport import messages
from sparkdl.transport.client import Connection, HttpExchange
from sparkdl.transport.exchange import Endpoint, awaiting
from sparkdl.transport.messages import Answer, Flag, Kind, Update
from sparkdl.transport.tls import server_context


class Local:
    """Exchanges by method calls."""

    def __init__(self, coordinator, stack):
        self.coordinator = coordinator

    def exchange(self, worker, attempt=1):
        return LocalExchange(self.coordinator, worker, attempt)


class Http:
    """Exchanges over a real socket."""

    def __init__(self, coordinator, stack, context=None, certificate=b""):
        app = make_app(coordinator, "secret", Traffic())
        port = stack.enter_context(serve(app, "127.0.0.1", 0, coordinator.shape.num_workers, context))
        stack.callback(coordinator.close)
        self.coordinator, self.stack = coordinator, stack
        self.endpoint = Endpoint("127.0.0.1", port, "secret", RUN, certificate)

    def exchange(self, worker, attempt=1):
        exchange = HttpExchange(self.endpoint, worker, attempt, self.coordinator.generation, LAYOUT)
        self.stack.callback(exchange.close)
        exchange.join("host", 1)
        return exchange


class Https(Http):
    """Exchanges over a real socket, with TLS."""

    def __init__(self, coordinator, stack):
        super().__init__(coordinator, stack, *server_context())


@pytest.fixture(params=[Local, Http, Https], ids=["local", "http", "https"])
def way(request):
    """A function that makes a coordinator's exchanges, closed at the end."""
    with ExitStack() as stack:
        yield lambda coordinator: request.param(coordinator, stack)


def group(way, coordinator, rows=10):
    """Return an exchange per worker, all of them ready."""
    ways = way(coordinator)
    coordinator.release(0, NEVER)
    exchanges = [ways.exchange(worker) for worker in range(coordinator.shape.num_workers)]
    together(*(lambda e=e: e.ready(rows, 0, {}) for e in exchanges))
    return exchanges


def update(*values, sequence=0, kind=Kind.DELTA, **fields):
    parameters = vector(*values)
    return Update(kind, sequence=sequence, rows=4 * bool(values), loss=1.0, parameters=parameters, **fields)


def test_everybody_begins_together(way):
    """A call of ready returns once all workers are ready, with the rows of each."""
    coordinator = coordinator_of("asynchronous", workers=2)
    ways = way(coordinator)
    coordinator.release(0, 0.5)
    first, second = ways.exchange(0), ways.exchange(1)
    begins = together(lambda: first.ready(3, 0, {}), lambda: second.ready(5, 0, {"note": 1}))

    assert [[3, 5], [3, 5]] == [list(begin["rows"]) for begin in begins]
    assert {0.5} == {begin["learning_rate"] for begin in begins}
    assert {"note": 1} == coordinator.members[1].notes


def test_ready_asks_again_until_the_worker_group_is_there(way):
    """A call of ready waits for a worker group that forms slowly."""
    coordinator = coordinator_of("asynchronous", workers=2)
    ways = way(coordinator)
    first = ways.exchange(0)

    def later():
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.members[0].held is not None, 10)
        second = ways.exchange(1)
        coordinator.release(0, NEVER)
        return second.ready(5, 0, {})

    with impatient():
        begins = together(lambda: first.ready(3, 0, {}), later)

    assert [[3, 5], [3, 5]] == [list(begin["rows"]) for begin in begins]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_an_update_is_answered_with_the_center(way, mode):
    """The reply holds the center with the update in it, and its version."""
    first, second = group(way, coordinator_of(mode, workers=2, size=2, statistics=1))
    first(update(1, 2, statistics=vector(4)))
    reply = second(update(10, 20, statistics=vector(2), base_version=1))

    assert (Answer.CENTER, 2) == (reply.kind, reply.version)
    assert ([11, 22], [2]) == (reply.parameters.tolist(), reply.statistics.tolist())


def test_a_round_is_answered_to_all(way):
    """Each worker starts a round, and each gets the mean of all."""
    exchanges = group(way, coordinator_of(workers=3, size=1))
    tickets = [
        exchange.begin(update(float(value), kind=Kind.GRADIENT))
        for exchange, value in zip(exchanges, (1, 2, 6), strict=True)
    ]
    replies = together(*(lambda e=e, t=t: e.finish(t) for e, t in zip(exchanges, tickets, strict=True)))

    assert [[3.0]] * 3 == [reply.parameters.tolist() for reply in replies]


def test_a_late_round_is_asked_for_again(way):
    """A worker that waits long sends its update once and still gets the round's answer."""
    coordinator = coordinator_of(workers=2, size=1)
    first, second = group(way, coordinator)

    def late():
        assert eventually(lambda: coordinator.aggregation.counted(0, 0), 10)
        return second(update(5.0, kind=Kind.GRADIENT))

    with impatient():
        replies = together(lambda: first(update(1.0, kind=Kind.GRADIENT)), late)

    assert [[3.0], [3.0]] == [reply.parameters.tolist() for reply in replies]
    assert 1 == coordinator.aggregation.version
    assert 0 == coordinator.counters["duplicates"]


def test_an_update_that_waits_unread_for_a_slow_worker_is_sent_again(way, monkeypatch):
    """A body that waits too long to be read is dropped, and its worker sends it until it is read."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    monkeypatch.setattr(limits, "BODY_PATIENCE", 0.02)
    coordinator = coordinator_of(workers=3, size=100_000)
    exchanges, sent = group(way, coordinator), []
    exchange = coordinator.exchange
    monkeypatch.setattr(coordinator, "exchange", lambda *args: sent.append(args[0].worker) or exchange(*args))

    def send(worker):
        time.sleep(0.5 * (worker == 0))
        return exchanges[worker](
            Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=np.full(100_000, worker, np.float32))
        )

    replies = together(*(lambda k=k: send(k) for k in range(3)))

    assert [{1.0}] * 3 == [set(reply.parameters.tolist()) for reply in replies]
    assert (1, 0) == (coordinator.aggregation.version, coordinator.counters["duplicates"])
    assert sent.count(1) > 1 == sent.count(0)


def test_an_update_that_is_sent_twice_counts_once(way):
    """A repeated update counts once and is answered as a duplicate."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1)
    (exchange,) = group(way, coordinator)
    exchange(update(1.0))
    reply = exchange(update(1.0))

    assert reply.flags & Flag.DUPLICATE
    assert [1.0] == reply.parameters.tolist() == coordinator.aggregation.parameters.tolist()
    assert 1 == coordinator.counters["duplicates"]


def test_an_epoch_ends_when_the_driver_says_so(way):
    """A report is answered when the driver releases the next epoch, with its learning rate."""
    coordinator = coordinator_of(workers=1, size=1, metrics=2, optimizer=3)
    (exchange,) = group(way, coordinator)
    report = Update(Kind.REPORT, rows=10, parameters=vector(3.0), metrics=b"mm", state=b"sss")

    def driver():
        result = coordinator.wait_epoch(0, 10)
        coordinator.commit(result.snapshot)
        coordinator.release(1, 0.25)
        return result

    with impatient():
        reply, result = together(lambda: exchange(report), driver)

    assert 0.25 == reply.learning_rate
    assert ([b"mm"], b"sss", 10) == (result.metrics, result.snapshot.state(0), result.rows)
    assert [3.0] == result.snapshot.parameters.tolist()


def test_a_run_that_stops_says_so(way):
    """After a stop, the next reply of any kind has the stop flag."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1, epochs=1)
    (exchange,) = group(way, coordinator)
    coordinator.stop()

    assert exchange(update(1.0)).flags & Flag.STOP
    assert exchange(Update(Kind.REPORT, rows=10)).flags & Flag.STOP


def test_a_worker_is_restored_from_the_cut(way):
    """A restored worker gets the center and its own state of the snapshot."""
    coordinator = coordinator_of("asynchronous", workers=1, size=2, optimizer=3)
    (exchange,) = group(way, coordinator)
    exchange(update(1, 2))
    exchange(Update(Kind.REPORT, rows=10, state=b"opt"))
    coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)
    reply = exchange(Update(Kind.RESTORE))

    assert (Answer.CENTER, [1, 2], b"opt", 1) == (
        reply.kind,
        reply.parameters.tolist(),
        reply.state,
        reply.version,
    )


def test_an_old_generation_is_refused(way):
    """An update of an old generation changes nothing."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1)
    (exchange,) = group(way, coordinator)
    coordinator.restart()
    with pytest.raises(RefusedError, match="Generation 1 is over; the current one is 2.") as error:
        exchange(update(1.0))

    assert 409 == error.value.status
    assert 0 == coordinator.aggregation.version


def test_a_superseded_attempt_is_refused(way):
    """A superseded attempt is refused, and the newer one continues."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1)
    ways = way(coordinator)
    coordinator.release(0, NEVER)
    old, new = ways.exchange(0, attempt=1), ways.exchange(0, attempt=2)
    new.ready(4, 0, {})
    with pytest.raises(RefusedError, match="superseded attempt 1") as error:
        old(update(1.0))

    assert 409 == error.value.status
    assert [1.0] == new(update(1.0)).parameters.tolist()


def test_weights_of_another_size_are_refused(way):
    """An update with weights of another size is refused."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1)
    (exchange,) = group(way, coordinator)
    with pytest.raises(RefusedError) as error:
        exchange(update(1.0, 2.0))

    assert 413 == error.value.status
    assert [1.0] == exchange(update(1.0)).parameters.tolist()


def test_a_run_that_is_over_refuses(way):
    """A worker that joins after the end of the run is refused."""
    coordinator = coordinator_of("asynchronous", workers=1, size=1)
    (exchange,) = group(way, coordinator)
    coordinator.close()
    with pytest.raises(RefusedError, match="The run is over.") as error:
        exchange(update(1.0))

    assert 410 == error.value.status


def test_what_a_worker_sent_stays_its_own(way):
    """The arrays of an update are neither changed nor kept."""
    coordinator = coordinator_of("asynchronous", workers=1, size=3)
    (exchange,) = group(way, coordinator)
    sent = update(1, 2, 3)
    reply = exchange(sent)
    sent.parameters[:] = 9

    assert [1, 2, 3] == reply.parameters.tolist() == coordinator.aggregation.parameters.tolist()


def test_asking_again_names_the_update_and_carries_none_of_it():
    """A repeated request for a reply has the update's header with the flag AWAIT, and no rows or body."""
    sent = Update(
        Kind.DELTA,
        worker=1,
        sequence=2,
        epoch=3,
        base_version=4,
        rows=5,
        flags=Flag.STOP,
        parameters=np.ones(2, np.float32),
        metrics=b"m",
        state=b"s",
        generation=6,
        attempt=7,
        run=RUN,
        layout=LAYOUT,
    )
    again = awaiting(sent)

    assert (Flag.STOP | Flag.AWAIT, 1, 2, 3, 4) == (
        again.flags,
        again.worker,
        again.sequence,
        again.epoch,
        again.base_version,
    )
    assert (6, 7, RUN, LAYOUT) == (again.generation, again.attempt, again.run, again.layout)
    assert 0 == again.rows == len(again.parameters) + len(again.metrics) + len(again.state)
    assert EMPTY.tolist() == again.statistics.tolist()


@pytest.fixture
def streaming():
    """A coordinator and an HttpExchange with an open stream."""
    with ExitStack() as stack:
        coordinator = coordinator_of("asynchronous", workers=1, size=1)
        (exchange,) = group(lambda coordinator: Http(coordinator, stack), coordinator)
        exchange(update(1.0))
        yield coordinator, exchange


def test_a_stream_that_broke_off_is_begun_anew(streaming):
    """After a stream broke, the next update opens another connection."""
    coordinator, exchange = streaming
    exchange._connection._http.sock.shutdown(socket.SHUT_RDWR)

    assert [2.0] == exchange(update(1.0, sequence=1, base_version=1)).parameters.tolist()
    assert 0 == coordinator.counters["duplicates"]


def test_where_every_answer_ends_its_connection_each_update_takes_another(monkeypatch):
    """If every answer closes its connection, as a proxy may do, each update takes a new one."""
    monkeypatch.setattr(http_server._Server, "can_add_keepalive_connection", False)
    with ExitStack() as stack:
        coordinator = coordinator_of("asynchronous", workers=1, size=1)
        (exchange,) = group(lambda coordinator: Http(coordinator, stack), coordinator)
        exchange._connection.retries = 0
        for sequence in range(3):
            reply = exchange(update(1.0, sequence=sequence, base_version=sequence))
            assert [sequence + 1.0] == reply.parameters.tolist()


def test_an_update_whose_sending_stalled_is_sent_again(monkeypatch):
    """An update that stalled is sent again after the endpoint has given up on it."""

    def stalling(sock, parts):
        once.undo()
        sock.sendall(parts[0])
        assert http_server._can_read(sock, 30)
        messages.send(sock, parts[1:])

    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    with ExitStack() as stack, monkeypatch.context() as once:
        coordinator = coordinator_of("asynchronous", workers=1, size=1)
        (exchange,) = group(lambda coordinator: Http(coordinator, stack), coordinator)
        once.setattr(messages, "send", stalling)

        assert [1.0] == exchange(update(1.0)).parameters.tolist()
    assert 1 == exchange.retried


def test_a_reply_that_was_lost_is_asked_for_again(streaming):
    """A lost reply is requested again, and its update counts once."""
    coordinator, exchange = streaming
    ticket = exchange.begin(update(1.0, sequence=1, base_version=1))
    assert eventually(lambda: coordinator.aggregation.counted(0, 1), 10)
    exchange._connection.close()
    reply = exchange.finish(ticket)

    assert reply.flags & Flag.DUPLICATE
    assert [2.0] == reply.parameters.tolist() == coordinator.aggregation.parameters.tolist()


def test_a_switch_between_requests_and_the_stream_repeats_nothing():
    """A worker that sends updates between other requests, as a shuffle's workers do, resends nothing."""
    with ExitStack() as stack:
        coordinator = coordinator_of("asynchronous", workers=1, size=1)
        exchange = Http(coordinator, stack).exchange(0)
        exchange(Update(kind=Kind.SHARE, rows=10))
        coordinator.release(0, NEVER)
        exchange.ready(10, 0, {})

        assert [1.0] == exchange(update(1.0)).parameters.tolist()
    assert 0 == exchange.retried


def test_an_endpoint_does_not_show_its_token():
    """The repr of an endpoint, which may be logged, does not show the token."""
    assert "Endpoint(host='h', port=1)" == repr(Endpoint("h", 1, "secret", RUN))


ANSWER = b'HTTP/1.1 200 OK\r\nDate: today\r\nContent-Length: 15\r\nServer: sparkdl\r\n\r\n{"stop": false}'


def test_an_answer_that_breaks_off_anywhere_is_none():
    """An answer that is truncated anywhere, also in its head, is rejected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            for length in range(len(ANSWER) + 1):
                with listener.accept()[0] as sock:
                    sock.recv(1 << 16)
                    sock.sendall(ANSWER[:length])

        def ask():
            endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], "secret", RUN)
            for _ in ANSWER:
                connection = Connection(endpoint, retries=0)
                with pytest.raises(TransportError):
                    connection.call("/v1/heartbeat")
            answered = connection.call("/v1/heartbeat")
            connection.close()
            return answered

        _, answered = together(answer, ask)

    assert (200, {"stop": False}) == answered


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_exchanges_of_a_large_model_use_the_same_memory(mode, monkeypatch):
    """The endpoint and a worker allocate memory for the vectors of the first exchanges only."""
    allocated, counts, version = [], [], 0
    monkeypatch.setattr(buffer_pool, "aligned", lambda size: allocated.append(size) or aligned(size))
    values = np.ones(buffer_pool.SMALL // 4, np.float32)
    kind = Kind.GRADIENT if mode == "synchronous" else Kind.DELTA
    with ExitStack() as stack:
        (exchange,) = group(
            lambda coordinator: Http(coordinator, stack), coordinator_of(mode, workers=1, size=len(values))
        )
        for sequence in range(6):
            given = Update(kind, sequence=sequence, rows=1, steps=1, loss=1.0, parameters=values)
            given.base_version = version
            version = exchange(given).version
            counts.append(sum(size > len(values) for size in allocated))

    assert 0 < counts[2] == counts[-1]

"""A client without the token changes nothing and does not stop training."""

import http.client
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from coordinators import LAYOUT, begun, coordinator_of, state_of, together, update_of
from served import BEAT, served

from sparkdl.server import http_server
from sparkdl.server.divergence import STRIKES
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import connections, messages, tls
from sparkdl.transport.client import RETRIES, Connection, HttpExchange
from sparkdl.transport.exchange import Endpoint

LORISES = 1000
UPDATES = 100
HEADS = [b"", b"P", b"POST /v1/exchange HTTP/1.1\r\nAuthorization: Bearer ", b"\r\n"]


@pytest.fixture
def many_files():
    """Allow as many open files as a thousand connections need, with both ends in this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def coordinator():
    return begun(coordinator_of("asynchronous", workers=2))


@pytest.fixture
def port(coordinator):
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port:
        yield port


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def greet(port, certificate):
    """Connect, and greet with TLS if there is a certificate and the connection is still open."""
    sock = connect(port)
    if certificate:
        sock = tls.Socket(sock, tls.client_context(certificate), server=False)
        with suppress(OSError):
            sock.greet()
    return sock


@pytest.mark.one_case
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_thousand_connections_that_never_send_a_whole_head_stop_no_training(
    coordinator, many_files, eventually, encrypted
):
    """A worker trains while a thousand connections send parts of a head now and then."""
    context, certificate = tls.server_context() if encrypted else (None, b"")
    with ExitStack() as stack:
        app = make_app(coordinator, "secret", Traffic())
        port = stack.enter_context(serve(app, "127.0.0.1", 0, 2, context))
        endpoint = Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, certificate)
        exchange = HttpExchange(endpoint, 0, 1, 1, coordinator.shape.layout)
        shown = [certificate * (number // len(HEADS) % 2) for number in range(LORISES)]  # half of them greet
        strange = [stack.enter_context(greet(port, each)) for each in shown]
        for number, sock in enumerate(strange):
            send(sock, HEADS[number % len(HEADS)])
        stack.callback(exchange.close)
        for sequence in range(20):
            for sock in strange[sequence::20]:
                send(sock, b"X")
            update = update_of(coordinator, 0, np.ones(5), sequence=sequence, base_version=sequence)
            assert [sequence + 1.0] * 5 == exchange(update).parameters.tolist()

        assert eventually(lambda: 0 < sum(map(is_open, strange)) <= connections.MOST)


def send(sock, data):
    with suppress(OSError):  # it was closed, as expected
        sock.sendall(data)


def is_open(sock):
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


SIZES = [connections.HEAD_BYTES + more for more in (-1, 0, 1, 255, 256, 4096)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encrypted", [False, True])
def test_heads_near_the_limit_take_no_thread(coordinator, size, encrypted):
    """More incomplete heads than threads do not delay a worker's exchange."""
    context, certificate = tls.server_context() if encrypted else (None, b"")
    start = b"GET / HTTP/1.1\r\nX: "
    with ExitStack() as stack:
        app = make_app(coordinator, "secret", Traffic())
        port = stack.enter_context(serve(app, "127.0.0.1", 0, 2, context))
        endpoint = Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, certificate)
        for _ in range(16):
            sock = stack.enter_context(greet(port, certificate))
            sock.sendall(start + b"x" * (size - len(start)))
        exchange = HttpExchange(endpoint, 0, 1, 1, coordinator.shape.layout)
        stack.callback(exchange.close)
        exchange._connection._http.timeout = 20

        assert [1.0] * 5 == exchange(update_of(coordinator, 0, np.ones(5))).parameters.tolist()
        assert 0 == exchange.retried


FLOOD = """
import resource, socket, sys
from sparkdl.transport import tls
port, count, certificate, socks = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), []
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for _ in range(count):
    socks.append(socket.socket())
    socks[-1].setblocking(False)
    socks[-1].connect_ex(("127.0.0.1", port))
for _ in range(3):
    worker = tls.connection_to("127.0.0.1", port, certificate, 30, "secret")
    worker.request("GET", "/v1/ping", headers={"Authorization": "Bearer secret"})
    print(worker.getresponse().status)
    worker.close()
"""


FLOODS = [(20, 1000), (60, 1000), (400, 1000)]
LARGER = itertools.product((256, 1024, 4096), (1000, 3000, 8000))


@pytest.mark.one_case
@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize(
    ("room", "count"), [*FLOODS, *(pytest.param(*flood, marks=pytest.mark.whole) for flood in LARGER)]
)
def test_more_connections_than_open_files_stop_nobody(coordinator, caplog, capfd, room, count, encrypted):
    """The oldest connections are closed to make room for a worker's, and one log line says so.

    ``room`` is the number of files that the process may open in addition to those already open.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    context, certificate = tls.server_context() if encrypted else (None, b"")
    with ExitStack() as stack:
        app = make_app(coordinator, "secret", Traffic())
        port = stack.enter_context(serve(app, "127.0.0.1", 0, 2, context))
        endpoint = Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, certificate)
        exchange = stack.enter_context(closing(HttpExchange(endpoint, 0, 1, 1, LAYOUT)))
        exchange(update_of(coordinator, 0, np.ones(5)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + room, limits[1]))
        try:
            command = [sys.executable, "-c", FLOOD, str(port), str(count), certificate.hex()]
            flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            replies = [
                exchange(update_of(coordinator, 0, np.ones(5), sequence=number, base_version=number))
                for number in range(1, 20)
            ]
            said, _ = flood.communicate(timeout=120)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert "204\n" * 3 == said
    assert [20.0] * 5 == replies[-1].parameters.tolist()
    logged = [text for text in caplog.messages if "Closing connections without a request" in text]
    assert 1 == len(logged)
    assert ("", "") == capfd.readouterr()


ATTACKS = Path(__file__).parents[3] / "benchmarks/attacks.py"
KINDS = ["flood", "heads", "silent", "halves", "slow", "tokens", "noise", "lines", "crowd"]
LAW = 2.0  # seconds in which a worker's heartbeat is answered


@contextmanager
def attacked(kind, encrypted):
    """Yield the endpoint of a server that a process attacks. It may open 60 more files."""
    with served(encrypted=encrypted, files=60) as endpoint:
        command = [sys.executable, str(ATTACKS), "--attack", kind, "--port", str(endpoint.port)]
        attackers = subprocess.Popen([*command, *["--encrypted"] * encrypted])
        try:
            yield endpoint
        finally:
            attackers.kill()
            attackers.wait()


def longest_heartbeat(endpoint, seconds=3.0):
    """Return the longest time that a heartbeat takes, on a connection that is kept or on a new one."""
    ends, longest = time.monotonic() + seconds, 0.0
    with closing(Connection(endpoint, RETRIES)) as kept:
        while time.monotonic() < ends:
            with closing(Connection(endpoint, RETRIES)) as new:
                for connection in (kept, new):
                    begun_at = time.monotonic()
                    assert 200 == connection.call("/v1/heartbeat", **BEAT)[0]
                    longest = max(longest, time.monotonic() - begun_at)
    return longest


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_heartbeat_is_answered_in_time_whatever_strangers_send(kind, encrypted):
    """A heartbeat is answered within 2 s during each attack.

    In a slow spell of the machine it may take longer; then it is measured again.
    """
    with attacked(kind, encrypted) as endpoint:
        assert LAW > longest_heartbeat(endpoint) or LAW > longest_heartbeat(endpoint)


def test_whole_heads_without_the_token_are_refused_at_a_limited_rate(coordinator, monkeypatch, eventually):
    """However many requests without the token arrive, threads refuse a few per second, and workers pass."""
    monkeypatch.setattr(connections, "REFUSALS", 2.0)
    traffic, whole = Traffic(), b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer none\r\n\r\n"
    with ExitStack() as stack:
        port = stack.enter_context(serve(make_app(coordinator, "secret", traffic), "127.0.0.1", 0, 2))
        begin = time.monotonic()
        strange = [stack.enter_context(connect(port)) for _ in range(100)]
        for sock in strange:
            sock.sendall(whole)
        train(coordinator, stack.enter_context(exchange_of(coordinator, port, 0)))
        refused = traffic.refused

        assert refused <= 2.0 * (1 + time.monotonic() - begin) + 1
        assert eventually(lambda: traffic.refused > refused)


def test_the_host_with_most_connections_loses_them_first(coordinator, eventually):
    """A worker whose head arrives slowly keeps its connection while another host opens many."""
    with ExitStack() as stack:
        port = stack.enter_context(serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2))
        slow = stack.enter_context(connect(port))
        slow.sendall(b"GET /v1/ping HTTP/1.1\r\nAuthorization: Bearer secret\r\n")
        strange = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.2", 0)))
            for _ in range(2 * connections.MOST)
        ]
        assert eventually(lambda: sum(map(is_open, strange)) < connections.MOST)
        slow.sendall(b"\r\n")

        assert b"HTTP/1.1 204" == slow.recv(12)


def test_warnings_about_closed_connections_become_rare(caplog, monkeypatch):
    """The time between two warnings doubles, so that a long attack fills no log."""
    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    pending = object.__new__(connections.PendingConnections)
    pending._until, pending._silent_until, pending._silence = {}, 0.0, connections.SAID_SECONDS
    pending._accepting = False
    for _ in range(24 * 60 * 6):  # a day
        pending._drop_oldest(1, "test")
        now[0] += 10.0

    assert 8 < len(caplog.messages) < 12


@pytest.mark.parametrize("jump", [-86_400, -3_600, 3_600, 86_400])
def test_a_clock_that_is_set_keeps_no_stranger_and_drops_no_worker(coordinator, port, monkeypatch, jump):
    """Setting the clock neither closes a worker's connection nor keeps an unauthenticated one open."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    exchange = HttpExchange(
        Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b""), 0, 1, 1, LAYOUT
    )
    with closing(exchange), connect(port) as sock:
        exchange(update_of(coordinator, 0, np.ones(5)))
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        assert b"" == sock.recv(1)

        assert [2.0] * 5 == exchange(
            update_of(coordinator, 0, np.ones(5), sequence=1, base_version=1)
        ).parameters.tolist()
        assert 0 == exchange.retried


def test_a_connection_that_cannot_be_read_is_closed(port, monkeypatch):
    """A connection whose head cannot be read, for lack of memory, is closed, and the endpoint goes on."""
    read, failures = connections._sent, [MemoryError("none left")]

    def fail_once(sock):
        if failures:
            raise failures.pop()
        return read(sock)

    monkeypatch.setattr(connections, "_sent", fail_once)
    with connect(port) as sock:
        sock.sendall(b"GET")
        with suppress(ConnectionResetError):  # the other way in which a connection may end
            assert b"" == sock.recv(1)
    with connect(port) as sock:
        sock.sendall(b"GET /v1/ping HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
        assert b"HTTP/1.1 204" == sock.recv(12)


@pytest.mark.parametrize("sent", HEADS[:2])
def test_a_head_that_does_not_come_closes_its_connection(port, monkeypatch, sent):
    """A connection that sends only a part of a head, or nothing, is closed."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with connect(port) as sock:
        sock.sendall(sent)
        assert b"" == sock.recv(1)


def test_a_head_may_come_in_parts(port):
    """A head may arrive in parts."""
    with connect(port) as sock:
        for part in (b"GET /v1/ping HTTP/1.1\r\nAuth", b"orization: Bearer sec", b"ret\r\n\r", b"\n"):
            sock.sendall(part)
            time.sleep(0.15)
        with closing(http.client.HTTPResponse(sock)) as answer:
            answer.begin()
            assert 204 == answer.status


def test_a_head_that_has_no_end_is_refused(port, coordinator):
    """An endless head is refused and not stored."""
    before = state_of(coordinator)
    with connect(port) as sock:
        sock.sendall(
            b"GET /v1/status HTTP/1.1\r\nX: " + b"x" * (connections.HEAD_BYTES + connections.LINE_BYTES)
        )
        with closing(http.client.HTTPResponse(sock)) as answer:
            answer.begin()
            assert 413 == answer.status
    assert before == state_of(coordinator)


def exchange_of(coordinator, port, worker):
    endpoint = Endpoint("127.0.0.1", port, "secret", coordinator.shape.run)
    return closing(HttpExchange(endpoint, worker, 1, 1, coordinator.shape.layout))


def train(coordinator, exchange):
    """Send updates that each add 1."""
    for sequence in range(UPDATES):
        exchange(update_of(coordinator, 0, np.ones(5), sequence=sequence, base_version=sequence))


def test_a_flood_of_updates_without_numbers_changes_nothing(coordinator, port):
    """Updates with NaN are counted and not merged; other workers train on, and the sender is named."""
    flooded, trained = threading.Event(), threading.Event()

    def flood():
        for sequence in itertools.count():
            flooding(update_of(coordinator, 1, np.full(5, np.nan), sequence=sequence))
            flooded.set()
            if trained.is_set() and sequence >= STRIKES:
                return sequence + 1

    def work():
        flooded.wait(60)
        try:
            train(coordinator, honest)
        finally:
            trained.set()

    with exchange_of(coordinator, port, 0) as honest, exchange_of(coordinator, port, 1) as flooding:
        sent, error = together(flood, work)

    assert (None, UPDATES) == (error, coordinator.aggregation.version)
    assert [float(UPDATES)] * 5 == coordinator.aggregation.parameters.tolist()
    assert sent == coordinator.counters["not_finite"]
    assert "the last 10 updates of worker 1 (the latest in epoch 1) contained NaN" in str(coordinator.failure)


def test_a_json_body_that_stalls_midway_may_be_sent_again(coordinator, monkeypatch):
    """A JSON body that does not arrive in time gets status 408, so that the worker sends it again."""
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    head = "POST /v1/join HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"
    with (
        serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port,
        connect(port) as sock,
        sock.makefile("rb") as stream,
    ):
        sock.sendall(head.encode() + b'{"worker": 1')
        assert b"HTTP/1.1 408" == stream.read()[:12]
    assert coordinator.failure is None


@pytest.mark.parametrize("kind", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_bodies_that_stall_midway_end_and_hold_nobody_back(coordinator, monkeypatch, caplog, kind):
    """Stalled bodies of one worker do not hold back the others and are closed after a timeout."""
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    update = update_of(coordinator, 1, np.ones(5))
    header, parameters = messages.encode_update(update), messages.sections(update)[0]
    half = header + bytes(parameters)[:10]
    if "chunked" in kind:
        half = b"%x\r\n%b\r\n14\r\n%b" % (len(header), header, half[len(header) :])
    head = f"POST /v1/exchange HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n{kind}\r\n\r\n"
    with ExitStack() as stack:
        port = stack.enter_context(serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2))
        stalled = [stack.enter_context(connect(port)) for _ in range(2)]
        for sock in stalled:
            sock.sendall(head.encode() + half)
        train(coordinator, stack.enter_context(exchange_of(coordinator, port, 0)))

        for sock in stalled:
            with sock.makefile("rb") as stream:
                assert b"HTTP/1.1 408" == stream.read()[:12]
    assert [float(UPDATES)] * 5 == coordinator.aggregation.parameters.tolist()
    assert [] == caplog.records
    assert [UPDATES, 0] == [coordinator.aggregation.next_sequence(worker) for worker in (0, 1)]


def test_a_server_that_stops_closes_who_waits(coordinator):
    """A stopping server closes waiting connections and frees its port."""
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port:
        waiting = [connect(port) for _ in range(2)]
        waiting[0].sendall(b"GET")
        time.sleep(0.3)
    for sock in waiting:
        with sock:
            assert b"" == sock.recv(1)

"""Tests of the HTTP endpoint: its replies, and its refusals before a body is read."""

import errno
import gc
import gzip
import http.client
import io
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import tracemalloc
import weakref
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import cheroot.connections
import cheroot.server
import cheroot.workers.threadpool
import cheroot.wsgi
import numpy as np
import pytest
from coordinators import LAYOUT, begun, coordinator_of, state_of, update_of
from leaks import listening
from relay import RESET

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.errors import ADVICE, ClusterError, DataError, RefusedError, WorkerError, WorkerLostError
from sparkdl.process.reasons import reason_of
from sparkdl.server import http_app, http_server
from sparkdl.server.http_app import Traffic, add_hosted_driver, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.state import RowsHeld
from sparkdl.transport import connections, messages, tls
from sparkdl.transport.arrivals import Arrival, ArrivalError
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Answer, Kind, Sections, Update

TOKEN = {"Authorization": "Bearer secret"}
WHO = {"worker": 0, "generation": 1, "attempt": 1}


class FlaskClient:
    """Requests to the app itself."""

    def __init__(self, app, served):
        self.client = app.test_client()

    def request(self, method, path, body=b"", headers=TOKEN):
        answer = self.client.open(path, method=method, data=body, headers=headers)
        pieces = (piece if isinstance(piece, list) else [piece] for piece in answer.response)
        return answer.status_code, answer.headers, b"".join(b"".join(piece) for piece in pieces)


class Socket:
    """Requests to a server on a real socket."""

    certificate = b""

    def __init__(self, app, served):
        served.app = app
        self.port = served.port

    def request(self, method, path, body=b"", headers=TOKEN):
        connection = tls.connection_to("127.0.0.1", self.port, self.certificate, 20, "secret")
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # a refused body is not read
                connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


class TlsSocket(Socket):
    """Requests to a server that uses TLS."""

    def __init__(self, app, served):
        served.app = app
        self.port, self.certificate = served.tls_port, served.certificate


@pytest.fixture
def coordinator():
    return begun(coordinator_of("asynchronous", workers=2, metrics=1))


@pytest.fixture
def traffic():
    return Traffic()


@pytest.fixture
def app(coordinator, traffic):
    return make_app(coordinator, "secret", traffic)


class Served:
    """One server for all tests, and one with TLS. Each test sets its own app."""

    app = None

    def __call__(self, environ, start_response):
        return self.app(environ, start_response)


@pytest.fixture(scope="module")
def served():
    served = Served()
    context, served.certificate = tls.server_context()
    with (
        serve(served, "127.0.0.1", 0, 2) as served.port,
        serve(served, "127.0.0.1", 0, 2, context) as served.tls_port,
    ):
        yield served


@pytest.fixture(params=[FlaskClient, Socket, TlsSocket], ids=["flask", "socket", "tls"])
def endpoint(request, app, served):
    return request.param(app, served)


@pytest.fixture
def port(app, served):
    served.app = app
    return served.port


def message(update):
    return messages.encode_update(update) + b"".join(messages.sections(update))


def joining(**changes):
    return json.dumps({**WHO, "host": "h", "pid": 1, **changes}).encode()


# -- replies --------------------------------------------------------------------------------------


def test_a_ping_says_that_the_token_is_right(endpoint):
    """A ping with a valid token is answered with 204."""
    assert (204, b"") == endpoint.request("GET", "/v1/ping")[::2]


def test_an_update_is_answered_by_a_reply(endpoint, coordinator, traffic):
    """A reply has the header and sections it announces, and its bytes are counted in both directions."""
    body = message(update_of(coordinator, 0, np.ones(5)))
    status, _, answer = endpoint.request("POST", "/v1/exchange", body)
    reply = messages.fill(
        *messages.decode_reply(answer[: messages.REPLY.size]), answer[messages.REPLY.size :]
    )

    assert 200 == status
    assert (Answer.CENTER, [1.0] * 5) == (reply.kind, reply.parameters.tolist())
    assert (len(body), len(answer)) == traffic.of_worker(0)


def test_a_worker_joins_and_is_told_where_to_begin(endpoint, coordinator):
    """A worker that joins learns the rows of all workers once they are ready."""
    coordinator.restart()
    for worker in (0, 1):
        assert 200 == endpoint.request("POST", "/v1/join", joining(worker=worker, generation=2))[0]
    coordinator.members[1].held = RowsHeld(10)
    ready = {"generation": 2, "rows": 10, "validation_rows": 0, "notes": {}, "fingerprint": [0, 0]}
    status, _, body = endpoint.request("POST", "/v1/ready", json.dumps(WHO | ready).encode())

    assert (200, [10, 10]) == (status, json.loads(body)["rows"])


LOGGED = {"name": "n", "level": 20, "message": "hello"}


def beat(*log, **fields):
    """Return the body of a heartbeat of worker 0."""
    return json.dumps(
        {
            **WHO,
            "epoch": 1,
            "rows": 7,
            "retries": 0,
            "log": log,
            "running": [],
            "seconds": [],
            "intervals": [],
            "ahead": 0.0,
            **fields,
        }
    ).encode()


def test_a_heartbeat_is_noted(endpoint, coordinator):
    """A heartbeat records a worker's progress and its log entries."""
    status, _, body = endpoint.request("POST", "/v1/heartbeat", beat(LOGGED))

    assert (200, False) == (status, json.loads(body)["stop"])
    assert (1, 7) == (coordinator.members[0].epoch, coordinator.members[0].seen_rows)
    assert [LOGGED | {"message": "worker 0: hello"}] == coordinator.take_log()


def test_times_of_a_worker_are_noted(endpoint, coordinator):
    """A heartbeat records a worker's seconds by activity, and traced intervals on the driver's clock."""
    endpoint.request(
        "POST",
        "/v1/heartbeat",
        beat(seconds=[1.0, 2.0, 0.5, 0.25, 0.0], intervals=[[1, 3.5, 0.5]], ahead=1.0),
    )

    assert [1.0, 2.0, 0.5, 0.25, 0.0] == coordinator.members[0].seconds
    assert [(0, ("compute", 4.5, 0.5))] == coordinator.intervals


def test_metric_states_of_the_epoch_under_way_and_of_the_one_before_are_kept(endpoint, coordinator):
    """Heartbeats keep the newest metric states of the current epoch and of the one before."""
    for running in ([0, 3, "YQ=="], [0, 5, "Yg=="], [], [1, 2, "Yw=="]):
        endpoint.request("POST", "/v1/heartbeat", beat(running=running))

    assert [(0, 5, b"b"), (1, 2, b"c")] == coordinator.members[0].running


def test_what_was_sent_again_is_counted_once(endpoint, coordinator):
    """Repeated or late heartbeats count no retry twice, and a new attempt begins at zero."""
    for retries in (2, 2, 5, 2):
        endpoint.request("POST", "/v1/heartbeat", beat(retries=retries))
    coordinator.restart()
    begun(coordinator)
    endpoint.request("POST", "/v1/heartbeat", beat(retries=1, generation=2))

    assert 6 == json.loads(endpoint.request("GET", "/v1/status")[2])["retries"]


FAILURE = WHO | {"worker": 1, "host": "h", "message": "broken", "traceback": "line 1"}


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("worker", WorkerError, f"broken (worker 1 on h). {ADVICE}"),
        ("data", DataError, "broken"),
        ("lost", WorkerLostError, "broken"),
    ],
)
def test_a_failure_reaches_the_driver_as_its_error(endpoint, coordinator, kind, error, text):
    """A failure of data or of a lost worker reaches the driver as such, any other one as a WorkerError."""
    endpoint.request("POST", "/v1/failure", json.dumps({"kind": kind, **FAILURE}).encode())

    assert (error, text) == (type(coordinator.failure), str(coordinator.failure))


def test_a_failure_of_an_attempt_that_was_superseded_ends_nothing(endpoint, coordinator):
    """A failure of a superseded attempt is refused and does not end the run."""
    body = {"kind": "worker", **FAILURE, "attempt": 0}
    status, *_ = endpoint.request("POST", "/v1/failure", json.dumps(body).encode())

    assert (409, None) == (status, coordinator.failure)


NOW = r"\d+ MiB"  # current memory of the process
BREAKS = [
    OSError(errno.ENOSPC, "No space left on device"),
    TimeoutError(errno.ETIMEDOUT, "Connection timed out"),  # of a file on a network file system
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    MemoryError("too much"),
    KeyError("a defect"),
]
BREAKING = {
    "join": ("/v1/join", joining()),
    "heartbeat": (
        "/v1/heartbeat",
        beat(),
    ),
    "_push": ("/v1/exchange", None),
}


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", BREAKING)
def test_whatever_the_endpoint_raises_fails_the_run_by_name(
    endpoint, coordinator, where, error, capfd, monkeypatch
):
    """An error of the endpoint fails the run with its cause, and nothing is printed."""
    path, body = BREAKING[where]
    monkeypatch.setattr(coordinator, where, mock.Mock(side_effect=error))
    status, *_ = endpoint.request("POST", path, body or message(update_of(coordinator, 0, np.ones(5))))

    assert status == 500
    assert isinstance(coordinator.failure, ClusterError)
    expected = f"The parameter endpoint failed: {re.sub(NOW, '', reason_of(error))}"
    assert re.sub(NOW, "", str(coordinator.failure)).startswith(expected)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ETIMEDOUT])
def test_what_the_endpoint_raises_later_in_a_stream_fails_the_run_too(port, coordinator, monkeypatch, number):
    """An error of the endpoint later in a stream, when it has no HTTP status, fails the run too."""
    exchange = HttpExchange(
        Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b""), 0, 1, 1, LAYOUT
    )
    with closing(exchange):
        exchange(update_of(coordinator, 0, np.ones(5)))
        monkeypatch.setattr(coordinator, "_push", mock.Mock(side_effect=OSError(number, "the reason")))
        with pytest.raises(RefusedError, match="the reason"):
            exchange(update_of(coordinator, 0, np.ones(5), sequence=1))

    assert "the reason" in str(coordinator.failure)


@pytest.mark.parametrize(
    "error", [OSError(113, "no way"), TimeoutError("timed out"), ConnectionError("gone")]
)
def test_a_socket_that_breaks_is_no_failure_of_the_endpoint(coordinator, error):
    """A broken or silent socket does not fail the run."""
    stream = mock.Mock()
    stream.read.return_value = messages.encode_update(update_of(coordinator, 0, np.ones(5)))
    stream.readinto.side_effect = error

    with pytest.raises(ArrivalError):
        next(http_app._replies(coordinator, Traffic(), stream))

    assert coordinator.failure is None


def test_a_server_that_has_ended_is_kept_by_nobody(coordinator):
    """A server that has ended is collected, although cheroot keeps the statistics of its servers."""
    coordinator = begun(coordinator_of("asynchronous", workers=2))
    gone = weakref.ref(coordinator)
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2):
        pass
    del coordinator
    gc.collect()

    assert gone() is None


def test_a_server_that_has_ended_lets_go_of_its_coordinator_at_once():
    """A server that has ended releases its coordinator without the garbage collector."""
    coordinator = begun(coordinator_of("asynchronous", workers=2))
    gone = weakref.ref(coordinator)
    gc.disable()
    try:
        with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2) as port:
            endpoint = Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b"")
            with closing(HttpExchange(endpoint, 0, 1, 1, LAYOUT)) as exchange:
                exchange(update_of(coordinator, 0, np.ones(5)))
        del coordinator
        assert gone() is None
    finally:
        gc.enable()


def test_the_counters_can_be_read(endpoint, coordinator):
    """The status has the generation, version, workers, exchanges and bytes."""
    update = message(update_of(coordinator, 0, np.ones(5)))
    for _ in range(2):
        endpoint.request("POST", "/v1/exchange", update)
    status = json.loads(endpoint.request("GET", "/v1/status")[2])

    assert {
        "generation": 1,
        "version": 1,
        "workers": 2,
        "exchanges": 1,
        "duplicates": 1,
    }.items() <= status.items()
    assert 2 * len(update) == status["bytes_received"]


# -- refusals -------------------------------------------------------------------------------------

UPDATES = {
    "another run": ({"run": b"x" * 16}, 409),
    "an old generation": ({"generation": 0}, 409),
    "an old attempt": ({"attempt": 0}, 409),
    "another layout": ({"layout": b"x" * 16}, 422),
    "too many weights": ({"parameters": np.ones(6, np.float32)}, 413),
    "metrics where none belong": ({"metrics": b"m"}, 413),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_that_is_not_this_runs_is_refused(endpoint, coordinator, name):
    """An update that does not fit the run is refused by its header and changes nothing."""
    fields, status = UPDATES[name]
    before = state_of(coordinator)
    answer = endpoint.request(
        "POST", "/v1/exchange", message(replace(update_of(coordinator, 0, np.ones(5)), **fields))
    )

    assert (status, "close") == (answer[0], answer[1]["Connection"])
    assert json.loads(answer[2])["error"].endswith(".")
    assert before == state_of(coordinator)


REQUESTS = {
    "half a header": ("POST", "/v1/exchange", b"SDLU" + bytes(60), 400),
    "noise": ("POST", "/v1/exchange", bytes(200), 400),
    "no JSON": ("POST", "/v1/join", b"{", 400),
    "no object": ("POST", "/v1/join", b"[1]", 400),
    "a field too few": ("POST", "/v1/join", b'{"worker": 0}', 400),
    "a field too many": ("POST", "/v1/join", joining(colour="red"), 400),
    "a field of another type": ("POST", "/v1/join", joining(pid="1"), 400),
    "a truth for a number": ("POST", "/v1/join", joining(pid=True), 400),
    "a worker that there is not": ("POST", "/v1/join", joining(worker=9), 400),
    "a log of something else": ("POST", "/v1/heartbeat", beat(1), 400),
    "a log without a name": ("POST", "/v1/heartbeat", beat({"level": 20, "message": "m"}), 400),
    "metric states of another model": ("POST", "/v1/heartbeat", beat(running=[0, 5, "bWV0cg=="]), 413),
    "seconds of something else": ("POST", "/v1/heartbeat", beat(seconds=[1.0, 2.0]), 400),
    "a clock that is no number": ("POST", "/v1/heartbeat", beat(ahead=float("nan")), 400),
    "an interval of no activity": ("POST", "/v1/heartbeat", beat(intervals=[[9, 0.0, 1.0]]), 400),
    "an interval without a start": ("POST", "/v1/heartbeat", beat(intervals=[[1, None, 1.0]]), 400),
    "metric states in no base64": ("POST", "/v1/heartbeat", beat(running=[0, 5, "m"]), 400),
    "metric states of no epoch": ("POST", "/v1/heartbeat", beat(running=["0", 5, "bQ=="]), 400),
    "a log of no level": ("POST", "/v1/heartbeat", beat(LOGGED | {"level": "high"}), 400),
    "JSON in JSON in JSON": ("POST", "/v1/join", b"[" * 100_000, 400),
    "a long JSON": ("POST", "/v1/join", b" " * (http_app.JSON_BYTES + 1), 413),
    "no path": ("GET", "/v2/ping", b"", 404),
    "rows of an endpoint without rows": ("GET", "/v1/rows/0/0", b"", 404),
    "no method": ("GET", "/v1/exchange", b"", 405),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_malformed_request_is_refused(endpoint, coordinator, name):
    """A malformed request is refused with a JSON error and changes nothing."""
    *request, status = REQUESTS[name]
    before = state_of(coordinator)
    answer = endpoint.request(*request)

    assert (status, "close") == (answer[0], answer[1]["Connection"])
    assert ["error"] == list(json.loads(answer[2]))
    assert before == state_of(coordinator)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer sécret"}],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/ping"),
        ("GET", "/v1/status"),
        ("GET", "/v1/rows/0/0"),
        ("POST", "/v1/join"),
        ("POST", "/v1/ready"),
        ("POST", "/v1/exchange"),
        ("POST", "/v1/heartbeat"),
        ("POST", "/v1/failure"),
        ("GET", "/nothing"),
    ],
)
def test_without_the_token_nothing_is_told(endpoint, coordinator, method, path, headers):
    """A request without a valid token is answered with 401, whatever its path."""
    before = state_of(coordinator)
    headers = (
        {name: value.encode() for name, value in headers.items()} if isinstance(endpoint, Socket) else headers
    )
    answer = endpoint.request(method, path, b"x", headers)

    assert (401, "close") == (answer[0], answer[1]["Connection"])
    assert before == state_of(coordinator)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("drive", b"{}", {}, 401),
        ("replace/0", b"12345678", {}, 401),
        ("leave", b'{"worker": 1}', {}, 401),
        ("evaluate/0", b"12345678", {}, 401),
        ("evaluate/0", b"1234567", TOKEN, 413),
        ("drive", b'{"epoch": 1, "released": 0, "learning_rate": 1, "stop": false}', TOKEN, 400),
        ("replace/0", b"1234567", TOKEN, 413),
        ("leave", b'{"worker": "1", "generation": 1, "attempt": 1}', TOKEN, 400),
        ("leave", b'{"worker": 1}', TOKEN, 400),
    ],
)
def test_a_steward_is_asked_for_nothing_that_is_not_the_clients(app, path, body, headers, status):
    """The paths of a hosted run require the token and a body of the right size and types."""
    add_hosted_driver(app, SimpleNamespace(weight_bytes=8, leave=None))

    assert status == FlaskClient(app, None).request("POST", f"/v1/{path}", body, headers)[0]


def test_weights_that_broke_off_are_not_taken(app, port):
    """A body of weights that breaks off half-way is refused."""
    taken = []
    add_hosted_driver(
        app, SimpleNamespace(weight_bytes=8, replace=lambda epoch, weights: taken.append(weights))
    )
    lines = "POST /v1/replace/0 HTTP/1.1", "Authorization: Bearer secret", "Content-Length: 8"
    with talk(port, *lines) as (sock, stream):
        sock.sendall(b"1234")
        sock.shutdown(socket.SHUT_WR)
        answer = stream.read()

    assert (b"HTTP/1.1 400", []) == (answer[:12], taken)


def test_requests_that_are_refused_are_counted(endpoint, coordinator):
    """Refused requests are counted if the token, the path, the body or the run is wrong."""
    other = message(replace(update_of(coordinator, 0, np.ones(5)), run=b"x" * 16))
    endpoint.request("GET", "/v1/ping", headers={})
    endpoint.request("GET", "/v2/ping")
    endpoint.request("POST", "/v1/join", b"{")
    endpoint.request("POST", "/v1/exchange", other)
    endpoint.request("POST", "/v1/exchange", message(update_of(coordinator, 0, np.ones(5))))
    status = json.loads(endpoint.request("GET", "/v1/status")[2])

    assert (4, 1, 1) == (status["refused_requests"], status["refused"], status["exchanges"])


@contextmanager
def talk(port, *lines):
    """Send the head of a request; yield the socket and the stream of its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall("\r\n".join([*lines, "Host: h", "", ""]).encode())
        with sock.makefile("rb") as stream:
            yield sock, stream


def test_a_request_with_json_has_to_say_how_long_it_is(port):
    """A JSON request without a length, such as a chunked one, is refused with 411."""
    lines = "POST /v1/join HTTP/1.1", "Authorization: Bearer secret", "Transfer-Encoding: chunked"
    with talk(port, *lines) as (_, stream):
        assert b"HTTP/1.1 411" == stream.readline()[:12]


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [("wrong", "/v1/exchange", b"401"), ("wrong", "/v1/join", b"401"), ("secret", "/v1/join", b"413")],
)
def test_a_body_that_is_refused_is_not_read(port, token, path, status):
    """A refused request is answered, and its connection closed, before its body is read."""
    lines = f"POST {path} HTTP/1.1", f"Authorization: Bearer {token}", f"Content-Length: {10**10}"
    with talk(port, *lines) as (_, stream):
        answer = stream.read()

    assert b"HTTP/1.1 " + status == answer[:12]


def test_the_sections_of_an_update_that_is_refused_are_not_read(port, coordinator):
    """An update that its header rules out is refused before its sections are read."""
    update = replace(update_of(coordinator, 0, np.ones(5)), run=b"x" * 16)
    lines = "POST /v1/exchange HTTP/1.1", "Authorization: Bearer secret", f"Content-Length: {10**10}"
    with talk(port, *lines) as (sock, stream):
        sock.sendall(messages.encode_update(update))
        answer = stream.read()

    assert b"HTTP/1.1 409" == answer[:12]


@pytest.mark.parametrize("length", ["-1", "+1", "1_0", "9" * 30, "x"])
def test_a_length_that_is_none_is_refused(port, length):
    """An invalid Content-Length is refused; a negative one would be read without limit."""
    lines = "POST /v1/exchange HTTP/1.1", "Authorization: Bearer secret", f"Content-Length: {length}"
    with talk(port, *lines) as (_, stream):
        assert b"HTTP/1.1 400" == stream.readline()[:12]


@pytest.mark.parametrize(
    "lines",
    [
        ["GET /v1/ping HTTP/0.9"],
        ["GET /v1/ping HTTP/2.0"],
        ["POST /v1/exchange HTTP/1.1", "Transfer-Encoding: gzip"],
        ["POST /v1/exchange HTTP/1.1", "Transfer-Encoding: gzip, chunked"],
    ],
)
def test_another_version_or_encoding_is_refused(port, lines):
    """An unsupported HTTP version or encoding is a mistake of the client: 400."""
    with talk(port, *lines, "Authorization: Bearer secret") as (_, stream):
        answer = stream.read()

    assert b"HTTP/1.1 400" == answer[:12]


@pytest.mark.parametrize("path", ["//[", "//[]", "//[x]/v1/ping"])
def test_a_path_that_looks_like_a_host_is_refused(port, path):
    """A path that starts like a host but is not a valid one is refused."""
    with talk(port, f"GET {path} HTTP/1.1", "Authorization: Bearer secret") as (_, stream):
        assert b"HTTP/1.1 400" == stream.readline()[:12]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/../..", 404),
        ("/v1/../../etc/passwd", 404),
        ("/v1/ping/../status", 404),
        ("/v1/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/v1/..%2f..%2fetc/passwd", 404),
        ("/v1//status", 404),
        ("/v1\\..\\..\\etc\\passwd", 404),
        ("/v1/..%5c..%5cetc%5cpasswd", 404),
        ("/static/x", 404),
        ("..\\..\\etc\\passwd", 400),
        ("../../etc/passwd", 400),
        ("//h/v1/status", 400),
        ("http://h/v1/status", 400),
        ("https://h/../etc/passwd", 400),
        ("file:///etc/passwd", 400),
    ],
)
def test_a_path_leads_nowhere_else(port, path, status):
    """A path that leaves the endpoint or reaches one of its paths indirectly is refused."""
    for token, expected in (("secret", status), ("wrong", min(status, 401))):
        with talk(port, f"GET {path} HTTP/1.1", f"Authorization: Bearer {token}") as (_, stream):
            assert b"HTTP/1.1 %d" % expected == stream.readline()[:12]


def test_a_head_that_begins_with_a_continuation_is_refused(port):
    """A request whose headers begin with a continuation line is refused."""
    with talk(port, "GET /v1/ping HTTP/1.1", " secret") as (_, stream):
        assert b"HTTP/1.1 400" == stream.readline()[:12]


def test_a_body_that_nobody_asked_for_is_not_read(port):
    """The body of a request that should have none is not read, and the connection is closed."""
    lines = "GET /v1/ping HTTP/1.1", "Authorization: Bearer secret", f"Content-Length: {10**10}"
    with talk(port, *lines) as (_, stream):
        answer = stream.read()

    assert b"HTTP/1.1 204" == answer[:12]


@pytest.mark.parametrize("path", ["/v1/join", "/v1/exchange"])
def test_a_compressed_body_is_not_unpacked(endpoint, coordinator, path):
    """A compressed body is not decompressed, so that a small one cannot fill the memory."""
    valid = joining() if path == "/v1/join" else message(update_of(coordinator, 0, np.ones(5)))
    bomb = gzip.compress(valid + b" " * (64 << 20), 1)
    before = state_of(coordinator)
    tracemalloc.start()
    try:
        answer = endpoint.request("POST", path, bomb, TOKEN | {"Content-Encoding": "gzip"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 400 == answer[0]
    assert peak < 8 << 20
    assert before == state_of(coordinator)


STREAM = "POST /v1/exchange HTTP/1.1", "Authorization: Bearer secret", "Transfer-Encoding: chunked"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_updates_follow_each_other_in_one_request(port, coordinator):
    """Each update of a stream is answered before the next one arrives."""
    with talk(port, *STREAM) as (sock, _), closing(http.client.HTTPResponse(sock)) as answer:
        for sequence in range(3):
            sock.sendall(chunk(message(update_of(coordinator, 0, np.ones(5), sequence=sequence))))
            if not sequence:
                answer.begin()
            reply, lengths = messages.decode_reply(answer.read(messages.REPLY.size))
            assert (sequence + 1, 20) == (reply.version, len(answer.read(lengths.nbytes)))
        sock.sendall(b"0\r\n\r\n")
        assert b"" == answer.read()


@pytest.mark.parametrize(
    "sent",
    [b"x\r\n", b"-1\r\n", b"\r\n", b"4\r\n1234xx", b"f" * 20 + b"\r\n", b"1" * 1000, b"7fffffffffff\r\n1"],
)
def test_what_is_not_in_chunks_is_refused(port, coordinator, sent):
    """A body with malformed chunks is refused, and no memory is allocated for an announced length."""
    before = state_of(coordinator)
    with talk(port, *STREAM) as (sock, stream):
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        answer = stream.read()

    assert b"HTTP/1.1 400" == answer[:12]
    assert before == state_of(coordinator)


def test_an_update_may_come_in_any_chunks(port, coordinator):
    """An update may be split into chunks anywhere."""
    body = message(update_of(coordinator, 0, np.ones(5)))
    with talk(port, *STREAM) as (sock, _), closing(http.client.HTTPResponse(sock)) as answer:
        for start in range(0, len(body), 50):
            sock.sendall(chunk(body[start : start + 50]))
        sock.sendall(b"0;the=end\r\n\r\n")
        answer.begin()
        assert (200, messages.REPLY.size + 20) == (answer.status, len(answer.read()))


@pytest.mark.parametrize("bad", [b"more", bytes(200), "old"])
def test_a_stream_ends_where_an_update_is_refused(port, coordinator, traffic, bad):
    """A refused update ends the stream, but the replies before it count."""
    old = message(update_of(coordinator, 0, np.ones(5), sequence=1, generation=0))
    with talk(port, *STREAM) as (sock, stream):
        sock.sendall(chunk(message(update_of(coordinator, 0, np.ones(5)))))
        sock.sendall(chunk(old if bad == "old" else bad) + b"0\r\n\r\n")
        answer = stream.read()

    assert b"HTTP/1.1 200" == answer[:12]
    assert not answer.endswith(b"0\r\n\r\n")
    assert (1, bad == "old") == (coordinator.aggregation.version, traffic.refused)


@pytest.mark.parametrize("end", [2, 40, -30, -2, "no chunk"])
def test_a_stream_that_breaks_off_changes_nothing(port, coordinator, caplog, end):
    """A stream that breaks off anywhere changes nothing and logs nothing."""
    update = chunk(message(update_of(coordinator, 0, np.ones(5))))
    before = state_of(coordinator)
    with talk(port, *STREAM) as (sock, stream):
        sock.sendall(b"zz\r\n" if end == "no chunk" else update[:end])
        sock.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 400" == stream.read(12)

    assert before == state_of(coordinator)
    assert [] == caplog.records


def test_a_connection_that_is_reset_in_a_body_is_nobodys_mistake(app, coordinator, caplog):
    """A connection that is reset within a body changes nothing and logs nothing."""
    before = state_of(coordinator)
    with serve(app, "127.0.0.1", 0, 2) as port:
        lines = "POST /v1/exchange HTTP/1.1", "Authorization: Bearer secret", "Content-Length: 1000"
        with talk(port, *lines) as (sock, _):
            sock.sendall(message(update_of(coordinator, 0, np.ones(5)))[:-1])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    assert before == state_of(coordinator)
    assert [] == caplog.records


def test_a_connection_is_kept_for_the_next_request(port):
    """A connection stays open for the next request."""
    lines = "GET /v1/ping HTTP/1.1", "Authorization: Bearer secret"
    with talk(port, *lines) as (sock, stream):
        for _ in range(3):
            assert b"204" == stream.readline().split()[1]
            while stream.readline() != b"\r\n":
                pass
            sock.sendall("\r\n".join([*lines, "Host: h", "", ""]).encode())


def test_however_many_connections_wait_all_are_kept(port):
    """The server keeps all idle connections open, however many there are."""
    with ExitStack() as stack:
        for _ in range(30):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            stack.callback(connection.close)
            connection.request("GET", "/v1/ping", headers=TOKEN)
            answer = connection.getresponse()
            answer.read()
            assert (204, None) == (answer.status, answer.headers["Connection"])


def test_a_connection_that_cannot_be_kept_does_not_end_the_server(app, monkeypatch):
    """If a connection cannot be kept for the next request, only that connection is closed."""
    put, failures = connections.PendingConnections.put, [OSError(errno.ENOMEM, "Cannot allocate memory")]
    failed = threading.Event()

    def fail_once(kept, connection):
        if failures and isinstance(threading.current_thread(), cheroot.workers.threadpool.WorkerThread):
            failed.set()
            raise failures.pop()
        put(kept, connection)

    monkeypatch.setattr(connections.PendingConnections, "put", fail_once)
    statuses = []
    with serve(app, "127.0.0.1", 0, 2) as port:
        for _ in range(2):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/v1/ping", headers=TOKEN)
                statuses.append(connection.getresponse().status)
                assert failed.wait(5)

    assert [204, 204] == statuses


def test_a_mistake_in_the_house_closes_the_connection(app, coordinator, port, monkeypatch, caplog):
    """An internal error closes the connection, because an unread body may be left in its socket."""
    monkeypatch.setattr(coordinator, "exchange", lambda update, read: 1 / 0)
    body = message(update_of(coordinator, 0, np.ones(5)))
    lines = "POST /v1/exchange HTTP/1.1", "Authorization: Bearer secret", f"Content-Length: {len(body)}"
    with caplog.at_level(logging.CRITICAL), talk(port, *lines) as (sock, stream):
        sock.sendall(body)
        answer = stream.read()

    assert b"HTTP/1.1 500" == answer[:12]


@pytest.mark.parametrize("times", [1, 3])
def test_what_fails_before_the_app_is_asked_is_sent_again(coordinator, port, monkeypatch, times):
    """A request that fails before it reaches the app is retried, and the run continues."""
    failing, read = itertools.count(), http_server._Request.read_request_headers

    def read_headers(request):
        if next(failing) < times:
            raise MemoryError("too much")
        return read(request)

    monkeypatch.setattr(http_server._Request, "read_request_headers", read_headers)
    exchange = HttpExchange(
        Endpoint("127.0.0.1", port, "secret", coordinator.shape.run, b""), 0, 1, 1, LAYOUT
    )
    with closing(exchange):
        assert [1.0] * 5 == exchange(update_of(coordinator, 0, np.ones(5))).parameters.tolist()

    assert times == exchange.retried
    assert coordinator.failure is None


def test_a_port_is_searched_in_a_range(app):
    """The first free port of a range is used; if none is free, the error lists the ports tried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with serve(app, "127.0.0.1", range(number, number + 20), 1) as port:
            assert number < port < number + 20
        with pytest.raises(ClusterError, match=f"tried port {number}: "), serve(app, "127.0.0.1", number, 1):
            pass


def test_an_address_of_another_machine_is_refused(app):
    """Binding to an address of another machine fails with an error that names the setting."""
    with (
        pytest.raises(ClusterError, match="bind_address= to an address of this machine"),
        serve(app, "192.0.2.1", 0, 1),
    ):
        pass


def test_a_server_that_stops_leaves_its_port_free(app):
    """A server that has stopped leaves its port free."""
    with serve(app, "127.0.0.1", 0, 1) as port:
        pass
    with serve(app, "127.0.0.1", port, 1) as again:
        assert port == again


FAILING_STARTS = """
import itertools
import threading
from unittest import mock

from leaks import leaked_threads, listening

from sparkdl.errors import ClusterError
from sparkdl.server.http_server import serve

before, start = threading.enumerate(), threading.Thread.start


def attempt(number):
    calls = itertools.count(1)

    def failing(thread):
        if next(calls) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch("threading.Thread.start", failing):
        with serve(None, "127.0.0.1", range(20000, 30000), 1):
            return "started"


for number in itertools.count(1):
    try:
        result = attempt(number)
    except ClusterError as error:
        result = str(error)
    print(leaked_threads(before, 0.5), listening(), result, flush=True)
    if result == "started":
        break
"""


def test_a_start_that_runs_out_of_threads_leaves_nothing_behind():
    """A start that fails for lack of threads leaves no thread and no port behind."""
    run = subprocess.run(
        [sys.executable, "-c", FAILING_STARTS],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "."])},
    )
    assert "" == run.stderr
    *failed, started = run.stdout.splitlines()

    assert started == "[] set() started"
    assert 7 == len(failed)  # six threads for requests, one for connections
    for line in failed:
        assert line.startswith("[] set() The endpoint cannot start on 127.0.0.1: ")
        assert "can't start new thread" in line


@pytest.mark.parametrize("where", ["PendingConnections", "socket.socket"])
def test_a_start_that_runs_out_of_files_is_no_busy_port(app, where, monkeypatch):
    """A start that fails for lack of files reports the cause, and tries no other port."""
    full = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    ports = listening()
    monkeypatch.setattr(f"sparkdl.server.http_server.{where}", full)
    with (
        pytest.raises(ClusterError, match="cannot start on 127.0.0.1: .*Too many open files"),
        serve(app, "127.0.0.1", range(20000, 30000), 1),
    ):
        pass
    monkeypatch.undo()

    assert 1 == full.call_count
    assert ports == listening()


@pytest.mark.parametrize("tls_too", [False, True])
def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tls_too, monkeypatch):
    """A client that vanished during a reply does not delay the end of the server."""
    monkeypatch.setattr(http_server, "STOP_SECONDS", 0.1)
    context, certificate = tls.server_context() if tls_too else (None, b"")
    sending, leave = threading.Event(), threading.Event()

    def app(environ, start_response):
        start_response("200 OK", [("Content-Length", str(1 << 28))])
        sending.set()
        return [bytes(1 << 28)]  # more than the buffers of the sockets hold

    def run():
        with serve(app, "127.0.0.1", 0, 1, context) as ports[0]:
            ready.set()
            leave.wait()

    ports, ready = [0], threading.Event()
    serving = threading.Thread(target=run)
    serving.start()
    ready.wait()
    client = tls.connection_to("127.0.0.1", ports[0], certificate, 20, "secret")
    with closing(client):
        client.request("GET", "/", headers=TOKEN)
        sending.wait()
        leave.set()
        serving.join(20)
        assert not serving.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a listening socket that can be shut down")
def test_the_end_waits_for_no_check_of_connections(monkeypatch):
    """A server ends at once, however rarely it checks its connections."""
    monkeypatch.setattr(http_server, "CHECK_SECONDS", 3600)

    def run():
        with serve(lambda environ, start_response: [], "127.0.0.1", 0, 1) as port:
            socket.create_connection(("127.0.0.1", port)).close()

    serving = threading.Thread(target=run, daemon=True)
    serving.start()
    serving.join(20)

    assert not serving.is_alive()


def test_a_header_that_lives_until_it_is_answered_keeps_no_body():
    """The header of an update that waits keeps no body in memory."""
    update = Update(Kind.DELTA)
    filled = Arrival(update, Sections(2, 0, 0, 0), io.BytesIO(bytes(8)), BufferPool())()

    assert (2, 0) == (len(filled.parameters), len(update.parameters))


# Internals of cheroot that sparkdl/server/http_server.py and sparkdl/transport/connections.py replace or rely
# on. cheroot has no public API for this.
INTERNALS = {
    cheroot.server.HTTPRequest: (
        "read_request_line",
        "read_request_headers",
        "simple_response",
        "send_headers",
        "write",
        "ensure_headers_sent",
    ),
    cheroot.server.HTTPConnection: ("RequestHandlerClass", "communicate", "close"),
    cheroot.server.HTTPServer: (
        "ConnectionClass",
        "bind_socket",
        "clear_stats",
        "interrupt",
        "keep_alive_conn_limit",
        "max_request_header_size",
        "prepare",
        "process_conn",
        "serve",
        "expiration_interval",
        "shutdown_timeout",
    ),
    cheroot.workers.threadpool.ThreadPool: ("stop",),
    cheroot.workers.threadpool.WorkerThread: ("conn", "server"),
    cheroot.wsgi.Gateway_10: ("respond", "start_response"),
    cheroot.connections.ConnectionManager: (
        "_expire",
        "_from_server_socket",
        "_remove_invalid_sockets",
        "_run",
        "close",
        "put",
        "run",
        "stop",
    ),
}


def test_cheroot_has_what_we_replace_of_it():
    """The installed cheroot has the internals that the server replaces; setup.cfg bounds its version."""
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in INTERNALS.items()
        for name in names
        if not hasattr(kind, name)
    ]
    made = cheroot.wsgi.Server(("127.0.0.1", 0), None)
    made.prepare()
    threads = list(made.requests._threads)
    made.stop()

    assert [] == missing
    assert hasattr(cheroot.workers.threadpool, "_SHUTDOWNREQUEST")
    assert hasattr(made.requests, "_queue")
    assert (10, {made}) == (len(threads), {thread.server for thread in threads})
    assert not any(thread.is_alive() for thread in threads)
    assert {"_selector", "_stop_requested"} <= vars(made._connections).keys()
    assert logging.statistics.pop(f"Cheroot HTTPServer {id(made)}", None)

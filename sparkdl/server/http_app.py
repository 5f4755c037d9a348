"""The coordinator over HTTP: a Flask app, which ``http_server`` serves.

These paths require the run's token (``Authorization: Bearer``); ``/metrics`` also takes a token of its own:

* ``GET  /v1/ping``       204: a worker can reach the endpoint and its token is valid;
* ``POST /v1/join``       JSON: a worker's attempt joins; 202: an older one is active, ask again;
* ``POST /v1/ready``      JSON: the worker's rows; 200 with its starting point, 202: ask again;
* ``POST /v1/exchange``   binary (``transport.messages``): updates, each answered before the next is read;
* ``POST /v1/heartbeat``  JSON: a worker's progress and log entries;
* ``POST /v1/failure``    JSON: the failure of a task;
* ``GET  /v1/rows/T/N``   binary: block N of the rows of task T, if the driver holds them as arrays;
* ``GET  /v1/status``     JSON: counters;
* ``GET  /metrics``       text: counts and gauges for Prometheus (``server.monitoring.metrics``).

The live page (``server.monitoring.page``) has its own paths, which require a session instead of the token.

If the endpoint is in worker 0 (``worker.hosted_server``), the process that called ``fit`` (the client) and
the other workers also use:

* ``POST /v1/drive``      JSON: the client's commands; the reply is the packed state of the run;
* ``POST /v1/replace/N``  binary: weights that the client set when epoch N was the last one released;
* ``POST /v1/evaluate/N`` binary: weights to evaluate for epoch N; no body: those of its snapshot;
* ``POST /v1/leave``      JSON: a worker's attempt has ended.

Errors of the app are JSON, ``{"error": message}``, except the 401 of ``GET /``, which is HTML. The statuses
are: 400 malformed, 401 no valid token, 403 not from the live page, 404 unknown path or block, 405 wrong
method, 408 incomplete request (may be sent again), 409 does not fit the state of the run (such as an old
generation or attempt), 410 the run is over, 411 no length, 413 wrong size, 422 a different model, rows or
arrays, 500 the endpoint failed, 501 no metrics, 503 too many viewers. The token is checked before the body is
read, and the header of an update before its sections. The connection of a refused request is closed, so that
the rest of its body is never read. Request data is never unpickled, and no path is resolved on the disk.
"""

from __future__ import annotations

import base64
import errno
import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite
from typing import Any, Protocol
from wsgiref.types import InputStream

import flask
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException, InternalServerError

from sparkdl.core.waiting import waited_seconds
from sparkdl.data import array_blocks
from sparkdl.data.array_blocks import ArrayBlocks
from sparkdl.data.fingerprint import Fingerprint
from sparkdl.errors import (
    DataError,
    RefusedError,
    RuleError,
    SparkDLError,
    WireError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.process.reasons import reason_of
from sparkdl.server.aggregation import Aggregation, Read
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.server.http_server import App, has_token, json_body
from sparkdl.server.monitoring.metrics import exposition
from sparkdl.server.monitoring.page import PAGE, Page
from sparkdl.transport import messages, tls
from sparkdl.transport.arrivals import Arrival, ArrivalError, read, read_whole
from sparkdl.transport.messages import ACTIVITIES, Buffers, Flag, Interval, Reply, Running, Sections, Update

logger = logging.getLogger(__name__)
BINARY = "application/octet-stream"
JSON_BYTES = 1 << 20  # size limit of a JSON body


class Traffic:
    """Counts of the bytes of updates and replies, also by worker, and of refused requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.received: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self.refused = 0

    def count(self, worker: int, received: int, sent: int) -> None:
        """Count the bytes of a worker's update and of its reply."""
        with self._lock:
            self.received[worker] += received
            self.sent[worker] += sent

    def of_worker(self, worker: int) -> tuple[int, int]:
        """Return the bytes received from a worker and sent to it."""
        with self._lock:
            return self.received[worker], self.sent[worker]

    def refuse(self) -> None:
        """Count a request that is answered with an error, or that ends with a refused update."""
        with self._lock:
            self.refused += 1

    def summary(self) -> dict[str, int]:
        """Return the counts."""
        with self._lock:
            return {
                "bytes_received": self.received.total(),
                "bytes_sent": self.sent.total(),
                "refused_requests": self.refused,
            }


class Exchanges(Protocol):
    """A coordinator or a shard, as a stream of updates sees it."""

    @property
    def aggregation(self) -> Aggregation:
        """The aggregation of the updates."""

    def admit(self, update: Update, lengths: Sections) -> None:
        """Check an update by its header alone, before any of its sections are read."""

    def exchange(self, update: Update, read: Read) -> Reply:
        """Return the reply to an admitted update, whose sections ``read`` returns."""

    def sent(self, update: Update, *, delivered: bool = True) -> None:
        """Record the end of a reply, which was sent if ``delivered``."""


def make_app(
    coordinator: GroupCoordinator,
    token: str,
    traffic: Traffic,
    *,
    metrics_token: str = "",
    page: Page | None = None,
    rows: ArrayBlocks | None = None,
) -> App:
    """Return the Flask app over a coordinator.

    Args:
        coordinator: the coordinator.
        token: the run's token.
        traffic: the counts of the endpoint's bytes and refused requests.
        metrics_token: a token that permits ``GET /metrics`` only; empty: there is none.
        page: the live page of the run, which has its own sessions.
        rows: the rows that workers get from the endpoint; None: there are none.
    """
    app = _new_app(token, metrics_token, traffic, lambda error: coordinator.break_down(error))
    if page is not None:
        page.add_to(app)
    if rows is not None:
        add_rows(app, rows)
    _add_membership(app, coordinator)

    @app.post("/v1/exchange")
    def exchange() -> ResponseReturnValue:
        return _exchange(coordinator, traffic)

    @app.get("/v1/status")
    def status() -> ResponseReturnValue:
        return {
            "generation": coordinator.generation,
            "workers": len(coordinator.members),
            **traffic.summary(),
            **coordinator.summary(),
        }

    @app.get("/metrics")
    def metrics() -> ResponseReturnValue:
        return exposition(coordinator, traffic.summary())

    return app


def make_plain_app(token: str, add: Callable[[App], object]) -> App:
    """Return a Flask app without a coordinator, to which a function adds the paths."""
    app = _new_app(token, "", Traffic(), lambda error: None)
    add(app)
    return app


def make_shard_app(shard: Exchanges, token: str) -> App:
    """Return the Flask app over a worker's shard (``worker.shards``)."""
    traffic = Traffic()
    app = _new_app(token, "", traffic, lambda error: None)

    @app.post("/v1/exchange")
    def exchange() -> ResponseReturnValue:
        return _exchange(shard, traffic)

    return app


def _new_app(
    token: str, metrics_token: str, traffic: Traffic, break_down: Callable[[BaseException], object]
) -> App:
    """Return an app that checks tokens and answers ``/v1/ping``.

    Args:
        token: the token of all paths.
        metrics_token: a token of ``/metrics`` only; empty: there is none.
        traffic: counts the refused requests.
        break_down: called with the exception if a request under ``/v1/`` fails with status 500.
    """
    app = App()
    expected = [f"Bearer {each}".encode() for each in (token, metrics_token) if each]
    app.secrets.append(partial(has_token, expected))
    app.greeting = tls.greeting_of(token)

    @app.before_request
    def check_token() -> None:
        if flask.request.blueprint == PAGE:  # the page checks its sessions itself
            return
        given = flask.request.headers.get("Authorization", "").encode("utf-8", "replace")
        allowed = expected if flask.request.path == "/metrics" else expected[:1]
        if not any(hmac.compare_digest(given, each) for each in allowed):
            raise RefusedError(401, "The request does not carry the token of this run.")

    @app.get("/v1/ping")
    def ping() -> ResponseReturnValue:
        return "", 204

    _add_errors(app, traffic, break_down)
    return app


def add_rows(app: App, rows: ArrayBlocks) -> None:
    """Add the path of the rows."""

    @app.get("/v1/rows/<int:task>/<int:index>")
    def block(task: int, index: int) -> ResponseReturnValue:
        try:
            parts = array_blocks.encode(rows.block(task, index))
        except IndexError:
            raise RefusedError(404, f"Task {task} has no block {index}.") from None
        body: Any = (each for each in [parts])  # a list of buffers, which _Request.write sends
        length = str(sum(map(len, parts)))
        return flask.Response(
            body, headers={"Content-Length": length}, mimetype=BINARY, direct_passthrough=True
        )


def _add_errors(app: App, traffic: Traffic, break_down: Callable[[BaseException], object]) -> None:
    """Add the answers to requests that are refused or fail."""

    def refusal(status: int, message: str) -> ResponseReturnValue:
        if flask.request.blueprint != PAGE:  # viewers of the page are not workers
            traffic.refuse()
        return flask.jsonify(error=message), status, {"Connection": "close"}

    @app.errorhandler(RefusedError)
    def refused(error: RefusedError) -> ResponseReturnValue:
        return refusal(error.status, str(error))

    @app.errorhandler(WireError)
    def malformed(error: WireError) -> ResponseReturnValue:
        return refusal(400, str(error))

    @app.errorhandler(ArrivalError)
    def stalled(error: ArrivalError) -> ResponseReturnValue:
        return refusal(408, "The rest of the request did not arrive.")

    @app.errorhandler(404)
    @app.errorhandler(405)
    def unknown(error: HTTPException) -> ResponseReturnValue:
        return refusal(error.code or 404, "No such path or method.")

    @app.errorhandler(500)
    def broken(error: InternalServerError) -> ResponseReturnValue:
        cause = error.original_exception or error
        if flask.request.path.startswith("/v1/"):  # the page and the metrics only observe the run
            break_down(cause)
        return refusal(500, f"The endpoint failed: {reason_of(cause)}.")


def _add_membership(app: App, coordinator: GroupCoordinator) -> None:
    """Add the paths for joining, reports of rows, heartbeats and failures."""

    @app.post("/v1/join")
    def join() -> ResponseReturnValue:
        body = _json(worker=int, generation=int, attempt=int, host=str, pid=int)
        return {}, 200 if coordinator.join(**body) else 202

    @app.post("/v1/ready")
    def ready() -> ResponseReturnValue:
        body = _json(
            worker=int,
            generation=int,
            attempt=int,
            rows=int,
            validation_rows=int,
            notes=dict,
            fingerprint=list,
        )
        try:
            fingerprint = Fingerprint.of(body["fingerprint"])
        except ValueError as error:
            raise RefusedError(400, str(error)) from None
        answer = coordinator.ready(**body | {"fingerprint": fingerprint})
        return ({}, 202) if answer is None else answer

    @app.post("/v1/heartbeat")
    def heartbeat() -> ResponseReturnValue:
        body = _json(
            worker=int,
            generation=int,
            attempt=int,
            epoch=int,
            rows=int,
            retries=int,
            log=list,
            running=list,
            seconds=list,
            intervals=list,
            ahead=float,
        )
        for entry in body["log"]:
            _check(entry, {"name": str, "level": int, "message": str})
        seconds, intervals = _seconds(body.pop("seconds")), list(map(_interval, body.pop("intervals")))
        ahead = body.pop("ahead")
        if not isfinite(ahead):
            raise RefusedError(400, "Expected ahead to be a finite number.")
        running = _running(body.pop("running"))
        if running is not None:
            coordinator.note_running(body["worker"], body["generation"], body["attempt"], running)
        answer = coordinator.heartbeat(**body)
        who = body["worker"], body["generation"], body["attempt"]
        coordinator.note_times(*who, seconds=seconds, intervals=intervals, ahead=ahead)
        return answer

    @app.post("/v1/failure")
    def failure() -> ResponseReturnValue:
        body = _json(kind=str, worker=int, generation=int, attempt=int, host=str, message=str, traceback=str)
        coordinator.fail_of(body["worker"], body["generation"], body["attempt"], _failure(body))
        return {}


def add_hosted_driver(app: App, hosted_driver: Any) -> None:
    """Add the paths of a run whose endpoint is in worker 0; ``hosted_driver`` does the driver's part."""

    @app.post("/v1/drive")
    def drive() -> ResponseReturnValue:
        body = _json(epoch=int, released=int, learning_rate=float, stop=bool, short=int)
        return flask.Response(hosted_driver.drive(**body), mimetype=BINARY)

    @app.post("/v1/replace/<int:epoch>")
    def replace_weights(epoch: int) -> ResponseReturnValue:
        weights = _weights(hosted_driver.weight_bytes)
        hosted_driver.replace(epoch, weights)
        return {}

    @app.post("/v1/evaluate/<int:epoch>")
    def evaluate(epoch: int) -> ResponseReturnValue:
        weights = _weights(hosted_driver.weight_bytes) if flask.request.content_length else b""
        hosted_driver.evaluate(epoch, weights)
        return {}

    @app.post("/v1/leave")
    def leave() -> ResponseReturnValue:
        hosted_driver.leave(**_json(worker=int, generation=int, attempt=int))
        return {}


def _weights(nbytes: int) -> bytes:
    """Return the body of a request, which must have this length."""
    length = flask.request.content_length
    if length != nbytes:
        raise RefusedError(413, f"Expected {nbytes} bytes of weights; got {length}.")
    return read_whole(flask.request.environ["wsgi.input"], length)


def _json(**fields: type) -> dict[str, Any]:
    """Return the fields of a JSON body after a check of their types."""
    length = flask.request.content_length
    if length is None:
        raise RefusedError(411, "The request has no content length.")
    if length > JSON_BYTES:
        raise RefusedError(413, f"Expected a JSON body of at most {JSON_BYTES} bytes; got {length}.")
    return _check(json_body(length), fields)


def _check(value: object, fields: dict[str, type]) -> dict[str, Any]:
    """Return a JSON object after a check of its fields and their types."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise RefusedError(400, f"Expected a JSON object with {', '.join(fields)}.")
    for name, kind in fields.items():
        if type(value[name]) is not kind:
            raise RefusedError(400, f"Expected {name} to be of type {kind.__name__}.")
    return value


def _seconds(values: list[Any]) -> list[float]:
    """Return the seconds of a heartbeat: one number for each activity, or none."""
    if len(values) not in (0, len(ACTIVITIES)) or not all(type(value) is float for value in values):
        raise RefusedError(400, f"Expected seconds to be empty or a list of {len(ACTIVITIES)} numbers.")
    return [value if isfinite(value) else 0.0 for value in values]


def _interval(values: Any) -> Interval:
    """Return the interval that a heartbeat gives as the index of an activity, a start and a length."""
    if not isinstance(values, list) or [type(value) for value in values] != [int, float, float]:
        raise RefusedError(400, "Expected an interval to have an activity, a start and a length.")
    index, start, seconds = values
    if not (0 <= index < len(ACTIVITIES) and isfinite(start) and isfinite(seconds)):
        raise RefusedError(400, "Expected an interval of a known activity and of finite numbers.")
    return Interval(ACTIVITIES[index], start, seconds)


def _running(values: list[Any]) -> Running | None:
    """Return the metric states of a heartbeat, [epoch, rows, base64], or None for an empty list."""
    if not values:
        return None
    if [type(value) for value in values] != [int, int, str]:
        raise RefusedError(400, "Expected running to be empty, or an epoch, rows and metric states.")
    epoch, rows, metrics = values
    try:
        return Running(epoch, rows, base64.b64decode(metrics, validate=True))
    except ValueError:
        raise RefusedError(400, "Expected metric states in base64.") from None


def _failure(body: dict[str, Any]) -> SparkDLError:
    for kind, error in (("lost", WorkerLostError), ("rule", RuleError)):
        if body["kind"] == kind:
            return error(body["message"])
    if body["kind"] == "data":
        return DataError(body["message"], traceback=body["traceback"])
    return WorkerError.of(
        body["message"], host=body["host"], worker=body["worker"], traceback=body["traceback"]
    )


def _exchange(coordinator: Exchanges, traffic: Traffic) -> flask.Response:
    replies = _replies(coordinator, traffic, flask.request.environ["wsgi.input"])
    first = next(replies, None)  # a refusal of the first update sets the response's status
    if first is None:
        raise RefusedError(400, "The request contains no update.")
    body: Any = _until_refused(first, replies, traffic)  # lists of buffers, which _Request.write sends
    return flask.Response(body, mimetype=BINARY, direct_passthrough=True)


def _replies(coordinator: Exchanges, traffic: Traffic, stream: InputStream) -> Iterator[Buffers]:
    """Yield the reply to each update of a stream, as buffers, before the next update is read.

    The code that sends a list of buffers empties it, so that a reply is not kept until the next one.
    """
    while header := read(stream, messages.UPDATE.size):
        update, lengths = messages.decode_update(header)
        coordinator.admit(update, lengths)
        arrival = Arrival(update, lengths, stream, coordinator.aggregation.pool)
        began, waited = time.perf_counter(), waited_seconds()
        reply = coordinator.exchange(update, arrival)
        if Flag.RESEND in reply.flags:
            arrival.discard()
        waited = waited_seconds() - waited
        merged = time.perf_counter() - began - waited - arrival.seconds
        delivered = False
        try:
            parts: Buffers = [
                messages.encode_reply(reply, waited=waited, merged=merged),
                *messages.sections(reply),
            ]
            del reply
            traffic.count(update.worker, len(header) + lengths.nbytes, sum(map(len, parts)))
            yield parts
            delivered = True
        finally:
            coordinator.sent(update, delivered=delivered)


def _until_refused(first: Buffers, replies: Iterator[Buffers], traffic: Traffic) -> Iterator[Buffers]:
    """Yield replies. An error after the first reply closes the connection.

    The status of this response was already sent. A worker that sends the update again gets the
    status of the error.
    """
    yield first
    try:
        yield from replies
    except ArrivalError:
        raise
    except Exception as error:  # noqa: BLE001 - the run has failed, or an update was bad
        if isinstance(error, RefusedError):  # not WireError, which most likely means that the worker died
            traffic.refuse()
        raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from None

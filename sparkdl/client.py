"""The Exchange over HTTP/1.1: one kept-alive connection, bounded retries, no proxies.

The few lines of HTTP that the endpoint speaks are read here: at a batch of 32 rows, what a general client
spends on an answer's head is as long as the gradient takes.

A request that got no answer is sent again with the same sequence number, which the endpoint counts once.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparkdl import wire
from sparkdl.errors import RefusedError, TransportError
from sparkdl.exchange import Endpoint, Exchange, awaiting
from sparkdl.wire import Flag, Reply, Update

TIMEOUT = 90.0  # seconds without a byte; longer than the endpoint makes a request wait
RETRIES = 6
MOST_LINE = 8192  # bytes of a line of an answer's head
BEAT_SECONDS = 0.5

Answer = tuple[int, bytes | memoryview]


class Connection:
    """A kept-alive connection to an endpoint.

    Args:
        endpoint: where it is.
        retries: how often a request that got no answer is sent again, with growing pauses.
    """

    def __init__(self, endpoint: Endpoint, retries: int = RETRIES) -> None:
        self.endpoint, self.retries = endpoint, retries
        self._socket: socket.socket | None = None
        self._stream: Any = None
        self._lines = f"Host: {endpoint.host}\r\nAuthorization: Bearer {endpoint.token}\r\n"

    def _open(self) -> socket.socket:
        if self._socket is None:
            address = self.endpoint.host, self.endpoint.port
            self._socket = socket.create_connection(address, timeout=TIMEOUT)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = self._socket.makefile("rb")
        return self._socket

    def send(self, method: str, path: str, body: Sequence[Any]) -> bool:
        """Send a request; False if it did not get through, and ``receive`` has to begin anew."""
        length = sum(len(part) for part in body)
        head = f"{method} {path} HTTP/1.1\r\n{self._lines}Content-Length: {length}\r\n\r\n".encode()
        try:
            connection = self._open()
            connection.sendall(head + body[0])
            for part in body[1:]:
                connection.sendall(part)
        except OSError:
            self.close()
            return False
        return True

    def receive(self, sent: bool, method: str, path: str, body: Sequence[Any]) -> Answer:
        """Return status and body of the answer, sending again what got none.

        Raises:
            TransportError: there was none, however often it was sent.
            RefusedError: the endpoint would not take the request.
        """
        problem: Exception | None = None
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(4.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
            if sent or self.send(method, path, body):
                try:
                    return self._answer()
                except (OSError, ValueError, IndexError) as error:
                    problem = error
                    self.close()
            sent = False
        raise TransportError(
            f"{socket.gethostname()} got no answer from the driver's endpoint at {self.endpoint.host}:"
            f"{self.endpoint.port} after {self.retries + 1} tries ({problem or 'it cannot be reached'})."
        )

    def _answer(self) -> Answer:
        status = int(self._line().split(None, 2)[1])
        length, closing = 0, False
        while line := self._line():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"connection":
                closing = value.strip().lower() == b"close"
        body = wire.as_bytes(np.empty(length, np.uint8))
        got = 0
        while got < length:
            count = self._stream.readinto(body[got:])
            if not count:
                raise ConnectionError(f"the answer broke off after {got} of {length} bytes")
            got += count
        if closing:
            self.close()
        if status >= 400:
            raise RefusedError(status, _message(bytes(body)))
        return status, body

    def _line(self) -> bytes:
        line: bytes = self._stream.readline(MOST_LINE)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the endpoint closed the connection")
        return line[:-2]

    def call(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST a JSON object; return the status and the object that is answered."""
        body = (json.dumps(fields).encode(),)
        status, answer = self.receive(self.send("POST", path, body), "POST", path, body)
        return status, json.loads(bytes(answer) or b"{}")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._stream.close()
            self._socket.close()
            self._socket = None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])


class HttpExchange(Exchange):
    """The Exchange of a worker with its run's endpoint.

    Args:
        endpoint: where it is.
        worker: this worker's index.
        attempt: Spark's taskAttemptId, which grows.
        generation: which start of the gang this is.
        layout: the digest of the trainable variables' layout.
    """

    def __init__(self, endpoint: Endpoint, worker: int, attempt: int, generation: int, layout: bytes) -> None:
        self.identity = {"worker": worker, "generation": generation, "attempt": attempt}
        self.layout, self.endpoint = layout, endpoint
        self._connection = Connection(endpoint)
        self._sent = False

    def join(self, host: str, pid: int) -> None:
        """Take part in the run."""
        self._connection.call("/v1/join", **self.identity, host=host, pid=pid)

    def ready(self, rows: int, validation_rows: int, notes: dict[str, Any]) -> dict[str, Any]:
        """Say what this worker holds; return where to begin, once the whole gang is ready."""
        while True:
            status, begin = self._connection.call(
                "/v1/ready", **self.identity, rows=rows, validation_rows=validation_rows, notes=notes
            )
            if status == 200:
                return begin

    def begin(self, update: Update) -> Update:
        """Send an update; the ticket it returns is redeemed by ``finish``."""
        ticket = replace(
            update, worker=self.identity["worker"], generation=self.identity["generation"],
            attempt=self.identity["attempt"], run=self.endpoint.run, layout=self.layout,
        )  # fmt: skip
        self._sent = self._connection.send("POST", "/v1/exchange", _body(ticket))
        return ticket

    def finish(self, ticket: Update) -> Reply:
        """Return the reply to an update, asking again while it is not ready."""
        sent = self._sent
        while True:
            _, answer = self._connection.receive(sent, "POST", "/v1/exchange", _body(ticket))
            header, body = answer[: wire.REPLY.size], answer[wire.REPLY.size :]
            reply, lengths = wire.decode_reply(bytes(header))
            if not reply.flags & Flag.AGAIN:
                return wire.fill(reply, lengths, body)
            ticket, sent = awaiting(ticket), False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _body(update: Update) -> tuple[Any, ...]:
    return (wire.encode_update(update), *wire.sections(update))


def report_failure(endpoint: Endpoint, **fields: Any) -> None:
    """Tell the driver what went wrong in a task; a driver that is gone is not told.

    Args:
        endpoint: where to tell it.
        fields: kind ("worker", "data" or "preflight"), generation, worker, host, message, traceback.
    """
    connection = Connection(endpoint, retries=1)
    try:
        connection.call("/v1/failure", **fields)
    except (TransportError, RefusedError):
        pass
    finally:
        connection.close()


class LogBuffer(logging.Handler):
    """Keeps the newest log records until a heartbeat takes them to the driver.

    As the root logger's only handler it also does what Python does where there is none: it prints warnings.
    """

    def __init__(self, capacity: int = 200) -> None:
        super().__init__(logging.INFO)
        self.records: deque[dict[str, Any]] = deque(maxlen=capacity)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as plain values."""
        self.records.append(
            {"name": record.name, "level": record.levelno, "message": record.getMessage()[:4000]}
        )
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and logging.getLogger().handlers == [self]:
            last.handle(record)

    def take(self) -> list[dict[str, Any]]:
        """Return and forget what was kept."""
        return [self.records.popleft() for _ in range(len(self.records))]


class Heartbeat:
    """A small thread that tells the driver how far a worker is, also during a long stretch.

    Args:
        exchange: whose worker it is.
        position: returns the epoch and the training rows used in it.
        stop: called when the driver wants training to end.
        log: what else there is to tell.
    """

    def __init__(
        self, exchange: HttpExchange, position: Callable[[], tuple[int, int]],
        stop: Callable[[], None], log: LogBuffer,
    ) -> None:  # fmt: skip
        self._identity, self._position, self._stop = exchange.identity, position, stop
        self._log = log
        self._connection = Connection(exchange.endpoint, retries=0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            if not self._beat():
                return
        self._beat()

    def _beat(self) -> bool:
        epoch, rows = self._position()
        try:
            _, answer = self._connection.call(
                "/v1/heartbeat", **self._identity, epoch=epoch, rows=rows, log=self._log.take()
            )
        except TransportError:
            return True  # The exchange's own retries say so if it lasts.
        except RefusedError:
            return False  # The loop learns of it at its next exchange.
        if answer["stop"]:
            self._stop()
        return True

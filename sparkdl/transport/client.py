"""HTTP/1.1 client of the endpoint: keep-alive, bounded retries, optional TLS, and no proxies.

All updates of a worker are chunks of one long request, and all replies are parts of its response.
With a batch of 32 rows, the headers of separate requests and responses would cost more time than the
gradient. A stream that breaks is restarted with the update that got no reply, which the endpoint
counts once.
"""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import random
import select
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.core.codecs import Codec, salt_of
from sparkdl.core.sparse_gradients import compressed, decompressed
from sparkdl.core.vectors import EMPTY, Vector, as_bytes
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.errors import RefusedError, TransportError
from sparkdl.transport import messages, tls
from sparkdl.transport.exchange import Begin, Endpoint, Exchange, Notes, repeated
from sparkdl.transport.messages import (
    Buffers,
    FailureReport,
    Flag,
    Kind,
    Reply,
    Update,
)

TIMEOUT = 90.0  # seconds without a byte; longer than the endpoint's ``limits.PATIENCE``
RETRIES = 6
OUTAGE_SECONDS = 60.0  # the ``outage`` of a worker's Connection
NO_WAY = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
BEAT_SECONDS = 0.5
WORD = 2**64 - 1
ENCODED = Kind.GRADIENT, Kind.DELTA  # the kinds of updates whose parameters a codec may encode

T = TypeVar("T")


class Connection:
    """A connection to an endpoint, opened on first use.

    Args:
        endpoint: the endpoint.
        retries: maximum number of times to resend an unanswered request, with growing pauses.
        outage: seconds for which ``retries`` is no limit while there is no route to the endpoint, or its name
            cannot be resolved.
        unsent: maximum bytes of updates that the operating system takes over before it has sent them, where
            it supports a limit; 0: no limit.

    Attributes:
        retried: number of times that a request was resent.
    """

    def __init__(self, endpoint: Endpoint, retries: int, *, outage: float = 0.0, unsent: int = 0) -> None:
        self.endpoint, self.retries, self.outage, self.unsent = endpoint, retries, outage, unsent
        self.retried = 0
        self._problem: Exception | None = None
        self._http = tls.connection_to(
            endpoint.host, endpoint.port, endpoint.certificate, TIMEOUT, endpoint.token
        )
        self._token = {"Authorization": f"Bearer {endpoint.token}"}
        self._pool = BufferPool()
        self._answer: http.client.HTTPResponse | None = None
        self._streams = False  # the open connection carries the stream of updates, and no other request

    def call(self, path: str, **fields: object) -> tuple[int, Any]:
        """POST a JSON object; return the status and the object in the response.

        Raises:
            TransportError: no attempt got a response.
            RefusedError: the endpoint refused the request.
        """
        status, answer = self.post(path, json.dumps(fields).encode())
        return status, json.loads(answer or b"{}")

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """POST bytes; return the status and the bytes of the response. Raises like ``call``."""
        return self._request("POST", path, body)

    def get(self, path: str) -> bytes:
        """GET a path; return the bytes of the response. Raises like ``call``."""
        return self._request("GET", path, None)[1]

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        def send() -> None:
            if self._streams:
                self.close()
            self._http.request(method, path, body, self._token)

        def receive() -> tuple[int, bytes]:
            answer = self._accepted()
            return answer.status, answer.read()

        return self.patiently(send, receive)

    def send(self, update: Update) -> None:
        """Send an update in this connection's stream, which begins with the first update."""
        parts = messages.sections(update)
        if not self._streams or self.is_closed():
            self.close()  # forget the old response of a stream that the endpoint closed
            self._streams = True
            self._http.putrequest("POST", "/v1/exchange")
            self._http.putheader("Authorization", self._token["Authorization"])
            self._http.putheader("Transfer-Encoding", "chunked")
            self._http.endheaders()
            if self.unsent and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.unsent)
        size = messages.UPDATE.size + sum(map(len, parts))
        message: Buffers = [b"%x\r\n" % size + messages.encode_update(update), *parts, b"\r\n"]
        messages.send(self._http.sock, message)

    def is_closed(self) -> bool:
        """Return True if the endpoint has closed the connection, as it does after a long pause.

        An update that is sent nevertheless would be lost, which is noticed only when its reply is read.
        """
        if self._http.sock is None:
            return True
        poll = select.poll()
        poll.register(self._http.sock, getattr(select, "POLLRDHUP", 0))  # Linux has it
        return bool(poll.poll(0))

    def receive(self, memory: Vector = EMPTY) -> Reply:
        """Return the next reply of the stream, in this memory if it has the size of the reply's sections."""
        if self._answer is None:
            self._answer = self._accepted()
        header = bytearray(messages.REPLY.size)
        self._read(memoryview(header))
        reply, lengths = messages.decode_reply(header)
        body = memory if memory.nbytes == lengths.nbytes else self._pool.borrow(lengths.nbytes)
        return messages.fill(reply, lengths, self._read(as_bytes(body)))

    def _accepted(self) -> http.client.HTTPResponse:
        answer = self._http.getresponse()
        if answer.length is None and not answer.chunked:
            answer.close()
            raise ConnectionError("the response headers ended early")
        if answer.status < 400:
            return answer
        message = _message(answer.read())
        self.close()
        if answer.status == 408 or answer.status >= 500 and message is None:
            raise ConnectionError(f"the request was not processed: status {answer.status}")
        raise RefusedError(answer.status, message or f"status {answer.status}")

    def _read(self, body: memoryview) -> memoryview:
        """Fill a buffer with the next bytes of the response; return it."""
        assert self._answer is not None  # noqa: S101 - receive sees to it
        if len(body) and self._answer.readinto(body) != len(body):
            raise ConnectionError("the response ended early")
        return body

    def attempt(self, send: Callable[[], None]) -> bool:
        """Try to send something; return False if that failed."""
        try:
            send()
        except (OSError, http.client.HTTPException) as error:
            self._problem = error
            self.close()
            return False
        return True

    def patiently(self, send: Callable[[], None], receive: Callable[[], T], *, sent: bool = False) -> T:
        """Return a response; resend the request until there is one. ``sent``: it was already sent once.

        Raises:
            TransportError: no attempt got a response.
            RefusedError: the endpoint refused the request.
        """
        begun = time.monotonic()
        for number in itertools.count():
            if number:
                self.retried += 1
                time.sleep(min(4.0, 0.1 * 2**number) * random.uniform(0.5, 1.0))
            if sent or self.attempt(send):
                try:
                    return receive()
                except (OSError, ValueError, http.client.HTTPException) as error:
                    self._problem = error
                    self.close()
            sent = False
            if number >= self.retries and not (self._is_out() and time.monotonic() < begun + self.outage):
                break
        raise TransportError(
            f"{socket.gethostname()} got no response from the run's endpoint at "
            f"{self.endpoint.host}:{self.endpoint.port} after {number + 1} attempts ({self._problem})."
        )

    def _is_out(self) -> bool:
        """Return True if the last attempt found no route to the endpoint, or could not resolve its name."""
        no_way = isinstance(self._problem, OSError) and self._problem.errno in NO_WAY
        return no_way or isinstance(self._problem, socket.gaierror)

    def local_address(self) -> str:
        """Return the address of this host from which it reaches the endpoint. The connection must be open."""
        return str(self._http.sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None
        self._streams = False
        self._http.close()


def _message(body: bytes) -> str | None:
    """Return the error message of a response; None if the response is not from the endpoint's Flask app."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return None


class HttpExchange(Exchange):
    """The Exchange of a worker with its run's endpoint.

    Args:
        endpoint: the endpoint.
        worker: this worker's index.
        attempt: Spark's taskAttemptId, which is larger for newer attempts.
        generation: the number of the generation (the start of the worker group) that the worker belongs to.
        layout: the digest of the trainable variables' layout.
        unsent: see Connection.
        codec: the codec of updates; None: they are sent as float32.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: int,
        attempt: int,
        generation: int,
        layout: bytes,
        *,
        unsent: int = 0,
        codec: Codec | None = None,
    ) -> None:
        self.codec = codec
        self.identity = {"worker": worker, "generation": generation, "attempt": attempt}
        self.layout, self.endpoint = layout, endpoint
        self._connection = Connection(endpoint, RETRIES, outage=OUTAGE_SECONDS, unsent=unsent)
        self._sent = False

    @property
    def retried(self) -> int:
        """The number of times that this worker has resent a request."""
        return self._connection.retried

    def join(self, host: str, pid: int) -> None:
        """Join the run, once no older attempt of this worker is active."""
        while self._connection.call("/v1/join", **self.identity, host=host, pid=pid)[0] == 202:
            time.sleep(BEAT_SECONDS)

    def ready(
        self, rows: int, validation_rows: int, notes: Notes, fingerprint: Fingerprint = NOTHING
    ) -> Begin:
        """Report this worker's rows; return the starting point, once the whole worker group is ready."""
        begin: Begin
        while True:
            status, begin = self._connection.call(
                "/v1/ready",
                **self.identity,
                rows=rows,
                validation_rows=validation_rows,
                notes=notes,
                fingerprint=fingerprint,
            )
            if status == 200:
                return begin

    def begin(self, update: Update) -> Update:
        """Fill in an update's sender and run, and send it; return it as the ticket for ``finish``."""
        update.worker, update.attempt = self.identity["worker"], self.identity["attempt"]
        update.generation = self.identity["generation"]
        update.run = self.endpoint.run
        update.layout = self.layout if update.layout == messages.NO_ID else update.layout
        if self.codec is not None and update.kind in ENCODED:
            update = _encoded(update, self.codec)
        self._sent = self._connection.attempt(partial(self._connection.send, update))
        return update

    def finish(self, ticket: Update, memory: Vector = EMPTY) -> Reply:
        """Return the reply to an update; request it again while it is not ready.

        Args:
            ticket: the result of ``begin``.
            memory: memory for the reply's parameters, used if it has their size and there are no other
                sections.
        """
        waited = merged = 0.0
        while True:
            reply = self.try_finish(ticket, memory)
            waited, merged = waited + reply.waited, merged + reply.merged
            if Flag.AGAIN not in reply.flags:
                reply.waited, reply.merged = waited, merged
                return reply
            ticket = repeated(ticket, reply)

    def send_lost(self, ticket: Update) -> None:
        """Send an update again if it did not reach the endpoint, as far as this host knows by now."""
        if not self._sent or self._connection.is_closed():
            self._connection.close()
            self._sent = self._connection.attempt(partial(self._connection.send, ticket))

    def try_finish(self, ticket: Update, memory: Vector = EMPTY) -> Reply:
        """Return the reply to an update, which says ``Flag.AGAIN`` if it is not ready.

        Then request it again with ``repeated(ticket, reply)``.
        """
        connection, sent, self._sent = self._connection, self._sent, False
        reply = connection.patiently(
            partial(connection.send, ticket), partial(connection.receive, memory), sent=sent
        )
        if self.codec is not None and Flag.ENCODED in reply.flags:
            reply.parameters = _decoded(reply, self.codec)
            reply.flags &= ~Flag.ENCODED
            if len(memory) == len(reply.parameters):
                memory[:] = reply.parameters
                reply.parameters = memory
        return reply

    def local_address(self) -> str:
        """Return the address of this host from which it reaches the endpoint. The connection must be open."""
        return self._connection.local_address()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _encoded(update: Update, codec: Codec) -> Update:
    """Return an update with its parameters as words of a codec."""
    if not len(update.parameters):
        return update
    place = (update.sequence << 32 | salt_of(update.layout)) & WORD, update.worker + 1
    if Flag.SLICES in update.flags:
        words = compressed(update.parameters, codec, place)
    else:
        words = codec.encode(update.parameters, place)
    return replace(update, parameters=words, flags=update.flags | Flag.ENCODED)


def _decoded(reply: Reply, codec: Codec) -> Vector:
    """Return the parameters of a reply without the codec.

    Raises:
        WireError: the parameters are not words of the codec.
    """
    words = reply.parameters
    if Flag.SLICES in reply.flags:
        return decompressed(words, codec)
    return codec.decode(words, codec.size_of(words))


def report_failure(endpoint: Endpoint, **fields: Unpack[FailureReport]) -> None:
    """Report the failure of a task to the endpoint; do nothing if it is gone or refuses the report.

    Args:
        endpoint: the endpoint to report to.
        fields: the fields of a FailureReport.
    """
    connection = Connection(endpoint, retries=1)
    try:
        connection.call("/v1/failure", **fields)
    except (TransportError, RefusedError):
        pass
    finally:
        connection.close()

"""An HTTP server for the endpoint, and the class of its apps.

The server is cheroot in a thread, with custom file objects and connections. cheroot reads and writes sockets
through ``_pyio``, the pure-Python version of ``io``, which copies a large body many times. It also lets a
silent client keep a thread.
"""

from __future__ import annotations

import errno
import hmac
import io
import json
import logging
import re
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any
from wsgiref.types import WSGIApplication

import cheroot.server
import cheroot.workers.threadpool
import cheroot.wsgi
import flask

from sparkdl.errors import ClusterError, RefusedError, WireError
from sparkdl.process.reasons import reason_of
from sparkdl.settings import PortChoice
from sparkdl.transport import messages, tls
from sparkdl.transport.arrivals import read_whole
from sparkdl.transport.connections import HEAD_BYTES, PendingConnections
from sparkdl.transport.messages import Buffers

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)
CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(;.*)?\r\n", re.DOTALL)  # line before a chunk, with its length
AUTHORIZATION = re.compile(rb"\nauthorization:([^\r\n]*)\r\n", re.IGNORECASE)
LENGTH_DIGITS = 16  # lengths with this many digits or more are refused
CHUNK_LINE = 256  # size limit of the line before a chunk
LINGER_SECONDS = 0.02  # time that a thread waits for the next request of its connection
STOP_SECONDS = 1  # time that requests under way may take once the server should stop
CHECK_SECONDS = 0.1  # time between two checks of connections without a request
IDLE_SECONDS = 60  # time that a connection may be silent


class App(flask.Flask):
    """A Flask app that recognises heads of requests by the secrets in them, before they are parsed.

    Attributes:
        secrets: functions that return True if a head has the secret of the run, or of one of its pages.
        greeting: the greeting of the workers if they use TLS.
    """

    def __init__(self) -> None:
        super().__init__("sparkdl", static_folder=None)
        self.url_map.merge_slashes = False  # otherwise Flask answers with a redirect page
        self.secrets: list[Callable[[bytes], bool]] = []
        self.greeting = ""

    def log_exception(self, exc_info: Any) -> None:
        """Log an exception of a request at debug level, because any client may cause many of them."""
        logger.debug("The endpoint failed.", exc_info=exc_info)

    def admits(self, head: bytes) -> bool:
        """Return True if the head of a request has a secret."""
        return any(has_secret(head) for has_secret in self.secrets)


def has_token(tokens: list[bytes], head: bytes) -> bool:
    """Return True if a head has one of some values of the header Authorization."""
    given = AUTHORIZATION.search(head)
    return given is not None and any(hmac.compare_digest(given[1].strip(), token) for token in tokens)


def json_body(length: int) -> Any:
    """Return the body of the current request, which has this length, as JSON; None if it is something else.

    Raises:
        ArrivalError: the connection failed, or the rest of the body did not arrive in time.
        WireError: the body is shorter.
        RefusedError: the JSON is nested too deeply.
    """
    text = read_whole(flask.request.environ["wsgi.input"], length)
    try:
        return json.loads(text)
    except ValueError:
        return None
    except RecursionError:
        raise RefusedError(400, "The JSON is nested too deeply.") from None


class _Raw(socket.SocketIO):
    """A raw stream over a socket. On Linux, a long read is one system call, which also waits for the data.

    A Python socket with a time-out polls before each read and returns the available data. A body then takes
    many reads, and each of them releases the interpreter lock and waits for it again.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sys.platform == "linux":
            sock.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IDLE_SECONDS, 0))
        super().__init__(sock, "r")
        self.socket = sock

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer.

        A buffer larger than cheroot's own is for a body; on Linux, it is filled completely.
        """
        whole = sys.platform == "linux" and memoryview(buffer).nbytes > io.DEFAULT_BUFFER_SIZE
        try:
            return self.socket.recv_into(buffer, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError:
            raise TimeoutError("timed out") from None


class _Reader(io.BufferedReader):
    """A buffered reader with the interface that cheroot expects."""

    def has_data(self) -> bool:
        """Return False: a worker waits for its answer before it sends another request."""
        return False


class _Writer:
    """A writer with the interface that cheroot expects."""

    def __init__(self, sock: socket.socket) -> None:
        self.write = sock.sendall


class _Chunks:
    """A chunked body that is read only as far as requested. cheroot reads a whole chunk of any size.

    Args:
        stream: stream to read the chunks from.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._left, self._ended = stream, 0, False

    def read(self, size: int) -> bytes:
        """Return this number of bytes, or fewer at the end of the body.

        Raises:
            WireError: the body is not chunked correctly.
        """
        data = bytearray(size)
        return bytes(data[: self.readinto(memoryview(data))])

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer; return the number of bytes read, which is smaller at the end of the body.

        Raises:
            WireError: the body is not chunked correctly.
        """
        filled = 0
        while filled < len(buffer) and (self._left or self._next()):
            part = buffer[filled : filled + self._left]
            self._fill(part)
            filled += len(part)
            self._left -= len(part)
            if not self._left:
                self._end_chunk()
        return filled

    def _next(self) -> bool:
        """Begin the next chunk; return False at the end of the body."""
        if not self._ended:
            line = CHUNK.fullmatch(self._stream.readline(CHUNK_LINE))
            if line is None:
                raise WireError("A chunk of the body has no length.")
            self._left = int(line[1], 16)
            self._ended = not self._left
        return not self._ended

    def _end_chunk(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise WireError("The length of a chunk of the body is wrong.")

    def _fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes. A raw stream would return only those that have arrived."""
        if self._stream.readinto(buffer) < len(buffer):
            raise WireError("The body ended early.")


class _Request(cheroot.server.HTTPRequest):
    """A request whose connection closes if the app requests it, and whose response is not copied."""

    def read_request_line(self) -> bool:
        """Read the first line, and refuse a path that looks like an invalid host."""
        try:
            return bool(super().read_request_line())  # type: ignore[no-untyped-call]
        except ValueError:
            return self._malformed("Request-URI")

    def read_request_headers(self) -> bool:
        """Read the headers. Refuse a continuation line at the start and a bad length, which break cheroot."""
        try:
            whole = bool(super().read_request_headers())  # type: ignore[no-untyped-call]
        except UnboundLocalError:
            whole = self._malformed("continuation line")
        length = self.inheaders.get(b"Content-Length", b"0")
        if whole and not (length.isdigit() and len(length) < LENGTH_DIGITS):
            whole = self._malformed("Content-Length")
        return whole

    def simple_response(self, status: str | int, msg: str = "") -> None:
        """Refuse a request. Statuses 501 (encoding) and 505 (version) become 400: the client is at fault."""
        refused = str(status)[:3] in ("501", "505")
        super().simple_response("400 Bad Request" if refused else status, msg)

    def _malformed(self, what: str) -> bool:
        self.simple_response("400 Bad Request", f"Malformed {what}.")
        return False

    def send_headers(self) -> None:
        """Send the headers. cheroot would first read the rest of the body, whatever its length."""
        if (b"Connection", b"close") in self.outheaders or getattr(self.rfile, "remaining", False):
            self.close_connection = True
        super().send_headers()

    def write(self, chunk: bytes | Buffers) -> None:
        """Send a piece of the response: bytes, or a list of buffers, which is emptied."""
        parts: Buffers = chunk if isinstance(chunk, list) else [chunk]
        if self.chunked_write and chunk:
            parts[:] = [b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n"]
        messages.send(self.conn.socket, parts)


class _Gateway(cheroot.wsgi.Gateway_10):
    """A cheroot gateway for an app whose response may consist of buffers instead of bytes."""

    def respond(self) -> None:
        """Send the pieces of the response, none of which is empty."""
        if self.req.chunked_read:
            self.env["wsgi.input"] = _Chunks(self.req.conn.rfile)
        with closing(self.req.server.wsgi_app(self.env, self.start_response)) as answer:
            for piece in answer:
                self.write(piece)
            self.req.ensure_headers_sent()


class _Connection(cheroot.server.HTTPConnection):
    """A cheroot connection without the pure-Python file objects, which copy a large body many times.

    Its files are created for its first request: most of the connections without a token never send one.
    """

    RequestHandlerClass = _Request

    def __init__(self, server: Any, sock: socket.socket) -> None:
        # cheroot would create the files, and caches of what it finds out about local peers.
        self.server, self.requests_seen = server, 0
        self.socket = sock
        if server.tls is not None:
            self.socket = tls.Socket(sock, server.tls, server=True, greeting=server.greeting)

    @cached_property
    def rfile(self) -> _Reader:
        """The file that reads from the socket."""
        return _Reader(_Raw(self.socket), self.rbufsize)

    @cached_property
    def wfile(self) -> _Writer:
        """The file that writes to the socket."""
        return _Writer(self.socket)

    def close(self) -> None:
        """Close the connection."""
        if "rfile" in vars(self):
            self.rfile.close()
        with suppress(OSError):  # the client has gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def communicate(self) -> bool:
        """Answer requests in the same thread while they follow each other closely."""
        if sys.platform != "linux":  # see _Raw
            self.socket.settimeout(IDLE_SECONDS)
        while super().communicate():  # type: ignore[no-untyped-call]
            if not _can_read(self.socket, LINGER_SECONDS):
                self.socket.settimeout(None)
                return True
        return False


def _can_read(sock: socket.socket, seconds: float) -> bool:
    """Return True if data can be read within ``seconds``. Unlike ``select``, allow any number of files."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class _Threads(cheroot.workers.threadpool.ThreadPool):
    """A cheroot thread pool that ends all threads after a failed start, and stops despite silent clients."""

    _queue: Any

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the threads.

        Args:
            timeout: seconds that requests in progress may take together. Then their connections are closed in
                both directions. cheroot 10 and 11 close only the receiving direction, so a thread that is
                sending would wait for its client.
        """
        # Not self._threads: cheroot 10 and 11 fill it only once all threads have started.
        threads = [
            each
            for each in threading.enumerate()
            if isinstance(each, cheroot.workers.threadpool.WorkerThread)
            and each.server is self.server
            and each is not threading.current_thread()
        ]
        for _ in threads:
            self._queue.put(cheroot.workers.threadpool._SHUTDOWNREQUEST)  # type: ignore[attr-defined]
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            while thread.is_alive():  # the thread may have taken another connection from the queue
                with suppress(OSError):  # already closed
                    if (connection := thread.conn) is not None:
                        connection.socket.shutdown(socket.SHUT_RDWR)
                thread.join(0.1)


class _Server(cheroot.wsgi.Server):
    """A cheroot server that cleans up after a failed start and gives no thread to pending connections."""

    ConnectionClass = _Connection
    tls: ssl.SSLContext | None = None
    greeting = ""
    max_request_header_size = HEAD_BYTES
    keep_alive_conn_limit: Any = None  # cheroot's limit is ten; every worker keeps a connection open
    unbound: OSError | None = None  # error of a failed bind
    admits: Callable[[bytes], bool]
    _connections: PendingConnections

    def clear_stats(self) -> None:
        """Remove the server from ``logging.statistics``, where cheroot 10 and 11 would keep it for good."""
        super().clear_stats()  # type: ignore[no-untyped-call]
        logging.statistics.pop(f"Cheroot HTTPServer {id(self)}", None)  # type: ignore[attr-defined]

    def prepare(self) -> None:
        """Listen, and start the threads."""
        try:
            super().prepare()
            self._connections.close()
            self._connections = PendingConnections(self)
        except BaseException:
            self.requests.stop()
            with suppress(AttributeError):  # the connections do not exist yet
                self._connections.close()
            if self.socket:
                self.socket.close()
            raise

    def serve(self) -> None:
        """Accept connections until the server stops. cheroot would start an additional idle thread."""
        while self.ready and not self.interrupt:
            try:
                self._connections.run(self.expiration_interval)
            except Exception:  # noqa: BLE001 - an error of one connection must not stop the others
                self.error_log("The endpoint's loop failed.", traceback=True)

    def process_conn(self, conn: _Connection) -> None:
        """Hand a connection to a thread once the headers of its request have arrived."""
        try:
            complete = self._connections.has_head(conn)
        except BaseException:
            conn.socket.close()  # only this loop knows the connection
            raise
        if complete:
            super().process_conn(conn)

    def put_conn(self, conn: _Connection) -> None:
        """Keep a connection for its next request, or close it. An exception would make cheroot stop here."""
        try:
            super().put_conn(conn)
        except Exception:  # noqa: BLE001 - the client opens another connection
            conn.close()
            self.error_log("A connection could not be kept.", traceback=True)

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Log an error of a connection at debug level, because any client may cause many of them."""
        logger.debug("%s", msg, exc_info=traceback)

    def bind_socket(self, sock: socket.socket, address: Any) -> socket.socket:  # type: ignore[override]
        """Bind a socket; if that fails, close it."""
        try:
            sock.bind(address)
        except OSError as error:
            self.unbound = error
            sock.close()
            raise
        return sock


@contextmanager
def serve(
    app: WSGIApplication,
    bind_address: str,
    port: PortChoice,
    num_workers: int,
    context: ssl.SSLContext | None = None,
    *,
    num_viewers: int = 0,
) -> Iterator[int]:
    """Serve an app in a thread during a ``with`` block; yield the port.

    Args:
        app: the app.
        bind_address: address to listen on.
        port: a port, a range of which the first free port is used, or 0 for any free port.
        num_workers: number of workers, each of which may have two requests under way.
        context: TLS context with key and certificate.
        num_viewers: number of streams of the live page, each of which keeps a thread.

    Raises:
        ClusterError: no port is free, the address does not belong to this machine, or the process may not
            have more threads or open files.
    """
    server = _listen(app, bind_address, port, num_workers, num_viewers=num_viewers)
    server.tls = context
    server.admits = app.admits if isinstance(app, App) else lambda head: True
    server.greeting = app.greeting if isinstance(app, App) else ""
    thread = threading.Thread(target=server.serve, name="sparkdl-endpoint", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError as error:
            raise _cannot_start(bind_address, error) from error
        yield server.bind_addr[1]
    finally:
        server.stop()
        if thread.is_alive():
            thread.join()
        # cheroot's objects form reference cycles, which would keep the app and its coordinator in memory.
        server.wsgi_app = None
        del server.admits


def _listen(
    app: WSGIApplication, address: str, port: PortChoice, num_workers: int, *, num_viewers: int = 0
) -> _Server:
    errors: list[str] = []
    for number in port if isinstance(port, range) else [port]:
        server = _Server(
            (address, number),
            app,
            timeout=IDLE_SECONDS,
            request_queue_size=max(128, 2 * num_workers),
            server_name="sparkdl",
        )
        server.gateway = _Gateway
        server.requests = _Threads(server, min=2 * num_workers + 4 + num_viewers)
        server.shutdown_timeout = STOP_SECONDS
        server.expiration_interval = CHECK_SECONDS
        try:
            server.prepare()
        except (OSError, RuntimeError) as error:
            # Two sockets may be bound to one port, but only one of them can listen.
            busy = server.unbound or getattr(error, "errno", None) == errno.EADDRINUSE
            if not busy:
                raise _cannot_start(address, error) from error
            errors.append(f"{number}: {error}")
            continue
        return server
    raise ClusterError(
        f"The endpoint cannot listen on {address}; tried port {'; '.join(errors)}. Set port= to 0 or to a "
        "free range, and bind_address= to an address of this machine."
    )


def _cannot_start(address: str, error: Exception) -> ClusterError:
    return ClusterError(
        f"The endpoint cannot start on {address}: {reason_of(error)}. Check the limits on threads and open "
        "files of this process (ulimit -u and ulimit -n)."
    )

"""Pending connections: they occupy no thread, and are limited in number and time.

cheroot hands a connection to a thread at its first byte, and the thread waits for the rest of the request's
head. A client with as many half-sent heads as there are threads would lock out all workers ("slow loris").
Here a thread gets a connection once its head is complete and has the token. Until then the connection is
checked every 0.1 s. Heads that are complete or too long and have no valid token go to the threads, which
refuse them, at a limited rate: parsing a head of many short lines takes some milliseconds. The same limit
applies to TLS handshakes of clients without the workers' greeting.

A connection is counted as pending as soon as it is accepted. Times are from a monotonic clock. If there are
too many, or the process cannot open more files, the oldest pending connections are closed, those of the host
that has the most of them, and last those of workers whose greeting has arrived. Until then new connections
are accepted one by one, and afterwards in batches, which wake the loop less often.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from contextlib import suppress
from selectors import EVENT_READ
from typing import Any

from cheroot.connections import ConnectionManager

from sparkdl.transport import tls

logger = logging.getLogger(__name__)
HEAD_BYTES = 16 << 10  # maximum length of a head
LINE_BYTES = 256  # bytes that cheroot reads at a time; it checks the length of a head only afterwards
HEAD_SECONDS = 10.0  # time limit for a head
MOST = 128  # limit on pending connections, higher for many workers; the oldest is closed for a new one
BATCH = 256  # maximum number of connections accepted at once
BATCH_SECONDS = 0.005  # pause after a batch for which others were closed
BACKLOG = 4096  # limit on connections that wait to be accepted, above which the system drops new ones
REFUSALS = 10.0  # maximum number per second of requests without a token, and handshakes without a greeting
SAID_SECONDS = 60.0  # time between the first two warnings about closed connections; then it doubles each time
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # no resources for another connection

Connection = Any  # a cheroot.server.HTTPConnection


class PendingConnections(ConnectionManager):
    """cheroot's connections between requests, and those whose head is not complete."""

    _selector: Any
    _stop_requested: bool

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        server.socket.setblocking(False)
        server.socket.listen(BACKLOG)
        self._until: dict[Connection, float] = {}  # closing times of pending ones, oldest first
        # Those of each host that come before workers' when connections are closed, oldest first.
        self._hosts: dict[str, dict[Connection, None]] = {}
        self._accepting, self._accept_again = True, 0.0  # whether, and when not, the time to begin again
        self._dropped: set[Connection] = set()  # closed since the loop was last woken
        self._begun: set[Connection] = set()  # those with a partial head
        self._strange: dict[Connection, None] = {}  # those without the token or greeting, oldest first
        self._silent_until, self._silence = 0.0, SAID_SECONDS
        self._refused = 0.0  # the time until which the requests refused so far suffice

    def has_head(self, connection: Connection) -> bool:
        """Return True if a thread can process a connection; otherwise keep it here, or close it."""
        self._begun.discard(connection)
        strange = False
        try:
            head = _sent(connection.socket)
        except tls.NoGreetingError:
            if self._may_refuse():
                connection.socket.forgive()
                return self.has_head(connection)
            head, strange = b"", True
        if head is None:
            self._forget(connection)
            connection.close()
            return False
        if b"\r\n\r\n" in head or len(head) >= HEAD_BYTES + LINE_BYTES:
            if self.server.admits(head) or self._may_refuse():
                self._forget(connection)
                return True
            strange = True
        if connection not in self._until:
            self._until[connection] = time.monotonic() + HEAD_SECONDS
            self._hosts.setdefault(connection.remote_addr, {})[connection] = None
        if isinstance(connection.socket, tls.Socket) and connection.socket.known:
            self._prefer(connection)
        if strange:
            self._strange[connection] = None
        elif head:
            self._begun.add(connection)
        else:
            self.put(connection)  # its first byte wakes this thread
        most = max(MOST, self.server.request_queue_size)  # many workers may connect at once
        self._drop_oldest(len(self._until) - most, f"at most {most} may wait without a request")
        return False

    def _may_refuse(self) -> bool:
        """Return True if a thread may refuse one more request now."""
        now = time.monotonic()
        if self._refused > now:
            return False
        self._refused = max(self._refused, now - 1.0) + 1.0 / REFUSALS  # after a pause, some at once
        return True

    def put(self, connection: Connection) -> None:
        """Keep a connection until more data arrives."""
        connection.last_used = time.monotonic()  # cheroot uses the wall clock, which may be changed
        self._selector.register(connection.socket.fileno(), EVENT_READ, connection)

    def stop(self) -> None:
        """End the loop that processes connections: on Linux at once, elsewhere at its next check."""
        self._stop_requested = True
        with suppress(OSError):  # a listening socket cannot be shut down on other systems
            self.server.socket.shutdown(socket.SHUT_RDWR)  # wakes the loop
        super().stop()

    def _run(self, expiration_interval: float) -> None:
        """Process connections as cheroot 10 and 11 do, but by a monotonic clock."""
        due = 0.0
        while not self._stop_requested:
            accepts = False
            for number, connection in self._ready(expiration_interval if self._accepting else BATCH_SECONDS):
                if connection is self.server:
                    accepts = True
                elif connection not in self._dropped:  # an earlier one of these may have replaced it
                    self._selector.unregister(number)
                    self.server.process_conn(connection)
            if accepts and self._accepting:
                self._accept_batch()
            self._dropped.clear()
            now = time.monotonic()
            if not self._accepting and now >= self._accept_again:
                self._selector.register(self.server.socket.fileno(), EVENT_READ, self.server)
                self._accepting = True
            if now >= due:
                self._expire(now - self.server.timeout)
                due = now + expiration_interval

    def _ready(self, seconds: float) -> list[tuple[int, Connection]]:
        """Return the connections with new data, and the server if a client wants to connect."""
        try:
            return list(self._selector.select(seconds))
        except OSError:
            self._remove_invalid_sockets()  # type: ignore[attr-defined]
            return []

    def _accept_batch(self) -> None:
        """Accept the connections that wait."""
        for _ in range(BATCH):
            try:
                sock, address = self.server.socket.accept()
            except OSError as error:
                if error.errno in FULL and self._drop_oldest(1 + len(self._until) // 2, error.strerror):
                    continue
                break  # none waits, its client has gone, the server stops, or files have to become free
            sock.settimeout(None)  # with a time-out, Python waits for data even if MSG_DONTWAIT is given
            connection = self.server.ConnectionClass(self.server, sock)
            connection.remote_addr, connection.remote_port = address[:2]
            self.server.process_conn(connection)

    def _pause(self) -> None:
        """Accept no connections for a moment; those that wait are then accepted together."""
        if self._accepting:
            self._selector.unregister(self.server.socket.fileno())
        self._accepting, self._accept_again = False, time.monotonic() + BATCH_SECONDS

    def _expire(self, threshold: float) -> None:
        """Check all pending connections, every 0.1 s; close those that exceed their time.

        They time out only here, between events, when cheroot itself holds none of them.
        """
        super()._expire(threshold)  # type: ignore[misc]
        for connection in tuple(self._begun):
            self.server.process_conn(connection)
        while self._strange and self._may_refuse():
            # That of the host with the fewest, so that a crowd of one host delays no other.
            connection = min(self._strange, key=lambda each: len(self._hosts.get(each.remote_addr, ())))
            del self._strange[connection]
            if isinstance(connection.socket, tls.Socket) and connection.socket.forgive():
                self.server.process_conn(connection)
            else:
                self._forget(connection)
                self.server.requests.put(connection)  # for a thread
        now = time.monotonic()
        for connection, end in tuple(self._until.items()):
            if end < now:
                self._drop(connection)

    def _drop_oldest(self, count: int, reason: str | None) -> int:
        """Close the oldest connections, and pause; return their number, which is at most ``count``."""
        if count <= 0:
            return 0
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until, self._silence = now + self._silence, 2 * self._silence
            logger.warning(
                "The endpoint cannot keep more connections. Closing connections without a request (%s).",
                reason,
            )
        count = min(count, len(self._until))
        for _ in range(count):
            self._drop(next(iter(max(self._hosts.values(), key=lambda each: len(each), default=self._until))))
        self._pause()
        return count

    def _forget(self, connection: Connection) -> None:
        """Count a connection as pending no longer, if it was."""
        if self._until.pop(connection, None) is not None:
            self._prefer(connection)

    def _prefer(self, connection: Connection) -> None:
        """Keep a connection when others are closed."""
        of_host = self._hosts.get(connection.remote_addr, {})
        of_host.pop(connection, None)
        if not of_host:
            self._hosts.pop(connection.remote_addr, None)

    def _drop(self, connection: Connection) -> None:
        self._forget(connection)
        self._dropped.add(connection)
        if connection in self._begun:
            self._begun.remove(connection)
        elif connection in self._strange:
            del self._strange[connection]
        else:
            with suppress(KeyError, ValueError):  # closed already
                self._selector.unregister(connection.socket.fileno())
        connection.close()

    def close(self) -> None:
        """Close the pending connections, and those between requests."""
        for connection in (*self._begun, *self._strange):
            connection.close()
        super().close()


def _sent(sock: socket.socket) -> bytes | None:
    """Return the unread data of a connection; None if the peer has closed it, or it is broken."""
    try:
        return sock.recv(HEAD_BYTES + LINE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None

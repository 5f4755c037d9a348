"""Pending connections: they occupy no thread, and are limited in number and time.

cheroot hands a connection to a thread at its first byte, and the thread waits for the rest of the request's
head. A client with as many half-sent heads as there are threads would lock out all workers ("slow loris").
Here a thread gets a connection once its head is complete and has the token. Until then the connection is
checked every 0.1 s. Heads that are complete or too long and have no valid token go to the threads, which
refuse them, at a limited rate: parsing a head of many short lines takes some milliseconds.

A connection is counted as pending as soon as it is accepted. Times are from a monotonic clock. If there are
too many, or the process cannot open more files, the oldest pending connections are closed, those of the host
that has the most of them.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from cheroot.connections import ConnectionManager

logger = logging.getLogger(__name__)
HEAD_BYTES = 16 << 10  # maximum length of a head
LINE_BYTES = 256  # bytes that cheroot reads at a time; it checks the length of a head only afterwards
HEAD_SECONDS = 10.0  # time limit for a head
MOST = 128  # limit on pending connections, higher for many workers; the oldest is closed for a new one
REFUSALS = 10.0  # maximum number of requests without a token per second that threads refuse
SAID_SECONDS = 60.0  # time between the first two warnings about closed connections; then it doubles each time
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # no resources for another connection

Connection = Any  # a cheroot.server.HTTPConnection


class PendingConnections(ConnectionManager):
    """cheroot's connections between requests, and those whose head is not complete."""

    _selector: Any
    _stop_requested: bool

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._until: dict[Connection, float] = {}  # closing times of pending ones, oldest first
        self._begun: set[Connection] = set()  # those with a partial head
        self._strange: dict[Connection, None] = {}  # those with a head without the token, oldest first
        self._silent_until, self._silence = 0.0, SAID_SECONDS
        self._refused = 0.0  # the time until which the requests refused so far suffice

    def has_head(self, connection: Connection) -> bool:
        """Return True if a thread can process a connection; otherwise keep it here, or close it."""
        self._begun.discard(connection)
        head = _sent(connection.socket)
        if head is None:
            self._until.pop(connection, None)
            connection.close()
            return False
        complete = b"\r\n\r\n" in head or len(head) >= HEAD_BYTES + LINE_BYTES
        if complete and (self.server.admits(head) or self._may_refuse()):
            self._until.pop(connection, None)
            return True
        self._until.setdefault(connection, time.monotonic() + HEAD_SECONDS)
        if complete:
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
        super().put(connection)
        connection.last_used = time.monotonic()  # cheroot uses the wall clock, which may be changed

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
            for number, connection in self._ready(expiration_interval):
                if connection is self.server:
                    connection = self._from_server_socket(self.server.socket)
                else:
                    self._selector.unregister(number)
                if connection is not None:
                    self.server.process_conn(connection)
            if (now := time.monotonic()) >= due:
                self._expire(now - self.server.timeout)
                due = now + expiration_interval

    def _ready(self, seconds: float) -> list[tuple[int, Connection]]:
        """Return the connections with new data, and the server if a client wants to connect."""
        try:
            return list(self._selector.select(seconds))
        except OSError:
            self._remove_invalid_sockets()  # type: ignore[attr-defined]
            return []

    def _from_server_socket(self, server_socket: socket.socket) -> Connection:
        """Accept a connection; return None if there is none, or no resources for it."""
        try:
            return super()._from_server_socket(server_socket)  # type: ignore[misc]
        except OSError as error:
            if error.errno == errno.EINVAL:  # the listening socket was shut down
                return None
            if error.errno not in FULL:
                raise
            self._drop_oldest(1 + len(self._until) // 2, error.strerror)
            time.sleep(0.01)  # if there was no connection to drop, other resources have to become free
            return None

    def _expire(self, threshold: float) -> None:
        """Check all pending connections, every 0.1 s; close those that exceed their time.

        They time out only here, between events, when cheroot itself holds none of them.
        """
        super()._expire(threshold)  # type: ignore[misc]
        for connection in tuple(self._begun):
            self.server.process_conn(connection)
        while self._strange and self._may_refuse():
            connection = next(iter(self._strange))
            del self._strange[connection], self._until[connection]
            self.server.requests.put(connection)  # for a thread
        now = time.monotonic()
        for connection, end in tuple(self._until.items()):
            if end < now:
                self._drop(connection)

    def _drop_oldest(self, count: int, reason: str | None) -> None:
        if count <= 0:
            return
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until, self._silence = now + self._silence, 2 * self._silence
            logger.warning(
                "The endpoint cannot keep more connections. Closing connections without a request (%s).",
                reason,
            )
        hosts = Counter(connection.remote_addr for connection in self._until)
        for _ in range(min(count, len(self._until))):
            host, _ = hosts.most_common(1)[0]
            hosts[host] -= 1
            self._drop(next(each for each in self._until if each.remote_addr == host))

    def _drop(self, connection: Connection) -> None:
        del self._until[connection]
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

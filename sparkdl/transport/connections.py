"""Connections that have not shown a token yet: they keep no thread busy, are few, and do not stay long.

cheroot hands a connection to a thread as soon as a byte has come, and the thread waits for the rest of the
request's head. As many connections as there are threads, each with half a head, would so keep all workers
out ("slow loris"). Here a thread gets a connection when the head is there, whole or so long that the thread
refuses it at once; until then it is looked at now and then. A head has its token in it, and a request without
one is refused and closed.

Connections without a head are counted when they are accepted, and times are those of a clock that nobody
sets. Where the process may open no more files, the oldest of them make room.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from contextlib import suppress
from typing import Any

from cheroot.connections import ConnectionManager

logger = logging.getLogger(__name__)
HEAD_BYTES = 16 << 10  # the longest head that is read
LINE_BYTES = 256  # what cheroot reads of a head at once, before it compares its length with the limit
HEAD_SECONDS = 10.0  # how long a head may take
MOST = 128  # connections without a head; the one that has been there longest makes room
SAID_SECONDS = 60.0  # how long nothing more is logged of connections that had to make room
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # there is no room for another connection

Connection = Any  # a cheroot.server.HTTPConnection


class PendingConnections(ConnectionManager):
    """cheroot's connections between their requests, and those whose request has not begun."""

    _selector: Any
    _stop_requested: bool

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._until: dict[Connection, float] = {}  # when those without a head are closed, oldest first
        self._begun: set[Connection] = set()  # those of them that have sent a part of it
        self._silent_until = 0.0

    def has_head(self, connection: Connection) -> bool:
        """Return whether a thread can take up a connection; one that has to wait is kept here."""
        self._begun.discard(connection)
        head = _sent(connection.socket)
        if head is None or b"\r\n\r\n" in head or len(head) >= HEAD_BYTES + LINE_BYTES:
            self._until.pop(connection, None)
            return True
        self._until.setdefault(connection, time.monotonic() + HEAD_SECONDS)
        if head:
            self._begun.add(connection)
        else:
            self.put(connection)  # whose first byte wakes this thread
        most = max(MOST, self.server.request_queue_size)  # of many workers many may come at once
        self._drop_oldest(len(self._until) - most, f"at most {most} may wait without a request")
        return False

    def put(self, connection: Connection) -> None:
        """Keep a connection until more comes on it."""
        super().put(connection)
        connection.last_used = time.monotonic()  # for cheroot has set it by a clock that may be set

    def _run(self, expiration_interval: float) -> None:
        """Take up connections, as cheroot 10 and 11 do, by a clock that nobody sets."""
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
        """Return the connections that something has come on, and the server if one wants to connect."""
        try:
            return list(self._selector.select(seconds))
        except OSError:
            self._remove_invalid_sockets()  # type: ignore[attr-defined]
            return []

    def _from_server_socket(self, server_socket: socket.socket) -> Connection:
        """Accept a connection; None if there is none, or no room for it."""
        try:
            return super()._from_server_socket(server_socket)  # type: ignore[misc]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._drop_oldest(1 + len(self._until) // 2, error.strerror)
            time.sleep(0.01)  # where there was none to drop, the system has to make room
            return None

    def _expire(self, threshold: float) -> None:
        """Look at all that wait, a few times a second; elsewhere none is dropped that cheroot still holds."""
        super()._expire(threshold)  # type: ignore[misc]
        for connection in tuple(self._begun):
            self.server.process_conn(connection)
        now = time.monotonic()
        for connection, end in tuple(self._until.items()):
            if end < now:
                self._drop(connection)

    def _drop_oldest(self, count: int, reason: str | None) -> None:
        if count <= 0:
            return
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + SAID_SECONDS
            logger.warning(
                "Others than workers connect to the endpoint; connections without a request are closed (%s).",
                reason,
            )
        for connection in tuple(self._until)[:count]:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        del self._until[connection]
        if connection in self._begun:
            self._begun.remove(connection)
        else:
            with suppress(KeyError, ValueError):  # closed already
                self._selector.unregister(connection.socket.fileno())
        connection.close()

    def close(self) -> None:
        """Close all connections that wait."""
        for connection in self._begun:
            connection.close()
        super().close()


def _sent(sock: socket.socket) -> bytes | None:
    """Return what a peer has sent and nobody has read; None where its end is closed or broken."""
    try:
        return sock.recv(HEAD_BYTES + LINE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None

"""Connections that have not shown a token yet: they keep no thread busy, are few, and do not stay long.

cheroot hands a connection to a thread as soon as a byte has come, and the thread waits for the rest of the
request's head. As many connections as there are threads, each with half a head, would so keep all workers
out ("slow loris"). Here a thread gets a connection when the head is there, whole or too long; until then it
is looked at now and then. A head has its token in it, and a request without one is refused and closed.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from cheroot.connections import ConnectionManager

HEAD_BYTES = 16 << 10  # the longest head that is read
HEAD_SECONDS = 10.0  # how long a head may take
MOST = 128  # connections without a head; the one that has been there longest makes room

Connection = Any  # a cheroot.server.HTTPConnection


class Connections(ConnectionManager):
    """cheroot's connections between their requests, and those whose request has not begun."""

    _selector: Any

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._until: dict[Connection, float] = {}  # when those without a head are closed, oldest first
        self._begun: set[Connection] = set()  # those of them that have sent a part of it

    def has_head(self, connection: Connection) -> bool:
        """Return whether a thread can take up a connection; one that has to wait is kept here."""
        self._begun.discard(connection)
        head = _sent(connection.socket)
        if head is None or b"\r\n\r\n" in head or len(head) >= HEAD_BYTES:
            self._until.pop(connection, None)
            return True
        self._until.setdefault(connection, time.monotonic() + HEAD_SECONDS)
        if head:
            self._begun.add(connection)
        else:
            self.put(connection)  # whose first byte wakes this thread
        return False

    def _expire(self, threshold: float) -> None:
        """Look at all that wait, a few times a second; elsewhere none is dropped that cheroot still holds."""
        super()._expire(threshold)  # type: ignore[misc]
        for connection in tuple(self._begun):
            self.server.process_conn(connection)
        most = max(MOST, self.server.request_queue_size)  # of many workers many may come at once
        too_many, now = len(self._until) - most, time.monotonic()
        for place, (connection, end) in enumerate(tuple(self._until.items())):
            if place < too_many or end < now:
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
        return sock.recv(HEAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None

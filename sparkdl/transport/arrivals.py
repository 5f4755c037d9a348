"""Reading of updates from the body of a request."""

from __future__ import annotations

import time
from wsgiref.types import InputStream

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.core.vectors import as_bytes
from sparkdl.errors import WireError
from sparkdl.transport import messages
from sparkdl.transport.messages import Sections, Update

DISCARDED = 1 << 16  # bytes that are read at a time if they are not kept


class ArrivalError(ConnectionError):
    """A body could not be read from its connection: the client or the network failed, not the endpoint.

    It has a class of its own because a file raises the same errors: on a network file system that does not
    answer, it raises TimeoutError.
    """


class Arrival:
    """The arrival of an update's sections.

    Args:
        update: the update, without its sections.
        lengths: their lengths.
        stream: the stream to read them from.
        pool: memory to read them into.

    Attributes:
        seconds: the time that reading them took.
    """

    def __init__(self, update: Update, lengths: Sections, stream: InputStream, pool: BufferPool) -> None:
        self.update, self.lengths, self.stream, self.pool = update, lengths, stream, pool
        self.seconds = 0.0

    def __call__(self) -> Update:
        """Return a copy of the update with its sections.

        The original has no sections, because it is kept until the reply is sent.
        """
        began = time.perf_counter()
        body = _read_sections(self.stream, self.lengths.nbytes, self.pool)
        self.seconds += time.perf_counter() - began
        return messages.fill(messages.copy_of(self.update), self.lengths, body)

    def discard(self) -> None:
        """Read the sections without keeping them, so that the next update can be read."""
        left = self.lengths.nbytes
        while left and (piece := read(self.stream, min(left, DISCARDED))):
            left -= len(piece)


def _read_sections(stream: InputStream, size: int, pool: BufferPool) -> memoryview:
    """Return the next bytes of a body, fewer at its end, in memory of the pool if the stream can do that.

    NumPy allocates this memory, which may then consist of huge pages. The memory of a ``bytes`` object costs
    a page fault per 4 kB.

    Raises:
        ArrivalError: the connection failed, or the rest of the body did not arrive in time.
        WireError: the body ended within a chunk, or is not chunked correctly.
    """
    readinto = getattr(stream, "readinto", None)
    if not size or readinto is None:
        return memoryview(read(stream, size))
    body = as_bytes(pool.borrow(size))
    try:
        return body[: readinto(body)].toreadonly()
    except OSError as error:
        raise ArrivalError(*error.args) from error


def read(stream: InputStream, size: int) -> bytes:
    """Return the next bytes of a body, fewer at its end.

    Raises:
        ArrivalError: the connection failed, or the rest of the body did not arrive in time.
        WireError: the body ended within a chunk, or is not chunked correctly.
    """
    try:
        return stream.read(size) if size else b""
    except OSError as error:
        raise ArrivalError(*error.args) from error


def read_whole(stream: InputStream, size: int) -> bytes:
    """Return a body of this length.

    Raises:
        ArrivalError: the connection failed, or the rest of the body did not arrive in time.
        WireError: the body is shorter, or is not chunked correctly.
    """
    body = read(stream, size)
    if len(body) < size:
        raise WireError(f"The body ended after {len(body)} of {size} bytes.")
    return body

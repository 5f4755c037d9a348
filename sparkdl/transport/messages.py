"""The binary format of messages between workers and the endpoint.

A message is a fixed little-endian header, then up to four sections of raw bytes, in this order:

* parameters: ``count`` float32, the flat trainable variables, or their gradient or delta, from element
  ``offset`` on (always 0). With the flag SLICES: ``count`` words that encode a gradient with slices, see
  ``core.sparse_gradients``. With the flag ENCODED: ``count`` words of the run's codec, see ``core.codecs``;
  with both flags, only the numbers of the gradient are encoded.
* statistics: ``statistics`` float32, the flat moving statistics.
* metrics: ``metrics`` bytes, the states of the worker's metrics, each in its own dtype. For arrays of the
  user's own: their dtype in NumPy's notation.
* state: ``state`` bytes, by the kind of update:

  * REPORT, STATE, and the reply to a RESTORE: optimizer variables, the states of random generators, and with
    an elastic rule the worker's own weights. In a report of the center, the state of the merge rule follows,
    as a record of ``core.packing``.
  * the reply to a RULE: such a record.
  * ARRAYS and the reply: arrays of the user's own, one after the other.
  * GIVE, and the reply to a TAKE: rows in NumPy's format.
  * the reply to a SHARE: the number of rows of each worker.

An update's header (worker to endpoint, ``UPDATE``, 144 bytes)::

    4s magic "SDLU"     H kind      H flags      I generation  I worker     I epoch     I steps
    Q attempt  Q sequence  Q base_version  Q rows  d loss  d normalizer  Q offset  Q count  Q statistics
    Q metrics  Q state     16s run   16s layout

A reply's header (endpoint to worker, ``REPLY``, 104 bytes)::

    4s magic "SDLR"     H kind      H flags      q evaluate    Q version    Q round
    d progress  d learning_rate  d waited   d merged  Q offset   Q count   Q statistics   Q metrics
    Q state

The header states the length of every section, so the endpoint can check and refuse a message before it reads
a byte of a section. Nothing here is ever unpickled.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field, fields
from enum import STRICT, IntEnum, IntFlag
from math import nan
from operator import attrgetter
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np

from sparkdl.core.vectors import EMPTY, Vector, as_bytes
from sparkdl.errors import WireError

UPDATE = struct.Struct("<4sHHIIIIQQQQddQQQQQ16s16s")
REPLY = struct.Struct("<4sHHqQQddddQQQQQ")
MAGIC_UPDATE, MAGIC_REPLY = b"SDLU", b"SDLR"
NO_ID = bytes(16)
ACTIVITIES = "data", "compute", "exchange", "wait", "merge"  # of a worker


class Kind(IntEnum):
    """The kinds of update."""

    GRADIENT = 1  # a gradient, to be averaged with the other workers'
    DELTA = 2  # over a window: weights after minus before; with an elastic rule, what ``Rule.draw`` returns
    # The end of an epoch: metric states, and state for a snapshot. In ``sparkdl.run``: the function returned.
    REPORT = 3
    VALIDATION = 4  # metric states over this worker's validation rows
    PULL = 5  # requests the weights that are being evaluated
    RESTORE = 6  # requests the state with which a starting worker resumes from the last snapshot
    CENTER = 7  # requests the current center
    ARRAYS = 8  # arrays of the user's own, to be added to the other workers'
    STATE = 9  # the middle of an epoch: metric states, and state for a snapshot
    SHARE = 10  # the number of this worker's training rows; requests those of all workers, uint64
    GIVE = 11  # training rows for worker ``sequence``
    TAKE = 12  # requests the training rows that worker ``sequence`` gives to this one
    RULE = 13  # requests the state of the merge rule at the last snapshot, as a record of ``core.packing``


class Answer(IntEnum):
    """The contents of a reply's parameters."""

    NOTHING = 0
    MEAN = 1  # the mean gradient of the round
    CENTER = 2  # the center, or in the reply to a PULL the weights to evaluate


class Flag(IntFlag, boundary=STRICT):
    """Flags of an update or a reply."""

    NONE = 0
    AWAIT = 1  # update: the same message was sent before; requests only its reply
    STOP = 2  # reply: stop training; update: this report ends a stopped epoch
    DUPLICATE = 4  # reply: the update had already been counted
    AGAIN = 8  # reply: not ready yet; request it again with AWAIT
    NOT_FINITE = 16  # reply, or update with shards: it is not merged, because of NaN, Inf or huge values
    SEND_STATE = 32  # reply: the worker must send its state (kind STATE) before its next update
    SPEAK = 64  # reply: this worker reports the weights and optimizer that all replicas share
    SLICES = 128  # update and reply: the gradient has slices
    ENCODED = 256  # update and reply: the run's codec encodes the parameters (``core.codecs``)
    RESEND = 512  # reply, with AGAIN: the sections were not read; send the update again


@dataclass(slots=True)
class Update:
    """A message from a worker. Arrays are float32 vectors; an empty one is a missing section.

    ``normalizer`` is the divisor of a gradient's loss, and the weight of the gradient in the mean of a round.
    If it is 0, the number of rows is the weight.
    """

    kind: Kind
    worker: int = 0
    sequence: int = 0
    epoch: int = 0
    steps: int = 0
    base_version: int = 0
    rows: int = 0
    loss: float = nan
    normalizer: float = 0.0
    flags: Flag = Flag.NONE
    offset: int = 0
    parameters: Vector = field(default_factory=lambda: EMPTY)
    statistics: Vector = field(default_factory=lambda: EMPTY)
    metrics: bytes = b""
    state: bytes = b""
    generation: int = 0
    attempt: int = 0
    run: bytes = NO_ID
    layout: bytes = NO_ID


_fields_of = attrgetter(*(each.name for each in fields(Update)))


def copy_of(update: Update) -> Update:
    """Return a copy of an update, with the same sections; five times as fast as ``dataclasses.replace``."""
    return Update(*_fields_of(update))


@dataclass(slots=True)
class Reply:
    """A message from the endpoint. ``learning_rate`` nan: unchanged; ``evaluate`` -1: nothing to evaluate.

    ``round`` is the open round, if updates are merged in rounds. Between the update and this reply the
    endpoint waited for ``waited`` seconds and worked for ``merged`` seconds.
    """

    kind: Answer = Answer.NOTHING
    flags: Flag = Flag.NONE
    evaluate: int = -1
    version: int = 0
    round: int = 0
    progress: float = 0.0
    learning_rate: float = nan
    waited: float = 0.0
    merged: float = 0.0
    offset: int = 0
    parameters: Vector = field(default_factory=lambda: EMPTY)
    statistics: Vector = field(default_factory=lambda: EMPTY)
    metrics: bytes = b""
    state: bytes = b""


Message = TypeVar("Message", Update, Reply)
Buffers = list[bytes | memoryview]


class Sections(NamedTuple):
    """The length of each section of a message: elements of the vectors, bytes of the others."""

    parameters: int
    statistics: int
    metrics: int
    state: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of all sections together."""
        return 4 * (self.parameters + self.statistics) + self.metrics + self.state


def sections(message: Update | Reply) -> tuple[memoryview, ...]:
    """Return the non-empty sections of a message as buffers, to send after its header."""
    parts = (message.parameters, message.statistics, message.metrics, message.state)
    return tuple([as_bytes(part) for part in parts if len(part)])


def lengths_of(message: Update | Reply) -> Sections:
    """Return the lengths of a message's sections."""
    return Sections(
        len(message.parameters), len(message.statistics), len(message.metrics), len(message.state)
    )


def encode_update(update: Update) -> bytes:
    """Return an update's header; its sections follow it."""
    return UPDATE.pack(
        MAGIC_UPDATE,
        update.kind,
        update.flags,
        update.generation,
        update.worker,
        update.epoch,
        update.steps,
        update.attempt,
        update.sequence,
        update.base_version,
        update.rows,
        update.loss,
        update.normalizer,
        update.offset,
        *lengths_of(update),
        update.run,
        update.layout,
    )


def decode_update(header: bytes) -> tuple[Update, Sections]:
    """Return an update without its sections, and their lengths.

    Raises:
        WireError: ``header`` is not an update's header.
    """
    if len(header) != UPDATE.size:
        raise WireError(f"Expected an update header of {UPDATE.size} bytes; got {len(header)}.")
    fields = UPDATE.unpack(header)
    if fields[0] != MAGIC_UPDATE:
        raise WireError(f"Expected an update to begin with {MAGIC_UPDATE!r}; got {fields[0]!r}.")
    try:
        kind, flags = Kind(fields[1]), Flag(fields[2])
    except ValueError as error:
        raise WireError(f"Expected an update of a known kind with known flags: {error}.") from None
    update = Update(
        kind=kind,
        flags=flags,
        generation=fields[3],
        worker=fields[4],
        epoch=fields[5],
        steps=fields[6],
        attempt=fields[7],
        sequence=fields[8],
        base_version=fields[9],
        rows=fields[10],
        loss=fields[11],
        normalizer=fields[12],
        offset=fields[13],
        run=fields[18],
        layout=fields[19],
    )
    return update, Sections(*fields[14:18])


def encode_reply(reply: Reply, *, waited: float | None = None, merged: float | None = None) -> bytes:
    """Return a reply's header; its sections follow it.

    Args:
        reply: the reply, which several workers may get.
        waited: seconds that this worker's update waited for others; None: as in the reply.
        merged: seconds that the endpoint worked on it; None: as in the reply.
    """
    return REPLY.pack(
        MAGIC_REPLY,
        reply.kind,
        reply.flags,
        reply.evaluate,
        reply.version,
        reply.round,
        reply.progress,
        reply.learning_rate,
        reply.waited if waited is None else waited,
        reply.merged if merged is None else merged,
        reply.offset,
        *lengths_of(reply),
    )


def decode_reply(header: bytes | bytearray) -> tuple[Reply, Sections]:
    """Return a reply without its sections, and their lengths.

    Raises:
        WireError: ``header`` is not a reply's header.
    """
    if len(header) != REPLY.size:
        raise WireError(f"Expected a reply header of {REPLY.size} bytes; got {len(header)}.")
    fields = REPLY.unpack(header)
    if fields[0] != MAGIC_REPLY:
        raise WireError(f"Expected a reply to begin with {MAGIC_REPLY!r}; got {fields[0]!r}.")
    try:
        kind, flags = Answer(fields[1]), Flag(fields[2])
    except ValueError as error:
        raise WireError(f"Expected a reply of a known kind with known flags: {error}.") from None
    reply = Reply(
        kind=kind,
        flags=flags,
        evaluate=fields[3],
        version=fields[4],
        round=fields[5],
        progress=fields[6],
        learning_rate=fields[7],
        waited=fields[8],
        merged=fields[9],
        offset=fields[10],
    )
    return reply, Sections(*fields[11:15])


def fill(message: Message, lengths: Sections, body: bytes | memoryview) -> Message:
    """Fill the sections of a message from ``body``; return the message.

    The parameters are a view into ``body``. The other sections are copies, which do not keep it in memory.

    Raises:
        WireError: the length of ``body`` does not match the sections.
    """
    if len(body) != lengths.nbytes:
        raise WireError(f"Expected sections of {lengths.nbytes} bytes; got {len(body)}.")
    view = memoryview(body)
    first = 4 * lengths.parameters
    second = first + 4 * lengths.statistics
    third = second + lengths.metrics
    message.parameters = np.frombuffer(view[:first], "<f4")
    message.statistics = np.frombuffer(bytes(view[first:second]), "<f4")
    message.metrics, message.state = bytes(view[second:third]), bytes(view[third:])
    return message


def send(connection: socket.socket, parts: Buffers) -> None:
    """Send buffers one after the other, in as few packets as possible."""
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]


class LogEntry(TypedDict):
    """A log record of a worker or of the endpoint, which the driver logs."""

    name: str
    level: int
    message: str


class FailureReport(TypedDict):
    """The failure of a task.

    Attributes:
        kind: "worker", "data", "rule", or "lost" if the task cannot reach another worker.
        worker: the worker; for a task that deals rows to workers, its partition.
        generation: the number of the generation (the start of the worker group) that the task belongs to.
        attempt: the worker's attempt; -1: the task belongs to no worker.
        host: the host of the task.
        message: the reason.
        traceback: the traceback, as Python formats it.
    """

    kind: str
    worker: int
    generation: int
    attempt: int
    host: str
    message: str
    traceback: str


class Interval(NamedTuple):
    """A part of a worker's time.

    Attributes:
        activity: one of ``ACTIVITIES``.
        start: its start, in seconds of the worker's clock; in ``History.intervals``, of the driver's.
        seconds: its length.
    """

    activity: str
    start: float
    seconds: float


class Running(NamedTuple):
    """A worker's metric states after some rows of an unfinished epoch.

    Attributes:
        epoch: the epoch.
        rows: number of the worker's training rows of this epoch that the states cover.
        metrics: the states; empty if they are too large to be sent during an epoch.
    """

    epoch: int
    rows: int
    metrics: bytes

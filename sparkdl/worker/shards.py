"""Reduction of gradients and deltas by the workers themselves (``placement="executors"``).

A vector is divided into one contiguous range per worker. Each worker serves a *shard*: the rounds of its
own range, with the same code as an endpoint. A worker sends a part of its vector to each shard, and
receives each reduced part: the mean, or the sum if the merge rule adds deltas. So a round is a reduce-scatter
and an all-gather: each worker sends and receives at most twice the size of the vector, however many workers
there are. Parts are added in worker order, so the result has the same bits as that of an endpoint on the
driver, except with compression, or if the endpoint would get gradients with slices.

Each worker applies a reduced gradient with its own optimizer, as it does the mean of an endpoint, and a
reduced delta with the merge rule, to its own copy of the center (``worker.replicated_center``).

The driver's endpoint gets the same updates without parameters. It counts them, averages the statistics, and
controls epochs, snapshots and restarts. A shard exists as long as its task: if a task is lost, the worker
group restarts from the last snapshot, with new shards.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.core.codecs import salt_of
from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.vectors import EMPTY, Vector, is_finite
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.errors import RefusedError, TransportError, WireError, WorkerLostError
from sparkdl.process.reasons import reason_of
from sparkdl.server import admission
from sparkdl.server.aggregation import GradientRounds, Read, check_current, limits
from sparkdl.server.divergence import FARTHEST
from sparkdl.server.http_app import make_shard_app
from sparkdl.server.http_server import serve
from sparkdl.transport import tls
from sparkdl.transport.arrivals import ArrivalError
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Begin, Endpoint, Exchange, Notes, repeated
from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Sections, Update
from sparkdl.worker.replicated_center import ReplicatedCenter

GRAIN = 16  # elements; ranges begin at multiples of it, so that their memory is aligned
REACH_SECONDS = 10.0  # time in which the host of a shard has to accept a connection
# Maximum bytes of a part that wait in the operating system. So a worker sends its parts one after the other,
# each at the full rate of its link. If it sent all at once, parts of several workers would meet at one shard.
UNSENT_BYTES = 128 << 10
REPORTS = Kind.REPORT, Kind.STATE
AGAIN = 408  # the status of a refusal after which a worker sends its part again
LEAVE_SECONDS = 60.0  # longest wait, at the end, for the other workers to receive their last replies


class VectorRange(NamedTuple):
    """A contiguous range of a flat vector."""

    start: int
    stop: int


def spans_of(size: int, num_workers: int) -> list[VectorRange]:
    """Return the range of each worker's shard, in worker order; ranges of a short vector may be empty."""
    edges = [size * worker // num_workers // GRAIN * GRAIN for worker in range(num_workers)]
    return [VectorRange(*edge) for edge in zip(edges, [*edges[1:], size], strict=True)]


class PartRounds(GradientRounds):
    """Rounds of one range, with the reduction of a merge rule, or the mean of gradients."""

    def __init__(self, size: int, num_workers: int, reduction: Callable[[], Reduction]) -> None:
        self._make = reduction
        super().__init__(np.zeros(size, np.float32), EMPTY, num_workers)

    def _reduction(self) -> Reduction:
        return self._make()


class Shard:
    """The rounds of one range. A round closes once all workers have sent their parts.

    Args:
        run: sixteen bytes that identify the run.
        generation: the number of the generation (the start of the worker group) that the shard belongs to.
        worker: the worker that serves it.
        num_workers: number of workers.
        size: number of elements of the range.
        layout: digest of the model's layout and of the range.
        center: this worker's copy of the center, if deltas are reduced.
    """

    def __init__(
        self,
        run: bytes,
        generation: int,
        worker: int,
        num_workers: int,
        *,
        size: int,
        layout: bytes,
        center: ReplicatedCenter | None = None,
    ) -> None:
        self.run, self.worker, self.size, self.layout = run, worker, size, layout
        self.kind = Kind.GRADIENT if center is None else Kind.DELTA
        reduction = Mean if center is None else center.reduction
        self.aggregation = PartRounds(size, num_workers, reduction)
        self.aggregation.generation = generation
        self._begun = self._closed = False
        self._failure = ""
        # The last round whose result was returned to each worker, and the last one that was also sent.
        self._answered = dict.fromkeys(range(num_workers), -1)
        self._received = dict(self._answered)

    def begin(self, sequence: int, attempts: list[int]) -> None:
        """Open the first round. Parts that arrive earlier wait for it.

        Args:
            sequence: the number of the round.
            attempts: the attempt of each worker. Parts of other attempts are refused.
        """
        with self.aggregation.changed:
            self._begun = True
            self.aggregation.attempts.update(enumerate(attempts))
            self._received = dict.fromkeys(self._received, sequence - 1)
            self.aggregation.begin(sequence)

    def admit(self, update: Update, lengths: Sections) -> None:
        """Check a part by its header alone, before its body is read.

        Raises:
            RefusedError: the part does not belong to this shard or cannot be merged, or the shard has failed
                or ended.
        """
        self._require_sound()
        admission.check_run(update, self.run)
        check_current(self.aggregation, update)
        if update.layout != self.layout:
            raise RefusedError(422, "The range of the part does not match this shard.")
        if update.kind is not self.kind or update.worker not in self._received:
            raise RefusedError(400, f"A shard takes no {update.kind.name} of worker {update.worker}.")
        if Flag.AWAIT in update.flags:
            if lengths.nbytes or not self.aggregation.counted(update.worker, update.sequence):
                raise RefusedError(
                    409, f"The part {update.sequence} of worker {update.worker} did not arrive."
                )
        elif lengths != (self.aggregation.num_words(update) if update.rows else 0, 0, 0, 0):
            raise RefusedError(413, f"A part with {update.rows} rows cannot have these sections.")

    def _require_sound(self) -> None:
        """Raise an error if the shard has failed or ended.

        A worker asks again after the end. Meanwhile the reason for the end reaches the driver.
        """
        rounds = self.aggregation
        with rounds.changed:  # the request that broke the round gives the reason
            rounds.changed.wait_for(lambda: self._failure or not rounds.broken, limits.PATIENCE)
        if self._failure:
            raise RefusedError(500, f"The shard of worker {self.worker} failed: {self._failure}.")
        if self._closed:
            raise RefusedError(AGAIN, "The shard has ended.")

    def exchange(self, update: Update, read: Read) -> Reply:
        """Add a part to its round; return the reduced part once the round has closed."""
        rounds = self.aggregation
        with rounds.changed:
            if not rounds.changed.wait_for(lambda: self._begun, limits.PATIENCE):
                raise RefusedError(AGAIN, f"Round {update.sequence} has not begun.")
        try:
            reply = rounds.push(update, lambda: rounds.decoded(read()), lambda counts: Reply())
        except (WireError, ArrivalError):
            raise
        except RefusedError:
            self._require_sound()
            raise
        except BaseException as error:
            with rounds.changed:
                self._failure = reason_of(error)
                rounds.changed.notify_all()
            raise
        if Flag.AGAIN not in reply.flags:
            self._answered[update.worker] = update.sequence
        return reply

    def sent(self, update: Update, *, delivered: bool = True) -> None:
        """Record the end of a reply, which was sent if ``delivered``."""
        with self.aggregation.changed:
            self.aggregation.losses.clear()  # the driver's endpoint has them
            if delivered and self._answered[update.worker] == update.sequence:
                self._received[update.worker] = update.sequence
                self.aggregation.changed.notify_all()

    def wait_sent(self) -> None:
        """Wait until the result of the last round was sent to all workers, for at most LEAVE_SECONDS."""
        rounds = self.aggregation
        with rounds.changed:
            last = rounds.round - 1
            rounds.changed.wait_for(
                lambda: not self._begun or min(self._received.values()) >= last, LEAVE_SECONDS
            )

    def close(self) -> None:
        """Answer no part from now on, not even those that wait."""
        with self.aggregation.changed:
            self._begun = self._closed = True
            self.aggregation.generation = -1
            self.aggregation.changed.notify_all()


class ShardedExchange(Exchange):
    """The Exchange of a worker that reduces gradients or deltas together with the other workers.

    Args:
        driver: the exchange with the driver's endpoint.
        shard: this worker's shard.
        address: host, port and certificate (hexadecimal) of this worker's shard.
        spans: the range of each worker's shard.
        scaled: whether gradients of a scaled loss are exchanged, which may be Inf.
        center: this worker's copy of the center, if deltas are exchanged.
    """

    def __init__(
        self,
        driver: HttpExchange,
        shard: Shard,
        address: tuple[str, int, str],
        spans: list[VectorRange],
        *,
        scaled: bool,
        center: ReplicatedCenter | None = None,
    ) -> None:
        self.driver, self.shard, self.address, self.spans, self.scaled = driver, shard, address, spans, scaled
        shard.aggregation.codec = driver.codec
        shard.aggregation.salt = salt_of(shard.layout)
        self.center = center
        self._peers: list[HttpExchange] = []
        self._parts: list[Update] = []
        self._pool = BufferPool()
        worker = driver.identity["worker"]
        # Each worker begins with the shard after its own, so that no shard gets all workers' parts at once.
        self._order = [(worker + 1 + place) % len(spans) for place in range(len(spans))]

    def ready(
        self, rows: int, validation_rows: int, notes: Notes, fingerprint: Fingerprint = NOTHING
    ) -> Begin:
        """Report this worker's rows and its shard; return the starting point, once all shards are reached.

        Raises:
            WorkerLostError: a shard cannot be reached.
        """
        known: Notes = {**notes, "shard": self.address}
        begin = self.driver.ready(rows, validation_rows, known, fingerprint)
        if self.center is not None:
            self.center.bind(sum(map(bool, begin["rows"])))
        # the open round of the driver's endpoint
        self.shard.begin(begin["sequence"], begin["attempts"])
        for worker, (host, port, certificate) in enumerate(begin["shards"]):
            mine = self.driver.endpoint
            endpoint = Endpoint(host, port, mine.token, mine.run, bytes.fromhex(certificate))
            self._reach(worker, endpoint)
            layout = range_digest(self.driver.layout, self.spans[worker])
            self._peers.append(
                HttpExchange(
                    endpoint,
                    layout=layout,
                    unsent=UNSENT_BYTES,
                    codec=self.driver.codec,
                    **self.driver.identity,
                )
            )
        return begin

    def _reach(self, worker: int, endpoint: Endpoint) -> None:
        """Require that a worker's host accepts a connection to its shard."""
        try:
            socket.create_connection((endpoint.host, endpoint.port), REACH_SECONDS).close()
        except OSError as error:
            mine, here = self.driver.identity["worker"], socket.gethostname()
            loopback = ipaddress.ip_address(endpoint.host.partition("%")[0]).is_loopback
            remedy = (
                f"Worker {worker} reaches the driver at a loopback address; set "
                "Network(advertised_host=...) to an address of the driver that all executors can use, "
                if loopback
                else "It needs connections from each executor to every other one, at any port; permit them, "
            )
            raise WorkerLostError(
                f"Worker {mine} on {here} cannot reach worker {worker} at {endpoint.host}:{endpoint.port}, "
                f'as placement="executors" requires: {error}. {remedy}or set placement="driver".'
            ) from None

    def begin(self, update: Update) -> Update:
        """Send an update; return the ticket for ``finish``."""
        if update.kind is not self.shard.kind:
            if self.center is not None and update.kind in REPORTS and len(update.parameters):
                update = self.center.report(update)
            return self.driver.begin(update)
        below = inf if self.center is None else FARTHEST
        below = below if self.driver.codec is None else min(below, self.driver.codec.below)
        sound = self.scaled or is_finite(update.parameters, below) and is_finite(update.statistics)
        rows = update.rows if sound else 0
        self._parts = [
            replace(
                update,
                rows=rows,
                statistics=EMPTY,
                parameters=update.parameters[slice(*span)] if rows else EMPTY,
            )
            for span in self.spans
        ]
        for worker in self._order:
            self._parts[worker] = self._peers[worker].begin(self._parts[worker])
        flags = update.flags if sound else update.flags | Flag.NOT_FINITE
        return self.driver.begin(replace(update, flags=flags, parameters=EMPTY))

    def finish(self, ticket: Update) -> Reply:
        """Return the reply to an update: to a gradient, the mean of all workers; to a delta, the center."""
        if ticket.kind is not self.shard.kind:
            return self._take_center(ticket.kind, self.driver.finish(ticket))
        mean: Vector = self._pool.borrow(4 * self.spans[-1].stop).view(np.float32)
        # Shards wait for parts that were lost. So lost parts are sent again before the shards are polled.
        received, pending = 0, {worker: self._parts[worker] for worker in self._order}
        while pending:
            for worker, part in pending.items():
                self._peers[worker].send_lost(part)
            for worker, part in list(pending.items()):
                reply = self._ask(worker, part, mean[slice(*self.spans[worker])])
                if Flag.AGAIN in reply.flags:
                    pending[worker] = repeated(part, reply)
                else:
                    del pending[worker]
                    received += len(reply.parameters)
        self._parts = []
        reply, reduced = self.driver.finish(ticket), mean if received else EMPTY
        if self.center is not None:
            return self.center.merge(reduced, reply)
        return replace(reply, parameters=reduced)

    def _ask(self, worker: int, part: Update, memory: Vector) -> Reply:
        """Return the reply of a shard to a part, in this memory.

        Raises:
            WorkerLostError: the shard does not answer, or belongs to an earlier start of the worker group.
        """
        try:
            return self._peers[worker].try_finish(part, memory)
        except (TransportError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.status not in (409, 410):
                raise
            raise WorkerLostError(
                f"Worker {self.driver.identity['worker']} lost worker {worker}: {error}"
            ) from None

    def _take_center(self, kind: Kind, reply: Reply) -> Reply:
        """Return a reply of the driver. If it has a new center, continue from that one."""
        if self.center is not None and reply.kind is Answer.CENTER and kind is not Kind.PULL:
            self.center.take(reply)
            if kind is Kind.RESTORE:
                self.center.restore(self.driver(Update(kind=Kind.RULE)).state)
        return reply

    def close(self) -> None:
        """Close the connections to the shards. The connection to the driver stays open."""
        for peer in self._peers:
            peer.close()


def range_digest(layout: bytes, span: VectorRange) -> bytes:
    """Return the digest of a range of a model with this layout."""
    return hashlib.blake2b(layout + repr(tuple(span)).encode(), digest_size=16).digest()


@contextmanager
def sharded(
    driver: HttpExchange,
    size: int,
    num_workers: int,
    *,
    scaled: bool = False,
    center: ReplicatedCenter | None = None,
) -> Iterator[ShardedExchange]:
    """Serve this worker's shard in a ``with`` block; yield its Exchange.

    Args:
        driver: the exchange with the driver's endpoint, which this worker has joined.
        size: number of elements of a gradient or a delta.
        num_workers: number of workers.
        scaled: whether gradients of a scaled loss are exchanged.
        center: this worker's copy of the center, if deltas are exchanged.
    """
    spans, worker = spans_of(size, num_workers), driver.identity["worker"]
    span, run = spans[worker], driver.endpoint.run
    layout = range_digest(driver.layout, span)
    size_of_range = span.stop - span.start
    generation = driver.identity["generation"]
    shard = Shard(run, generation, worker, num_workers, size=size_of_range, layout=layout, center=center)
    context, certificate = tls.server_context() if driver.endpoint.certificate else (None, b"")
    app, host = make_shard_app(shard, driver.endpoint.token), driver.local_address()
    with serve(app, host, 0, num_workers, context) as port:
        exchange = ShardedExchange(
            driver, shard, (host, port, certificate.hex()), spans, scaled=scaled, center=center
        )
        try:
            yield exchange
            shard.wait_sent()
        finally:
            exchange.close()
            shard.close()

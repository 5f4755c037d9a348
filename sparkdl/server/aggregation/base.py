"""The interface between the coordinator and a center with its way of merging updates."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sparkdl.core.buffer_pool import BufferPool
from sparkdl.core.codecs import Codec
from sparkdl.core.vectors import Vector
from sparkdl.core.waiting import Condition
from sparkdl.errors import RefusedError
from sparkdl.server.aggregation import limits
from sparkdl.transport.messages import Flag, Reply, Update

# Returns an update with its sections. The caller owns it, and may remove the sections.
Read = Callable[[], Update]
# Returns a reply with the current stop flag, learning rate and progress. If called with True, it
# first counts the update, or the round that the update closes.
Control = Callable[[bool], Reply]


class Aggregation(ABC):
    """A center and its way of merging updates, as the coordinator sees them.

    Attributes:
        has_rounds: True if updates are merged in rounds, into one update of the center per round. A restart
            then rolls back to the last snapshot, and a snapshot within an epoch is made between two rounds.
        has_replicas: True if each worker has a copy of the center that it updates itself.
        round: number of the open round, if there are rounds.
        whole: True if the open round waits for all workers, regardless of quorum and timeout.
        working: number of workers that have rows.
        lost: lost workers, which are not waited for until they return.
        parameters: trainable variables of the center; with replicas, those of the last snapshot.
        statistics: moving statistics.
        version: number of changes of the center: merged updates or rounds, and calls of
            ``replace``.
        merges: number of merged updates or rounds, including those that a restart rolled back.
        state: state of the rule.
        losses: mean loss of each update or round counted since the losses were last taken, and nan
            for each update that was rejected by ``Screening``.
        dropped: number of late updates that were not merged, by worker.
        slices: number of gradient slices merged.
        merged_late: number of late updates merged.
        late: number of late updates in the open round, which are merged when it closes.
        attempts: current attempt of each worker, where known.
        staleness: number of merged updates by staleness, if there are no rounds.
        latest_staleness: staleness of each worker's last merged update.
        broken: True if counting an update failed half-way. Nothing is merged until ``restore``.
        pool: memory for the vectors of exchanges.
        codec: codec of updates and of mean gradients on the network; None: they are float32.
        lock: guards all of the state. The coordinator that owns the center also waits on it.
    """

    has_rounds = has_replicas = False
    round, whole = 0, False

    def __init__(self, parameters: Vector, statistics: Vector, num_workers: int) -> None:
        self.parameters, self.statistics = parameters, statistics
        self.num_workers = self.working = num_workers
        self.lost: set[int] = set()
        self.version = self.merges = 0
        self.renewed = 0  # the version with which the driver last set the center
        self.generation = 0
        self.state: Any = None
        self.losses: list[float] = []
        self.dropped: Counter[int] = Counter()
        self.merged_late = self.late = self.slices = 0
        self.attempts: dict[int, int] = {}
        self.broken = False
        self.pool = BufferPool()
        self.codec: Codec | None = None
        self.staleness = [0] * (limits.MOST_STALE + 1)
        self.latest_staleness: dict[int, int] = {}
        self.lock = threading.RLock()
        self.changed = Condition(self.lock)

    @abstractmethod
    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Count an update once and return the reply for its worker."""

    @abstractmethod
    def next_sequence(self, worker: int) -> int:
        """Return the first sequence number of this worker that is not counted yet."""

    @abstractmethod
    def has_taken(self, worker: int, sequence: int) -> bool:
        """Return True if an update was accepted before, so that a repetition changes nothing."""

    @abstractmethod
    def counted(self, worker: int, sequence: int) -> bool:
        """Return True if an update was counted and has not been rolled back since."""

    def bind(self, working: int) -> None:
        """Set the number of workers with rows, before the first update."""
        self.working = working

    def lose(self, worker: int) -> None:
        """Stop waiting for a worker, and accept nothing from it until it returns."""
        with self.changed:
            self.lost.add(worker)
            self.changed.notify_all()

    def may_come_back(self, worker: int) -> bool:
        """Return True if a lost worker may return now, False if it has to wait for another snapshot."""
        return True

    def come_back(self, worker: int) -> None:
        """Readmit a lost worker, which continues after its last counted update."""
        with self.changed:
            self.lost.discard(worker)

    def begin(self, sequence: int) -> None:
        """Discard the open round and open the one with this number, if there are rounds."""

    def enter(self, worker: int) -> None:
        """Include a worker in the staleness bound, if there is one, when it begins to train."""

    def leave(self, worker: int) -> None:
        """Exclude a worker from the staleness bound, if there is one, while it does not train."""

    def board(self, update: Update) -> None:
        """Wait until there is room for the vectors of one more exchange. ``sent`` releases the room."""

    def sent(self) -> None:
        """Release the room of an exchange whose reply was sent."""

    def settle(self) -> None:
        """Wait until the center has all counted updates.

        No merge begins before the caller releases the lock.
        """

    def ledger(self) -> dict[int, int]:
        """Return the last counted update of each worker, if there are no rounds."""
        return {}

    def restore_ledger(self, ledger: dict[int, int]) -> None:
        """Continue after these updates, if there are no rounds."""

    def reach(self, parameters: Vector) -> None:
        """Take the center of a snapshot that all replicas have reached, if workers have replicas."""

    def all_of(self, workers: Collection[int]) -> bool:
        """Return True if each worker is one of these or lost."""
        return len(self.lost.union(workers)) == self.num_workers

    def rule_bytes(self) -> int:
        """Return the largest size of the rule's state in a report, in bytes; 0 if reports have none."""
        return 0

    def read_rule(self, record: bytes) -> Any:
        """Return the state of the rule that a worker has reported.

        Raises:
            RefusedError: the record is not a state of this rule.
        """
        raise RefusedError(400, "Workers report no state of the merge rule in this run.")

    def body_bytes(self) -> int:
        """Return the size of an update's sections in bytes, once they are decoded."""
        return 4 * (len(self.parameters) + len(self.statistics))

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return True if an update's parameters may have this number of words, with or without slices."""
        return not sliced and words == len(self.parameters)

    def num_words(self, update: Update) -> int:
        """Return the number of words of an update's parameters, unless they have slices."""
        size = len(self.parameters)
        return size if self.codec is None or Flag.ENCODED not in update.flags else self.codec.num_words(size)

    def decoded(self, update: Update) -> Update:
        """Return an update with its parameters as float32.

        Raises:
            WireError: the parameters are not those of an update of this size.
        """
        if not (Flag.ENCODED in update.flags and self.codec and len(update.parameters)):
            return update
        parameters = self.codec.decode(update.parameters, len(self.parameters))
        return replace(update, flags=update.flags & ~Flag.ENCODED, parameters=parameters)

    def numbers(self, update: Update) -> list[Vector]:
        """Return all numbers of an update's parameters.

        Raises:
            WireError: the parameters are not a gradient of this model.
        """
        return [update.parameters]

    @contextmanager
    def _booking(self) -> Iterator[None]:
        """Refuse all further updates if the ``with`` block, which counts an update, fails."""
        try:
            yield
        except BaseException:
            with self.changed:
                self.broken = True
                self.changed.notify_all()
            raise

    def _note_staleness(self, worker: int, staleness: int) -> None:
        """Count a merged update by its staleness, for observers."""
        self.staleness[min(staleness, limits.MOST_STALE)] += 1
        self.latest_staleness[worker] = staleness

    def wake(self) -> None:
        """Make every waiting request check its condition again."""
        with self.changed:
            self.changed.notify_all()

    def snapshot(self) -> tuple[Vector, Vector, int]:
        """Return the center, the statistics and their version. Later updates do not change them."""
        with self.changed:
            return self.parameters, self.statistics, self.version

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Replace the center, as a new version."""
        with self.changed:
            self.parameters, self.statistics = parameters, statistics
            self.version += 1
            self.renewed = self.version

    def restore(self, parameters: Vector, statistics: Vector, version: int, state: Any) -> None:
        """Restore the center of an earlier version and the rule's state at that version."""
        with self.changed:
            self.replace(parameters, statistics)
            self.version, self.state = version, state
            self.renewed, self.broken = version, False


def check_current(aggregation: Aggregation, update: Update) -> None:
    """Refuse an update whose generation has ended or whose attempt was superseded or lost.

    Raises:
        RefusedError: the run or the generation has ended, the worker was lost, a newer attempt has replaced
            this one, or a merge has failed half-way.
    """
    if aggregation.generation < 0:
        raise RefusedError(410, "The run has ended.")
    if aggregation.generation != update.generation:
        raise RefusedError(
            409, f"Generation {update.generation} is over; the current one is {aggregation.generation}."
        )
    if update.worker in aggregation.lost:
        raise RefusedError(409, f"The run continues without worker {update.worker}.")
    attempt = aggregation.attempts.get(update.worker, update.attempt)
    if attempt != update.attempt:
        raise RefusedError(409, f"Attempt {attempt} of worker {update.worker} superseded {update.attempt}.")
    if aggregation.broken:
        raise RefusedError(409, "An update could not be merged; the run ends.")

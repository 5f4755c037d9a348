"""The interface that the coordinator has to a center and to its way of merging updates."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.errors import RefusedError
from sparkdl.transport.messages import Reply, Update

Read = Callable[[], Update]
Control = Callable[[bool], Reply]  # the control words of this moment; True: the update, or round, counts


class Aggregation(ABC):
    """A center, and how updates reach it, as the coordinator sees them.

    Attributes:
        has_rounds: whether an update of the center is made of one of every worker. Then a restart takes back
            all since the last snapshot, and a snapshot within an epoch is made between two rounds.
        has_replicas: whether each worker has a copy of the center that it moves itself.
        round: the number of the open round, where there are rounds.
        whole: whether the open round waits for all workers, whatever else is enough.
        working: how many of the workers have rows.
        absent: the workers that nobody waits for until they come back.
        parameters: the center variable; where workers have replicas, what it was at the last snapshot.
        statistics: the moving statistics.
        version: how many updates, or rounds, the center has taken.
        state: the rule's state.
        losses: the mean loss of each update or round counted since they were last taken away.
        dropped: late updates that were not merged, by worker.
        slices: how many slices of gradients were merged.
        merged_late: late updates that were; ``late``: those that are to be, if their round closes.
        attempts: the present attempt of each worker, where it is known.
        broken: whether booking an update has failed half-way; nothing is merged then until ``restore``.
        lock: guards all of it; the coordinator that owns the center waits on it too.
    """

    has_rounds = has_replicas = False
    round, whole = 0, False

    def __init__(self, parameters: Vector, statistics: Vector, num_workers: int) -> None:
        self.parameters, self.statistics = parameters, statistics
        self.num_workers = self.working = num_workers
        self.absent: set[int] = set()
        self.version = 0
        self.generation = 0
        self.state: Any = None
        self.losses: list[float] = []
        self.dropped: Counter[int] = Counter()
        self.merged_late = self.late = self.slices = 0
        self.attempts: dict[int, int] = {}
        self.broken = False
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)

    @abstractmethod
    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Count an update once and answer what its worker goes on with."""

    @abstractmethod
    def next_sequence(self, worker: int) -> int:
        """Return the first sequence number of this worker that is not counted yet."""

    @abstractmethod
    def has_taken(self, worker: int, sequence: int) -> bool:
        """Return whether an update was taken in, so that it changes nothing if it comes again."""

    @abstractmethod
    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update was counted, and not taken back since."""

    def bind(self, working: int) -> None:
        """Learn how many workers have rows, before the first update comes."""
        self.working = working

    def lose(self, worker: int) -> None:
        """Wait for a worker no longer, and take nothing of it until it comes back."""
        with self.changed:
            self.absent.add(worker)
            self.changed.notify_all()

    def may_come_back(self, worker: int) -> bool:
        """Return whether a lost worker may come back now, and not only after another snapshot."""
        return True

    def come_back(self, worker: int) -> None:
        """Take a worker in again that was lost, after its last counted update."""
        with self.changed:
            self.absent.discard(worker)

    def begin(self, sequence: int) -> None:
        """Forget the open round and open the one with this number, if there are rounds."""

    def enter(self, worker: int) -> None:
        """Include a worker that begins to train in the bound of staleness, if there is one."""

    def leave(self, worker: int) -> None:
        """Exclude an idle worker from the bound of staleness, if there is one."""

    def board(self, update: Update) -> None:
        """Wait until there is room for the vectors of one more exchange, which ``sent`` gives back."""

    def sent(self) -> None:
        """Give back the room of an exchange whose reply was sent."""

    def settle(self) -> None:
        """Wait until all counted updates are in the center; it stays so while the caller has the lock."""

    def ledger(self) -> dict[int, int]:
        """Return the last update counted of each worker, where updates are merged one at a time."""
        return {}

    def restore_ledger(self, ledger: dict[int, int]) -> None:
        """Go on after these updates, where updates are merged one at a time."""

    def reach(self, parameters: Vector) -> None:
        """Take the center of a snapshot that all replicas have reached, if workers have replicas."""

    def all_of(self, workers: Collection[int]) -> bool:
        """Return whether these are all workers but absent ones."""
        return len(self.absent.union(workers)) == self.num_workers

    def body_bytes(self) -> int:
        """Return how many bytes the sections of an update have."""
        return 4 * (len(self.parameters) + len(self.statistics))

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return whether an update's parameters may have so many words, with or without slices."""
        return not sliced and words == len(self.parameters)

    def numbers(self, update: Update) -> list[Vector]:
        """Return all numbers of an update's parameters.

        Raises:
            WireError: they are not a gradient of this model.
        """
        return [update.parameters]

    @contextmanager
    def _booking(self) -> Iterator[None]:
        """Refuse all further updates if a ``with`` block that books one fails."""
        try:
            yield
        except BaseException:
            with self.changed:
                self.broken = True
                self.changed.notify_all()
            raise

    def wake(self) -> None:
        """Let every waiting request look again at why it waits."""
        with self.changed:
            self.changed.notify_all()

    def snapshot(self) -> tuple[Vector, Vector, int]:
        """Return the center and the statistics, which no update touches, and their version."""
        with self.changed:
            return self.parameters, self.statistics, self.version

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take another center, as a new version."""
        with self.changed:
            self.parameters, self.statistics = parameters, statistics
            self.version += 1

    def restore(self, parameters: Vector, statistics: Vector, version: int, state: Any) -> None:
        """Take the center that there was at some version, and the rule's state then."""
        with self.changed:
            self.replace(parameters, statistics)
            self.version, self.state = version, state
            self.broken = False


def without_body(update: Update) -> Update:
    """Return an update without its vectors, which are not to be kept while it waits."""
    return replace(update, parameters=EMPTY, statistics=EMPTY)


def check_current(aggregation: Aggregation, update: Update) -> None:
    """Refuse an update on its way: its generation has ended, its attempt was superseded, or nothing merges.

    Raises:
        RefusedError: it is refused.
    """
    if aggregation.generation != update.generation:
        raise RefusedError(
            409, f"Generation {update.generation} is over; the run is at {aggregation.generation}."
        )
    if update.worker in aggregation.absent:
        raise RefusedError(409, f"The run goes on without worker {update.worker}.")
    attempt = aggregation.attempts.get(update.worker, update.attempt)
    if attempt != update.attempt:
        raise RefusedError(409, f"Attempt {attempt} of worker {update.worker} superseded {update.attempt}.")
    if aggregation.broken:
        raise RefusedError(409, "An update could not be merged, and the run ends.")

"""How the updates of many workers become one center: by rounds, one at a time, or at once.

The three classes are interchangeable. ``push`` takes an update whose sections are still unread and a
function that reads them, so that a body that has to wait its turn waits outside of memory, and counts
each (worker, sequence) once. None of them knows HTTP, and what they know of workers is a number.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.sparse_gradients import SliceMean, Tables, decode, most_words
from sparkdl.core.vectors import EMPTY, Vector, window_share
from sparkdl.errors import RefusedError
from sparkdl.rules import Merge, Rule, apply
from sparkdl.transport.messages import Answer, Flag, Reply, Update

PATIENCE = 20.0  # seconds that a request may wait before its worker is told to ask again
EARLY_BYTES = 64 << 20  # what is kept of bodies that came before their turn, or of centers on their way
LEAST_EARLY = 2  # and of how many exchanges without rounds: one slow worker does not keep the others out
KEPT_BYTES = 64 << 20  # what hybrid rounds keep of mean gradients for workers that come late
STRAGGLERS = 3  # bodies of theirs that are read beside the others', whatever their size
LEAST_KEPT = 4  # and how many of them, whatever their size
STRIPE = 1 << 16  # elements that one lock of a hogwild center guards

Read = Callable[[], Update]
Control = Callable[[bool], Reply]  # the control words of this moment; True: the update, or round, counts


class Aggregation(ABC):
    """What a center and its way of merging are to the store.

    Attributes:
        working: how many of the workers have rows.
        absent: the workers that nobody waits for until they come back.
        parameters: the center variable; of ``GradientRounds`` what it was at the last cut.
        statistics: the moving statistics.
        version: how many updates, or rounds, the center has taken.
        state: the rule's state.
        losses: the mean loss of each update or round counted since they were last taken away.
        dropped: late updates that were not merged, by worker.
        slices: how many slices of gradients were merged.
        merged_late: late updates that were; ``late``: those that are to be, if their round closes.
        attempts: the present attempt of each worker, where it is known.
        broken: whether booking an update has failed half-way; nothing is merged then until ``restore``.
        lock: guards all of it; the store that owns the center waits on it too.
    """

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

    def come_back(self, worker: int) -> None:
        """Take a worker in again that was lost, after its last counted update."""
        with self.changed:
            self.absent.discard(worker)

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


class Hybrid(NamedTuple):
    """When a round closes without all of its workers (Chen et al., 2016), and what becomes of late updates.

    Attributes:
        quorum: so many workers with rows are enough.
        timeout: so many seconds after the first of them those that are in are enough; None: any time.
        merge_late: whether a late update is merged into the round that is open when it comes, or dropped.
    """

    quorum: int
    timeout: float | None = None
    merge_late: bool = False


class SynchronousRounds(Aggregation):
    """Synchronous: a round closes when all workers are in that are not absent; sums run in worker order.

    The order makes a run repeat bit for bit. An update that comes before its turn is kept while it fits
    in a small budget; beyond it, its body stays unread in the socket.

    *Hybrid* rounds close with those that are in at some moment, and add in the order of arrival. A worker
    that is late is told which round is open, and goes on with that one.

    Attributes:
        round: the number of the round that is open.
        whole: whether it waits for all workers, hybrid or not.
        depth: by how many rounds a worker may be late.
        awaited: the workers that are not in the open round yet.
    """

    def __init__(
        self, parameters: Vector, statistics: Vector, num_workers: int, hybrid: Hybrid | None = None
    ) -> None:
        super().__init__(parameters, statistics, num_workers)
        self.hybrid = hybrid
        self.clock = time.monotonic
        self.depth = 0
        self.whole = False
        self.begin(0)

    def _reduction(self) -> Reduction:
        """Return what makes one vector of the parameters of a round."""
        return Mean()

    def begin(self, sequence: int) -> None:
        """Forget the open round and wait for the one with this number."""
        with self.changed:
            self.round = sequence
            self.replies: dict[int, Reply] = {}  # those of the last rounds
            self.taken = dict.fromkeys(range(self.num_workers), sequence - 1)  # each worker's last update
            self.answered = dict(self.taken)
            self.reading: set[int] = set()
            self._open()
            self.changed.notify_all()

    def _open(self) -> None:
        self.rows, self.loss, self.weight = 0, 0.0, 0.0
        self.awaited = set(range(self.num_workers)) - self.absent
        self.with_rows, self.late, self.deadline = 0, 0, inf
        self.steps = 0
        self.early: dict[int, Update] = {}
        self.here: set[int] = set()
        self.reductions: tuple[Reduction, Reduction] = self._reduction(), Mean()

    def next_sequence(self, worker: int) -> int:
        """Return the number after that of the last update taken in of this worker."""
        return self.taken[worker] + 1

    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update is in the open round, or that round has closed."""
        with self.changed:
            return sequence < self.round or self.has_taken(worker, sequence)

    def has_taken(self, worker: int, sequence: int) -> bool:
        """Return whether an update is in a round, or was dropped as late."""
        return sequence <= self.taken[worker]

    def lose(self, worker: int) -> None:
        """Wait for a worker no longer; what it has in the open round counts."""
        with self.changed, self._booking():
            self.awaited.discard(worker)
            self.reading.discard(worker)
            self._add_early()
            super().lose(worker)

    def come_back(self, worker: int) -> None:
        """Wait for a worker in the open round, as if it had been in all before."""
        with self.changed:
            super().come_back(worker)
            self.taken[worker] = self.answered[worker] = self.round - 1
            self.awaited.add(worker)

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Add an update to its round and answer when the round has closed."""
        counts = False
        if self._admit(update):
            try:
                counts = self._accept(read(), control)
            finally:
                with self.changed:
                    self.reading.discard(update.worker)
                    self.changed.notify_all()
        else:
            counts = self._accept(read(), control)
        with self.changed:
            if not self._closes(update, control):
                return Reply(flags=Flag.AGAIN)
            reply = self._answer(update)
            return reply if counts else replace(reply, flags=reply.flags | Flag.DUPLICATE)

    def _admit(self, update: Update) -> bool:
        """Wait until the update's body may be read; False if it is counted already, or late."""
        with self.changed:
            if update.sequence > self.round:
                raise RefusedError(409, f"Round {update.sequence} is not open; {self.round} is.")
            if update.rows and update.sequence == self.round and self.hybrid is not None:
                self.deadline = min(self.deadline, self.clock() + (self.hybrid.timeout or inf))
            if update.sequence == self.round:
                self._let_go(update.worker)
            while update.sequence > self.taken[update.worker]:
                size = self.body_bytes()
                kept = size * (len(self.early) + len(self.reading))
                if self._is_next(update) or kept + size <= EARLY_BYTES:
                    self.reading.add(update.worker)
                    return True
                self.changed.wait(self._until(self.clock() + PATIENCE))
                _check(self, update)
            return False

    def _let_go(self, worker: int) -> None:
        """Forget the last reply once every worker has come with what it made of it."""
        self.here.add(worker)
        if self.hybrid is None and self.all_of(self.here):
            self.replies.clear()

    def _until(self, patience: float) -> float:
        """Return the seconds up to the deadline, or to when patience ends, whichever comes first."""
        now = self.clock()
        return (self.deadline if now < self.deadline < patience else patience) - now

    def _is_next(self, update: Update) -> bool:
        """Return whether a body is to be read whatever is kept: one in turn, or beside a few stragglers'."""
        if self.hybrid is None:
            return update.worker == min(self.awaited, default=update.worker)
        spare = min(STRAGGLERS, self.num_workers - self.hybrid.quorum)
        return not update.rows or len(self.reading) <= spare or self.clock() >= self.deadline

    def _accept(self, update: Update, control: Control) -> bool:
        """Take in an update unless it was taken in before; return whether it was not."""
        with self.changed:
            _check(self, update)
            if self.has_taken(update.worker, update.sequence):
                return False
            with self._booking():
                self.taken[update.worker] = update.sequence
                if update.sequence < self.round:
                    self._accept_late(update)
                    return True
                self.early[update.worker] = update
                del update  # and with it its body, once that is added
                self._add_early()
                if self._may_close():
                    self._close(control)
            self.changed.notify_all()
            return True

    def _add_early(self) -> None:
        """Add the updates whose turn it is: where sums run in worker order, once those before are in."""
        while self.early:
            worker = min(self.early)
            if self.hybrid is None and worker > min(self.awaited, default=worker):
                return
            self._add(self.early.pop(worker))
            self.awaited.discard(worker)

    def _accept_late(self, update: Update) -> None:
        if self.hybrid is not None and self.hybrid.merge_late:
            self._add(update)
            self.late += bool(update.rows)
        elif update.rows:
            self.dropped[update.worker] += 1

    def _add(self, update: Update) -> None:
        """Add an update to the open round; statistics are a mean by rows, whatever the parameters are."""
        if not update.rows:
            return
        self._reduce(update)
        self.reductions[1].add(update.statistics, update.rows)
        self.rows += update.rows
        self.loss += (update.normalizer or update.rows) * update.loss
        self.weight += update.normalizer or update.rows
        self.steps += update.steps
        self.with_rows += update.sequence == self.round

    def _reduce(self, update: Update) -> None:
        """Add the parameters of an update to those of the open round."""
        self.reductions[0].add(update.parameters, update.normalizer or update.rows)

    def _may_close(self) -> bool:
        if not self.awaited or self.hybrid is None or self.whole:
            return not self.awaited
        enough = self.with_rows >= self.hybrid.quorum or (self.with_rows and self.clock() >= self.deadline)
        return bool(enough) and (not self.depth or self._answered_by_all() >= self.round - self.depth)

    def _answered_by_all(self) -> int:
        """Return the last round whose reply every worker has that is not absent."""
        return min(sequence for worker, sequence in self.answered.items() if worker not in self.absent)

    def _close(self, control: Control) -> None:
        parameters, statistics = (reduction.result() for reduction in self.reductions)
        self.version += 1
        self.losses.append(self.loss / (self.weight or 1))
        reply = self._conclude(parameters, statistics, control(True))
        self.replies[self.round] = reply
        self._forget_replies()
        self.merged_late += self.late
        self.round += 1
        reply.round = self.round
        self._open()
        self.changed.notify_all()

    def _forget_replies(self) -> None:
        """Let go of the replies that nobody can still ask for."""
        through = self.round - self.depth - 1
        if self.depth:  # which may have become less
            through = min(through, self._answered_by_all())
        for sequence in [sequence for sequence in self.replies if sequence <= through]:
            del self.replies[sequence]

    def _closes(self, update: Update, control: Control) -> bool:
        """Wait until an update's round has closed, and close it if its time is up; False: not yet."""
        patience = self.clock() + PATIENCE

        def over() -> bool:
            return self.round > update.sequence or self.generation != update.generation or self.broken

        while not over():
            if self._may_close():
                with self._booking():
                    self._close(control)
            elif self.clock() >= patience:
                return False
            else:
                self.changed.wait_for(lambda: over() or self._may_close(), self._until(patience))
        _check(self, update)
        return True

    def _answer(self, update: Update) -> Reply:
        """Return the reply of a round; a worker that is late learns from it which round is open."""
        reply = self.replies.get(update.sequence if self.depth or self.hybrid is None else self.round - 1)
        if reply is None:
            raise RefusedError(409, f"Round {update.sequence} closed long ago.")
        self.answered[update.worker] = max(self.answered[update.worker], update.sequence)
        if self.depth:
            self.changed.notify_all()
        return reply if self.round == reply.round else replace(reply, round=self.round)

    @abstractmethod
    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        """Use the means of a round, empty when no worker had rows, and fill in its reply."""


class GradientRounds(SynchronousRounds):
    """Every worker gets the mean gradient of a round and applies it with its own optimizer.

    One that is late applies the means of the rounds that it missed, one after the other, so that replicas
    stay identical. The last ones are kept for that; a round that would let go of one that is still missing
    at some worker waits.

    Args:
        parameters: the center variable.
        statistics: the moving statistics.
        num_workers: how many workers send updates.
        hybrid: when a round closes without some of its workers; None: never.
        tables: the trainable variables, where gradients may have slices.
    """

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        hybrid: Hybrid | None = None,
        tables: Tables = (),
    ) -> None:
        self.tables = tables
        self.words = 0  # of the longest gradient with slices so far
        super().__init__(parameters, statistics, num_workers, hybrid)
        self.most = most_words(len(parameters), num_workers) if tables else 0
        if hybrid is not None:
            self.depth = self._depth(len(parameters))

    def _depth(self, words: int) -> int:
        """Return how many mean gradients of this length are kept."""
        return max(LEAST_KEPT, KEPT_BYTES // (4 * (words + len(self.statistics)) or 1))

    def body_bytes(self) -> int:
        """Return how many bytes the sections of an update have, by those that came."""
        return 4 * (self.words + len(self.statistics)) if self.words else super().body_bytes()

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return whether a gradient may have so many words."""
        return 0 < words <= self.most if sliced else super().takes(words, sliced=False)

    def numbers(self, update: Update) -> list[Vector]:
        """Return all numbers of a gradient, but not those of its slices' rows."""
        if update.flags & Flag.SLICES:
            return decode(update.parameters, self.tables).parts
        return super().numbers(update)

    def _reduction(self) -> Reduction:
        return SliceMean(self.tables) if self.tables else super()._reduction()

    def _reduce(self, update: Update) -> None:
        reduction = self.reductions[0]
        if not (isinstance(reduction, SliceMean) and update.flags & Flag.SLICES):
            super()._reduce(update)
            return
        self.words = max(self.words, len(update.parameters))
        weight = update.normalizer or update.rows
        self.slices += reduction.add_encoded(update.parameters, weight)

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(statistics):
            self.statistics = statistics
        if getattr(self.reductions[0], "sliced", False):
            reply = replace(reply, flags=reply.flags | Flag.SLICES)
        if self.hybrid is not None:
            self.depth = min(self.depth, self._depth(len(parameters)))
        return replace(
            reply,
            kind=Answer.MEAN,
            version=self.version,
            parameters=parameters,
            statistics=self.statistics,
        )


class DeltaRounds(SynchronousRounds):
    """The center moves by the rule's answer to the reduced delta; every worker goes on from the center."""

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        rule: Rule,
        decays: Vector,
        hybrid: Hybrid | None = None,
    ) -> None:
        self.rule, self.decays = rule, decays
        super().__init__(parameters, statistics, num_workers, hybrid)
        self.state = rule.init(parameters)

    def bind(self, working: int) -> None:
        """Take the rule for so many workers."""
        super().bind(working)
        self.rule = self.rule.bound(working)

    def _reduction(self) -> Reduction:
        """Return the rule's way to make one delta of a round's."""
        return self.rule.reduction()

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(parameters):
            merge = Merge(0, 1, center=self.parameters)
            step, self.state = apply(self.rule, parameters, self.state, merge)
            self.parameters = self.parameters + step
        if len(statistics):
            share = window_share(self.decays, self.steps, 1)
            self.statistics = self.statistics + share * (statistics - self.statistics)
        return replace(
            reply,
            kind=Answer.CENTER,
            version=self.version,
            parameters=self.parameters,
            statistics=self.statistics,
        )


class Asynchronous(Aggregation):
    """Asynchronous: each update is merged under one lock, its staleness known.

    The center is changed in place, and a worker gets a copy of it. However many workers there are, few
    exchanges of a large model are under way at a time, from the body that is read to the center that has
    arrived; the rest waits in sockets. So there is one vector for each of these, the center, and for a moment
    what a rule makes of a delta.

    Where staleness is bounded (stale-synchronous parallel: Ho et al., 2013), a worker that has made more
    than ``bound`` exchanges more than the slowest one waits for it before it goes on.
    """

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        rule: Rule,
        decays: Vector,
        bound: int | None = None,
    ) -> None:
        super().__init__(parameters.copy(), statistics, num_workers)
        self.rule, self.state = rule, rule.init(parameters)
        self.decays = decays
        self.last: dict[int, int] = {}
        self.bound = bound
        self.clocks: dict[int, int] = {}  # the exchanges of each worker that is training
        self.given: Callable[[], Vector | None] = _nothing  # a copy of this center that somebody has
        self.flights = 0  # exchanges whose body, or whose center on its way to a worker, takes memory

    def bind(self, working: int) -> None:
        """Take the rule for so many workers."""
        super().bind(working)
        self.rule = self.rule.bound(working)

    def enter(self, worker: int) -> None:
        """Let a worker begin, or begin again once it has left, beside the slowest of the others."""
        with self.changed:
            self.clocks.setdefault(worker, min(self.clocks.values(), default=0))

    def leave(self, worker: int) -> None:
        """Let nobody wait for a worker any more."""
        with self.changed:
            self.clocks.pop(worker, None)
            self.changed.notify_all()

    def _ahead(self, worker: int) -> int:
        return self.clocks.get(worker, 0) - min(self.clocks.values(), default=0)

    def next_sequence(self, worker: int) -> int:
        """Return the number after the last one counted of this worker."""
        return self.last.get(worker, -1) + 1

    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update was merged; nothing that was merged is taken back."""
        with self.changed:
            return sequence < self.next_sequence(worker)

    has_taken = counted

    def settle(self) -> None:
        """Let all that is counted be in the center while the caller, who has the lock, keeps it."""

    def board(self, update: Update) -> None:
        """Wait until there is room for the vectors of one more exchange, which ``sent`` gives back."""
        with self.changed:
            while not self._has_room():
                self.changed.wait(PATIENCE)
                _check(self, update)
            self.flights += 1

    def _has_room(self) -> bool:
        return self.flights < max(LEAST_EARLY, EARLY_BYTES // (self.body_bytes() or 1))

    def sent(self) -> None:
        """Give back the room of an exchange whose reply has gone."""
        with self.changed:
            self.flights -= 1
            self.changed.notify_all()

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update and answer what the center then is."""
        update = read()
        with self.changed:
            _check(self, update)
            merge, flags = self._meant(update)
            body, update, step, state = (
                [update.parameters],
                replace(update, parameters=EMPTY),
                EMPTY,
                self.state,
            )
            if merge is not None:
                step, state = apply(self.rule, body.pop(), self.state, merge)
            with self._booking():
                if not flags:
                    self._book(update, merge)
                if merge is not None:
                    self.parameters += step
                    self.given, self.state = _nothing, state
            del body, step
            update = without_body(update)
            reply = self._words(update, control, counts=merge is not None)
            if reply.flags & Flag.AGAIN:
                return reply
            return replace(
                reply,
                kind=Answer.CENTER,
                flags=reply.flags | flags,
                version=self.version,
                parameters=self.parameters.copy(),
                statistics=self.statistics,
            )

    def snapshot(self) -> tuple[Vector, Vector, int]:
        """Return a copy of the center, one for all who ask at once, the statistics, and their version."""
        with self.changed:
            copy = self.given()
            if copy is None:
                copy = self.parameters.copy()
                self.given = weakref.ref(copy)
            return copy, self.statistics, self.version

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take the values of another center, as a new version."""
        with self.changed:
            self.parameters[...] = parameters
            self.given = _nothing
            super().replace(self.parameters, statistics)

    def _words(self, update: Update, control: Control, *, counts: bool) -> Reply:
        """Return the control words of the moment at which the worker is not too far ahead."""
        reply = control(counts)
        bound = self.bound
        if bound is None:
            return reply
        with self.changed:
            self.sent()  # who waits takes no room
            near = self.changed.wait_for(
                lambda: (
                    self.generation != update.generation
                    or self.broken
                    or self._ahead(update.worker) <= bound
                    and self._has_room()
                ),
                PATIENCE,
            )
            self.flights += 1
            _check(self, update)
            return control(False) if near else Reply(flags=Flag.AGAIN)

    def _meant(self, update: Update) -> tuple[Merge | None, Flag]:
        """Return how to merge an update, None if there is nothing to merge, and a flag for the reply."""
        if self.counted(update.worker, update.sequence):
            return None, Flag.DUPLICATE
        if not len(update.parameters):
            return None, Flag.NONE
        return Merge(self.version - update.base_version, self.working, update.steps), Flag.NONE

    def _book(self, update: Update, merge: Merge | None) -> None:
        """Count an update, and merge its statistics if it is to be merged."""
        self.last[update.worker] = update.sequence
        if update.worker in self.clocks:
            self.clocks[update.worker] += 1
        if merge is None:
            return
        self.losses.append(update.loss)
        if len(self.statistics):
            share = window_share(self.decays, update.steps, self.working)
            self.statistics = self.statistics + share * (update.statistics - self.statistics)
        self.version += 1


class Hogwild(Asynchronous):
    """Hogwild (Recht et al., 2011): updates are merged at once, element by element.

    There is no lock over the whole center. An addition takes a short lock per stripe, because NumPy's
    ``+=`` from two threads loses additions; a reader may see one update's first half and another's second.
    """

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        rule: Rule,
        decays: Vector,
        bound: int | None = None,
    ) -> None:
        super().__init__(parameters, statistics, num_workers, rule, decays, bound)
        self.stripes = [threading.Lock() for _ in range(0, max(1, len(parameters)), STRIPE)]
        self.adding = 0  # updates that are counted, and not in the center yet
        self.settling = 0  # who waits until there are none, and lets no other begin meanwhile

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update stripe by stripe and answer what the center then looks like."""
        update = read()
        with self.changed:
            self.changed.wait_for(lambda: not self.settling)
            _check(self, update)
            merge, flags = self._meant(update)
            with self._booking():
                if not flags:
                    self._book(update, merge)
            self.adding += merge is not None
        if merge is not None:
            try:
                with self._booking():
                    self._add(update, merge)
            finally:
                self._added()
        update = without_body(update)
        reply = self._words(update, control, counts=merge is not None)
        if reply.flags & Flag.AGAIN:
            return reply
        return replace(
            reply,
            kind=Answer.CENTER,
            flags=reply.flags | flags,
            version=self.version,
            parameters=self.parameters.copy(),
            statistics=self.statistics,
        )

    def settle(self) -> None:
        """Wait until additions have ended; none begins before the caller gives back the lock."""
        with self.changed:
            self.settling += 1
            self.changed.wait_for(lambda: not self.adding)
            self.settling -= 1
            self.changed.notify_all()

    def _added(self) -> None:
        with self.changed:
            self.adding -= 1
            self.given = _nothing
            if self.settling:
                self.changed.notify_all()

    def _add(self, update: Update, merge: Merge) -> None:
        for index, lock in enumerate(self.stripes):
            part = slice(index * STRIPE, (index + 1) * STRIPE)
            step, _ = apply(self.rule, update.parameters[part], None, merge)
            with lock:
                self.parameters[part] += step

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take another center in place, so that additions under way are not lost."""
        with self.changed:
            for index, lock in enumerate(self.stripes):
                part = slice(index * STRIPE, (index + 1) * STRIPE)
                with lock:
                    self.parameters[part] = parameters[part]
            self.given = _nothing
            self.statistics = statistics
            self.version += 1


def _nothing() -> None:
    """Be a weak reference to what is gone."""


def without_body(update: Update) -> Update:
    """Return an update without its vectors, which are not to be kept while it waits."""
    return replace(update, parameters=EMPTY, statistics=EMPTY)


def _check(merging: Aggregation, update: Update) -> None:
    """Refuse an update on its way: its generation has ended, its attempt was superseded, or nothing merges.

    Raises:
        RefusedError: it is refused.
    """
    if merging.generation != update.generation:
        raise RefusedError(
            409, f"Generation {update.generation} is over; the run is at {merging.generation}."
        )
    if update.worker in merging.absent:
        raise RefusedError(409, f"The run goes on without worker {update.worker}.")
    attempt = merging.attempts.get(update.worker, update.attempt)
    if attempt != update.attempt:
        raise RefusedError(409, f"Attempt {attempt} of worker {update.worker} superseded {update.attempt}.")
    if merging.broken:
        raise RefusedError(409, "An update could not be merged, and the run ends.")


@dataclass(frozen=True)
class AggregationSpec:
    """The terms on which updates meet.

    Attributes:
        mode: "synchronous", "asynchronous" or "hogwild".
        joint: whether gradients are merged, and not deltas.
        num_workers: how many workers send updates.
        rule: what becomes of a delta.
        staleness: how many exchanges a worker may be ahead of the slowest one, where there are no rounds.
        hybrid: when a round closes without some of its workers; None: never.
        tables: the trainable variables, where gradients are merged that may have slices.
    """

    mode: str
    joint: bool
    num_workers: int
    rule: Rule
    staleness: int | None = None
    hybrid: Hybrid | None = None
    tables: Tables = ()


def make_aggregation(
    terms: AggregationSpec, parameters: Vector, statistics: Vector, decays: Vector | None = None
) -> Aggregation:
    """Return a center on which updates meet on these terms.

    Args:
        terms: the terms.
        parameters: the center variable.
        statistics: the moving statistics.
        decays: how much of each statistic a training step keeps; nan, or None for all: not known.
    """
    start = parameters, statistics, terms.num_workers
    if terms.joint:
        return GradientRounds(*start, terms.hybrid, terms.tables)
    decays = np.full_like(statistics, np.nan) if decays is None else decays
    if terms.mode == "synchronous":
        return DeltaRounds(*start, terms.rule, decays, terms.hybrid)
    kind = {"asynchronous": Asynchronous, "hogwild": Hogwild}[terms.mode]
    return kind(*start, terms.rule, decays, terms.staleness)

"""Synchronous rounds: the updates of all workers are reduced to one update of the center."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import replace
from math import inf
from typing import NamedTuple

from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.vectors import Vector
from sparkdl.errors import RefusedError
from sparkdl.server.aggregation import limits
from sparkdl.server.aggregation.base import Aggregation, Control, Read, check_current
from sparkdl.transport.messages import Flag, Reply, Update


class Hybrid(NamedTuple):
    """Conditions under which a round closes without all of its workers (Chen et al., 2016).

    Attributes:
        quorum: number of updates with rows after which a round may close.
        timeout: seconds after a round's first update with rows, after which it may close without a quorum;
            None: no limit.
        merge_late: True to merge a late update into the round that is open when it arrives, False to drop it.
    """

    quorum: int
    timeout: float | None = None
    merge_late: bool = False


class SynchronousRounds(Aggregation):
    """Synchronous rounds: a round closes once every present worker has sent its update.

    Updates are added in worker order, so that a run is reproducible bit for bit. An update that arrives
    before its turn is kept if it fits in a small budget. Otherwise its body stays unread in the socket.

    *Hybrid* rounds close once the quorum or the timeout is reached, and add updates in order of arrival. The
    reply tells a late worker which round is open, and the worker continues with that one.

    Attributes:
        round: number of the open round.
        whole: True if the open round waits for all workers, regardless of quorum and timeout.
        depth: number of rounds that a worker may be late in hybrid rounds; 0: no limit.
        awaited: workers whose update is not in the open round yet.
    """

    has_rounds = True

    def __init__(
        self, parameters: Vector, statistics: Vector, num_workers: int, hybrid: Hybrid | None = None
    ) -> None:
        super().__init__(parameters, statistics, num_workers)
        self.hybrid = hybrid
        self.clock = time.monotonic
        self.depth = 0
        self.outside = 0  # requests that wait until their body may be read
        self.whole = False
        self.begin(0)

    def _reduction(self) -> Reduction:
        """Return the reduction of a round's parameters to one vector."""
        return Mean()

    def begin(self, sequence: int) -> None:
        """Discard the open round and open the one with this number."""
        with self.changed:
            self.round = sequence
            self.replies: dict[int, Reply] = {}  # replies of the last rounds
            self.taken = dict.fromkeys(range(self.num_workers), sequence - 1)  # each worker's last update
            self.answered = dict(self.taken)
            self.reading: set[int] = set()
            self._open()
            self.changed.notify_all()

    def _open(self) -> None:
        self.rows, self.loss, self.weight = 0, 0.0, 0.0
        self.awaited = set(range(self.num_workers)) - self.lost
        self.with_rows, self.late, self.deadline = 0, 0, inf
        self.steps = 0
        self.early: dict[int, Update] = {}
        self.here: set[int] = set()
        self.reductions: tuple[Reduction, Reduction] = self._reduction(), Mean()
        self.reductions[0].pool = self.pool

    def next_sequence(self, worker: int) -> int:
        """Return the sequence number after the last accepted update of this worker."""
        return self.taken[worker] + 1

    def counted(self, worker: int, sequence: int) -> bool:
        """Return True if an update is in the open round, or if its round has closed."""
        with self.changed:
            return sequence < self.round or self.has_taken(worker, sequence)

    def has_taken(self, worker: int, sequence: int) -> bool:
        """Return True if an update is in a round or was dropped as late."""
        return sequence <= self.taken[worker]

    def lose(self, worker: int) -> None:
        """Stop waiting for a worker. Its update in the open round, if any, still counts."""
        with self.changed, self._booking():
            self.awaited.discard(worker)
            self.reading.discard(worker)
            self._add_early()
            super().lose(worker)

    def may_come_back(self, worker: int) -> bool:
        """Return True if the open round has no update of this lost worker."""
        return self.next_sequence(worker) <= self.round

    def come_back(self, worker: int) -> None:
        """Include a worker in the open round, as if it had taken part in all earlier ones."""
        with self.changed:
            super().come_back(worker)
            self.taken[worker] = self.answered[worker] = self.round - 1
            self.awaited.add(worker)

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Add an update to its round and reply when the round has closed."""
        counts = False
        admitted = self._admit(update)
        if admitted is None:
            return Reply(flags=Flag.AGAIN | Flag.RESEND)
        if admitted:
            try:
                counts = self._accept(read(), control)
            finally:
                with self.changed:
                    self.reading.discard(update.worker)
                    self._let_in()
        else:
            counts = self._accept(read(), control)
        with self.changed:
            if not self._closes(update, control):
                return Reply(flags=Flag.AGAIN)
            reply = self._answer(update)
            return reply if counts else replace(reply, flags=reply.flags | Flag.DUPLICATE)

    def _admit(self, update: Update) -> bool | None:
        """Wait until the update's body may be read.

        Returns:
            True if it may be read, False if the update was accepted before, and None if the worker should
            send it again, because it has waited for BODY_PATIENCE.
        """
        patience = self.clock() + limits.BODY_PATIENCE
        with self.changed:
            if update.sequence > self.round:
                raise RefusedError(
                    409, f"Round {update.sequence} is not open; the open round is {self.round}."
                )
            if update.rows and update.sequence == self.round and self.hybrid is not None:
                self.deadline = min(self.deadline, self.clock() + (self.hybrid.timeout or inf))
            if update.sequence == self.round:
                self._note_arrival(update.worker)
            while update.sequence > self.taken[update.worker]:
                size = self.body_bytes()
                kept = size * (len(self.early) + len(self.reading))
                if self._is_next(update) or kept + size <= limits.EARLY_BYTES:
                    self.reading.add(update.worker)
                    return True
                if self.clock() >= patience:
                    return None
                self.outside += 1
                try:
                    self.changed.wait(self._until(patience))
                finally:
                    self.outside -= 1
                check_current(self, update)
            return False

    def _let_in(self) -> None:
        """Wake the requests that wait until their body may be read, if there are any."""
        if self.outside:
            self.changed.notify_all()

    def _note_arrival(self, worker: int) -> None:
        """Record that a worker's next update has begun. Once all have, discard the last reply."""
        self.here.add(worker)
        if self.hybrid is None and self.all_of(self.here):
            self.replies.clear()

    def _until(self, patience: float) -> float:
        """Return the seconds until the deadline, unless it has passed, or the end of patience if sooner."""
        now = self.clock()
        return (self.deadline if now < self.deadline < patience else patience) - now

    def _is_next(self, update: Update) -> bool:
        """Return True if an update's body may be read regardless of the budget.

        In worker order, this holds for the update whose turn it is. In hybrid rounds, it holds if few other
        bodies are being read, if the update has no rows, or once the deadline has passed.
        """
        if self.hybrid is None:
            return update.worker == min(self.awaited, default=update.worker)
        spare = min(limits.STRAGGLERS, self.num_workers - self.hybrid.quorum)
        return not update.rows or len(self.reading) <= spare or self.clock() >= self.deadline

    def _accept(self, update: Update, control: Control) -> bool:
        """Accept an update; return False if it was accepted before."""
        with self.changed:
            check_current(self, update)
            if self.has_taken(update.worker, update.sequence):
                return False
            with self._booking():
                self.taken[update.worker] = update.sequence
                if update.sequence < self.round:
                    self._accept_late(update)
                    return True
                self.early[update.worker] = update
                del update  # so that its body is freed once it is added
                self._add_early()
                if self._may_close():
                    self._close(control)
            self._let_in()
            return True

    def _add_early(self) -> None:
        """Add the updates whose turn it is. In worker order, an update waits for lower-numbered workers."""
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
        """Add an update to the open round. Its statistics are averaged, weighted by its rows."""
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
        """Add the parameters of an update to the open round."""
        self.reductions[0].add(update.parameters, update.normalizer or update.rows)

    def _may_close(self) -> bool:
        if not self.awaited or self.hybrid is None or self.whole:
            return not self.awaited
        enough = self.with_rows >= self.hybrid.quorum or (self.with_rows and self.clock() >= self.deadline)
        return bool(enough) and (not self.depth or self._answered_by_all() >= self.round - self.depth)

    def _answered_by_all(self) -> int:
        """Return the last round whose reply was given to every present worker."""
        return min(sequence for worker, sequence in self.answered.items() if worker not in self.lost)

    def _close(self, control: Control) -> None:
        parameters, statistics = (reduction.result() for reduction in self.reductions)
        self.version += 1
        self.merges += 1
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
        """Discard the replies that no worker can request any more."""
        through = self.round - self.depth - 1
        if self.depth:  # A longer gradient reduces the depth; keep the replies that late workers still need.
            through = min(through, self._answered_by_all())
        for sequence in [sequence for sequence in self.replies if sequence <= through]:
            del self.replies[sequence]

    def _closes(self, update: Update, control: Control) -> bool:
        """Wait until an update's round closes, or close it at its deadline; return False if it stays open."""
        patience = self.clock() + limits.PATIENCE

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
        check_current(self, update)
        return True

    def _answer(self, update: Update) -> Reply:
        """Return the reply of a round. It tells a late worker which round is open."""
        reply = self.replies.get(update.sequence if self.depth or self.hybrid is None else self.round - 1)
        if reply is None:
            raise RefusedError(409, f"Round {update.sequence} closed too long ago; its reply was dropped.")
        self.answered[update.worker] = max(self.answered[update.worker], update.sequence)
        if self.depth:
            self.changed.notify_all()
        return reply if self.round == reply.round else replace(reply, round=self.round)

    @abstractmethod
    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        """Apply a round's reduced sections, which are empty if no worker had rows, and complete its reply."""

"""Asynchronous updates: each is merged when it arrives, under one lock."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from sparkdl.core.vectors import EMPTY, Vector, window_share
from sparkdl.rules import Merge, Rule, apply
from sparkdl.server.aggregation import limits
from sparkdl.server.aggregation.base import Aggregation, Control, Read, check_current
from sparkdl.transport.messages import Answer, Flag, Reply, Update


class Asynchronous(Aggregation):
    """Asynchronous merging: each update is merged under one lock, and its staleness is known.

    The center is changed in place, and a worker gets a copy of it. Only a few exchanges of a large model are
    under way at a time, however many workers there are. An exchange lasts from reading the body until the
    worker has received the center. The bodies of all other updates stay unread in their sockets.
    Memory holds one vector for each exchange under way, the center, and briefly the step that a
    rule makes of a delta.

    With bounded staleness (stale-synchronous parallel: Ho et al., 2013), a worker that is more than ``bound``
    exchanges ahead of the slowest worker waits for it.
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
        self.clocks: dict[int, int] = {}  # exchanges by worker; one that enters begins at the lowest
        self.given: Callable[[], Vector | None] = no_vector  # weak reference to the last copy of this center
        self.flights = 0  # exchanges whose body or outgoing center takes memory

    def bind(self, working: int) -> None:
        """Set the number of workers with rows and bind the rule to it."""
        super().bind(working)
        self.rule = self.rule.bound(working)

    def enter(self, worker: int) -> None:
        """Include a worker in the staleness bound when it begins to train, level with the slowest one."""
        with self.changed:
            self.clocks.setdefault(worker, min(self.clocks.values(), default=0))

    def leave(self, worker: int) -> None:
        """Exclude a worker from the staleness bound while it does not train."""
        with self.changed:
            self.clocks.pop(worker, None)
            self.changed.notify_all()

    def _ahead(self, worker: int) -> int:
        return self.clocks.get(worker, 0) - min(self.clocks.values(), default=0)

    def next_sequence(self, worker: int) -> int:
        """Return the sequence number after the last counted update of this worker."""
        return self.last.get(worker, -1) + 1

    def counted(self, worker: int, sequence: int) -> bool:
        """Return True if an update was counted. Counted updates are never rolled back."""
        with self.changed:
            return sequence < self.next_sequence(worker)

    has_taken = counted

    def ledger(self) -> dict[int, int]:
        """Return the sequence number of the last counted update of each worker."""
        return dict(self.last)

    def restore_ledger(self, ledger: dict[int, int]) -> None:
        """Continue after these updates."""
        self.last = dict(ledger)

    def board(self, update: Update) -> None:
        """Wait until there is room for the vectors of one more exchange. ``sent`` releases the room."""
        with self.changed:
            while not self._has_room():
                self.changed.wait(limits.PATIENCE)
                check_current(self, update)
            self.flights += 1

    def _has_room(self) -> bool:
        return self.flights < max(limits.LEAST_EARLY, limits.EARLY_BYTES // (self.body_bytes() or 1))

    def sent(self) -> None:
        """Release the room of an exchange whose reply was sent."""
        with self.changed:
            self.flights -= 1
            self.changed.notify_all()

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update and return the resulting center."""
        update = read()
        with self.changed:
            check_current(self, update)
            merge, flags = self._meant(update)
            body, step, state = [update.parameters], EMPTY, self.state
            update.parameters = EMPTY
            if merge is not None:
                step, state = apply(self.rule, body.pop(), self.state, merge)
            with self._booking():
                if not flags:
                    self._record_merge(update, merge)
                if merge is not None:
                    self.parameters += step
                    self.given, self.state = no_vector, state
            del body, step
            update.statistics = EMPTY  # frees the body before the worker waits
            return self._reply(update, control, flags, counts=merge is not None)

    def snapshot(self) -> tuple[Vector, Vector, int]:
        """Return a copy of the center, the statistics and their version.

        Calls share one copy until the center changes.
        """
        with self.changed:
            copy = self.given()
            if copy is None:
                copy = self._copy()
                self.given = weakref.ref(copy)
            return copy, self.statistics, self.version

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Replace the values of the center, as a new version."""
        with self.changed:
            self.parameters[...] = parameters
            self.given = no_vector
            super().replace(self.parameters, statistics)

    def _words(self, update: Update, control: Control, *, counts: bool) -> Reply:
        """Count an update if ``counts``, and return a reply without weights.

        With a staleness bound, the worker waits until it is within the bound and there is room for an
        exchange. If this takes longer than PATIENCE, the reply tells it to ask again.
        """
        reply = control(counts)
        bound = self.bound
        if bound is None:
            return reply
        with self.changed:
            self.sent()  # a waiting request takes no room
            near = self.changed.wait_for(
                lambda: (
                    self.generation != update.generation
                    or self.broken
                    or self._ahead(update.worker) <= bound
                    and self._has_room()
                ),
                limits.PATIENCE,
            )
            self.flights += 1
            check_current(self, update)
            return control(False) if near else Reply(flags=Flag.AGAIN)

    def _reply(self, update: Update, control: Control, flags: Flag, *, counts: bool) -> Reply:
        """Return the reply to an update: the center, unless the worker has to repeat the request."""
        reply = self._words(update, control, counts=counts)
        if Flag.AGAIN in reply.flags:
            return reply
        reply.kind, reply.version, reply.flags = Answer.CENTER, self.version, reply.flags | flags
        reply.parameters, reply.statistics = self._copy(), self.statistics
        return reply

    def _copy(self) -> Vector:
        """Return a copy of the center."""
        copy: Vector = self.pool.borrow_like(self.parameters)
        copy[...] = self.parameters
        return copy

    def _meant(self, update: Update) -> tuple[Merge | None, Flag]:
        """Return the merge of an update, or None if there is nothing to merge, and a flag for the reply."""
        if self.counted(update.worker, update.sequence):
            return None, Flag.DUPLICATE
        if not len(update.parameters):
            return None, Flag.NONE
        return Merge(self.version - update.base_version, self.working, update.steps), Flag.NONE

    def _record_merge(self, update: Update, merge: Merge | None) -> None:
        """Count an update, and merge its statistics if there is a merge."""
        self.last[update.worker] = update.sequence
        if update.worker in self.clocks:
            self.clocks[update.worker] += 1
        if merge is None:
            return
        self.losses.append(update.loss)
        self._note_staleness(update.worker, merge.staleness)
        if len(self.statistics) and update.base_version >= self.renewed:
            share = window_share(self.decays, update.steps, self.working)
            self.statistics = self.statistics + share * (update.statistics - self.statistics)
        self.version += 1
        self.merges += 1


def no_vector() -> None:
    """Return None, like a dead weak reference to a vector."""

"""Asynchronous updates: each is merged when it arrives, under one lock."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from sparkdl.core.vectors import EMPTY, Vector, window_share
from sparkdl.rules import Merge, Rule, apply
from sparkdl.server.aggregation import limits
from sparkdl.server.aggregation.base import Aggregation, Control, Read, check_current, without_body
from sparkdl.transport.messages import Answer, Flag, Reply, Update


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
        self.given: Callable[[], Vector | None] = no_vector  # a copy of this center that somebody has
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
        """Exclude an idle worker from the bound of staleness."""
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

    def ledger(self) -> dict[int, int]:
        """Return the last update counted of each worker."""
        return dict(self.last)

    def restore_ledger(self, ledger: dict[int, int]) -> None:
        """Go on after these updates."""
        self.last = dict(ledger)

    def board(self, update: Update) -> None:
        """Wait until there is room for the vectors of one more exchange, which ``sent`` gives back."""
        with self.changed:
            while not self._has_room():
                self.changed.wait(limits.PATIENCE)
                check_current(self, update)
            self.flights += 1

    def _has_room(self) -> bool:
        return self.flights < max(limits.LEAST_EARLY, limits.EARLY_BYTES // (self.body_bytes() or 1))

    def sent(self) -> None:
        """Give back the room of an exchange whose reply was sent."""
        with self.changed:
            self.flights -= 1
            self.changed.notify_all()

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update and answer what the center then is."""
        update = read()
        with self.changed:
            check_current(self, update)
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
                    self.given, self.state = no_vector, state
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
            self.given = no_vector
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
                limits.PATIENCE,
            )
            self.flights += 1
            check_current(self, update)
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


def no_vector() -> None:
    """Return None, as a weak reference to a vector that is gone does."""

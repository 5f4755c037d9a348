"""Rebalance: rows that workers give to each other before they train, so that all have as many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from mmap import mmap

import numpy as np

from sparkdl.errors import RefusedError
from sparkdl.server import row_check
from sparkdl.server.aggregation import Read, limits
from sparkdl.server.membership import Membership
from sparkdl.server.run_state import RunState
from sparkdl.server.schedule import Schedule
from sparkdl.server.state import spooled
from sparkdl.transport.messages import Flag, Reply, Update


class Rebalance:
    """The rows of all workers, and those on their way from one worker to another.

    Args:
        state: the state of the run.
        membership: the workers.
        schedule: the control words of a reply.

    Attributes:
        shares: the rows that each worker was dealt, before some are given away.
        given: the rows on their way, by the worker that gives them and the one that takes them.
    """

    def __init__(self, state: RunState, membership: Membership, schedule: Schedule) -> None:
        self.state, self.membership, self.schedule = state, membership, schedule
        self.num_workers = membership.shape.num_workers
        self.shares: dict[int, int] = {}
        self.given: dict[tuple[int, int], bytes | mmap] = {}

    def share(self, update: Update, read: Read) -> Reply:
        """Record how many rows a worker was dealt; answer with the number of every worker, once all have."""
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            before = self.shares.get(update.worker)
            if not update.flags & Flag.AWAIT and before != update.rows:
                if before is not None and len(self.shares) == self.num_workers:
                    self.state.refuse_rows(row_check.other_count(update.worker, update.rows, before))
                self.shares[update.worker] = update.rows
                self.state.changed.notify_all()
            known = self._wait(update, lambda: len(self.shares) == self.num_workers)
            shares = np.array([rows for _, rows in sorted(self.shares.items())], "<u8")
            return (
                replace(self.schedule.reply(), state=shares.tobytes()) if known else Reply(flags=Flag.AGAIN)
            )

    def give(self, update: Update, read: Read) -> Reply:
        """Keep the rows that a worker gives to another one, also for a taker that starts again."""
        if update.sequence >= self.num_workers:
            raise RefusedError(400, f"Unknown worker {update.sequence}.")
        rows = spooled(read().state)
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            self.given[update.worker, update.sequence] = rows
            self.state.changed.notify_all()
            return self.schedule.reply()

    def take(self, update: Update, read: Read) -> Reply:
        """Answer with the rows that another worker gives to this one, once they are there."""
        move = update.sequence, update.worker
        with self.state.changed:
            if not self._wait(update, lambda: move in self.given):
                return Reply(flags=Flag.AGAIN)
            return replace(self.schedule.reply(), state=bytes(self.given[move]))

    def _wait(self, update: Update, ready: Callable[[], bool]) -> bool:
        """Wait for something that other workers report; return whether it is there."""
        self.state.changed.wait_for(lambda: self.state.is_over(update.generation) or ready(), limits.PATIENCE)
        self.membership.check(update.worker, update.generation, update.attempt)
        return ready()

    def clear(self) -> None:
        """Forget the rows of the generation that ends."""
        self.shares.clear()
        self.given.clear()

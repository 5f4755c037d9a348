"""Rebalance: rows that workers give to each other before they train, so that all have as many."""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap

import numpy as np

from sparkdl.errors import RefusedError
from sparkdl.server import limits, row_check
from sparkdl.server.membership import Membership
from sparkdl.server.run_state import RunState
from sparkdl.server.state import spooled
from sparkdl.transport.messages import Flag, Update


class Rebalance:
    """The rows of all workers, and those on their way from one worker to another.

    Args:
        state: the state of the run.
        membership: the workers.

    Attributes:
        shares: the rows that each worker was dealt, before some are given away.
        given: the rows on their way, by the worker that gives them and the one that takes them.
    """

    def __init__(self, state: RunState, membership: Membership) -> None:
        self.state, self.membership = state, membership
        self.num_workers = membership.shape.num_workers
        self.shares: dict[int, int] = {}
        self.given: dict[tuple[int, int], bytes | mmap] = {}

    def share(self, update: Update) -> bytes | None:
        """Record how many rows a worker was dealt; return the number of every worker, None to ask again."""
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
            return shares.tobytes() if known else None

    def check_taker(self, update: Update) -> None:
        """Check that the worker that rows are given to is one of the group.

        Raises:
            RefusedError: it is not.
        """
        if update.sequence >= self.num_workers:
            raise RefusedError(400, f"Unknown worker {update.sequence}.")

    def give(self, update: Update) -> None:
        """Keep the rows that a worker gives away, also for a taker that starts again."""
        rows = spooled(update.state)
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            self.given[update.worker, update.sequence] = rows
            self.state.changed.notify_all()

    def take(self, update: Update) -> bytes | None:
        """Return the rows that another worker gives to this one; None to ask again."""
        move = update.sequence, update.worker
        with self.state.changed:
            ready = self._wait(update, lambda: move in self.given)
            return bytes(self.given[move]) if ready else None

    def _wait(self, update: Update, ready: Callable[[], bool]) -> bool:
        """Wait for something that other workers report; return whether it is there."""
        self.state.changed.wait_for(lambda: self.state.is_over(update.generation) or ready(), limits.PATIENCE)
        self.membership.check(update.worker, update.generation, update.attempt)
        return ready()

    def clear(self) -> None:
        """Forget the rows of the generation that ends."""
        self.shares.clear()
        self.given.clear()

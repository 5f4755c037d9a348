"""Rebalance: rows that workers pass on before training, so that their shares differ by at most one row."""

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
from sparkdl.server.schedule import EpochSchedule
from sparkdl.server.state import in_file
from sparkdl.transport.messages import Flag, Reply, Update


class Rebalance:
    """The number of rows of each worker, and the rows that workers give to other workers.

    Args:
        state: state of the run.
        membership: the workers.
        schedule: source of the stop flag, learning rate and progress of a reply.

    Attributes:
        shares: number of rows that each worker was dealt, before some are given away.
        given: rows that were given, by (giving worker, taking worker).
    """

    def __init__(self, state: RunState, membership: Membership, schedule: EpochSchedule) -> None:
        self.state, self.membership, self.schedule = state, membership, schedule
        self.num_workers = membership.shape.num_workers
        self.shares: dict[int, int] = {}
        self.given: dict[tuple[int, int], bytes | mmap] = {}

    def share(self, update: Update, read: Read) -> Reply:
        """Record the number of rows dealt to a worker; reply with all workers' numbers once known."""
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            before = self.shares.get(update.worker)
            if Flag.AWAIT not in update.flags and before != update.rows:
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
        """Keep rows that one worker gives to another, also for later attempts of the receiving worker."""
        if update.sequence >= self.num_workers:
            raise RefusedError(400, f"Unknown worker {update.sequence}.")
        rows = in_file(read().state)
        with self.state.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            self.given[update.worker, update.sequence] = rows
            self.state.changed.notify_all()
            return self.schedule.reply()

    def take(self, update: Update, read: Read) -> Reply:
        """Reply with the rows that another worker gives to this one, once they have arrived."""
        move = update.sequence, update.worker
        with self.state.changed:
            if not self._wait(update, lambda: move in self.given):
                return Reply(flags=Flag.AGAIN)
            return replace(self.schedule.reply(), state=bytes(self.given[move]))

    def _wait(self, update: Update, ready: Callable[[], bool]) -> bool:
        """Wait for a report of other workers; return True if it has arrived."""
        self.state.changed.wait_for(lambda: self.state.is_over(update.generation) or ready(), limits.PATIENCE)
        self.membership.check(update.worker, update.generation, update.attempt)
        return ready()

    def clear(self) -> None:
        """Forget the rows of the generation that ends."""
        self.shares.clear()
        self.given.clear()

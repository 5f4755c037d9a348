"""Agreement on the rows of all workers, which must be the rows that the run began with."""

from __future__ import annotations

from sparkdl.errors import RefusedError
from sparkdl.server import row_check
from sparkdl.server.aggregation import Aggregation
from sparkdl.server.membership import Membership
from sparkdl.server.run_state import RunState
from sparkdl.server.schedule import EpochSchedule
from sparkdl.server.snapshots import Snapshots
from sparkdl.server.state import Member, RowsHeld


class RowAgreement:
    """The rows that the workers hold. The coordinator's lock guards them.

    Args:
        state: state of the run.
        membership: the workers.
        schedule: maker of the workers' plans.
        snapshots: snapshots of the run.
        aggregation: the aggregation, which holds the center.

    Attributes:
        held: rows of each worker, once all have reported them; before that, those that the run expects.
    """

    def __init__(
        self,
        state: RunState,
        membership: Membership,
        schedule: EpochSchedule,
        snapshots: Snapshots,
        aggregation: Aggregation,
    ) -> None:
        self.state, self.membership, self.schedule = state, membership, schedule
        self.snapshots, self.aggregation = snapshots, aggregation
        self.held: tuple[RowsHeld, ...] = ()
        self._owner = ""
        self._warned = False

    def expect(self, held: tuple[RowsHeld, ...], owner: str) -> None:
        """Set the rows that the workers should hold: those of ``owner``, which errors name."""
        self.held, self._owner = held, owner

    def check(self, worker: int, member: Member, held: RowsHeld) -> None:
        """Refuse a worker whose rows differ from those that it, or its earlier attempt, reported.

        If a worker restarts while others train, its recomputed partition may have rows that other
        workers already have. If it has as many rows as before, the difference only causes a warning.

        Raises:
            RefusedError: the same attempt reports different rows, or a later one a different number of rows.
        """
        if member.held is not None:
            if member.held != held:
                raise RefusedError(422, f"Worker {worker} reported rows that differ from its first report.")
        elif self.membership.agreed:
            before = self.held[worker]
            if held.rows != before.rows:
                self.state.refuse_rows(row_check.other_count(worker, held.rows, before.rows))
            if held != before and not self._warned:
                self._warned = True
                self.state.warn(row_check.one_in_other_order(worker))

    def agree(self) -> None:
        """Fix the rows of all workers and their plans, once all have reported.

        Raises:
            RefusedError: the rows differ from those that the run began with, or there are no training rows.
        """
        members = self.membership.members
        held = tuple(members[k].held or RowsHeld(0) for k in sorted(members))
        if self.held and self.held != held:
            self._compare(held)
        rows = tuple(each.rows for each in held)
        if not any(rows):
            held_out = sum(member.validation_rows for member in members.values())
            self.state.refuse_rows(row_check.no_rows(held_out))
        if self.schedule.plan_for(rows):
            self.aggregation.bind(self.schedule.plans[0].working)
        self.held, self.membership.agreed = held, True
        self.snapshots.begin()

    def _compare(self, held: tuple[RowsHeld, ...]) -> None:
        """Continue with workers whose rows are distributed or ordered differently, if the rows are the same.

        In rounds, rows may have moved to other workers, and the epoch under way begins again. Without rounds,
        each worker must have as many rows as before.
        """
        rounds = self.aggregation.has_rounds
        if not row_check.may_go_on(self.held, held, anywhere=rounds):
            owner = "the previous worker group" if self.schedule.plans else self._owner
            self.state.refuse_rows(row_check.other_rows(self.held, held, owner))
        self.snapshots.restore_epoch()
        held_out = any(member.validation_rows for member in self.membership.members.values())
        snapshot = str(self.snapshots.committed)
        self.state.warn(row_check.other_order(snapshot, anywhere=rounds, validation=held_out))

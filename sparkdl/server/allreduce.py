"""All-reduce: coordination of a run of the user's own function, whose workers add arrays.

Workers make the same calls in the same order. A call takes one round of ``aggregation`` for each dtype of its
arrays. The arrays of a round are added in worker order. In an update, ``metrics`` holds the name of the dtype
and ``state`` the numbers. A worker whose function has returned sends a report without sections.
"""

from __future__ import annotations

import numpy as np

from sparkdl.core.reduction import NUMBERS, Reduction, Total
from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.errors import RefusedError, WorkerError, WorkerLostError
from sparkdl.server import admission
from sparkdl.server.aggregation import Read, SynchronousRounds, limits
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.server.state import GroupSpec, RowsHeld
from sparkdl.transport.exchange import Begin, Notes
from sparkdl.transport.messages import Flag, Kind, Reply, Sections, Update


class AllReduceRounds(SynchronousRounds):
    """All-reduce rounds, for arrays of any length and dtype.

    Attributes:
        alike: layout and size in bytes of the arrays of the open round and of the one before it, by round.
    """

    def __init__(self, num_workers: int) -> None:
        self.alike: dict[int, tuple[bytes, int]] = {}
        super().__init__(EMPTY, EMPTY, num_workers)

    def body_bytes(self) -> int:
        """Return the size of an update of the open round in bytes."""
        return self.alike.get(self.round, (b"", 0))[1]

    def _reduction(self) -> Reduction:
        return Total()

    def _open(self) -> None:
        super()._open()
        self.losses.clear()
        self.alike = {sequence: it for sequence, it in self.alike.items() if sequence >= self.round - 1}

    def _add(self, update: Update) -> None:
        self.reductions[0].add(np.frombuffer(update.state, update.metrics.decode()), 1.0)

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        reply.version, reply.state = self.version, parameters.tobytes()
        return reply


class AllReduceCoordinator(GroupCoordinator):
    """Coordinator of a run whose workers add arrays.

    Args:
        run: sixteen random bytes that identify the run.
        num_workers: number of workers in the group.
    """

    def __init__(self, run: bytes, num_workers: int) -> None:
        self.rounds = AllReduceRounds(num_workers)
        super().__init__(GroupSpec(run=run, num_workers=num_workers), self.rounds)
        self.requested_round = dict.fromkeys(range(num_workers), -1)  # each worker's last round
        self.returned: set[int] = set()

    def ready(
        self,
        worker: int,
        generation: int,
        attempt: int,
        rows: int,
        validation_rows: int,
        notes: Notes,
        fingerprint: Fingerprint = NOTHING,
    ) -> Begin | None:
        """Record a ready worker; return an empty dict once all are ready, or None if the wait timed out."""
        with self.changed:
            member = self.membership.hear(worker, generation, attempt)
            held = RowsHeld(rows, fingerprint)
            if member.held not in (None, held):
                raise RefusedError(422, f"Worker {worker} reported rows that differ from its first report.")
            member.held, member.validation_rows, member.notes = held, validation_rows, notes
            if not self.membership.agreed and self._all_ready():
                self.membership.agreed = True
                self.rounds.begin(0)
            self.changed.notify_all()
            begins = self.changed.wait_for(
                lambda: self.state.is_over(generation) or self.membership.agreed, limits.PATIENCE
            )
            self.membership.hear(worker, generation, attempt)
            return {} if begins else None

    def _all_ready(self) -> bool:
        return self.rounds.all_of(self.membership.ready_workers())

    def lose(self, worker: int, reason: str) -> None:
        """Fail the run: it cannot continue without a worker."""
        self.state.failure = self.failure or WorkerLostError(reason)
        self.changed.notify_all()

    def _restart(self) -> None:
        """Start again with the first round."""
        self.rounds.restore(EMPTY, EMPTY, 0, None)
        self.rounds.begin(0)

    def _check_header(self, update: Update, lengths: Sections) -> None:
        admission.check_run(update, self.shape.run)
        with self.changed:
            self.membership.hear(update.worker, update.generation, update.attempt)
            if not self.membership.agreed:
                raise RefusedError(409, "The worker group is not ready and cannot sum arrays yet.")
            if update.kind is Kind.REPORT and not lengths.nbytes:
                return
            if update.kind is not Kind.ARRAYS or lengths.parameters or lengths.statistics:
                raise RefusedError(400, f"Expected arrays for all_reduce; got {update.kind.name}.")
            self._check_arrays(update, lengths)

    def _check_arrays(self, update: Update, lengths: Sections) -> None:
        if not self.rounds.round - 1 <= update.sequence <= self.rounds.round:
            raise RefusedError(
                409, f"Round {update.sequence} is not open; the open round is {self.rounds.round}."
            )
        if Flag.AWAIT in update.flags:
            if lengths.nbytes or not self.rounds.counted(update.worker, update.sequence):
                raise RefusedError(
                    409, f"The arrays of worker {update.worker} for round {update.sequence} did not arrive."
                )
            return
        these = update.layout, lengths.state
        if self.rounds.alike.setdefault(update.sequence, these) != these or lengths.metrics > 4:
            raise RefusedError(
                422,
                f"The arrays that worker {update.worker} passed to all_reduce do not match another worker's. "
                "All workers should pass arrays of the same structure, shapes and dtypes with the same op, "
                "in the same order of calls.",
            )
        self.requested_round[update.worker] = max(self.requested_round[update.worker], update.sequence)
        self._fail_if_left_alone()

    def _answer(self, update: Update, read: Read) -> Reply:
        """Reply to arrays with the sum over all workers, and record a worker that has returned."""
        if update.kind is Kind.ARRAYS:
            return self.rounds.push(update, lambda: _checked(read()), lambda counts: Reply())
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            self.returned.add(update.worker)
            self._fail_if_left_alone()
            return Reply()

    def _fail_if_left_alone(self) -> None:
        """Fail the run if a worker waits for another worker that has returned."""
        for gone in sorted(self.returned):
            waiting = [
                worker
                for worker, requested_round in self.requested_round.items()
                if requested_round > self.requested_round[gone]
            ]
            if waiting:
                message = (
                    f"Worker {gone} returned, and worker {waiting[0]} waits for it in all_reduce or "
                    "barrier. Call them equally often on every worker."
                )
                self.fail(self.generation, WorkerError(message, worker=gone))


def _checked(update: Update) -> Update:
    """Return the update if its numbers can be read.

    Raises:
        RefusedError: the section holds no array of numbers.
    """
    dtype = update.metrics.decode("ascii", "replace")
    known = dtype in NUMBERS and not len(update.state) % np.dtype(dtype).itemsize
    if not (known or Flag.AWAIT in update.flags):
        raise RefusedError(400, f"{len(update.state)} bytes of {dtype!r} are not an array of numbers.")
    return update

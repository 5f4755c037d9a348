"""Membership: the attempt of each worker that takes part in a run, and the time of its last message."""

from __future__ import annotations

from math import inf

from sparkdl.errors import RefusedError
from sparkdl.server.run_state import RunState
from sparkdl.server.state import GroupSpec, Member
from sparkdl.transport.messages import Running

# A worker that is alive, but has trained no row for this multiple of the stall time, is reported.
LONG_STEP = 10
# If the driver has not checked for longer than this many seconds, that time does not count as silence.
ABSENCE = 5.0


class Membership:
    """Workers of the current generation.

    Args:
        state: state of the run.
        shape: settings of the worker group.

    Attributes:
        members: current attempt of each worker.
        agreed: True if all workers have reported their rows.
        asking: workers that wait for a reply of the endpoint.
        looked: time of the driver's last check for silent workers.
    """

    def __init__(self, state: RunState, shape: GroupSpec) -> None:
        self.state, self.shape = state, shape
        self.members: dict[int, Member] = {}
        self.agreed = False
        self.asking: set[int] = set()
        self.looked = inf
        # Position (epoch and rows) of each worker that is not waiting for a reply, and when it got there.
        self._positions: dict[int, tuple[tuple[int, int], float]] = {}

    def older_attempt(self, worker: int, generation: int, attempt: int) -> Member | None:
        """Return the attempt that a newer one should replace, if there is one.

        Raises:
            RefusedError: the generation or the run is over, the worker is unknown, or a newer attempt has
                joined.
        """
        self.state.check_open(generation)
        if not 0 <= worker < self.shape.num_workers:
            raise RefusedError(400, f"Unknown worker {worker}: the run has {self.shape.num_workers} workers.")
        known = self.members.get(worker)
        if known is not None and known.attempt > attempt:
            raise RefusedError(
                409, f"Attempt {known.attempt} of worker {worker} is newer than attempt {attempt}."
            )
        return known if known is not None and known.attempt < attempt else None

    def is_at_work(self, member: Member) -> bool:
        """Return True if an attempt sent a message recently; it must then not be replaced."""
        return self.state.clock() - member.heard < self.shape.silence

    def add(self, worker: int, attempt: int, host: str, pid: int) -> None:
        """Add an attempt, in place of an older one; do nothing if this or a newer attempt has joined."""
        known = self.members.get(worker)
        if known is None or known.attempt < attempt:
            self.members[worker] = Member(attempt, host, pid, self.state.clock())

    def hear(self, worker: int, generation: int, attempt: int) -> Member:
        """Return an attempt's record, and set the time of its last message to now.

        Raises:
            RefusedError: see ``check``.
        """
        member = self.check(worker, generation, attempt)
        member.heard = self.state.clock()
        return member

    def check(self, worker: int, generation: int, attempt: int) -> Member:
        """Return an attempt's record, if the attempt may take part in the run.

        Raises:
            RefusedError: the generation or the run is over, or the attempt was superseded or lost, or has not
                joined.
        """
        self.state.check_open(generation)
        member = self.members.get(worker)
        if member is None:
            raise RefusedError(409, f"Worker {worker} has not joined generation {self.state.generation}.")
        if member.attempt != attempt:
            raise RefusedError(
                409, f"Attempt {member.attempt} of worker {worker} superseded attempt {attempt}."
            )
        if member.lost:
            raise RefusedError(
                409, f"Attempt {attempt} of worker {worker} was lost; only a new attempt may join."
            )
        return member

    def check_failed(self, worker: int, generation: int, attempt: int) -> None:
        """Refuse a failure report of an attempt that may not fail the run.

        Attempt -1 is a task that deals rows and belongs to no worker.

        Raises:
            RefusedError: the generation or the run is over, the attempt was lost, or a different attempt is
                active.
        """
        self.state.check_open(generation)
        known = self.members.get(worker) if attempt >= 0 else None
        if known is None:
            return
        if known.attempt == attempt:
            self.check(worker, generation, attempt)
        elif known.attempt > attempt or self.is_at_work(known):
            raise RefusedError(409, f"Attempt {known.attempt} of worker {worker} is active.")

    def note_progress(self, worker: int, *, epoch: int, rows: int, retries: int) -> None:
        """Record a worker's position in its epoch and its number of retried requests."""
        member = self.members[worker]
        self.state.counters["retries"] += max(0, retries - member.retries)
        member.epoch, member.seen_rows, member.retries = epoch, rows, max(retries, member.retries)
        if worker in self.asking or not self.agreed:
            self._positions.pop(worker, None)
        elif worker not in self._positions or self._positions[worker][0] != (epoch, rows):
            self._positions[worker] = (epoch, rows), self.state.clock()

    def note_running(self, member: Member, running: Running) -> None:
        """Keep a worker's metric states of the current epoch and of the epoch before."""
        before = [each for each in member.running if each.epoch == running.epoch - 1]
        member.running = [*before, running]

    def silent_workers(self) -> list[tuple[int, str]]:
        """Return the workers that were silent for too long, each with the reason for its loss.

        Time during which the driver did not check does not count, if it is longer than ``ABSENCE``.
        """
        now = self.state.clock()
        away = max(0.0, now - self.looked)
        self.looked = now
        silent = []
        for worker, member in self.members.items():
            if away > ABSENCE:
                member.heard = min(now, member.heard + away)
            quiet = now - member.heard
            if quiet > self.shape.stall and not member.lost:
                silent.append(
                    (
                        worker,
                        f"Worker {worker} on {member.host} (process {member.pid}) has sent no heartbeat for "
                        f"{quiet:.0f} s, in epoch {member.epoch + 1}: the process hangs, or its machine "
                        "failed or was cut off. A worker may be silent for "
                        f"stall_timeout={self.shape.stall:g} seconds.",
                    )
                )
        if away > ABSENCE:
            self._positions.clear()
        return silent

    def warn_of_long_steps(self) -> None:
        """Warn, once per standstill, about each worker that is alive but trains no rows.

        Such a worker may just be slow.
        """
        now = self.looked
        for worker, ((epoch, rows), since) in self._positions.items():
            member = self.members[worker]
            if now - member.heard < ABSENCE and now - since > LONG_STEP * self.shape.stall:
                self._positions[worker] = (epoch, rows), inf
                self.state.warn(
                    f"Worker {worker} on {member.host} (process {member.pid}) is alive but has trained no "
                    f"row for {now - since:.0f} s, in epoch {epoch + 1} after {rows} rows. A step or an "
                    "evaluation takes very long, or hangs. If this continues, inspect the process, for "
                    f"example with py-spy dump --pid {member.pid}, and cancel the fit."
                )

    def ready_workers(self) -> set[int]:
        """Return the workers that have reported their rows."""
        return {worker for worker, member in self.members.items() if member.held is not None}

    def missing(self) -> list[int]:
        """Return the workers that have not joined."""
        return [k for k in range(self.shape.num_workers) if k not in self.members]

    def clear(self) -> None:
        """Forget all workers of the generation that ends."""
        self.members.clear()
        self._positions.clear()
        self.agreed = False

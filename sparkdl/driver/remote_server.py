"""A run whose endpoint is in worker 0, because executors cannot reach the process that called ``fit``.

The endpoint runs in that worker's process (``worker.hosted_server``). Its address is sent to the
other workers once, through Spark's barrier. The process that called ``fit`` is the client. It has a
``RemoteCoordinator`` in place of the coordinator.

Without a spare slot, the client learns the state of the run only from the job's result. With one, the client
requests the state from the endpoint with small jobs of one task. It gets the address from a task without
rows, which precedes the task of worker 0. This task ends once it has sent the address, and frees its slot.

The state is sent as one record (``core.packing``); nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparkdl.core.packing import unpack
from sparkdl.core.vectors import Vector
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.fingerprint import Fingerprint
from sparkdl.errors import SparkDLError
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.group_coordinator import Summary
from sparkdl.server.hosted_run import HostedRun, endpoint_at
from sparkdl.server.state import EpochResult, Member, RowsHeld, Snapshot
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Interval, LogEntry, Running

logger = logging.getLogger(__name__)


Ask = Callable[[Endpoint, str, bytes], bytes]  # (endpoint, path, body) -> the answer's body


class RemoteCoordinator:
    """The client's view of the coordinator in worker 0, from requests or from the job's result.

    Args:
        hosted: the settings of the hosted run.
        ask: the function that sends a request to the endpoint through a small job.
    """

    failure: SparkDLError | None = None  # failures arrive as the job's error
    lost: frozenset[int] = frozenset()  # the run needs all workers
    restart_point = "from the beginning"  # the endpoint and its snapshots end with worker 0
    # The endpoint in worker 0 does not report these.
    staleness: tuple[int, ...] = ()
    latest_staleness: Mapping[int, int] = MappingProxyType({})
    intervals: tuple[tuple[int, Interval], ...] = ()
    restarts = 0  # as in GroupCoordinator
    broken = False

    def __init__(self, hosted: HostedRun, ask: Ask) -> None:
        self.hosted, self.shape, self.ask = hosted, hosted.shape, ask
        first = self.shape.plan.first_epoch
        self.snapshot = Snapshot(first, hosted.parameters, hosted.statistics, 0, self.shape.first_step)
        self.generation = 1
        self.counters: dict[str, int] = {}  # those of the endpoint are in ``summary``
        self._log: list[LogEntry] = []
        self.members: dict[int, Member] = {}
        self.plans: list[BatchPlan] = []
        self._summary: Summary = {}
        self._results: dict[int, EpochResult] = {}
        self._stopped: Snapshot | None = None
        self._awaiting_evaluation: dict[int, EpochResult] = {}
        self._endpoint: Endpoint | None = None
        self._orders = {"released": first - 1, "learning_rate": float("nan"), "stop": False, "short": -1}
        self._changed = threading.Condition()
        self._over = False

    @property
    def held(self) -> tuple[RowsHeld, ...]:
        """The row count and fingerprint of each worker, once all have reported them."""
        return tuple(self.members[worker].held or RowsHeld(0) for worker in sorted(self.members))

    def receive(self, rows: Iterable[tuple[bytes]]) -> bool:
        """Read the rows of the worker group's result as they arrive; return True if they held a record."""
        pieces = (bytes(data) for (data,) in rows)
        try:
            if self.hosted.ahead:
                self._endpoint = endpoint_at(next(pieces, b"").decode(), self.hosted)
            record = b"".join(pieces)
            if record:
                self._read(record)
            return bool(record)
        finally:
            with self._changed:
                self._endpoint, self._over = None, True
                self._changed.notify_all()

    def _read(self, record: bytes) -> None:
        known = unpack(record)
        with self._changed:
            self.members = {worker: _member(fields) for worker, fields in known["members"]}
            self._log += known["log"]
            self._summary = known["summary"]
            if known["rows"] is not None:
                plan = replace(self.shape.plan, rows=tuple(known["rows"]))
                self.plans = [replace(plan, worker=k) for k in range(self.shape.num_workers)]
            self._results |= _results(known["results"])
            if known["stopped"] is not None:
                self._stopped = Snapshot.of(known["stopped"])
            self._awaiting_evaluation |= _results(known["awaiting_evaluation"])
            self._changed.notify_all()

    def _drive(self, epoch: int) -> None:
        """Send the client's commands to the endpoint, and read the state of the run.

        The endpoint answers when the epoch ends or needs the client, at the latest after a second.
        Errors are only logged, because the job of the worker group reports them.
        """
        endpoint = self._endpoint
        if endpoint is None:
            return
        try:
            self._read(self.ask(endpoint, "/v1/drive", json.dumps({"epoch": epoch, **self._orders}).encode()))
        except SparkDLError as error:
            logger.debug("The endpoint in worker 0 could not be reached: %s", error)

    def wait_epoch(self, epoch: int, timeout: float) -> EpochResult | None:
        """Remove and return the result of an epoch; None if it is not known yet.

        If the endpoint's address is known, this sends a request first. Then it waits for at most ``timeout``
        seconds.
        """
        if epoch not in self._results:
            self._drive(epoch)
        with self._changed:
            self._changed.wait_for(
                lambda: epoch in self._results or epoch in self._awaiting_evaluation or self._over, timeout
            )
            return self._results.pop(epoch, None)

    def awaiting_evaluation(self, epoch: int) -> EpochResult | None:
        """Return the workers' reports of an epoch whose evaluation waits for the driver, else None."""
        return self._awaiting_evaluation.get(epoch)

    def evaluate(self, epoch: int, weights: tuple[Vector, Vector] | None) -> None:
        """Let workers evaluate an epoch, as ``Coordinator.evaluate`` does."""
        self._awaiting_evaluation.clear()
        if self._endpoint is not None:
            body = b"".join(part.tobytes() for part in weights or ())
            self.ask(self._endpoint, f"/v1/evaluate/{epoch}", body)

    def release(self, epoch: int, learning_rate: float) -> None:
        """Let workers train to the end of this epoch; the next request tells the coordinator."""
        self._orders.update(released=epoch, learning_rate=learning_rate)

    def commit(self, snapshot: Snapshot) -> None:
        """Make a snapshot the last complete one."""
        self.snapshot = snapshot

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Replace the center with the weights that a callback set."""
        if self._endpoint is not None:
            path = f"/v1/replace/{self._orders['released']}"
            self.ask(self._endpoint, path, parameters.tobytes() + statistics.tobytes())
        self.snapshot = replace(self.snapshot, parameters=parameters, statistics=statistics)

    @property
    def newest_snapshot(self) -> Snapshot:
        """The last committed snapshot: the client gets no snapshot before the end of its epoch."""
        return self.snapshot

    def request_snapshot(self, *, ends: bool = False) -> None:
        """Do nothing: checkpoints and callbacks that save within an epoch are refused in a hosted run."""

    def carried(self) -> None:
        """Return no state: the next run starts a new endpoint in worker 0, without the state of this run."""

    def end_early(self, epoch: int) -> None:
        """End an epoch, and training with it, early; the next request tells the coordinator."""
        self._orders["short"] = epoch

    def stop(self) -> None:
        """Tell every worker that training ends."""
        self._orders["stop"] = True
        self._drive(self.shape.epochs)

    def restart(self) -> int:
        """Start the next generation of the worker group; return its number."""
        self.generation += 1
        self._over = False
        return self.generation

    @property
    def reported(self) -> bool:
        """True once the group's result was read, so that a stopped run has reported its last state."""
        return self._over

    def stopped_snapshot(self) -> Snapshot:
        """Return the snapshot of a run that ends early.

        If the run reported no snapshot, return the last committed one.
        """
        return self._stopped or self.snapshot

    def missing(self) -> list[int]:
        """Return no workers: Spark starts all workers of this group, or none."""
        return []

    def take_log(self, *, last: bool = False) -> list[LogEntry]:
        """Remove and return the messages for the driver to log, whose number the endpoint has bounded."""
        with self._changed:
            taken, self._log = self._log, []
            return taken

    def summary(self) -> Summary:
        """Return counts of the run."""
        return self._summary


def _member(fields: dict[str, Any]) -> Member:
    running = [Running(epoch, rows, bytes(metrics)) for epoch, rows, metrics in fields["running"]]
    held = fields["held"] and RowsHeld(fields["held"][0], Fingerprint.of(fields["held"][1]))
    return Member(**fields | {"running": running, "held": held, "heard": time.monotonic()})  # on this clock


AnyCoordinator = Coordinator | RemoteCoordinator


def _results(given: Iterable[Any]) -> dict[int, EpochResult]:
    """Return the results of epochs from their values, by epoch."""
    return {
        epoch: EpochResult(**fields | {"snapshot": Snapshot.of(fields["snapshot"])})
        for epoch, fields in given
    }

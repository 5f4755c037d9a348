"""The endpoint of a hosted run, which worker 0 serves.

A hosted run (``placement="worker"``) needs no connections from executors to the process that calls ``fit``:
worker 0 serves the endpoint, and a ``HostedDriver`` beside it does the driver's part of the run. The client,
``driver.remote_server``, runs in the process that calls ``fit``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from sparkdl.core.packing import pack
from sparkdl.core.vectors import Vector
from sparkdl.data import arrow
from sparkdl.data.arrow import RecordBatch
from sparkdl.data.bad_values import Watched
from sparkdl.errors import RefusedError
from sparkdl.rules import Rule
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.hosted_run import HostedRun, endpoint_at
from sparkdl.server.http_app import Traffic, add_hosted_driver, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.state import EpochResult
from sparkdl.transport import tls
from sparkdl.transport.client import RETRIES, Connection
from sparkdl.worker.session import Attempt
from sparkdl.worker.train import TrainJob, train_task
from sparkdl.worker.user_code import Code

ASK_SECONDS = 1.0  # longest time for which a request of the client waits for an event
LEAVE_SECONDS = 60.0  # longest wait for the other workers to finish before the endpoint closes
LINGER_SECONDS = 2.0  # delay after a failure, in which the failed task can report the error first


class HostedDriver:
    """The driver's part of a hosted run: it commits snapshots and carries out the client's commands.

    Args:
        coordinator: the coordinator.
        traffic: counts of the endpoint's bytes and refused requests.
        learning_rate: rate of all epochs. None if the client starts each epoch and sets its rate.
    """

    def __init__(self, coordinator: Coordinator, traffic: Traffic, learning_rate: float | None) -> None:
        self.coordinator, self.traffic, self.learning_rate = coordinator, traffic, learning_rate
        self.results: dict[int, EpochResult] = {}
        self._left: set[int] = set()

    def run(self) -> None:
        """Do ``_collect`` in a thread of its own. If the run fails, close the coordinator.

        Workers wait for epochs that only this thread releases, so an error here fails the run.
        """
        try:
            self._collect()
        except BaseException as error:  # noqa: BLE001 - the run would wait for this thread without end
            self.coordinator.break_down(error)
        if self.coordinator.failure is not None:
            time.sleep(LINGER_SECONDS)
            self.coordinator.close()

    def _collect(self) -> None:
        """Collect the result of each epoch, until the last epoch ends, or the run fails or is closed."""
        coordinator = self.coordinator
        for epoch in range(coordinator.shape.plan.first_epoch, coordinator.shape.epochs):
            if self.learning_rate is not None:
                coordinator.release(epoch, self.learning_rate)
            while (result := coordinator.wait_epoch(epoch, ASK_SECONDS)) is None:
                if coordinator.failure is not None or coordinator.closed:
                    return
                time.sleep(0.02)  # wait_epoch returns at once if it needs a command of the client
            coordinator.commit(result.snapshot)
            with coordinator.changed:
                if self.learning_rate is not None:  # no client reads the weights of earlier epochs
                    self.results = {k: replace(r, snapshot=result.snapshot) for k, r in self.results.items()}
                self.results[epoch] = result
                coordinator.changed.notify_all()
        if self.learning_rate is not None:
            coordinator.stop()

    def drive(self, epoch: int, *, released: int, learning_rate: float, stop: bool, short: int) -> bytes:
        """Apply the client's commands, wait until it has something to do, and return the record for it.

        The wait takes at most ASK_SECONDS. It ends early when the epoch has a result, when the client
        has to release or evaluate the epoch, or when the run is over.

        Args:
            epoch: the epoch that the client waits for. The client has the results of earlier epochs.
            released: the last epoch that may begin.
            learning_rate: the learning rate of the released epoch.
            stop: whether to end training.
            short: the epoch to end early, which also ends training; -1 for none.
        """
        coordinator = self.coordinator
        coordinator.release(released, learning_rate)
        if short >= 0:
            coordinator.end_early(short)
        if stop:
            coordinator.stop()
        with coordinator.changed:
            self.results = {k: result for k, result in self.results.items() if k >= epoch}
            coordinator.changed.wait_for(
                lambda: (
                    epoch in self.results
                    or coordinator.closed
                    or (coordinator.plans and released < epoch)
                    or coordinator.awaiting_evaluation(epoch) is not None
                ),
                ASK_SECONDS,
            )
            ended = coordinator.awaiting_evaluation(epoch)
        return self.record(awaiting_evaluation=None if ended is None else (epoch, ended))

    @property
    def weight_bytes(self) -> int:
        """The size in bytes of the weights that ``replace`` expects."""
        return self.coordinator.aggregation.parameters.nbytes + self.coordinator.aggregation.statistics.nbytes

    def replace(self, epoch: int, weights: bytes) -> None:
        """Replace the center with the weights that a callback set.

        Args:
            epoch: the last epoch that had been released when the callback set the weights.
            weights: the parameters, then the statistics, as float32.

        Raises:
            RefusedError: a later epoch has been released since. This happens if a request arrives twice.
        """
        with self.coordinator.changed:
            if self.coordinator.released > epoch + 1:
                raise RefusedError(
                    409,
                    f"A callback set these weights after epoch {epoch + 1}, but a later epoch has begun.",
                )
            self.coordinator.replace(*self._parts(weights))

    def evaluate(self, epoch: int, weights: bytes) -> None:
        """Let the workers evaluate an epoch.

        Args:
            epoch: the epoch.
            weights: the weights to evaluate, as in ``replace``; if empty, those at the end of the epoch.
        """
        self.coordinator.evaluate(epoch, self._parts(weights) if weights else None)

    def _parts(self, weights: bytes) -> tuple[Vector, Vector]:
        vector = np.frombuffer(weights, np.float32)
        count = len(self.coordinator.aggregation.parameters)
        return vector[:count].copy(), vector[count:].copy()

    def leave(self, worker: int, generation: int, attempt: int) -> None:
        """Record the end of a worker's attempt. It sends no more requests.

        Raises:
            RefusedError: the worker is unknown, it is worker 0, the generation or the run is over, or the
                attempt was superseded or lost.
        """
        if not 0 < worker < self.coordinator.shape.num_workers:
            raise RefusedError(400, f"Unknown worker {worker}.")
        with self.coordinator.changed:
            self.coordinator.membership.check(worker, generation, attempt)
            self._left.add(worker)
            self.coordinator.changed.notify_all()

    def wait_left(self) -> None:
        """Wait until all other workers have finished, for at most LEAVE_SECONDS."""
        others = self.coordinator.shape.num_workers - 1
        with self.coordinator.changed:
            self.coordinator.changed.wait_for(lambda: len(self._left) >= others, LEAVE_SECONDS)

    def record(
        self, *, last: bool = False, awaiting_evaluation: tuple[int, EpochResult] | None = None
    ) -> bytes:
        """Return the state of the run for the client, with the log since the last record.

        Args:
            last: whether this is the last record, which has the snapshot of a run that was stopped.
            awaiting_evaluation: the epoch whose evaluation waits for the client, and the workers' reports on
                it; None if no evaluation waits.
        """
        coordinator = self.coordinator
        with coordinator.changed:
            known: dict[str, object] = {
                "rows": coordinator.plans[0].rows if coordinator.plans else None,
                "log": coordinator.take_log(last=last),
                "members": [(worker, vars(member)) for worker, member in coordinator.members.items()],
                "summary": coordinator.summary() | self.traffic.summary(),
                "results": _values(self.results.items()),
                "stopped": coordinator.stopped_snapshot().values() if last and not self.results else None,
                "awaiting_evaluation": _values([awaiting_evaluation] if awaiting_evaluation else []),
            }
        return pack(known)


def _values(results: Iterable[tuple[int, EpochResult]]) -> list[tuple[int, dict[str, object]]]:
    """Return the results of epochs as values that ``core.packing`` can pack."""
    return [(epoch, vars(result) | {"snapshot": result.snapshot.values()}) for epoch, result in results]


def train(
    job: TrainJob, attempt: Attempt, blocks: Watched, code: Code, context: Any
) -> Iterator[RecordBatch]:
    """Train a worker of a hosted run, and yield the messages for the client.

    Args:
        job: the values that the tasks of the run share.
        attempt: this attempt. Its endpoint is not known yet.
        blocks: the worker's rows.
        code: the user's code that the run needs.
        context: Spark's BarrierTaskContext.
    """
    hosted: HostedRun = job.hosted
    attempt = replace(attempt, worker=attempt.worker - hosted.ahead)
    with ExitStack() as stack:
        hosted_driver, address = None, ""
        if attempt.worker == 0:
            hosted_driver, address = _host(stack, hosted, code.rule, attempt.generation, context)
        address = "".join(context.allGather(address))
        if attempt.worker < 0:  # the extra task, which has no rows: it sends the address to the client
            yield from arrow.rows_of(address.encode())
            return
        attempt = replace(attempt, endpoint=endpoint_at(address, hosted))
        try:
            train_task(job, attempt, blocks, code)
        except RefusedError:
            if hosted_driver is not None and hosted_driver.coordinator.failure is not None:
                raise hosted_driver.coordinator.failure from None
            time.sleep(LINGER_SECONDS)  # worker 0 reports the reason first
            raise
        if hosted_driver is None:
            _leave(attempt)
            return
        hosted_driver.wait_left()
        yield from arrow.rows_of(hosted_driver.record(last=True))


def _host(
    stack: ExitStack, hosted: HostedRun, rule: Rule | None, generation: int, context: Any
) -> tuple[HostedDriver, str]:
    """Serve a coordinator until the stack is closed; return a HostedDriver and the address as JSON."""
    coordinator, traffic = hosted.make_coordinator(rule, generation), Traffic()
    hosted_driver = HostedDriver(coordinator, traffic, hosted.learning_rate)
    given = context.getTaskInfos()[context.partitionId()].address  # an IPv6 address is in brackets
    host = given.rpartition(":")[0].strip("[]")
    app = make_app(coordinator, hosted.token, traffic)
    add_hosted_driver(app, hosted_driver)
    context, certificate = tls.server_context() if hosted.tls else (None, b"")
    port = stack.enter_context(serve(app, host, 0, hosted.shape.num_workers, context))
    thread = threading.Thread(target=hosted_driver.run, name="sparkdl-hosted-driver", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(coordinator.close)  # closed first, so that no request waits while the server stops
    return hosted_driver, json.dumps([host, port, certificate.hex()])


def _leave(attempt: Attempt) -> None:
    connection = Connection(attempt.endpoint, RETRIES)
    try:
        connection.call("/v1/leave", worker=attempt.worker, generation=attempt.generation, attempt=attempt.id)
    finally:
        connection.close()

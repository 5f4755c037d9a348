"""The endpoint of a hosted run, in worker 0. There a ``HostedDriver`` does the driver's part.

``driver.remote_server`` is its client.
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
from sparkdl.data.bad_values import Watched
from sparkdl.errors import RefusedError
from sparkdl.rules import Rule
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.hosted_run import HostedRun, endpoint_at
from sparkdl.server.http_app import Traffic, add_steward, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.state import EpochResult
from sparkdl.transport import tls
from sparkdl.transport.client import RETRIES, Connection
from sparkdl.worker.session import Task
from sparkdl.worker.train import Code, TrainJob, train_task

ASK_SECONDS = 1.0  # longest wait of a client's request for the end of an epoch
LEAVE_SECONDS = 60.0  # longest wait of worker 0 for the others to end, before it closes the endpoint
LINGER_SECONDS = 2.0  # wait of a failed run for the failed task to report the error itself


class HostedDriver:
    """The driver's part of a run, in worker 0.

    Args:
        store: the coordinator.
        traffic: the traffic of the endpoint.
        learning_rate: see HostedRun.
    """

    def __init__(self, store: Coordinator, traffic: Traffic, learning_rate: float | None) -> None:
        self.store, self.traffic, self.learning_rate = store, traffic, learning_rate
        self.results: dict[int, EpochResult] = {}
        self._left: set[int] = set()

    def conduct(self) -> None:
        """Keep the result of each epoch until the last one has ended or the coordinator is closed."""
        store = self.store
        for epoch in range(store.shape.plan.first_epoch, store.shape.epochs):
            if self.learning_rate is not None:
                store.release(epoch, self.learning_rate)
            while (result := store.wait_epoch(epoch, ASK_SECONDS)) is None:
                if store.failure is not None:
                    time.sleep(LINGER_SECONDS)
                    store.close()
                if store.closed:
                    return
                time.sleep(0.02)  # the epoch may have to be released first
            store.commit(result.cut)
            with store.changed:
                if self.learning_rate is not None:  # only the last epoch's model is needed
                    self.results = {k: replace(r, cut=result.cut) for k, r in self.results.items()}
                self.results[epoch] = result
                store.changed.notify_all()
        if self.learning_rate is not None:
            store.stop()

    def drive(self, epoch: int, *, released: int, learning_rate: float, stop: bool, short: int) -> bytes:
        """Apply the commands of the client; return the record once the client has something to do.

        Args:
            epoch: the epoch that the client waits for. The client knows the earlier ones.
            released: the last epoch that may begin.
            learning_rate: the learning rate of the released epoch.
            stop: whether to end training.
            short: the epoch to end early, which also ends training; -1 for none.
        """
        store = self.store
        store.release(released, learning_rate)
        if short >= 0:
            store.cut_short(short)
        if stop:
            store.stop()
        with store.changed:
            self.results = {k: result for k, result in self.results.items() if k >= epoch}
            store.changed.wait_for(
                lambda: (
                    epoch in self.results
                    or store.closed
                    or (store.plans and released < epoch)
                    or store.unattended(epoch) is not None
                ),
                ASK_SECONDS,
            )
            ended = store.unattended(epoch)
        return self.record(unattended=None if ended is None else (epoch, ended))

    @property
    def weight_bytes(self) -> int:
        """The number of bytes that ``replace`` takes."""
        return self.store.merging.parameters.nbytes + self.store.merging.statistics.nbytes

    def replace(self, epoch: int, weights: bytes) -> None:
        """Set the center to weights that a callback set.

        Args:
            epoch: the last epoch that was released when the callback set them.
            weights: the parameters, then the statistics.

        Raises:
            RefusedError: a later epoch was released since then, for example if a request comes twice.
        """
        with self.store.changed:
            if self.store.released > epoch + 1:
                raise RefusedError(
                    409, f"The weights are those after epoch {epoch + 1}; a later one has begun."
                )
            self.store.replace(*self._parts(weights))

    def evaluate(self, epoch: int, weights: bytes) -> None:
        """Let workers evaluate an epoch with these weights, as in ``replace``; if empty, those at its end."""
        self.store.evaluate(epoch, self._parts(weights) if weights else None)

    def _parts(self, weights: bytes) -> tuple[Vector, Vector]:
        vector = np.frombuffer(weights, np.float32)
        count = len(self.store.merging.parameters)
        return vector[:count].copy(), vector[count:].copy()

    def leave(self, worker: int) -> None:
        """Record the end of a worker, which sends no more requests.

        Raises:
            RefusedError: the worker is unknown, or it is worker 0.
        """
        if not 0 < worker < self.store.shape.num_workers:
            raise RefusedError(400, f"Worker {worker} is none that the endpoint waits for.")
        with self.store.changed:
            self._left.add(worker)
            self.store.changed.notify_all()

    def wait_left(self) -> None:
        """Wait for all other workers to end, for at most LEAVE_SECONDS."""
        others = self.store.shape.num_workers - 1
        with self.store.changed:
            self.store.changed.wait_for(lambda: len(self._left) >= others, LEAVE_SECONDS)

    def record(self, *, stopped: bool = False, unattended: tuple[int, EpochResult] | None = None) -> bytes:
        """Return the state of the run for the client, with the log since the last record.

        Args:
            stopped: whether to include the snapshot of a stopped run.
            unattended: the epoch whose evaluation waits for the client, and the workers' reports about it.
        """
        store = self.store
        with store.changed:
            known: dict[str, Any] = {
                "rows": store.plans[0].rows if store.plans else None,
                "log": [store.log.popleft() for _ in range(len(store.log))],
                "members": [(worker, vars(member)) for worker, member in store.members.items()],
                "summary": store.summary() | self.traffic.summary(),
                "results": _values(self.results.items()),
                "stopped": store.stopped_cut().values() if stopped else None,
                "unattended": _values([unattended] if unattended else []),
            }
        return pack(known)


def _values(results: Iterable[tuple[int, EpochResult]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the results of epochs in the form that ``core.packing`` takes."""
    return [(epoch, vars(result) | {"cut": result.cut.values()}) for epoch, result in results]


def train(job: TrainJob, task: Task, blocks: Watched, code: Code, context: Any) -> Iterator[Any]:
    """Train a worker of a hosted run, and yield the messages for the client.

    Args:
        job: the values that the tasks of the run share.
        task: this task. Its endpoint is not known yet.
        blocks: the worker's rows.
        code: the code of the run.
        context: Spark's BarrierTaskContext.
    """
    hosted: HostedRun = job.hosted
    task = replace(task, worker=task.worker - hosted.ahead)
    with ExitStack() as stack:
        steward, address = None, ""
        if task.worker == 0:
            steward, address = _host(stack, hosted, code.rule, task.generation, context)
        address = "".join(context.allGather(address))
        if task.worker < 0:  # the task without rows
            yield from arrow.rows_of(address.encode())
            return
        task = replace(task, endpoint=endpoint_at(address, hosted))
        try:
            train_task(job, task, blocks, code)
        except RefusedError:
            if steward is not None and steward.store.failure is not None:
                raise steward.store.failure from None
            time.sleep(LINGER_SECONDS)  # worker 0 reports why the run is over
            raise
        if steward is None:
            _leave(task)
            return
        steward.wait_left()
        yield from arrow.rows_of(steward.record(stopped=not steward.results))


def _host(
    stack: ExitStack, hosted: HostedRun, rule: Rule | None, generation: int, context: Any
) -> tuple[HostedDriver, str]:
    """Serve a coordinator until the stack is closed; return its HostedDriver, and its address as JSON."""
    store, traffic = hosted.store(rule, generation), Traffic()
    steward = HostedDriver(store, traffic, hosted.learning_rate)
    host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
    app = make_app(store, hosted.token, traffic)
    add_steward(app, steward)
    context, certificate = tls.server_context() if hosted.tls else (None, b"")
    port = stack.enter_context(serve(app, host, 0, hosted.shape.num_workers, context))
    thread = threading.Thread(target=steward.conduct, name="sparkdl-steward", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(store.close)  # runs first, so that no request waits while the server stops
    return steward, json.dumps([host, port, certificate.hex()])


def _leave(task: Task) -> None:
    connection = Connection(task.endpoint, RETRIES)
    try:
        connection.call("/v1/leave", worker=task.worker)
    finally:
        connection.close()

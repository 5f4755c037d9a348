"""Workers whose every update adds an amount of its own, so that a sum says what was counted.

As a program it is one of them, on whatever host it runs: it reads a line of JSON, ``Job``'s fields, and
prints a line with what its replies began with.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from sparkdl.client import HttpExchange
from sparkdl.exchange import Endpoint
from sparkdl.member import Task, membership
from sparkdl.wire import Kind, Update

RUN, LAYOUT, SIZE = b"r" * 16, b"l" * 16, 3


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes:
        host: where the endpoint is.
        port: its port.
        worker: the worker's index.
        kind: of its updates.
        updates: how many it sends, of four rows each.
        pause: seconds between two of them.
        size: how many numbers an update has.
    """

    host: str
    port: int
    worker: int
    kind: int
    updates: int
    pause: float = 0.0
    size: int = SIZE

    @property
    def endpoint(self):
        return Endpoint(self.host, self.port, "secret", RUN)

    @property
    def line(self):
        """The job as its program reads it."""
        return json.dumps(asdict(self)) + "\n"


def amount(worker, sequence, updates):
    """Return what an update adds, another number for each."""
    return float(1 + worker * updates + sequence)


def total(workers, updates):
    """Return what all updates of a gang add."""
    return sum(amount(worker, k, updates) for worker in range(workers) for k in range(updates))


def work(job):
    """Be a worker in this thread; return what its replies began with."""
    exchange = HttpExchange(job.endpoint, job.worker, 1, 1, LAYOUT)
    exchange.join("host", 1)
    try:
        return send(job, exchange)
    finally:
        exchange.close()


def send(job, exchange):
    """Send a worker's updates."""
    exchange.ready(4 * job.updates, 0, {})
    replies, version = [], 0
    for sequence in range(job.updates):
        values = np.full(job.size, amount(job.worker, sequence, job.updates), np.float32)
        reply = exchange(
            Update(
                Kind(job.kind), sequence=sequence, rows=4, loss=1.0, steps=1, base_version=version,
                parameters=values,
            )
        )  # fmt: skip
        version = reply.version
        replies.append(reply.parameters[:SIZE].tolist())
        time.sleep(job.pause)
    return replies


def main():
    """Be a worker with a heartbeat, as a task is."""
    job = Job(**json.loads(sys.stdin.readline()))
    with membership(Task(job.worker, 1, 1, 1, job.endpoint), LAYOUT) as (exchange, _):
        print(json.dumps(send(job, exchange)))  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()

"""Workers whose every update adds an amount of its own, so that a sum says what was counted.

As a program it is one of them, on whatever host it runs: it reads a line of JSON, ``Job``'s fields, and
prints a line with what its replies began with.
"""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Kind, Update
from sparkdl.worker.session import Task, membership

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
        attempt: which attempt of its worker it is.
        generation: which start of the gang it is of.
    """

    host: str
    port: int
    worker: int
    kind: int
    updates: int
    pause: float = 0.0
    size: int = SIZE
    attempt: int = 1
    generation: int = 1

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
    exchange = HttpExchange(job.endpoint, job.worker, job.attempt, job.generation, LAYOUT)
    exchange.join("host", 1)
    try:
        return send(job, exchange)
    finally:
        exchange.close()


@contextmanager
def started(job, before=()):
    """Yield the process of a worker; ``before`` comes before its command."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*before, sys.executable, __file__], text=True, **pipes) as process:
        process.stdin.write(job.line)
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def send(job, exchange):
    """Send a worker's updates, but for those that an earlier attempt has sent, and report that it is done."""
    first = exchange.ready(4 * job.updates, 0, {})["sequence"]
    replies, version = [], 0
    for sequence in range(first, job.updates):
        values = np.full(job.size, amount(job.worker, sequence, job.updates), np.float32)
        reply = exchange(
            Update(
                Kind(job.kind),
                sequence=sequence,
                rows=4,
                loss=1.0,
                steps=1,
                base_version=version,
                parameters=values,
            )
        )
        version = reply.version
        replies.append(reply.parameters[:SIZE].tolist())
        time.sleep(job.pause)
    exchange(Update(Kind.REPORT, rows=4 * job.updates, base_version=version))
    return replies


def main():
    """Be a worker with a heartbeat, as a task is."""
    job = Job(**json.loads(sys.stdin.readline()))
    task = Task(job.worker, job.attempt, 1, job.generation, job.endpoint)
    with membership(task, LAYOUT) as (exchange, _):
        print(json.dumps(send(job, exchange)))  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()

"""Workers whose updates each add a different amount, so that a sum shows which were counted.

As a program this is one worker, on any host: it reads a line of JSON with ``Job``'s fields, and prints a line
with the first parameters of its replies.
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
from sparkdl.worker.session import Attempt, membership

RUN, LAYOUT, SIZE = b"r" * 16, b"l" * 16, 3


@dataclass(frozen=True)
class Job:
    """A worker's job.

    Attributes:
        host: the host of the endpoint.
        port: its port.
        worker: the worker's index.
        kind: the kind of its updates.
        updates: the number of updates it sends, of four rows each.
        pause: seconds between two updates.
        size: the number of parameters of an update.
        attempt: the number of the attempt.
        generation: the generation of the worker group.
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
        """The job as a line of the program's input."""
        return json.dumps(asdict(self)) + "\n"


def amount(worker, sequence, updates):
    """Return the amount that an update adds, different for each."""
    return float(1 + worker * updates + sequence)


def total(workers, updates):
    """Return the sum of all updates of a worker group."""
    return sum(amount(worker, k, updates) for worker in range(workers) for k in range(updates))


def work(job):
    """Run a worker in this thread; return the first parameters of its replies."""
    exchange = HttpExchange(job.endpoint, job.worker, job.attempt, job.generation, LAYOUT)
    exchange.join("host", 1)
    try:
        return send(job, exchange)
    finally:
        exchange.close()


@contextmanager
def started(job, before=()):
    """Yield the process of a worker; ``before`` precedes its command."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*before, sys.executable, __file__], text=True, **pipes) as process:
        process.stdin.write(job.line)
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def send(job, exchange):
    """Send the updates that no earlier attempt has sent, then a report; return the replies."""
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
    """Run a worker with a heartbeat, as a task does."""
    job = Job(**json.loads(sys.stdin.readline()))
    attempt = Attempt(job.worker, job.attempt, 1, job.generation, job.endpoint)
    with membership(attempt, LAYOUT) as (exchange, _):
        print(json.dumps(send(job, exchange)))  # noqa: T201 - the script's output


if __name__ == "__main__":
    main()

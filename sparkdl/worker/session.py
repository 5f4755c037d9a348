"""A task's session at the endpoint: it joins a worker group, and reports its log and its failure."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sparkdl.core.codecs import Codec
from sparkdl.errors import DataError, RefusedError, RuleError, WorkerLostError
from sparkdl.process.reasons import reason_of, text_of
from sparkdl.transport import client
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.heartbeat import Heartbeat
from sparkdl.transport.log_lines import LogBuffer


@dataclass(frozen=True)
class Attempt:
    """One attempt by Spark to run a worker's task.

    Attributes:
        worker: the worker's index: that of the task's partition. With ``placement="worker"``, partition 0 may
            be an extra task, which sends the endpoint's address to the process that called ``fit``. The index
            is then one less.
        id: Spark's taskAttemptId.
        threads: number of threads that the task may use.
        generation: number of the worker group's start that this attempt belongs to.
        endpoint: the endpoint of the run.
    """

    worker: int
    id: int
    threads: int
    generation: int
    endpoint: Endpoint


@contextmanager
def membership(
    attempt: Attempt, layout: bytes, codec: Codec | None = None
) -> Iterator[tuple[HttpExchange, Heartbeat]]:
    """Join a worker group for a ``with`` block, and report the block's exceptions to the driver.

    A refusal with status 409 or 410 is not reported: the attempt or its generation is old, a message came
    too late or too early, or the run is over. The task then fails, and Spark reports that.

    Yields:
        The worker's exchange and its heartbeat, which sends log records to the driver.
    """
    exchange = HttpExchange(
        attempt.endpoint, attempt.worker, attempt.id, attempt.generation, layout, codec=codec
    )
    package, log = logging.getLogger("sparkdl"), LogBuffer()
    level = package.level
    logging.getLogger().addHandler(log)
    package.setLevel(logging.INFO)
    try:
        exchange.join(socket.gethostname(), os.getpid())
        with Heartbeat(exchange, log, partial(tell_failure, attempt)) as heartbeat:
            yield exchange, heartbeat
    except RefusedError as error:
        if error.status not in (409, 410):
            tell_failure(attempt, error)
        raise
    except Exception as error:
        tell_failure(attempt, error)
        raise
    finally:
        logging.getLogger().removeHandler(log)
        package.setLevel(level)
        exchange.close()


def tell_failure(attempt: Attempt, error: Exception) -> None:
    """Report an exception in this task to the driver."""
    data = error if isinstance(error, DataError) else None
    message, text = (data.reason, data.traceback) if data else (reason_of(error), text_of(error))
    kinds = {DataError: "data", WorkerLostError: "lost", RuleError: "rule"}
    client.report_failure(
        attempt.endpoint,
        kind=next((name for kind, name in kinds.items() if isinstance(error, kind)), "worker"),
        generation=attempt.generation,
        worker=attempt.worker,
        attempt=attempt.id,
        host=socket.gethostname(),
        message=message[:10_000],
        traceback=text[-100_000:],
    )

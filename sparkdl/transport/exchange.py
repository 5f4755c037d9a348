"""The interface between the training loop and the endpoint.

``frequency`` determines when the loop calls its Exchange, and ``mode`` how the endpoint handles the call. An
exchange has two phases, so that other work can overlap with it: ``begin`` sends an update, ``finish``
returns the reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypedDict

from sparkdl.data.bad_values import Fault
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.transport.messages import Flag, Reply, Update


@dataclass(frozen=True)
class Endpoint:
    """The address and credentials of a run's endpoint.

    Attributes:
        host: the host that executors connect to.
        port: its port.
        token: the run's secret.
        run: sixteen bytes that identify the run.
        certificate: the endpoint's certificate (DER); empty without TLS.
    """

    host: str
    port: int
    token: str
    run: bytes
    certificate: bytes = b""

    @property
    def url(self) -> str:
        """The address as a URL, without the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}/"

    def __repr__(self) -> str:
        return f"Endpoint(host={self.host!r}, port={self.port})"


class Notes(TypedDict, total=False):
    """A worker's report to the driver about its rows and devices, sent when it is ready.

    Attributes:
        one_class: whether all labels are the same class.
        threads: number of threads of the task.
        empty: number of partitions without rows.
        gpus: the GPUs that the task takes.
        on_gpu: whether it computes on a GPU.
        faults: the faults of its rows.
        shard: host, port and certificate (hexadecimal) of the worker's shard, if it serves one.
    """

    one_class: bool
    threads: int
    empty: int
    gpus: list[str]
    on_gpu: bool
    faults: list[Fault]
    shard: tuple[str, int, str]


class Begin(TypedDict, total=False):
    """The starting point of a worker. It is empty in ``sparkdl.run``, where workers do not train.

    Attributes:
        rows: number of training rows of each worker.
        validation_rows: number of validation rows of each worker.
        epoch: the first epoch.
        sequence: the number after the worker's last counted update. Its next update has this
            number or a higher one.
        restore: whether the worker has to request its state.
        learning_rate: the learning rate; None: the model's own.
        progress: number of steps counted so far, including those before the run.
        stop: whether training ends at once.
        shards: the address of each worker's shard, as in its notes, if workers serve shards.
        attempts: the attempt of each worker, if workers serve shards.
    """

    rows: list[int] | tuple[int, ...]
    validation_rows: list[int]
    epoch: int
    sequence: int
    restore: bool
    learning_rate: float | None
    progress: float
    stop: bool
    shards: list[tuple[str, int, str]]
    attempts: list[int]


class Exchange(ABC):
    """A worker loop's connection to the endpoint. One thread uses it, and finishes one ticket at a time."""

    @abstractmethod
    def ready(
        self, rows: int, validation_rows: int, notes: Notes, fingerprint: Fingerprint = NOTHING
    ) -> Begin:
        """Report this worker's rows; return the starting point, once the whole worker group is ready."""

    @abstractmethod
    def begin(self, update: Update) -> Update:
        """Send an update; return the ticket for ``finish``."""

    @abstractmethod
    def finish(self, ticket: Update) -> Reply:
        """Return the reply to an update; may wait for other workers."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the exchange."""

    def __call__(self, update: Update) -> Reply:
        """Send an update and return its reply."""
        return self.finish(self.begin(update))


def repeated(update: Update, reply: Reply) -> Update:
    """Return the message to send after a reply with ``Flag.AGAIN``: the update again, or only its header."""
    return update if Flag.RESEND in reply.flags else awaiting(update)


def awaiting(update: Update) -> Update:
    """Return the header that requests the reply to an update that was already sent."""
    return Update(
        kind=update.kind,
        flags=update.flags | Flag.AWAIT,
        worker=update.worker,
        sequence=update.sequence,
        epoch=update.epoch,
        base_version=update.base_version,
        generation=update.generation,
        attempt=update.attempt,
        run=update.run,
        layout=update.layout,
    )

"""The seam between the training loop and everything else.

``frequency`` decides only when the loop comes to its Exchange, ``mode`` only what is behind it. An
exchange has two phases, so that what lies between them can overlap with it: ``begin`` sends an update,
``finish`` returns the reply to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.store import ParameterStore
from sparkdl.transport.messages import NO_ID, Flag, Reply, Update, lengths_of


@dataclass(frozen=True)
class Endpoint:
    """Where a run's endpoint is and how to speak to it.

    Attributes:
        host: the host that executors connect to.
        port: its port.
        token: the run's secret.
        run: sixteen bytes that name the run.
        certificate: the one (DER) that the endpoint shows, with TLS.
    """

    host: str
    port: int
    token: str
    run: bytes
    certificate: bytes = b""

    def __repr__(self) -> str:
        return f"Endpoint(host={self.host!r}, port={self.port})"


class Exchange(ABC):
    """What a worker's loop talks to. One thread uses it, and finishes each ticket before the next."""

    @abstractmethod
    def ready(
        self, rows: int, validation_rows: int, notes: dict[str, Any], fingerprint: Fingerprint = NOTHING
    ) -> dict[str, Any]:
        """Say what this worker holds; return where to begin, once the whole gang is ready."""

    @abstractmethod
    def begin(self, update: Update) -> Update:
        """Send an update; the ticket it returns is redeemed by ``finish``."""

    @abstractmethod
    def finish(self, ticket: Update) -> Reply:
        """Return the reply to an update, which may mean waiting for other workers."""

    @abstractmethod
    def close(self) -> None:
        """Give back whatever the exchange holds."""

    def __call__(self, update: Update) -> Reply:
        """Send an update and return its reply."""
        return self.finish(self.begin(update))


class LocalExchange(Exchange):
    """An Exchange with a store in the same process, by method calls. For threads, tests and one process.

    Args:
        store: the store.
        worker: this worker's index.
        attempt: a number that is larger for a later attempt of the same worker.
    """

    def __init__(self, store: ParameterStore, worker: int, attempt: int = 0) -> None:
        self.store, self.worker, self.attempt = store, worker, attempt
        self.generation = store.generation
        store.join(worker, self.generation, attempt, "localhost", 0)

    def ready(
        self, rows: int, validation_rows: int, notes: dict[str, Any], fingerprint: Fingerprint = NOTHING
    ) -> dict[str, Any]:
        """Say what this worker holds; return where to begin, once the whole gang is ready."""
        identity, begin = (self.worker, self.generation, self.attempt), None
        while begin is None:
            begin = self.store.ready(*identity, rows, validation_rows, notes, fingerprint)
        return begin

    def begin(self, update: Update) -> Update:
        """Stamp the update; it is merged when it is finished."""
        update.worker, update.attempt, update.generation = self.worker, self.attempt, self.generation
        update.run = self.store.shape.run
        update.layout = self.store.shape.layout if update.layout == NO_ID else update.layout
        return update

    def finish(self, ticket: Update) -> Reply:
        """Merge the update and return the store's reply."""
        while True:
            sent = ticket
            self.store.admit(sent, lengths_of(sent))
            reply = self.store.exchange(sent, lambda sent=sent: sent)  # type: ignore[misc]
            self.store.sent(sent)
            if not reply.flags & Flag.AGAIN:
                return reply
            ticket = awaiting(ticket)

    def close(self) -> None:
        """Nothing is held."""


def awaiting(update: Update) -> Update:
    """Return the header of an update that was sent before, to ask for its reply again."""
    return Update(
        kind=update.kind, flags=update.flags | Flag.AWAIT, worker=update.worker,
        sequence=update.sequence, epoch=update.epoch, base_version=update.base_version,
        generation=update.generation, attempt=update.attempt, run=update.run, layout=update.layout,
    )  # fmt: skip

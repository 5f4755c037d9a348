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
from sparkdl.transport.messages import Flag, Reply, Update


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


def awaiting(update: Update) -> Update:
    """Return the header of an update that was sent before, to ask for its reply again."""
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

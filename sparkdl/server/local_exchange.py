"""An Exchange within one process, for tests and threads."""

from __future__ import annotations

from typing import Any

from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.transport.exchange import Exchange, awaiting
from sparkdl.transport.messages import NO_ID, Flag, Reply, Update, lengths_of


class LocalExchange(Exchange):
    """An Exchange with a store in the same process, by method calls. For threads, tests and one process.

    Args:
        store: the store.
        worker: this worker's index.
        attempt: a number that is larger for a later attempt of the same worker.
    """

    def __init__(self, store: GroupCoordinator, worker: int, attempt: int = 0) -> None:
        self.store, self.worker, self.attempt = store, worker, attempt
        self.generation = store.generation
        store.join(worker, self.generation, attempt, "localhost", 0)

    def ready(
        self, rows: int, validation_rows: int, notes: dict[str, Any], fingerprint: Fingerprint = NOTHING
    ) -> dict[str, Any]:
        """Say what this worker holds; return where to begin, once the whole gang is ready."""
        identity, begin = (self.worker, self.generation, self.attempt), None
        holds = {"rows": rows, "validation_rows": validation_rows, "notes": notes, "fingerprint": fingerprint}
        while begin is None:
            begin = self.store.ready(*identity, **holds)  # type: ignore[arg-type]
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

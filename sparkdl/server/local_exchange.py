"""An Exchange within one process, for tests and benchmarks."""

from __future__ import annotations

from functools import partial

from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.transport.exchange import Begin, Exchange, Notes, repeated
from sparkdl.transport.messages import NO_ID, Flag, Reply, Update, copy_of, lengths_of


class LocalExchange(Exchange):
    """An Exchange that calls a coordinator in the same process; each worker may be a thread.

    Args:
        coordinator: the coordinator.
        worker: index of this worker.
        attempt: attempt number, larger for a later attempt of the same worker.
    """

    def __init__(self, coordinator: GroupCoordinator, worker: int, attempt: int = 0) -> None:
        self.coordinator, self.worker, self.attempt = coordinator, worker, attempt
        self.generation = coordinator.generation
        coordinator.join(worker, self.generation, attempt, "localhost", 0)

    def ready(
        self, rows: int, validation_rows: int, notes: Notes, fingerprint: Fingerprint = NOTHING
    ) -> Begin:
        """Report this worker's rows; return its starting point once the whole worker group is ready."""
        begin = None
        while begin is None:
            begin = self.coordinator.ready(
                worker=self.worker,
                generation=self.generation,
                attempt=self.attempt,
                rows=rows,
                validation_rows=validation_rows,
                notes=notes,
                fingerprint=fingerprint,
            )
        return begin

    def begin(self, update: Update) -> Update:
        """Fill in the header fields that identify this worker and its run. ``finish`` sends the update."""
        update.worker, update.attempt, update.generation = self.worker, self.attempt, self.generation
        update.run = self.coordinator.shape.run
        update.layout = self.coordinator.shape.layout if update.layout == NO_ID else update.layout
        return update

    def finish(self, ticket: Update) -> Reply:
        """Pass the update to the coordinator and return its reply."""
        while True:
            sent = ticket
            self.coordinator.admit(sent, lengths_of(sent))
            reply = self.coordinator.exchange(sent, partial(copy_of, sent))
            self.coordinator.sent(sent)
            if Flag.AGAIN not in reply.flags:
                return reply
            ticket = repeated(ticket, reply)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

"""A display that also fills the record of the run, which the live page and the report show."""

from __future__ import annotations

from sparkdl.driver.display.progress import Display, Results
from sparkdl.driver.remote_server import AnyCoordinator
from sparkdl.server.http_app import Traffic
from sparkdl.server.monitoring.record import RunRecord


class ObservedDisplay(Display):
    """A display that also keeps the record of the run.

    Args:
        display: the display that the user sees.
        record: the record of the run.
        coordinator: the run's coordinator, in this process or in worker 0.
        traffic: the counts of requests to the endpoint.
    """

    def __init__(
        self, display: Display, record: RunRecord, coordinator: AnyCoordinator, traffic: Traffic
    ) -> None:
        super().__init__(display.epochs)
        self.display, self.record, self.coordinator, self.traffic = display, record, coordinator, traffic

    def note(self, text: str) -> None:
        """Show a line about the run."""
        self.display.note(text)

    def wait(self, reason: str) -> None:
        """Show why no worker trains yet."""
        self.display.wait(reason)
        self.record.wait_for_workers(reason)

    def begin(self, epoch: int, rows: int) -> None:
        """Begin an epoch."""
        self.display.begin(epoch, rows)
        self.record.begin_epoch(epoch, rows)

    def update(self, rows: int, total: int, results: Results) -> None:
        """Show and record the progress of an epoch."""
        self.display.update(rows, total, results)
        self.record.advance(rows, total, results, self.coordinator, self.traffic)

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """End an epoch."""
        self.display.end(epoch, rows, logs)
        self.record.end_epoch(epoch, rows, logs, self.coordinator, self.traffic)

    def close(self) -> None:
        """Close the display."""
        self.display.close()

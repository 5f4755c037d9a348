"""The base class of all displays of a run's progress, and the display of one line per epoch."""

from __future__ import annotations

import sys
import time

import numpy as np

from sparkdl.core.vectors import Array

Results = dict[str, float | Array]  # the results of metrics by name; a metric may have several values


class Display:
    """The silent display, and the base class of the others.

    Args:
        epochs: number of epochs.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.started = time.monotonic()

    def note(self, text: str) -> None:
        """Show a line about the run."""

    def wait(self, reason: str) -> None:
        """Show why no worker trains yet."""

    def begin(self, epoch: int, rows: int) -> None:
        """Begin an epoch of ``rows`` rows (0 if not known yet)."""
        self.started = time.monotonic()

    def update(self, rows: int, total: int, results: Results) -> None:
        """Show the progress of the epoch: ``rows`` of ``total`` rows (0 if not known), and the results."""

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """End an epoch."""

    def close(self) -> None:
        """Close the display."""

    def seconds(self) -> float:
        """Return the seconds since the epoch began; more than 0."""
        return max(1e-9, time.monotonic() - self.started)

    def line(self, epoch: int, rows: int, logs: Results) -> str:
        """Return the line of an epoch that has just ended."""
        seconds, values = self.seconds(), results_text(logs)
        return (
            f"Epoch {epoch + 1}/{self.epochs} - {seconds:.1f} s - {rows / seconds:,.0f} rows/s"
            f"{' - ' + values if values else ''}"
        )


def results_text(logs: Results) -> str:
    """Return the results of metrics as one line."""
    return " - ".join(f"{name}: {value_text(value)}" for name, value in logs.items())


def value_text(value: float | Array) -> str:
    """Return the text of a metric's result, which may have several values; small ones as in Keras's bar."""
    if np.ndim(value):
        return np.array2string(np.asarray(value), precision=4)
    number = float(value)
    return f"{number:.4e}" if 0 < abs(number) <= 1e-3 else f"{number:.4f}"


class LineDisplay(Display):
    """One line per epoch."""

    def note(self, text: str) -> None:
        """Print the line."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """Print the epoch's line."""
        self.note(self.line(epoch, rows, logs))

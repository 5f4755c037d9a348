"""Displays of a run's progress: a bar in terminals and notebooks, otherwise a line per epoch."""

from __future__ import annotations

import sys
import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sparkdl.core.vectors import Array

Results = dict[str, float | Array]  # the results of metrics by name; a metric may have several values


def choose_display(verbose: str | int, epochs: int) -> Display:
    """Return the display for a value of ``verbose``.

    Args:
        verbose: 0 is silent, 1 a progress bar, 2 one line per epoch; "auto" is 1 in terminals and notebooks,
            else 2.
        epochs: number of epochs.
    """
    console = Console()
    if verbose == "auto":
        verbose = 1 if console.is_terminal or console.is_jupyter else 2
    return {0: Display, 1: BarDisplay, 2: LineDisplay}[int(verbose)](epochs, console)


class Display:
    """The silent display, and the base class of the others.

    Args:
        epochs: number of epochs.
        console: the console to write to.
    """

    live = False  # True if the display shows results while an epoch runs

    def __init__(self, epochs: int, console: Console) -> None:
        self.epochs, self.console = epochs, console
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Show a line."""

    def begin(self, epoch: int, rows: int) -> None:
        """Begin an epoch of ``rows`` rows (0 if not known yet)."""
        self.started = time.monotonic()

    def update(self, rows: int, total: int, results: Results) -> None:
        """Show the progress of the epoch: ``rows`` of ``total`` rows done (0 if not known), and results."""

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """End an epoch."""

    def close(self) -> None:
        """Close the display."""

    def _line(self, epoch: int, rows: int, logs: Results) -> str:
        seconds = max(1e-9, time.monotonic() - self.started)
        values = _results(logs)
        return (
            f"Epoch {epoch + 1}/{self.epochs} - {seconds:.1f} s - {rows / seconds:,.0f} rows/s"
            f"{' - ' + values if values else ''}"
        )


def _results(logs: Results) -> str:
    return " - ".join(f"{name}: {_text(value)}" for name, value in logs.items())


def _text(value: float | Array) -> str:
    """Return the text of a metric's result, which may have several values."""
    return f"{value:.4f}" if np.ndim(value) == 0 else np.array2string(np.asarray(value), precision=4)


class LineDisplay(Display):
    """One line per epoch."""

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """Print the epoch's line."""
        self.say(self._line(epoch, rows, logs))


class BarDisplay(Display):
    """A bar with speed, remaining time and the results so far, and a line for each completed epoch."""

    live = True

    def __init__(self, epochs: int, console: Console) -> None:
        super().__init__(epochs, console)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[speed]} rows/s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[results]}", markup=False),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.task: TaskID | None = None

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, epoch: int, rows: int) -> None:
        """Draw the bar of an epoch."""
        super().begin(epoch, rows)
        self._remove()
        self.progress.start()
        self.task = self.progress.add_task(
            f"Epoch {epoch + 1}/{self.epochs}", total=rows or None, speed="-", results=""
        )

    def update(self, rows: int, total: int, results: Results) -> None:
        """Move the bar, and show the results so far."""
        if self.task is not None:
            seconds = max(1e-9, time.monotonic() - self.started)
            speed = f"{rows / seconds:,.0f}"
            self.progress.update(
                self.task, completed=rows, total=total or None, speed=speed, results=_results(results)
            )

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """Replace the bar with the epoch's line."""
        self._remove()
        self.say(self._line(epoch, rows, logs))

    def close(self) -> None:
        """Remove the bar."""
        self.progress.stop()

    def _remove(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None

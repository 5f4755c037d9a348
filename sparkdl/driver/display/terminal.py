"""The display in a terminal: a bar below the lines of the epochs.

Lines that other code prints while the bar is drawn appear above it. Rich redirects ``sys.stdout`` and
``sys.stderr`` for that. A logging handler keeps the stream that it was made with, so it is redirected here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sparkdl.driver.display.progress import Display, Results, results_text

ECHO_COLUMNS = 3  # for the ^C that the terminal itself prints behind the bar


class _Narrower:
    """A bar that leaves some columns free, so that the echo of Ctrl-C begins no line.

    Otherwise the next drawing would erase that line in place of the bar.
    """

    def __init__(self, bar: RenderableType) -> None:
        self.bar = bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Constrain(self.bar, max(1, options.max_width - ECHO_COLUMNS))


class _Bars(Progress):
    """The bars of a run, narrower than the terminal."""

    def get_renderable(self) -> RenderableType:
        """Return the bars."""
        return _Narrower(super().get_renderable())


class BarDisplay(Display):
    """A bar with speed, remaining time and the results so far, and a line for each completed epoch.

    Args:
        epochs: number of epochs.
        console: the console to write to.
    """

    def __init__(self, epochs: int, console: Console) -> None:
        super().__init__(epochs)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[results]}", markup=False),
        )
        error = sys.stderr
        self.progress = _Bars(
            *columns,
            console=console,
            transient=True,
            # stderr that goes to a file is not redirected to the console.
            redirect_stderr=error is not None and error.isatty(),
        )
        self.task: TaskID | None = None
        self.handlers: list[tuple[Any, Any]] = []  # logging handlers, each with the stream to restore

    def note(self, text: str) -> None:
        """Print the line above the bar."""
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def wait(self, reason: str) -> None:
        """Show the reason beside the bar."""
        if self.task is not None:
            self.progress.update(self.task, results=reason)

    def begin(self, epoch: int, rows: int) -> None:
        """Draw the bar of an epoch."""
        super().begin(epoch, rows)
        self._remove()
        self._start()
        self.task = self.progress.add_task(
            f"Epoch {epoch + 1}/{self.epochs}", total=rows or None, speed="", results=""
        )

    def update(self, rows: int, total: int, results: Results) -> None:
        """Move the bar, and show the results so far."""
        if self.task is not None:
            self.progress.update(
                self.task,
                completed=rows,
                total=total or None,
                speed=f"{rows / self.seconds():,.0f} rows/s" if rows else "",
                results=results_text(results),
            )

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """Replace the bar with the epoch's line."""
        self._remove()
        self.note(self.line(epoch, rows, logs))

    def close(self) -> None:
        """Remove the bar."""
        self.progress.stop()
        for handler, stream in self.handlers:
            handler.setStream(stream)
        self.handlers = []

    def _start(self) -> None:
        """Start to draw, and redirect logging handlers, unless this was done before."""
        before = sys.stdout, sys.stderr
        self.progress.start()
        for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
            if old is not new:
                for handler in _handlers_of(old):
                    self.handlers.append((handler, old))
                    handler.setStream(new)

    def _remove(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None


def _handlers_of(stream: object) -> Iterator[Any]:
    """Yield the logging handlers that write to a stream."""
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # the dict also has placeholders
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                yield handler

"""The display in a notebook: one HTML output that is updated, without ipywidgets.

The output that stays in the saved notebook is a small table of the epochs, with a chart of the loss. A front
end that shows no HTML gets the lines of the epochs.
"""

from __future__ import annotations

import re
import time
from html import escape
from typing import Any

import numpy as np

from sparkdl.driver.display.progress import Display, Results, results_text, value_text

SECONDS = 0.25  # the minimum time between two updates of the bar
MOST = 20  # the maximum number of rows of the table
WIDTH, HEIGHT = 320, 90  # of the chart, in pixels
COLORS = {"loss": "#1f77b4", "val_loss": "#ff7f0e"}


class HtmlDisplay(Display):
    """A progress bar, the results so far, a table of the epochs, and a chart of the loss.

    Args:
        epochs: number of epochs.
    """

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.rows: list[tuple[str, str, str, Results]] = []  # the epoch, its seconds and speed, its results
        self.bar = ""
        self.epoch = 0
        self.handle: Any = None
        self.shown = 0.0

    def note(self, text: str) -> None:
        """Show the line above the table."""
        self.notes.append(text)
        self._show()

    def wait(self, reason: str) -> None:
        """Show the reason beside the bar."""
        self._move(0, 0, reason)

    def begin(self, epoch: int, rows: int) -> None:
        """Draw the bar of an epoch."""
        super().begin(epoch, rows)
        self.epoch = epoch
        self._move(0, rows, "")

    def update(self, rows: int, total: int, results: Results) -> None:
        """Move the bar, and show the results so far."""
        speed = [f"{rows / self.seconds():,.0f} rows/s"] if rows else []
        self._move(rows, total, " - ".join([*speed, *([results_text(results)] if results else [])]))

    def end(self, epoch: int, rows: int, logs: Results) -> None:
        """Add the epoch to the table."""
        seconds = self.seconds()
        self.lines.append(self.line(epoch, rows, logs))
        self.rows.append((str(epoch + 1), f"{seconds:.1f}", f"{rows / seconds:,.0f}", logs))
        self.bar = ""
        self._show()

    def close(self) -> None:
        """Remove the bar; the table stays."""
        self.bar = ""
        if self.handle is not None:
            self._show()

    def _move(self, rows: int, total: int, text: str) -> None:
        value = f' value="{rows}" max="{total}"' if total else ""
        label = f"Epoch {self.epoch + 1}/{self.epochs}"
        self.bar = f'<div>{label} <progress{value} aria-label="{label}"></progress> {escape(text)}</div>'
        if time.monotonic() - self.shown > SECONDS:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        notes = "".join(f"<div>{linked(escape(note))}</div>" for note in self.notes)
        parts = (notes, table([row[:3] for row in self.rows], [row[3] for row in self.rows]))
        chart = curves([row[3] for row in self.rows])
        data = {
            "text/html": f"<div>{''.join(parts)}{chart}{self.bar}</div>",
            "text/plain": "\n".join([*self.notes, *self.lines]),
        }
        self.shown = time.monotonic()
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self.handle.update(data, raw=True)


def linked(html: str) -> str:
    """Return HTML with its addresses turned into links."""
    return re.sub(r"https?://\S+", r'<a href="\g<0>" target="_blank" rel="noopener">\g<0></a>', html)


def table(epochs: list[tuple[str, str, str]], logs: list[Results]) -> str:
    """Return the table of the epochs as HTML; if there are many, of the first epoch and the last ones.

    Args:
        epochs: the number of each epoch, its seconds and its rows per second.
        logs: the results of each epoch.
    """
    if not epochs:
        return ""
    names = list(dict.fromkeys(name for each in logs for name in each))
    rows = [
        [*epoch, *(value_text(each[name]) if name in each else "" for name in names)]
        for epoch, each in zip(epochs, logs, strict=True)
    ]
    if len(rows) > MOST:
        rows = [rows[0], ["…"] * len(rows[0]), *rows[2 - MOST :]]
    head = _row(["epoch", "seconds", "rows/s", *names], "th")
    body = "".join(_row(row, "td") for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def curves(logs: list[Results]) -> str:
    """Return a chart of the loss and the validation loss of each epoch as HTML with an SVG picture.

    It is empty if there are fewer than two epochs, or no finite losses.
    """
    series = {
        name: [(x, float(each[name])) for x, each in enumerate(logs) if np.ndim(each.get(name, ())) == 0]
        for name in COLORS
        if any(name in each for each in logs)
    }
    points = [y for line in series.values() for _, y in line if np.isfinite(y)]
    if len(logs) < 2 or not points:
        return ""
    low, high = min(points), max(points)
    drawn = "".join(
        f'<polyline fill="none" stroke="{COLORS[name]}" stroke-width="1.5" points="'
        + " ".join(
            f"{x * WIDTH / (len(logs) - 1):.1f},{HEIGHT * (1 - (y - low) / ((high - low) or 1)):.1f}"
            for x, y in line
            if np.isfinite(y)
        )
        + '"/>'
        for name, line in series.items()
    )
    legend = " ".join(f'<span style="color:{COLORS[name]}">{name}</span>' for name in series)
    return (
        f'<div><svg width="{WIDTH}" height="{HEIGHT}" viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}" role="img" '
        f'aria-label="Loss by epoch, from {low:.4g} to {high:.4g}">{drawn}</svg> {legend} '
        f"{low:.4g} to {high:.4g}</div>"
    )

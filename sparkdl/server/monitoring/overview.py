"""The record of several fits for their live page: a table of the fits, and a curve for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

from sparkdl.server.monitoring.live import Cursor, LiveRecord

Cell = str | float | None


class Curve(TypedDict):
    """The results of a fit.

    Attributes:
        name: the name of the fit.
        values: the results, one for each epoch; None for NaN and Inf.
        best: whether this is the best of the fits.
        running: whether it is still training.
    """

    name: str
    values: list[float | None]
    best: bool
    running: bool


class OverviewTable(NamedTuple):
    """The fits at one moment.

    Attributes:
        done: the number of fits that have ended.
        of: the number of all fits.
        facts: names and texts to show above the table.
        columns: the columns: ``(title,)`` for numbers, ``(title, "text")`` for text.
        rows: the cells of each fit.
        metric: the name of the result that the curves show.
        curves: the curves.
    """

    done: int
    of: int
    facts: list[tuple[str, str]]
    columns: list[tuple[str, str] | tuple[str]]
    rows: list[list[Cell]]
    metric: str = ""
    curves: list[Curve] = []


class Overview(LiveRecord):
    """The record of several fits.

    Args:
        name: the title of the page.
        kind: the plural noun for the fits, such as "trials".
        read: returns the table. It is called in threads of the page, at most once per second for each viewer.
        stops: as ``LiveRecord.stops``.
    """

    page = "overview"

    def __init__(self, name: str, kind: str, read: Callable[[], OverviewTable], *, stops: str = "") -> None:
        super().__init__("running")
        self.stops = stops
        self._name, self._kind, self._read = name, kind, read

    def publish(self) -> None:
        """Tell readers that the table has changed."""
        with self._changed:
            self._publish()

    def changes(self, cursor: Cursor) -> tuple[dict[str, object], Cursor]:
        """Return the table, and the events since a cursor."""
        table = self._read()
        with self._changed:
            whole = cursor.thinned != 0 or cursor.events > self._num_events
            if whole:
                cursor = Cursor(0)
            about = {"whole": whole, "name": self._name, "kind": self._kind, "stops": bool(self.stops)}
            values = self._common(cursor) | about | table._asdict()
            return values, Cursor(0, events=self._num_events)

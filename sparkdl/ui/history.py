"""The History that a fit returns: Keras's, with the counts of the run and a readable text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkdl.driver.display.notebook import curves, table
from sparkdl.driver.display.progress import value_text
from sparkdl.driver.training_record import TrainingRecord, counted
from sparkdl.errors import ConfigError
from sparkdl.server.monitoring import document
from sparkdl.server.state import Member
from sparkdl.transport.messages import Interval
from sparkdl.ui.trace import trace_of


class History(keras.callbacks.History):  # type: ignore[misc]
    """Keras's History of a fit on a cluster.

    Attributes:
        history: the results of every epoch, a list by name, as in Keras.
        epoch: the numbers of the epochs, from 0, as in Keras.
        training: the counts and timings of the run, by name. Printed, it is a summary.
        run: the values of the run's live page at its end, for JSON; empty before a fit.
        intervals: the traced intervals of ``fit(profile=...)``, each with its worker, on one clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []  # Keras sets it when training begins
        self.training = TrainingRecord()
        self.run: dict[str, Any] = {}
        self.intervals: list[tuple[int, Interval]] = []
        self._hosts: dict[int, str] = {}  # those of the workers whose batches were traced
        self._epochs_of: dict[str, list[int]] = {}  # the epochs that have a result, by its name

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Append the results of an epoch."""
        super().on_epoch_end(epoch, logs)
        for name in logs or {}:
            self._epochs_of.setdefault(name, []).append(epoch)

    def trace(self, intervals: Iterable[tuple[int, Interval]], members: Mapping[int, Member]) -> None:
        """Append traced intervals of workers on these hosts."""
        self.intervals += intervals
        self._hosts |= {worker: members[worker].host for worker, _ in intervals if worker in members}

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the live page of the run, with its data, as one HTML file that needs no server.

        Args:
            path: a local path; an existing file is replaced.

        Raises:
            ConfigError: this History belongs to no fit.
            OSError: the file cannot be written.
        """
        if not self.run:
            raise ConfigError(
                "report needs the History of a fit; this one belongs to no fit. Call fit first."
            )
        Path(path).write_text(document.report(self.run), "utf-8")

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace of ``fit(profile=...)`` as JSON in Chrome's Trace Event Format.

        Perfetto (ui.perfetto.dev) and chrome://tracing show it: a row for each worker, with its time by
        activity, from the start of the first interval.

        Args:
            path: a local path; an existing file is replaced.

        Raises:
            ConfigError: the fit traced no batches.
            OSError: the file cannot be written.
        """
        if not self.intervals:
            raise ConfigError(
                "save_trace needs a fit that traced batches; this one traced none. Pass profile= to fit, for "
                "example profile=(10, 20)."
            )
        Path(path).write_text(json.dumps(trace_of(self.intervals, self._hosts)), "utf-8")

    def __repr__(self) -> str:
        if not self.epoch:
            return "History of no epochs"
        changes = ", ".join(
            f"{name} {' → '.join(dict.fromkeys(value_text(value) for value in (values[0], values[-1])))}"
            for name, values in self.history.items()
            if values
        )
        run = self.training
        what = f"History of {counted(len(self.epoch), 'epoch')}: {changes}"
        if not run:  # read from a file, without the counts
            return what
        counts = counted(run.get("rows", 0), "row"), counted(run.get("workers", 0), "worker")
        return f"{what}; {', '.join(counts)}, {sum(run.get('epoch_seconds', [])):.1f} s"

    def _repr_html_(self) -> str:
        logs = [dict[str, Any]() for _ in self.epoch]
        places = {epoch: place for place, epoch in enumerate(self.epoch)}
        for name in self.history:
            for epoch, value in points(self, name):
                logs[places[epoch]][name] = value
        timed = {
            epoch: (f"{second:.1f}", f"{speed:,.0f}")
            for epoch, second, speed in self.training.timings(self.epoch)
        }
        rows = [(str(epoch + 1), *timed.get(epoch, ("", ""))) for epoch in self.epoch]
        return f"<div>{table(rows, logs)}{curves(logs)}{self.training._repr_html_()}</div>"


def points(history: keras.callbacks.History, name: str) -> list[tuple[int, Any]]:
    """Return the epochs that have a result, with the result.

    A History of plain Keras, and results that a resumed run took from its checkpoint, have no record of
    these epochs. Such results are assigned to the first epochs.
    """
    values, known = history.history[name], getattr(history, "_epochs_of", {}).get(name, [])
    earlier = history.epoch[: len(values) - len(known)]
    return list(zip([*earlier, *known], values, strict=False))


def scalars(history: keras.callbacks.History) -> dict[str, list[tuple[int, float]]]:
    """Return the epochs and the values of every result that is one number, by name."""
    found = {name: points(history, name) for name in history.history}
    return {name: each for name, each in found.items() if each and np.ndim(each[0][1]) == 0}

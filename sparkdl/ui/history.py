"""The History that a fit returns: Keras's, with the counts of the run and a readable text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.driver.notebook import curves, table
from sparkdl.driver.progress import value_text
from sparkdl.driver.training_record import TrainingRecord, counted


class History(keras.callbacks.History):  # type: ignore[misc]
    """Keras's History of a fit on a cluster.

    Attributes:
        history: the results of every epoch, a list by name, as in Keras.
        epoch: the numbers of the epochs, from 0, as in Keras.
        training: the counts and timings of the run, by name. Printed, it is a summary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []  # Keras sets it when training begins
        self.training = TrainingRecord()
        self._epochs_of: dict[str, list[int]] = {}  # the epochs that have a result, by its name

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Append the results of an epoch."""
        super().on_epoch_end(epoch, logs)
        for name in logs or {}:
            self._epochs_of.setdefault(name, []).append(epoch)

    def __repr__(self) -> str:
        if not self.epoch:
            return "History of no epochs"
        changes = ", ".join(
            f"{name} {' → '.join(dict.fromkeys(value_text(value) for value in (values[0], values[-1])))}"
            for name, values in self.history.items()
            if values
        )
        run = self.training
        counts = counted(run.get("rows", 0), "row"), counted(run.get("workers", 0), "worker")
        seconds = sum(run.get("epoch_seconds", []))
        return (
            f"History of {counted(len(self.epoch), 'epoch')}: {changes}; {', '.join(counts)}, {seconds:.1f} s"
        )

    def _repr_html_(self) -> str:
        logs = [dict[str, Any]() for _ in self.epoch]
        places = {epoch: place for place, epoch in enumerate(self.epoch)}
        for name in self.history:
            for epoch, value in points(self, name):
                logs[places[epoch]][name] = value
        seconds, speeds = self.training.get("epoch_seconds", []), self.training.rows_per_second()
        timed = [(f"{second:.1f}", f"{speed:,.0f}") for second, speed in zip(seconds, speeds, strict=False)]
        timed = [("", "")] * (len(logs) - len(timed)) + timed[: len(logs)]
        rows = [(str(epoch + 1), *pair) for epoch, pair in zip(self.epoch, timed, strict=True)]
        return f"<div>{table(rows, logs)}{curves(logs)}{self.training._repr_html_()}</div>"


def points(history: keras.callbacks.History, name: str) -> list[tuple[int, Any]]:
    """Return the epochs that have a result, with the result.

    A History that another program made, or that a resumed run took from a checkpoint, has no record of these
    epochs. Its results are those of the first ones.
    """
    values, known = history.history[name], getattr(history, "_epochs_of", {}).get(name, [])
    earlier = history.epoch[: len(values) - len(known)]
    return list(zip([*earlier, *known], values, strict=False))


def scalars(history: keras.callbacks.History) -> dict[str, list[tuple[int, float]]]:
    """Return the epochs and the values of every result that is one number, by name."""
    found = {name: points(history, name) for name in history.history}
    return {name: each for name, each in found.items() if each and np.ndim(each[0][1]) == 0}

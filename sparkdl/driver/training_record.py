"""The counts and timings of a run, which ``history.training`` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sparkdl.config import AUTO
from sparkdl.driver.request import Request
from sparkdl.modeling import keras_settings
from sparkdl.server.monitoring.record import RunRecord
from sparkdl.server.run_state import COUNTED

TRAFFIC = "bytes_received", "bytes_sent", "refused_requests"
# The counts that are summed over the runs of a fit.
SUMMED = "version", "restarts", "late_dropped", "late_merged", "slices", *TRAFFIC, *COUNTED
COUNTS = {  # shown if they are not 0
    "resumed": "resumed",
    "restarts": "restarts",
    "lost": "lost workers",
    "returned": "returned workers",
    "retries": "repeated requests",
    "late_merged": "late updates merged",
    "late_dropped": "late updates dropped",
    "not_finite": "non-finite updates",
    "refused": "refused updates",
    "refused_requests": "refused requests",
    "checkpoints_failed": "failed checkpoints",
}


class TrainingRecord(dict[str, Any]):
    """The counts and timings of a run by name: a dict that prints as a summary."""

    @classmethod
    def of(cls, before: dict[str, Any], **settings: object) -> TrainingRecord:
        """Return the record of a run that begins.

        Args:
            before: the record of the run whose fit it continues; empty if there is none.
            settings: the settings of the run.
        """
        first = {"learning_rate_scale": 1.0, "rows": 0, "epoch_rows": [], "epoch_seconds": [], "losses": []}
        return cls({**first, "restarts": 0, **before, **settings})

    def count(self, counts: Mapping[str, Any]) -> None:
        """Record the counts of the run, with those of the joint start that preceded it."""
        earlier = self.get("joint_start", {})
        self.update({name: count + earlier.get(name, 0) for name, count in counts.items()})

    def end_joint_start(self, epochs: int) -> None:
        """Record the counts so far as those of a joint start, if it had any epochs."""
        if epochs > 0:
            counts = {name: self[name] for name in SUMMED if name in self}
            self["joint_start"] = {"epochs": epochs, **counts}

    def timings(self, epochs: Sequence[int]) -> list[tuple[int, float, float]]:
        """Return the epoch, its seconds and its rows per second, for each epoch whose row count is known.

        The row counts of the first epochs may be unknown in a run that resumed an older checkpoint.

        Args:
            epochs: the epochs of a History. An epoch that ended with an error is not among them.
        """
        rows, seconds = self.get("epoch_rows", []), self.get("epoch_seconds", [])
        untimed = len(seconds) - len(rows)
        timed = zip(epochs[untimed:], seconds[untimed:], rows, strict=False)
        return [(epoch, second, count / max(1e-9, second)) for epoch, second, count in timed]

    def summary(self) -> dict[str, str]:
        """Return the values of the summary by title, without counts that are 0."""
        rows, seconds = self.get("worker_rows", []), self.get("epoch_seconds", [])
        speeds = [speed for _, _, speed in self.timings(range(len(seconds)))]
        scale = self.get("learning_rate_scale", 1.0)
        shown = {
            "workers": f"{self.get('workers', 0):,}",
            "rows": f"{self.get('rows', 0):,}",
            "rows by worker": listed([f"{count:,}" for count in rows]),
            "batch size": f"{self.get('batch_size', 0):,}",
            "merge": str(self.get("merge") or ""),
            "learning rate": "" if scale == 1 else f"{scale:.2f} times",
            "seconds by epoch": listed([f"{each:.1f}" for each in seconds]),
            "rows/s by epoch": listed([f"{speed:,.0f}" for speed in speeds]),
            "sent to workers": _bytes(self.get("bytes_sent", 0)),
            "received from workers": _bytes(self.get("bytes_received", 0)),
        }
        counts = {title: f"{self[name]:,}" for name, title in COUNTS.items() if self.get(name)}
        return {title: text for title, text in (shown | counts).items() if text not in ("", "0")}

    def __repr__(self) -> str:
        return lines_of(self.summary())

    def _repr_html_(self) -> str:
        return table_of(self.summary())


def record_of(request: Request, training: TrainingRecord, parameters: int) -> RunRecord:
    """Return the record of a fit that begins.

    Args:
        request: the request of the fit.
        training: counts and settings of the run, as in ``History.training``.
        parameters: number of trainable weights.
    """
    config = request.config
    return RunRecord(
        {
            "model": request.model.name,
            "mode": config.mode.value,
            "frequency": AUTO if request.switch or request.continues else str(config.frequency),
            "merge": training["merge"],
            "workers": request.num_workers,
            "batch_size": training["batch_size"],
            "first_epoch": request.fit.initial_epoch,
            "epochs": request.fit.epochs,
            "parameters": parameters,
            "backend": keras_settings.backend(),
        }
    )


def listed(texts: Sequence[str], most: int = 8) -> str:
    """Join strings with commas.

    If there are more than ``most``, only the first ones and the last one are kept, and the number of all
    strings is added.
    """
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 2])}, …, {texts[-1]} ({len(texts)})"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def lines_of(values: dict[str, str]) -> str:
    """Return values with their titles as lines of text in two columns."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{title:{width}}  {text}" for title, text in values.items())


def table_of(values: dict[str, str]) -> str:
    """Return values with their titles as an HTML table of two columns."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(title)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for title, text in values.items()
    )
    return f"<table>{rows}</table>"


def _bytes(count: float) -> str:
    """Return a number of bytes as text; an empty string for 0."""
    if not count:
        return ""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"

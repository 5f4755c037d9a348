"""The table of a search on its live page: the trials, and the curves of the best and of the running ones."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from optuna import Study
from optuna.trial import FrozenTrial

from sparkdl.driver.display.progress import value_text
from sparkdl.server.monitoring.live import finite
from sparkdl.server.monitoring.overview import Cell, Curve, OverviewTable

CURVES = 20  # the number of ended trials whose curves are shown
RUNNING, COMPLETE, REPEATED = "running", "complete", "repeated"


@dataclass
class TrialRow:
    """A trial as the page shows it.

    Attributes:
        state: "running", "complete", "pruned", "failed", or "repeated" if another trial repeats it.
        params: its parameters by name.
        curve: the metric after each epoch.
        value: its value; None if it has none.
        reason: why it failed.
        began: the time of the monotonic clock when it began.
        seconds: its duration; None while it runs.
    """

    state: str = RUNNING
    params: dict[str, object] = field(default_factory=dict)
    curve: Sequence[float] = ()
    value: float | None = None
    reason: str = ""
    began: float = field(default_factory=time.monotonic)
    seconds: float | None = None


class TrialTable:
    """The trials of a search, kept for the readers of its page.

    Args:
        metric: the name of the result that is optimized.
        maximize: whether a larger value is better.
        num_trials: the total number of trials to run, in which repeated trials do not count; None if it is
            not known.
        changed: called after each change.
    """

    def __init__(
        self,
        metric: str,
        *,
        maximize: bool,
        num_trials: int | None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.metric, self.num_trials, self.changed = metric, num_trials, changed
        self._sign = -1.0 if maximize else 1.0
        self._lock = threading.Lock()
        self._rows: dict[int, TrialRow] = {}

    def load(self, study: Study, states: dict[int, str]) -> None:
        """Add the trials that a study already has.

        Args:
            study: the study.
            states: the state of each trial that has begun, by its number.
        """
        for trial in study.get_trials(deepcopy=False):
            if trial.number in states:
                self._rows[trial.number] = self._row_of(trial, states[trial.number])

    def _row_of(self, trial: FrozenTrial, state: str) -> TrialRow:
        duration = trial.duration
        return TrialRow(
            state=state,
            params=dict(trial.params),
            curve=trial.user_attrs.get("results", {}).get(self.metric, ()),
            value=trial.value,
            reason=trial.user_attrs.get("reason", ""),
            seconds=None if duration is None else duration.total_seconds(),
        )

    def begin(self, number: int) -> None:
        """Add a trial that begins."""
        with self._lock:
            self._rows[number] = TrialRow()
        self.changed()

    def report(self, number: int, params: dict[str, object], curve: Sequence[float]) -> None:
        """Record the metric of a trial after each epoch so far."""
        with self._lock:
            row = self._rows[number]
            row.params, row.curve = params, list(curve)
        self.changed()

    def end(
        self, number: int, params: dict[str, object], state: str, value: float | None = None, reason: str = ""
    ) -> None:
        """Record the end of a trial."""
        with self._lock:
            row = self._rows[number]
            row.params, row.state, row.value, row.reason = params, state, value, reason
            row.seconds = time.monotonic() - row.began
        self.changed()

    def read(self) -> OverviewTable:
        """Return the table for the page."""
        with self._lock:
            rows = dict(sorted(self._rows.items(), reverse=True))
            complete = [number for number, row in rows.items() if row.state == COMPLETE]
            best = min(complete, key=self._order, default=None)
            names = list(dict.fromkeys(name for row in rows.values() for name in row.params))
            failed = any(row.reason for row in rows.values())
            done = sum(row.state not in (RUNNING, REPEATED) for row in rows.values())
            return OverviewTable(
                done=done,
                of=max(done, self.num_trials or len(rows)),
                facts=[] if best is None else self._facts(best),
                columns=[
                    ("Trial",),
                    ("State", "text"),
                    (self.metric,),
                    ("Epochs",),
                    ("Seconds",),
                    *((name,) for name in names),
                    *([("Reason", "text")] if failed else []),
                ],
                rows=[
                    _cells(number, row, names, best=number == best) + ([row.reason] if failed else [])
                    for number, row in rows.items()
                ],
                metric=self.metric,
                curves=self._curves(best),
            )

    def _order(self, number: int) -> tuple[float, int]:
        """Return the sorting key of a trial: the better value first, then the earlier trial."""
        row = self._rows[number]
        values = row.curve if row.value is None else [row.value]
        return min((self._sign * value for value in values if math.isfinite(value)), default=math.inf), number

    def _facts(self, best: int) -> list[tuple[str, str]]:
        row = self._rows[best]
        params = ", ".join(f"{name}={_text(value)}" for name, value in row.params.items())
        value = f"{value_text(row.value or 0.0)} (trial {best})"
        return [(f"Best {self.metric}", value), ("Parameters", params)]

    def _curves(self, best: int | None) -> list[Curve]:
        """Return the curves of the running trials and of the best others."""
        drawn = [number for number, row in self._rows.items() if row.curve]
        running = [number for number in drawn if self._rows[number].state == RUNNING]
        ended = sorted((number for number in drawn if number not in running), key=self._order)[:CURVES]
        return [
            Curve(
                name=f"trial {number}",
                values=finite(list(self._rows[number].curve)),
                best=number == best,
                running=number in running,
            )
            for number in sorted([*running, *ended])
        ]


def _cells(number: int, row: TrialRow, names: list[str], *, best: bool) -> list[Cell]:
    """Return the cells of a trial, without the reason of its failure."""
    value = row.value if row.value is not None else next(reversed(row.curve), None)
    seconds = time.monotonic() - row.began if row.seconds is None else row.seconds
    return [
        str(number),
        "best" if best else row.state,
        None if value is None else finite(float(value)),
        str(len(row.curve)),
        f"{seconds:.1f}",
        *(_text(row.params.get(name, "")) for name in names),
    ]


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The plan of a scheduler: a table of its jobs, with their states, their order and their expected times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from sparkdl.scheduling.job import Job, State
from sparkdl.server.monitoring.live import finite
from sparkdl.server.monitoring.overview import Curve, OverviewTable

METRIC = "loss"  # the result whose curves a page shows
CURVES = 20  # maximum number of curves


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """One job of a plan. Times are seconds from the moment of the plan.

    Attributes:
        name: the job's name.
        state: its state, such as "running"; "running, to be paused" if it leaves at the end of its epoch.
        priority: its priority.
        share: its share.
        slots: the slots that it needs.
        epochs_done: the number of epochs done.
        epochs: the number of epochs of the fit.
        since: the seconds that it has run or waited; None if it has ended.
        starts: the expected seconds until it starts; None if it runs, has ended, or this is not known.
        ends: the expected seconds until it ends; None if it has ended, or this is not known.
    """

    name: str
    state: str
    priority: int
    share: str
    slots: int
    epochs_done: int
    epochs: int
    since: float | None = None
    starts: float | None = None
    ends: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The jobs of a scheduler: running ones, then waiting ones in the order of their rank, then ended ones.

    It prints as a table, in a notebook as HTML. Expected times come from a simulation with the scheduler's
    own policy, which assumes that no job is added. They are unknown until the length of an epoch is known,
    and for jobs that would end after 10,000 simulated epochs.

    Attributes:
        slots: the slots of the scheduler.
        rows: the jobs, each a ``ScheduleRow``.
    """

    slots: int
    rows: Sequence[ScheduleRow]

    def __iter__(self) -> Iterator[ScheduleRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        lines = [list(_cells(None)), *(list(_cells(row)) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([self.title(), *texts])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in _cells(None))
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in self.rows
        )
        return f"<p>{self.title()}</p><table><tr>{head}</tr>{body}</table>"

    def title(self) -> str:
        """Return the number of slots in use, as text."""
        used = sum(row.slots for row in self.rows if row.state.startswith("running"))
        return f"{used} of {self.slots} slots in use"


def table_of(schedule: Schedule, jobs: Sequence[Job]) -> OverviewTable:
    """Return a plan as a table for a page, with the curves of the jobs that have run last.

    Args:
        schedule: the plan.
        jobs: the jobs, in the order in which they were submitted.
    """
    trained = [job for job in jobs if job.history is not None and job.history.history.get(METRIC)]
    first, state, *rest = _cells(None)
    return OverviewTable(
        done=sum(job.done for job in jobs),
        of=len(jobs),
        facts=[("Slots", schedule.title())],
        columns=[(first, "text"), (state, "text"), *((title,) for title in rest)],
        rows=[list(_cells(row)) for row in schedule],
        metric=METRIC,
        curves=[
            Curve(
                name=job.name,
                values=finite(list(job.history.history[METRIC])),
                best=False,
                running=job.state is State.RUNNING,
            )
            for job in trained[-CURVES:]
            if job.history is not None
        ],
    )


def _cells(row: ScheduleRow | None) -> tuple[str, ...]:
    """Return the cells of a row as text, or the titles if the row is None."""
    if row is None:
        return "job", "state", "priority", "share", "slots", "epochs", "since", "starts in", "ends in"
    return (
        row.name,
        row.state,
        str(row.priority),
        row.share,
        str(row.slots),
        f"{row.epochs_done}/{row.epochs}",
        *(duration(each) for each in (row.since, row.starts, row.ends)),
    )


def duration(seconds: float | None) -> str:
    """Return seconds as text such as "5 s", "3 min" or "2.5 h"; "" if they are not known."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

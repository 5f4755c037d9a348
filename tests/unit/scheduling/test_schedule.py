"""The table that a scheduler prints."""

import pytest

from sparkdl.scheduling.schedule import Schedule, ScheduleRow, duration

ROWS = [
    ScheduleRow(
        name="nightly",
        state="running",
        priority=0,
        share="",
        slots=2,
        epochs_done=3,
        epochs=10,
        since=42.4,
        ends=140,
    ),
    ScheduleRow(
        name="<b>",
        state="waiting",
        priority=1,
        share="team",
        slots=1,
        epochs_done=0,
        epochs=5,
        since=3,
        starts=7,
    ),
]


def test_a_plan_prints_as_a_table():
    """A plan prints a line for each job, with times that are known."""
    lines = [
        "2 of 4 slots in use",
        "job      state    priority  share  slots  epochs  since  starts in  ends in",
        "nightly  running  0                2      3/10    42 s              2 min",
        "<b>      waiting  1         team   1      0/5     3 s    7 s",
    ]

    assert lines == repr(Schedule(4, ROWS)).splitlines()


def test_a_plan_in_a_notebook_escapes_names():
    """The HTML of a plan has the names as text, not as elements."""
    html = Schedule(4, ROWS)._repr_html_()

    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_a_plan_is_a_sequence_of_its_jobs():
    """A program can read the rows of a plan."""
    plan = Schedule(4, ROWS)

    assert ["nightly", "<b>"] == [row.name for row in plan]
    assert 2 == len(plan)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (9000, "2.5 h")],
)
def test_durations_have_a_unit_that_suits_them(seconds, text):
    """A duration is shown in seconds, minutes or hours."""
    assert text == duration(seconds)

"""Whose turn it is today: of many settings of a fault each run takes one, and some days take all of them.

``SPARKDL_TEST_DAY=N pytest ...`` takes those of day N again; the head of pytest's output says which it is.
"""

import datetime
import os

import pytest

# In the environment, for the processes that pytest-xdist starts.
DAY = int(os.environ.setdefault("SPARKDL_TEST_DAY", str(datetime.date.today().toordinal())))


def by_turns(values, name=str):
    """Return a parameter of a test for each value; but for today's they are of the whole product only."""
    today = DAY % len(values)
    marks = [() if index == today else pytest.mark.whole for index in range(len(values))]
    return [
        pytest.param(value, id=name(value), marks=mark) for value, mark in zip(values, marks, strict=True)
    ]

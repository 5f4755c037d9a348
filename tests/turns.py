"""Selection of the share of many similar tests that the default suite runs; the full suite runs all.

The share is always the same. ``SPARKDL_TEST_SHARE=N pytest ...`` runs another one, and the head of pytest's
output shows which.
"""

import os

import pytest

# In the environment, for the processes that pytest-xdist starts. Any number will do.
SHARE = int(os.environ.setdefault("SPARKDL_TEST_SHARE", "19228"))


def by_turns(values, name=str):
    """Return a parameter of a test for each value, marked as `whole` unless it is in the share."""
    chosen = SHARE % len(values)
    marks = [() if index == chosen else pytest.mark.whole for index in range(len(values))]
    return [
        pytest.param(value, id=name(value), marks=mark) for value, mark in zip(values, marks, strict=True)
    ]

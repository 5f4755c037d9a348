"""Tests of the soak test: it passes for some seconds, and it finds growth and wrong sums."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import soak  # noqa: E402


@pytest.mark.whole
def test_some_seconds_of_it():
    """Updates are merged once while workers are killed and a relay loses requests and answers."""
    options = ["--minutes", "0.2", "--workers", "3", "--kill", "2", "--pause", "0.01", "--share", "0.1"]
    command = [sys.executable, str(BENCHMARKS / "soak.py"), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)

    assert (0, "") == (run.returncode, run.stderr)
    counts = dict(re.findall(r"^\| ([a-z' ]+) \| ([\d,]+) \|$", run.stdout, re.MULTILINE))
    assert counts["updates merged"] == counts["sum of the center"]
    for each in ("updates merged", "workers killed", "attempts that took a worker's place", "answers lost"):
        assert counts[each] != "0"


@pytest.mark.parametrize("name", soak.BARS)
def test_what_grows_is_found(name):
    """Steady growth is found; fluctuation and growth during warm-up are not reported."""
    steady = {each: 30.0 + np.arange(220) % 2 for each in soak.BARS}
    steady[name][:60] -= 20
    growing = steady | {name: steady[name] + np.arange(220) / 5}

    assert [] == soak.grown(steady)
    assert [name] == soak.grown(growing)


@pytest.mark.parametrize("seconds", [1, 12])
def test_a_process_that_never_got_warm_has_not_grown(seconds):
    """A process that is still loading code and filling pools is not reported as growing."""
    assert [] == soak.grown({each: 30.0 + np.arange(seconds) for each in soak.BARS})


SOUND = {
    "center": [3, 4],
    "said": ["3", "4"],
    "rest": 0.0,
    "version": 7,
    "counters": {"exchanges": 7},
}


LIES = [
    {"center": [4, 3]},
    {"said": ["3", ""]},
    {"rest": 1.0},
    {"version": 8},
    {"counters": {"exchanges": 6}},
]


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_add_up_is_found(lie):
    """A wrong sum, version or counter, or a worker's missing report, is found."""
    assert soak.adds_up(SOUND)
    assert not soak.adds_up(SOUND | lie)

"""The driver warns of the settings that fell short of plain Keras in the study."""

import sys
from configparser import ConfigParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.driver.known_shortfalls import Shortfall, known, shortfall, words_of
from sparkdl.rules import RULES, Average, DiLoCo, Rule

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import convergence  # noqa: E402


def asked(merge=None, *, mode="synchronous", window=None, adaptive=False, workers=8):
    return shortfall(merge, mode=mode, window=window, adaptive=adaptive, workers=workers)


def test_the_data_file_is_what_the_journal_says():
    """The data file has every combination that misses its bar in the committed study, and no other."""
    answers = convergence.Journal(BENCHMARKS / "convergence.jsonl").answers()
    written = files("sparkdl.driver").joinpath("known_shortfalls.json").read_text(encoding="utf-8")

    assert answers
    assert convergence.shortfalls(answers) == [tuple(one) for one in known()]
    assert convergence.data_file(answers) == written


def test_a_wheel_has_the_data_file():
    """The package data in setup.cfg names the data file."""
    settings = ConfigParser()
    settings.read(BENCHMARKS.parent / "setup.cfg")

    assert "known_shortfalls.json" in settings["options.package_data"]["sparkdl.driver"].split()


@given(
    merge=st.sampled_from([None, *RULES]),
    mode=st.sampled_from(["synchronous", "asynchronous", "hogwild"]),
    window=st.sampled_from([1, 16, None]),
    adaptive=st.booleans(),
    workers=st.integers(1, 300),
)
def test_more_workers_are_never_warned_of_less(merge, mode, window, adaptive, workers):
    """More workers get at least the warnings of fewer; one worker with the default rule gets none."""
    settings = {"mode": mode, "window": window, "adaptive": adaptive}
    fewer, more = (asked(merge, workers=k, **settings) for k in (workers, workers + 1))

    assert asked(None, workers=1, **settings) is None
    assert fewer is None or more.points >= fewer.points


def test_a_rule_as_an_object_is_warned_of_where_its_settings_are_the_usual():
    """A rule object is warned of if its settings are the defaults, which the study covered."""

    class Own(Rule):
        name = "average"

    assert asked("average") == asked(Average()) is not None
    assert asked("diloco") == asked(DiLoCo()) is not None
    assert asked(DiLoCo(outer_learning_rate=0.5)) is None
    assert asked(Own()) is None


@pytest.mark.parametrize(("points", "said"), [(float("inf"), "diverged"), (2.5, "scored 2.5 points")])
def test_a_warning_says_what_was_seen_and_what_does_better(points, said):
    """A warning has the measured result, the setting that it belongs to, and one that does better."""
    words = words_of(Shortfall("synchronous", "n", "sum", False, 8, points, "tabular"), "synchronous")

    assert said in words
    assert 'merge="sum"' in words
    assert 'frequency="batch"' in words
    assert 'the page "Which mode: the evidence" of its documentation' in words
    assert ".md" not in words
    assert "hogwild" not in words


def test_a_warning_about_hogwild_says_why_it_names_another_mode():
    """The study ran asynchronous only, which merges the same updates, and the warning says so."""
    below = asked("sum", mode="hogwild", adaptive=True)

    assert "asynchronous" == below.mode
    assert 'This holds for mode="hogwild" too, which merges' in words_of(below, "hogwild")

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
MEASURED = (1, 2, 4, 8)  # the numbers of workers in the study
MEASURED_AFTER_JOINT = (2, 4, 8, 16)  # those in the study of joint starts
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


def test_a_number_of_workers_that_met_the_bar_is_not_warned_of():
    """A combination of the data file names the next number of workers in the study, if it met the bar."""
    found = {(*one[:4], one.workers) for one in known()}

    for one in known():
        measured = MEASURED_AFTER_JOINT if one.frequency == "auto" else MEASURED
        larger = [number for number in measured if number > one.workers]
        short = [(*one[:4], number) in found for number in larger[:1]]
        assert one.below == (None if not larger or short == [True] else larger[0])


def test_a_joint_start_is_warned_of_up_to_the_next_number_of_workers():
    """A joint start fell short with 4 workers, but not with 8."""
    settings = {"mode": "synchronous", "window": 16, "adaptive": True, "joint_start": True}
    found = {workers: shortfall(None, workers=workers, **settings) for workers in (3, 4, 7, 8, 20)}

    assert [None, 4, 4, None, None] == [one and one.workers for one in found.values()]


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
def test_a_run_is_warned_of_the_nearest_measurement(merge, mode, window, adaptive, workers):
    """A run gets the result of the largest number of workers in the study that is not above its own."""
    settings = {"mode": mode, "window": window, "adaptive": adaptive}
    nearest = max(number for number in MEASURED if number <= workers)
    below = asked(merge, workers=workers, **settings)

    assert asked(None, workers=1, **settings) is None
    assert below == asked(merge, workers=nearest, **settings)
    assert below is None or below.workers == nearest


def test_a_result_with_fewer_workers_does_not_replace_the_own():
    """A run with eight workers is not warned of ADAG's divergence from Keras with one worker."""
    below = {workers: asked("adag", mode="asynchronous", workers=workers).points for workers in (1, 8)}

    assert below == {1: 102.5, 8: 12.2}


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


@pytest.mark.parametrize(("workers", "words"), [(1, "SGD and 1 worker scored"), (2, "SGD and 2 workers")])
def test_a_warning_counts_workers_in_words_that_agree(workers, words):
    """A warning has "1 worker", and "workers" for any other number."""
    below = Shortfall("asynchronous", "epoch", "adag", False, workers, 102.5, "tabular")

    assert words in words_of(below, "asynchronous")


def test_a_warning_about_hogwild_says_why_it_names_another_mode():
    """The study ran asynchronous only, and the warning says that its simulation makes no difference."""
    below = asked("sum", mode="hogwild", adaptive=True)
    words = words_of(below, "hogwild")

    assert "asynchronous" == below.mode
    assert 'The same holds for mode="hogwild", which computes the same in the study\'s simulation.' in words

"""Fuzzed inputs are refused properly: no 5xx, no changed byte of state, little memory."""

import random
import tracemalloc

import pytest
from fuzz import Http, Wire, kept, replay, search

TARGETS = {"wire": (Wire, 300_000, 30_000), "http": (Http, 30_000, 3_000)}


@pytest.fixture(params=TARGETS)
def fuzzed(request):
    """A target, and the numbers of its inputs without and with a check of memory."""
    target, *numbers = TARGETS[request.param]
    target = target()
    share = 1 if request.config.getoption("--all") else 20
    yield target, *(number // share for number in numbers)
    target.close()


def test_each_input_of_the_corpus_is_an_outcome_of_its_own(fuzzed):
    """Each input of the corpus has its own outcome, and the invariants hold for it."""
    target, *_ = fuzzed
    inputs = kept(target)

    assert len(inputs) == len({replay(target, data) for data in inputs}) > 20


def test_inputs_that_are_almost_right_are_answered_or_refused(fuzzed):
    """An almost valid input gets a status below 500 or WireError, and a refused one changes nothing."""
    target, number, _ = fuzzed
    search(target, number, random.Random(1))


def test_no_input_takes_much_memory(fuzzed):
    """No input takes much memory, whatever length it claims to have."""
    target, _, number = fuzzed
    tracemalloc.start()
    try:
        search(target, number, random.Random(2))
    finally:
        tracemalloc.stop()

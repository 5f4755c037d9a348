"""Whatever comes, the house refuses it in its own words: no 5xx, no changed byte of state, little memory."""

import random
import tracemalloc

import pytest
from fuzz import Http, Wire, kept, replay, search

TARGETS = {"wire": (Wire, 300_000, 30_000), "http": (Http, 30_000, 3_000)}


@pytest.fixture(params=TARGETS)
def fuzzed(request):
    """A target, and how many inputs it is given, without a look at memory and with one."""
    target, *numbers = TARGETS[request.param]
    target = target()
    yield target, *numbers
    target.close()


def test_each_input_of_the_corpus_is_an_outcome_of_its_own(fuzzed):
    """They are what earlier searches have found, and the promises hold for them."""
    target, *_ = fuzzed
    inputs = kept(target)

    assert len(inputs) == len({replay(target, data) for data in inputs}) > 20


def test_inputs_that_are_almost_right_are_answered_or_refused(fuzzed):
    """With a status below 500, or the error of the wire; what is refused has changed nothing."""
    target, number, _ = fuzzed
    search(target, number, random.Random(1))


def test_no_input_takes_much_memory(fuzzed):
    """Whatever length it claims to have."""
    target, _, number = fuzzed
    tracemalloc.start()
    try:
        search(target, number, random.Random(2))
    finally:
        tracemalloc.stop()

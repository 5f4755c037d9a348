"""The sample of `make test` is fixed: a test's choice depends on its own name and parameters alone."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import selection

KINDS = ("local", "local-cluster", "standalone", "connect")
NAMES = [f"test_{number}_is_{word}" for number in range(8) for word in ("learned", "refused", "named")]
MODULE = SimpleNamespace(MASTERS=KINDS)


def cases_of(name, *parameters, marks=(), module=MODULE):
    """Return the cases of a test on every kind of master, in pytest's order."""
    return [
        SimpleNamespace(
            originalname=name,
            path="tests/test_it.py",
            module=module,
            fixturenames=["spark"],
            callspec=SimpleNamespace(params={"spark": kind, **dict(enumerate(values))}),
            get_closest_marker=lambda mark: mark in marks or None,
        )
        for kind, *values in product(module.MASTERS, *parameters)
    ]


def sample_of(*tests):
    """Return the chosen cases as tuples of the name and the values."""
    values = {}
    chosen = [item for cases in tests for item in cases if selection.is_in_sample(item, values)]
    return {(item.originalname, *item.callspec.params.values()) for item in chosen}


@pytest.mark.parametrize("marks", [(), ("one_case",)])
def test_the_sample_does_not_depend_on_other_tests(marks):
    """Each test's cases are the same with others, without them and in another order."""
    tests = [cases_of(name, "abc", "xyz", marks=marks) for name in NAMES]

    together = sample_of(*tests)

    assert together == sample_of(*tests) == sample_of(*reversed(tests))
    assert together == set.union(*(sample_of(test) for test in tests))


def test_the_sample_is_the_same_on_every_day_and_in_every_process():
    """The kinds of a few tests are written here: no date and no seed of hashes changes them."""
    expected = {
        ("test_0_is_learned", "standalone"),
        ("test_0_is_refused", "local-cluster"),
        ("test_0_is_named", "standalone"),
        ("test_1_is_learned", "connect"),
        ("test_1_is_refused", "local"),
    }

    assert expected == sample_of(*map(cases_of, NAMES[:5]))


def test_every_kind_of_master_is_used():
    """Tests without other parameters spread over all kinds; each runs once."""
    chosen = Counter(kind for _, kind in sample_of(*map(cases_of, NAMES)))

    assert len(NAMES) == chosen.total()
    assert set(KINDS) == chosen.keys()


@pytest.mark.parametrize("name", NAMES[:3])
def test_two_parameters_of_three_values_meet_three_kinds_in_pairs(name):
    """Each pair of values runs once, and each value of each parameter runs on each kind."""
    kinds = KINDS[:3]

    chosen = sample_of(cases_of(name, "abc", "xyz", module=SimpleNamespace(MASTERS=kinds)))

    assert sorted(product("abc", "xyz")) == sorted((a, x) for _, _, a, x in chosen)
    assert set(product(kinds, "abc")) == {(kind, a) for _, kind, a, _ in chosen}
    assert set(product(kinds, "xyz")) == {(kind, x) for _, kind, _, x in chosen}


def test_a_long_test_runs_its_first_case_and_one_for_each_master_runs_on_all():
    """The marks `one_case`, `each_master` and `whole` leave one case, one for each kind, and none."""
    long, each, whole = (
        sample_of(cases_of(NAMES[0], "abc", marks=(mark,))) for mark in ("one_case", "each_master", "whole")
    )

    assert ["a"] == [value for _, _, value in long]
    assert set(product(KINDS, "abc")) == {(kind, value) for _, kind, value in each}
    assert set() == whole

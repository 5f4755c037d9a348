"""Rules: what one update does to the center, as in the literature."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.rules import Average, DynSGD, Merge, Sum, choose_rule
from sparkdl.rules.base import Rule

RULES = {"average": Average, "sum": Sum, "dynsgd": DynSGD}
deltas = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6).map(
    lambda v: np.array(v, np.float32)
)
merges = st.builds(Merge, staleness=st.integers(0, 50), workers=st.integers(1, 50))


@given(deltas, merges)
def test_average_moves_the_center_by_a_kth_part(delta, merge):
    """The step is delta / K."""
    step, _ = Average().update(delta, None, merge)

    np.testing.assert_array_max_ulp(step, delta / np.float32(merge.workers), 2)


@given(deltas, merges)
def test_sum_adds_the_delta_whole(delta, merge):
    """The step is the delta."""
    np.testing.assert_array_equal(Sum().update(delta, None, merge)[0], delta)


@given(deltas, merges)
def test_dynsgd_divides_by_staleness_plus_one(delta, merge):
    """The step is delta / (staleness + 1)."""
    step, _ = DynSGD().update(delta, None, merge)

    np.testing.assert_array_max_ulp(step, delta / np.float32(merge.staleness + 1), 2)


@pytest.mark.parametrize("rule", RULES.values())
@given(delta=deltas)
def test_one_worker_alone_adds_its_delta_without_a_rounding(rule, delta):
    """One worker is never stale, and its center is what it trained to the bit."""
    np.testing.assert_array_equal(rule().update(delta, None, Merge(0, 1))[0], delta)


@pytest.mark.parametrize("rule", RULES.values())
@given(delta=deltas, merge=merges)
def test_a_rule_changes_none_of_its_arguments(rule, delta, merge):
    """The delta belongs to its worker; a stripe of it may be asked for again."""
    before = delta.copy()
    rule().update(delta, rule().init(delta), merge)

    np.testing.assert_array_equal(before, delta)


@pytest.mark.parametrize("rule", RULES.values())
@given(delta=deltas, merge=merges, at=st.integers(0, 6))
def test_a_rule_works_element_by_element(rule, delta, merge, at):
    """Hogwild merges stripes: the parts of a step are the steps of the parts."""
    whole = rule().update(delta, None, merge)[0]
    parts = [rule().update(part, None, merge)[0] for part in (delta[:at], delta[at:])]

    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("rule", RULES.values())
def test_workers_go_on_from_the_center(rule):
    """No rule of today keeps local weights."""
    assert "center" == rule().adopt("local", "center")


DEFAULTS = [
    (True, 1, Average), (True, None, Average), (False, 1, Sum), (False, 4, DynSGD), (False, None, DynSGD),
]  # fmt: skip


@pytest.mark.parametrize(("synchronous", "window", "kind"), DEFAULTS)
def test_every_mode_has_a_default_rule(synchronous, window, kind):
    """Rounds average; single batches are added whole, longer windows divided by their staleness."""
    assert isinstance(choose_rule(None, synchronous=synchronous, window=window), kind)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_chosen_by_its_name(name):
    """The name is the word that users write."""
    assert isinstance(choose_rule(name, synchronous=False, window=1), RULES[name])


def test_a_rule_that_means_nothing_in_a_mode_is_refused():
    """DynSGD needs a staleness, which rounds have not."""
    with pytest.raises(ConfigError, match='merge="dynsgd" divides an update by its staleness'):
        choose_rule("dynsgd", synchronous=True, window=None)


def test_an_unknown_rule_is_refused_by_name():
    """The message says which there are."""
    with pytest.raises(ConfigError, match="one of 'average', 'sum', 'dynsgd'; got 'vote'."):
        choose_rule("vote", synchronous=False, window=None)


def test_a_rule_without_an_update_is_not_one():
    """The base class decides nothing."""
    with pytest.raises(NotImplementedError):
        Rule().update(np.ones(1, np.float32), None, Merge(0, 1))

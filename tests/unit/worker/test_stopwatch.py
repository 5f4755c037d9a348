"""Tests of a worker's stopwatch: each second belongs to one activity."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.transport.messages import ACTIVITIES, Reply
from sparkdl.worker.stopwatch import Stopwatch

clocks = st.lists(st.tuples(st.sampled_from(ACTIVITIES), st.integers(0, 9), st.integers(0, 9)), max_size=8)


class Clock:
    """A clock that only the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@given(steps=clocks, replies=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=8, max_size=8))
def test_each_second_belongs_to_one_activity(steps, replies):
    """The seconds of all activities together are the time that passed, and traced intervals are in order."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "perf_counter", clock)
        watch = Stopwatch(range(1, 100))
        with watch.time("compute"):
            for (activity, inner, outer), (waited, merged) in zip(steps, replies, strict=False):
                watch.begin_batch()
                with watch.time(activity):
                    clock.now += inner
                if activity == "exchange":
                    watch.divide(Reply(waited=waited, merged=merged))
                clock.now += outer
    passed = clock.now - 100.0
    intervals = [*watch.take_intervals(), *watch._intervals]
    ends = [each.start + each.seconds for each in intervals]

    assert passed == pytest.approx(sum(watch.seconds.values()))
    assert all(seconds >= -1e-9 for seconds in watch.seconds.values())
    assert all(after.start >= end - 1e-9 for end, after in zip(ends, intervals[1:], strict=False))


def test_an_exchange_is_divided_by_what_the_endpoint_reports(clock):
    """The time of an exchange is that on the way, the wait for other workers, and the merge."""
    watch = Stopwatch(range(1, 2))
    watch.begin_batch()
    with watch.time("exchange"):
        clock.now += 10.0
    watch.divide(Reply(waited=5.0, merged=1.0))
    watch.begin_batch()

    assert {"data": 0, "compute": 0, "exchange": 4.0, "wait": 5.0, "merge": 1.0} == watch.seconds
    assert [("exchange", 100, 2), ("wait", 102, 5), ("merge", 107, 1), ("exchange", 108, 2)] == (
        watch.take_intervals()
    )


def test_the_time_of_a_batch_ends_with_the_next_batch(clock):
    """The time between two activities belongs to the batch in which it passed, at both ends of the range."""
    watch = Stopwatch(range(2, 4))
    with watch.time("compute"):
        for number in range(1, 6):
            watch.begin_batch()
            clock.now += number
            if number == 2:
                with watch.time("data"):
                    clock.now += 0.5

    intervals = [*watch.take_intervals(), *watch._intervals]
    assert [("compute", 101, 2), ("data", 103, 0.5), ("compute", 103.5, 3)] == intervals
    assert {"data": 0.5, "compute": 15} == {name: watch.seconds[name] for name in ("data", "compute")}


def test_only_chosen_batches_are_traced(clock):
    """Batches outside the range leave no intervals."""
    watch = Stopwatch(range(2, 4))
    for _ in range(5):
        watch.begin_batch()
        with watch.time("data"):
            clock.now += 1.0

    assert [101.0, 102.0] == [each.start for each in watch.take_intervals()]

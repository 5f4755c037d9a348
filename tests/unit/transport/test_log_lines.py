"""Log lines on their way to the driver are bounded, and none is lost without being counted."""

import logging

import pytest
from clock import Clock

from sparkdl.transport.log_lines import PERIOD_SECONDS, LogLines, named


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(clock):
    return LogLines(2, "a worker sends", clock)


def entry(message, level=logging.WARNING):
    return {"name": "n", "level": level, "message": message}


def add(lines, *messages, level=logging.WARNING):
    for message in messages:
        lines.add(entry(message, level))


def taken(lines):
    return [each["message"] for each in lines.take()]


def left_out(count, which="at WARNING or above"):
    noun = "line" if count == 1 else "lines"
    return f"Left out {count:,} log {noun} {which}: a worker sends at most 2 of them per minute."


def test_lines_beyond_the_limit_of_a_period_are_counted(lines, clock):
    """The first lines of a period are kept, and one line states how many others there were."""
    add(lines, *map(str, range(1002)))
    during = taken(lines)
    clock.sleep(PERIOD_SECONDS)

    assert ["0", "1"] == during
    assert [left_out(1000)] == taken(lines)


def test_a_new_period_takes_lines_again(lines, clock):
    """After a period of the maximum number of lines, the next one takes as many."""
    add(lines, "1", "2", "3")
    clock.sleep(PERIOD_SECONDS)
    add(lines, "4")

    assert ["1", "2", "4", left_out(1)] == taken(lines)


def test_chatter_leaves_room_for_warnings(lines):
    """Lines below WARNING have a limit of their own, and so has the line that counts them."""
    add(lines, *map(str, range(9)), level=logging.INFO)
    add(lines, "a warning")
    lines.end_period()

    ended = lines.take()
    assert ["0", "1", "a warning", left_out(7, "below WARNING")] == [each["message"] for each in ended]
    assert logging.INFO == ended[-1]["level"]


def test_a_period_without_losses_ends_silently(lines, clock):
    """No line is added if nothing was left out."""
    add(lines, "1", "2")
    clock.sleep(PERIOD_SECONDS)

    assert ["1", "2"] == taken(lines)


def test_lines_that_nobody_takes_stay_few(lines, clock):
    """If lines are not taken for long, the newest stay, and the others are counted."""
    for minute in range(50):
        add(lines, f"{minute} a", f"{minute} b", f"{minute} c")
        clock.sleep(PERIOD_SECONDS)

    assert ["48 a", "48 b", "49 a", "49 b", left_out(146)] == taken(lines)


def test_lines_that_do_not_count_are_always_added(lines):
    """The endpoint's own lines are added, however many others there were."""
    add(lines, "1", "2", "3")
    lines.insist(entry("a worker was lost"))

    assert ["1", "2", "a worker was lost"] == taken(lines)


def test_lines_that_are_put_back_come_first(lines):
    """Lines that could not be sent keep their place; those that find no room are counted."""
    add(lines, "1", "2")
    add(lines, "3", "4", level=logging.INFO)
    kept = lines.take()
    lines.insist(entry("5"))
    lines.put_back(kept)
    lines.end_period()

    assert ["2", "3", "4", "5", left_out(1)] == taken(lines)


def test_what_was_left_out_is_stated_until_it_arrives(lines):
    """If the line with the count could not be sent, a later line has the count of all lines left out."""
    add(lines, "1", "2", "3")
    lines.end_period()
    assert 3 == len(lines)
    lines.put_back(lines.take())
    add(lines, "4", "5", "6")
    lines.put_back(lines.take())

    assert ["1", "2", "4", "5", left_out(2)] == taken(lines)
    assert ([], 0) == (taken(lines), len(lines))


def test_the_lines_of_one_message_have_a_limited_size(lines):
    """Lines are taken up to a size, at least one, and the count comes with the last of them."""
    add(lines, "1", "2", "3")
    lines.end_period()

    assert [["1"], ["2", left_out(1)]] == [[each["message"] for each in lines.take(50)] for _ in range(2)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("ready", "worker 1: ready"),
        ("Worker 1 is ready", "Worker 1 is ready"),
        ("worker 1: ready", "worker 1: ready"),
        ("worker 12 is lost", "worker 1: worker 12 is lost"),
        ("first\nsecond", "worker 1: first\nsecond"),
        ("", "worker 1: "),
    ],
)
def test_a_message_names_its_worker_once(message, expected):
    """The name comes before the message, unless the message begins with it."""
    assert expected == named(1, message)

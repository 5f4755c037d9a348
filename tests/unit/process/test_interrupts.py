"""An interrupt ends a call once, at a safe point."""

import _thread
import itertools
import logging
import os
import signal
import threading
import time

import pytest

from sparkdl.errors import SparkDLError, short
from sparkdl.process import interrupts


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """Handle interrupts even if pytest runs in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)


def test_a_check_raises_what_was_noted(caplog):
    """A noted interrupt is raised at the next check and logged once."""
    done = []

    def work():
        press(20)
        done.append("after the interrupts")
        interrupts.check()
        done.append("never")

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupts.call(work)

    assert ["after the interrupts"] == done
    assert raised.value.__suppress_context__
    assert ["Interrupted: stopping the call and cancelling its Spark job."] == caplog.messages


@pytest.mark.parametrize("presses", [1, 20])
def test_a_call_without_checks_is_interrupted_where_it_is(presses):
    """A call without checks, such as a long callback, is interrupted after a moment."""
    begun = time.monotonic()

    def work():
        press(presses)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert interrupts.SOON < time.monotonic() - begun < 5


def test_a_cleanup_is_not_broken_off():
    """Interrupts before and during a cleanup are raised after it."""
    done = []

    def work():
        with interrupts.Cleanup() as stack:
            stack.callback(done.append, "second")
            stack.callback(press, 5)
            stack.callback(done.append, "first")
            press()
            interrupts.check()

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert ["first", "second"] == done


def test_an_interrupt_in_the_cleanup_of_a_failure_comes_after_it():
    """An interrupt during the cleanup of a failure replaces the failure."""
    done = []

    def work():
        with interrupts.Cleanup() as stack:
            stack.callback(done.append, "cleaned up")
            stack.callback(press)
            raise SparkDLError("A worker failed.")

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert ["cleaned up"] == done


def test_a_call_that_is_done_meanwhile_is_interrupted_too():
    """An interrupt during a call that finishes is raised at its end."""
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(press)


def test_a_cleanup_that_hangs_can_be_broken_off(monkeypatch):
    """After some seconds another Ctrl-C interrupts a hung cleanup."""
    monkeypatch.setattr(interrupts, "GRACE", 0.2)
    begun = time.monotonic()

    def work():
        with interrupts.held():
            threading.Timer(0.5, press).start()
            press()
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert time.monotonic() - begun < 10


def test_a_handler_that_returns_lets_the_call_go_on():
    """If the user's own handler returns, the call continues."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        assert "done" == interrupts.call(lambda: press(3) or interrupts.check() or "done")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [signal.SIGINT] * 3 == pressed


def test_what_a_handler_raises_ends_the_call():
    """An exception from the user's own handler ends the call."""

    def handler(_number, _frame):
        raise SystemExit(130)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(SystemExit):
            interrupts.call(lambda: press(3) or interrupts.check())
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_comes_meanwhile_is_put_back():
    """A handler installed during a call, as by a new SparkContext, is in place after it."""

    def handler(_number, _frame):
        raise LookupError

    def work():
        signal.signal(signal.SIGINT, handler)
        interrupts.reinstall()
        press()
        interrupts.check()

    with pytest.raises(LookupError):
        interrupts.call(work)

    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_calls_of_other_threads_are_left_alone():
    """A call in another thread is not interrupted: Python runs handlers in the main thread only."""
    done = []
    ended = threading.Event()

    def elsewhere():
        interrupts.call(lambda: ended.wait(5) and interrupts.check())
        done.append("went on")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(lambda: press() or ended.set() or thread.join() or interrupts.check())
    thread.join()
    assert ["went on"] == done


def test_no_thread_stays():
    """The watching thread of an interrupted call ends with it."""
    before = _thread._count()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupts.call(press)
    assert before == _thread._count()


def raise_interrupt(*_):
    raise KeyboardInterrupt


PLACES = ["say", "undo", "before the handler", "after the handler"]
ENDS = [*itertools.product(PLACES, [0, 1]), ("getppid", 1)]  # reached only by an interrupted call


@pytest.mark.parametrize(("place", "pressed"), ENDS)
def test_an_interrupt_at_the_end_of_a_call_leaves_nothing_behind(place, pressed, monkeypatch):
    """After an interrupt anywhere at the end of a call, Ctrl-C works again and no thread remains."""
    real, before, guards, undone = signal.signal, _thread._count(), [], []

    def restore(number, handler):
        if place == "after the handler":
            real(number, handler)
        raise KeyboardInterrupt

    def work():
        guard = interrupts._guard
        guards.append(guard)
        guard._undo.append(lambda: undone.append("first"))
        if place == "say":
            monkeypatch.setattr(guard, "say", raise_interrupt)
        elif place == "getppid":
            monkeypatch.setattr(os, "getppid", raise_interrupt)
        elif place == "undo":
            guard._undo.append(raise_interrupt)
        else:
            monkeypatch.setattr(signal, "signal", restore)
        press(pressed)

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)
    monkeypatch.undo()

    assert interrupts._guard is None
    assert ["first"] == undone
    guards[0].install()  # as a SparkContext of a later call would do
    with pytest.raises(KeyboardInterrupt):
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline = time.monotonic() + 5
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert before == _thread._count()


def test_the_traceback_is_short():
    """The traceback has the caller's line and one line of the package."""

    @short
    def fit():
        press()
        interrupts.check()

    with pytest.raises(KeyboardInterrupt) as raised:
        fit()

    assert ["test_the_traceback_is_short", "shortened"] == [frame.name for frame in raised.traceback]


def test_py4j_shows_no_traceback(caplog):
    """Log records of py4j about an interrupted request are dropped, and its loggers are restored."""

    def work():
        press()
        interrupts._guard._quieten_py4j()
        logging.root.error("KeyboardInterrupt while sending command.")
        logging.getLogger("py4j.clientserver").error("Exception occurred while shutting down connection")
        logging.getLogger("py4j.clientserver").error("something else")

    filters = len(logging.getLogger().filters)
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert "something else" == caplog.messages[0]
    assert filters == len(logging.getLogger().filters)


def test_waits_of_a_cleanup_are_shorter_once_interrupted():
    """A cleanup waits as long as it may, but less after an interrupt."""
    left = []

    def work():
        left.append(interrupts.limited(30))
        press()
        left.append(interrupts.limited(30))
        left.append(interrupts.limited(30, reserve=1.0))

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)

    assert 30 == left[0]
    assert 1 < left[1] <= interrupts.CLEANED
    assert left[2] < left[1] - 0.9

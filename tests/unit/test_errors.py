"""Errors of public functions hold no references to the call that raised them."""

import gc
import traceback
import weakref

import pytest

from sparkdl.errors import SparkDLError, short


class Data:
    """An object held by a local variable of a fit."""


def fail(error, gone):
    data = Data()
    gone.append(weakref.ref(data))
    raise error


def raise_alone(gone):
    fail(SparkDLError("short"), gone)


def raise_from_cause(gone):
    try:
        fail(ValueError("long"), gone)
    except ValueError as error:
        raise SparkDLError("short") from error


def raise_with_cause(gone):
    try:
        fail(ValueError("long"), gone)
    except ValueError as error:
        raised = SparkDLError("short")
        raised.cause = error
    fail(raised, gone)


def raise_in_context(gone):
    try:
        fail(ValueError("long"), gone)
    except ValueError:
        fail(SparkDLError("short"), gone)


def interrupt(gone):
    try:
        fail(ValueError("long"), gone)
    except ValueError:
        fail(KeyboardInterrupt(), gone)


@pytest.mark.parametrize(
    "function", [raise_alone, raise_from_cause, raise_with_cause, raise_in_context, interrupt]
)
def test_an_error_that_is_kept_keeps_nothing_of_the_call(function):
    """A kept error does not keep the call's data and model alive, even with a cause that has a traceback."""
    gone = []
    try:
        short(function)(gone)
    except (SparkDLError, KeyboardInterrupt) as error:
        kept = error
    gc.collect()

    assert gone
    assert not any(data() for data in gone)
    if kept.__context__ is not None:
        assert "raise error" in "".join(traceback.format_tb(kept.__context__.__traceback__))


def test_an_exception_that_the_caller_handles_is_left_alone():
    """An exception that the caller is handling keeps its frames: it is not part of the call."""
    gone = []
    try:
        fail(ValueError("of the caller"), gone)
    except ValueError as handled:
        with pytest.raises(SparkDLError):
            short(raise_alone)([])
        frame = handled.__traceback__.tb_next.tb_frame

    assert frame.f_locals["data"] is gone[0]()

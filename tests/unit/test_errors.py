"""What an error of a public function keeps of the call that raised it."""

import gc
import traceback
import weakref

import pytest

from sparkdl.errors import SparkDLError, short


class Data:
    """What a fit has in a local variable."""


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
    """Data and model of a fit go, also where another exception is the cause; its lines can be read."""
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
    """It is no part of the call, and a debugger may want its variables."""
    gone = []
    try:
        fail(ValueError("of the caller"), gone)
    except ValueError as handled:
        with pytest.raises(SparkDLError):
            short(raise_alone)([])
        frame = handled.__traceback__.tb_next.tb_frame

    assert frame.f_locals["data"] is gone[0]()

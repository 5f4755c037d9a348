"""The reason of an error is found wherever it is in the text."""

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ADVICE, DataError, SparkDLError, WorkerError, short
from sparkdl.process.memory import MEMORY
from sparkdl.process.reasons import FRAMES, own_lines, reason_of

GRAPH = """Graph execution error:

Detected at node loss/SoftmaxCrossEntropy defined at (most recent call last):
  File "/home/me/train.py", line 12, in <module>

  File "/venv/lib/python3.11/site-packages/keras/src/trainer.py", line 60, in fit

Received a label value of 4 which is outside the valid range of [0, 3).  Label values: 4 4
\t [[{{node loss/SoftmaxCrossEntropy}}]] [Op:__inference_210]"""
EAGER = (
    "{{function_node __wrapped__MatMul_device_/job:localhost}} Matrix sizes differ: [2,3] [Op:MatMul] name: "
)
ROOTS = """2 root error(s) found.
  (0) INVALID_ARGUMENT:  indices[0] = 7 is not in [0, 2)
\t [[{{node Gather}}]]
  (1) INVALID_ARGUMENT:  another"""
AUTOGRAPH = """in user code:

    File "/home/me/train.py", line 26, in step  *
        raise ValueError("in the graph")

    ValueError: in the graph
"""
LAYER = """Exception encountered when calling Scale.call().

\x1b[1mThe factor is negative.\x1b[0m

Arguments received by Scale.call():
  • inputs=tf.Tensor(shape=(None, 5))"""
SHAPES = """Exception encountered when calling Scale.call().

\x1b[1mCould not infer the shape of 'scale'. Error encountered:

no such layer\x1b[0m

Arguments received by Scale.call():"""
LOADER = """Caught IndexError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 30, in _worker_loop
    data = fetcher.fetch(index)
IndexError: list index out of range
"""
CALLBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in table
    return rows[name]
KeyError: 'name'"""
TEXTS = {
    "TensorFlow's graph": (GRAPH, "Received a label value of 4 which is outside the valid range of [0, 3)."),
    "TensorFlow's eager ops": (EAGER, "Matrix sizes differ: [2,3]"),
    "several root errors": (ROOTS, "indices[0] = 7 is not in [0, 2)"),
    "AutoGraph": (AUTOGRAPH, "ValueError: in the graph"),
    "a layer of Keras": (LAYER, "The factor is negative."),
    "a shape of Keras": (SHAPES, "Could not infer the shape of 'scale'. Error encountered: no such layer"),
    "torch's loader": (LOADER, "IndexError: list index out of range"),
    "a traceback": (CALLBACK, "KeyError: 'name'"),
    "XLA": (
        "INVALID_ARGUMENT: Executable expected shape f32[2]\nmore",
        "INVALID_ARGUMENT: Executable expected",
    ),
    "torch": ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\n", "mat1 and mat2 shapes"),
    "empty lines first": ("\n\n  the reason\nmore", "the reason"),
}


class OpError(Exception):
    """An error like TensorFlow's, which passes nothing to Exception, so its repr is empty."""

    def __init__(self, message):
        super().__init__()
        self.message = message

    def __str__(self):
        return self.message


class SilentError(Exception):
    """An exception whose text raises an error."""

    def __str__(self):
        raise RuntimeError("no text")


def raised(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any is looked at
        return error
    raise AssertionError("nothing was raised")


def nested():
    try:
        raise ValueError("bad picture")
    except ValueError as error:
        raise RuntimeError("training failed") from error


def silent_with_cause():
    try:
        raise ValueError("bad picture")
    except ValueError as error:
        raise SilentError from error


def silent_after_another():
    try:
        raise ValueError("bad picture")
    except ValueError:
        raise StopIteration  # noqa: B904 - only its context has a message


def asserts():
    raise AssertionError


EXCEPTIONS = {
    "a message": (
        lambda: raised(lambda: int("x")),
        "ValueError: invalid literal for int() with base 10: 'x'",
    ),
    "a key": (lambda: KeyError("name"), "KeyError: 'name'"),
    "a sentence that KeyError quotes": (lambda: KeyError("There is no 'x'."), "KeyError: There is no 'x'."),
    "a cause": (lambda: raised(nested), "RuntimeError: training failed (ValueError: bad picture)"),
    "a cause alone": (lambda: raised(silent_with_cause), "ValueError: bad picture"),
    "what came before": (lambda: raised(silent_after_another), "ValueError: bad picture"),
    "a group": (lambda: ExceptionGroup("all", [ExceptionGroup("in", [KeyError("a")])]), "KeyError: 'a'"),
    "an assertion": (
        lambda: raised(asserts),
        "AssertionError, without a message (raised by `raise AssertionError` in asserts",
    ),
    "nothing at all": (lambda: EOFError(), "EOFError, without a message"),
    "a text that fails": (lambda: SilentError(), "SilentError, without a message"),
    "several arguments": (
        lambda: OSError(28, "No space left on device"),
        "OSError: [Errno 28] No space left",
    ),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_reason_is_found_in_a_text(kind):
    """Graphs, tracebacks, bold type and node addresses around the reason are left out."""
    text, reason = TEXTS[kind]

    for error in (OpError(text), RuntimeError(text)):
        assert reason_of(error).startswith(f"{type(error).__name__}: {reason}")
        assert "\n" not in reason_of(error)


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_the_reason_of_an_exception(kind):
    """Without a message, the reason is the cause, or the line that raised the exception."""
    make, reason = EXCEPTIONS[kind]

    assert reason_of(make()).startswith(reason)


@given(st.text(max_size=300))
def test_every_text_gives_one_line(text):
    """The reason of any exception is one line that begins with its name."""
    reason = reason_of(ValueError(text))

    assert reason.startswith("ValueError")
    assert len(reason.splitlines()) == 1


def test_the_lines_of_the_user_are_shown():
    """The message shows the user's frames, and library frames only if there are no others."""
    text = "".join(traceback.format_exception(raised(nested)))
    library = 'Traceback (most recent call last):\n  File "/venv/site-packages/a.py", line 1, in f\n    g()\n'
    deep = library + "".join(f'  File "/home/me/{k}.py", line 1, in f{k}\n    g()\n' for k in range(9))

    assert [line.partition(", in ")[2] for line in own_lines(text)] == [
        "raised: function()",
        'nested: raise RuntimeError("training failed") from error',
    ]
    assert own_lines(f"{library}ValueError: x\n", others=False) == []
    for path, own in (("/home/me/sparkdl/jobs/train.py", 1), ("/opt/sparkdl/worker/tasks.py", 0)):
        moved = library.replace("/venv/site-packages/a.py", path)
        assert len(own_lines(f"{moved}ValueError: x\n", others=False)) == own
    assert own_lines(f"{library}ValueError: x\n") == ['File "/venv/site-packages/a.py", line 1, in f: g()']
    assert len(own_lines(f"{deep}ValueError: x")) == 9
    assert len(str(WorkerError("x", traceback=f"{deep}ValueError: x")).splitlines()) == FRAMES + 2


def test_a_workers_error_begins_and_ends_with_its_reason():
    """The message has the reason, the place and the remedy, and ends with the reason."""
    text = "".join(traceback.format_exception(raised(nested)))
    error = WorkerError.of("RuntimeError: training failed", host="h", worker=3, traceback=text)
    first, *_, last = str(error).splitlines()

    assert first == f"RuntimeError: training failed (worker 3 on h). {ADVICE}"
    assert last == "RuntimeError: training failed (worker 3 on h)"
    assert (error.worker, error.host, error.traceback) == (3, "h", text)
    assert (WorkerError(first).worker, WorkerError(first).host) == (3, "h")
    assert MEMORY in str(WorkerError.of("MemoryError: x", host="h", worker=1))
    assert str(DataError("Expected numbers.", traceback="")) == "Expected numbers."


def test_errors_leave_a_door_without_what_is_behind_it():
    """A user sees their own line and the reason; the cause is kept, other exceptions are unchanged."""

    @short
    def door(kind):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise kind("outer") from error

    error = raised(lambda: door(SparkDLError))

    assert isinstance(error.cause, KeyError)
    assert len(traceback.format_exception(error)) == 5  # the header, three frames, the reason
    assert isinstance(raised(lambda: door(OSError)).__cause__, KeyError)

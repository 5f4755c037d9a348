"""Reasons for failures, in one line: the informative part of an exception's text, wherever it stands.

Many libraries put the reason below other text. TensorFlow's errors have an empty ``repr`` and begin
with the graph. AutoGraph's and torch's begin with a traceback. Keras names the layer first, in bold.
"""

from __future__ import annotations

import os
import pkgutil
import re
import traceback

from sparkdl.process import memory

LONGEST = 500  # maximum number of characters of an exception's text in a reason
FRAMES = 2  # maximum number of frames in a message; the error's attribute ``traceback`` has all
RAISED = r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*"  # an exception's name in the last line of a traceback
PREAMBLE = re.compile(
    r"Graph execution error:|Detected at node|Stack trace for op definition|Traceback \(most recent|"
    r"Original Traceback|in user code:|in [\w.]+ code:|Node: |\[\[|File \"|Original stack trace|"
    r"\d+ root error\(s\) found|\(\d+\) \w+: *$|Exception encountered when calling|Arguments received by|"
    r"Caught \w+ in "
)
NOISE = re.compile(
    r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\}\s*|\[\[\{\{node.*|\[Op:[^]]*\].*|"
    r"^\s*\(\d+\)\s+(?:[A-Z_]+:\s+)?|^\s*Detected at node.*?\(most recent call last\):"
)
BLOCK = re.compile(r"^Traceback \(most recent call last\):\n((?:[ \t].*\n|\n)+)", re.MULTILINE)
FRAME = re.compile(r'^ *File "(?P<path>[^"]+)", line \d+, in .*\n(?: {4,}.*\n)*', re.MULTILINE)
# The modules and packages of this package. A user's own folder may also be called sparkdl, such as a clone.
OURS = "|".join(each.name for each in pkgutil.iter_modules([os.path.dirname(os.path.dirname(__file__))]))
LIBRARIES = re.compile(
    r"/(?:site|dist)-packages/|/lib/python[\d.]+/|/pyspark(?:\.zip)?/|/sparkdl-shipped\.zip/|"
    rf"/sparkdl/(?:{OURS}|__init__)(?:/|\.py$)|^<frozen|__autograph_generated_file"
)


def reason_of(error: BaseException) -> str:
    """Return the name and message of an exception as one line.

    If memory ran out, the line begins with "Memory ran out".
    """
    return memory.explained(_innermost(error), _reason_of(error))


def _reason_of(error: BaseException) -> str:
    error = _innermost(error)
    message = _message_of(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not message and cause is not None and cause is not error:
        return _reason_of(cause)
    name = type(error).__name__
    if not message:
        place = _place(error)
        return f"{name}, without a message{place}"
    of_cause = _message_of(error.__cause__) if error.__cause__ is not None else ""
    if of_cause and of_cause not in message:
        message = f"{message} ({type(error.__cause__).__name__}: {of_cause})"
    return message if message.startswith(f"{name}: ") else f"{name}: {message}"


def text_of(error: BaseException | None) -> str:
    """Return the traceback of an exception as text; an empty string for None."""
    return "".join(traceback.format_exception(error)) if error is not None else ""


def first_reason(text: str) -> str:
    """Return the line of an error's text that gives the reason; an empty string if there is none."""
    lines = [NOISE.sub("", line).rstrip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    candidates = [line.strip() for line in lines if not PREAMBLE.match(line.strip())] or [lines[0].strip()]
    if not PREAMBLE.match(lines[0].strip()):
        found = candidates[0]
    elif ends := [
        line for line in lines if re.match(rf"\s*{RAISED}(?:Error|Exception|Exit|Iteration): \S", line)
    ]:
        return ends[-1].strip()  # the end of the traceback that the text begins with
    else:
        found = next(
            (line for line in lines if line.strip() in candidates and not line[0].isspace()), candidates[0]
        ).strip()
    after = candidates.index(found) + 1
    return f"{found} {candidates[after]}" if found.endswith(":") and len(candidates) > after else found


def own_lines(text: str, *, others: bool = True) -> list[str]:
    """Return the frames outside of libraries of the last traceback that has any, one line each.

    Args:
        text: tracebacks as Python formats them.
        others: whether to return the frames of the last traceback if all frames are in libraries.
    """
    blocks = [list(FRAME.finditer(block[1])) for block in BLOCK.finditer(f"{text}\n")]
    own = [[frame for frame in block if not LIBRARIES.search(frame["path"])] for block in blocks]
    shown = next(filter(None, reversed(own)), blocks[-1] if blocks and others else [])
    return [": ".join(part.strip() for part in frame[0].splitlines()[:2] if part.strip()) for frame in shown]


def with_own_lines(message: str, text: str, *, last: str = "", others: bool = True) -> str:
    """Return a message, then the last frames that ``own_lines`` returns, then the reason again.

    Args:
        message: a message whose first line gives the reason.
        text: the traceback as Python formats it; if there are no frames to add, the message is returned
            unchanged.
        last: the last line; by default the first line of the message.
        others: see ``own_lines``.
    """
    frames = own_lines(text, others=others)[-FRAMES:]
    lines = [message, *(f"  {frame}" for frame in frames), last or message.split("\n")[0]]
    return "\n".join(lines) if frames else message


def _innermost(error: BaseException) -> BaseException:
    """Return the first leaf of a group of exceptions; return any other exception unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _message_of(error: BaseException) -> str:
    """Return the reason in an exception's text, as one line of bounded length."""
    if isinstance(error, KeyError) and len(error.args) == 1 and " " in str(error.args[0]):
        text = str(error.args[0])  # a sentence; str() of a KeyError would quote it
    else:
        text = _text(error)
    reason = first_reason(text)
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}..."


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the __str__ of another library or of the user
        text = ""
    return text if text.strip() else str(getattr(error, "message", None) or "")


def _place(error: BaseException) -> str:
    """Return the place where an exception was raised, as the end of a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" (raised by `{last.line}` in {last.name}, {last.filename}, line {last.lineno})"

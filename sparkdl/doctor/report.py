"""The report of the checks: one line each, on the standard output that the doctor was started with.

This file and ``installation`` need only the standard library when they are imported, so that the doctor also
runs where a package is missing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

NAME, MARK = 11, 9  # the widths of the columns


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        mark: the outcome.
        text: the finding, in one line; if the check did not pass, it ends with the remedy.
    """

    mark: Literal["ok", "warning", "failed"]
    text: str


class Report:
    """The lines of the checks.

    Args:
        out: the terminal or the file that the lines are written to.

    Attributes:
        checked: the names of all checks so far.
        failed: the names of those that failed.
        warned: the names of those that gave a warning.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.checked: list[str] = []
        self.failed: list[str] = []
        self.warned: list[str] = []

    def check(self, name: str, function: Callable[[], Finding]) -> bool:
        """Run a check and write its line; return False if the check failed.

        The name is written before the check runs.

        Args:
            name: one word.
            function: the check. An exception counts as a failure.
        """
        self.checked.append(name)
        self._write(f"{name:<{NAME}}")
        try:
            finding = function()
        except Exception as error:  # noqa: BLE001 - a person reads the reason, not a traceback
            finding = Finding("failed", _reason(error))
        self._write(f"{finding.mark:<{MARK}}{' '.join(finding.text.split())}\n")
        if finding.mark == "failed":
            self.failed.append(name)
        elif finding.mark == "warning":
            self.warned.append(name)
        return finding.mark != "failed"

    def line(self, text: str = "") -> None:
        """Write a line."""
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _reason(error: Exception) -> str:
    """Return the message of an exception in one line, with a remedy."""
    from sparkdl.errors import SparkDLError
    from sparkdl.process.reasons import reason_of

    if isinstance(error, SparkDLError):
        return str(error).split("\n")[0]
    traceback.print_exception(error)  # into the log, which is this process's standard error now
    return f"{reason_of(error).rstrip('.')}. See the log named below."


@contextmanager
def quiet() -> Iterator[tuple[TextIO, Path]]:
    """Redirect the output of this process and its child processes to a file in a ``with`` block.

    The JVM and TensorFlow write to file descriptors, not to ``sys.stderr``.

    Yields:
        The former standard output, and the path of the file.
    """
    kept = os.dup(1), os.dup(2)
    sys.stdout.flush()
    with (
        tempfile.NamedTemporaryFile("w", prefix="sparkdl-doctor-", suffix=".log", delete=False) as log,
        os.fdopen(os.dup(kept[0]), "w", encoding="utf-8", errors="replace") as terminal,
    ):
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            yield terminal, Path(log.name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, former in zip((1, 2), kept, strict=True):
                os.dup2(former, number)
                os.close(former)

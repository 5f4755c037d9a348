"""A filter for lines that a JVM prints while it starts, and that tell a user of sparkdl nothing.

A JVM inherits the standard error of the process that starts it, and keeps it. If sparkdl starts Spark, the
JVM gets a pipe instead. A thread copies what the JVM writes there to the standard error, without the lines
below. So later lines of Spark also pass through Python, where a progress bar can make room for them.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The lines of Spark 3.5 to 4.3 on Java 17 and 21.
NOISE = re.compile(
    rb"WARNING: Using incubator modules: |"
    rb"Using Spark's default log4j profile: |"
    rb"Setting default log level to |"
    rb"To adjust logging level use sc\.setLogLevel|"
    rb".* WARN Utils: Your hostname, .* resolves to a loopback address|"
    rb".* WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address|"
    rb".* WARN NativeCodeLoader: Unable to load native-hadoop library"
)


@contextmanager
def filtered() -> Iterator[None]:
    """Relay the standard error of a process that is started in a ``with`` block, without ``NOISE``."""
    try:
        kept = os.dup(2)
    except OSError:  # this process has no standard error
        yield
        return
    source, target = os.pipe()
    threading.Thread(target=_relay, args=(source, kept), name="sparkdl-stderr", daemon=True).start()
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        os.dup2(kept, 2)


def _relay(source: int, kept: int) -> None:
    """Write the lines that come out of a pipe to this process's own standard error, until the pipe ends."""
    with os.fdopen(source, "rb") as lines:
        for line in lines:
            if not NOISE.match(line):
                _write(line, kept)
    os.close(kept)


def _write(line: bytes, kept: int) -> None:
    stream = sys.stderr
    with suppress(OSError, ValueError):  # the stream may be closed
        if stream is None or stream is sys.__stderr__:
            # Not to descriptor 2, which is the pipe itself during the start, and not through the stream,
            # whose lock this daemon thread could still hold when the process exits.
            os.write(kept, line)
        else:
            stream.write(line.decode(errors="replace"))

"""Output of a process that sparkdl starts: only the known lines of a JVM's start are left out."""

import io
import os
import subprocess
import sys

import pytest

from sparkdl.spark import startup

NOISE = """\
WARNING: Using incubator modules: jdk.incubator.vector
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
26/11/29 21:16:05 WARN Utils: Your hostname, vm, resolves to a loopback address: 127.0.0.1; using 192.0.2.2
26/11/29 21:16:05 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address
Setting default log level to "WARN".
To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).
26/11/29 21:16:06 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform...
"""
OTHER = "26/11/29 21:16:07 ERROR SparkContext: Error initializing SparkContext.\n"
WRITE = f"import sys; sys.stderr.write({NOISE + OTHER + NOISE!r})"


@pytest.mark.parametrize("replaced", [False, True])
def test_only_the_known_lines_are_left_out(replaced, capfd, monkeypatch, eventually):
    """Other lines of the process reach the standard error, or the stream that replaces it."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream if replaced else sys.__stderr__)
    shown = []
    with startup.filtered():
        subprocess.run([sys.executable, "-c", WRITE], check=True)

    def arrived():
        shown.append(stream.getvalue() if replaced else capfd.readouterr().err)
        return shown[-1]

    assert eventually(arrived)
    assert OTHER == shown[-1]


def test_many_lines_arrive_once_and_in_order(capfd, monkeypatch, eventually):
    """A process that writes more than a pipe holds, and is waited for, neither hangs nor repeats itself."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    lines = [f"line {number} of Spark, with some text behind it\n" for number in range(5000)]
    write = "import sys; [sys.stderr.write(line) for line in sys.argv[1].splitlines(True)]"
    with startup.filtered():
        subprocess.run([sys.executable, "-c", write, "".join(lines)[:100_000]], check=True, timeout=60)
        subprocess.run([sys.executable, "-c", write, "the end\n"], check=True, timeout=60)
    shown = []

    assert eventually(lambda: shown.append(capfd.readouterr().err) or "the end" in "".join(shown))
    assert "".join(lines)[:100_000] + "the end\n" == "".join(shown)


def test_the_standard_error_is_restored(capfd):
    """After the start, this process writes to its own standard error, also if the start failed."""
    with pytest.raises(LookupError), startup.filtered():
        raise LookupError
    os.write(2, b"mine\n")

    assert "mine\n" == capfd.readouterr().err

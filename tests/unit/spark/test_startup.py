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


def test_the_standard_error_is_restored(capfd):
    """After the start, this process writes to its own standard error, also if the start failed."""
    with pytest.raises(LookupError), startup.filtered():
        raise LookupError
    os.write(2, b"mine\n")

    assert "mine\n" == capfd.readouterr().err

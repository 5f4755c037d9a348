"""A failed allocation is reported as memory that ran out, whichever library raised it."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparkdl.errors import ADVICE, WorkerError
from sparkdl.process import memory
from sparkdl.process.reasons import reason_of
from sparkdl.spark.failures import explain

LOADER = "libtensorflow_cc.so.2: failed to map segment from shared object"


class ResourceExhaustedError(Exception):
    """An error with the name of TensorFlow's."""


class XlaRuntimeError(RuntimeError):
    """An error with the name of JAX's."""


class ArrowMemoryError(MemoryError):
    """An error with the name of pyarrow's."""


def caused(cause):
    error = RuntimeError("training failed")
    error.__cause__ = cause
    return error


SHORTAGES = {
    "Python's": (MemoryError(), ""),
    "NumPy's": (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "7.45 GiB"),
    "the system's": (OSError(12, "Cannot allocate memory"), ""),
    "the loader's": (ImportError(LOADER), ""),
    "C++'s": (RuntimeError("std::bad_alloc"), ""),
    "TensorFlow's": (ResourceExhaustedError("OOM when allocating tensor with shape[200,30]"), "(200,30)"),
    "TensorFlow's without a word": (ResourceExhaustedError(), ""),
    "JAX's": (XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes."), "4096 bytes"),
    "torch's": (RuntimeError("can't allocate memory: you tried to allocate 64 bytes."), "64 bytes"),
    "pyarrow's": (ArrowMemoryError("malloc of size 4096 failed"), "4096 bytes"),
    "a cause's": (caused(MemoryError()), ""),
}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_the_first_words_say_that_memory_ran_out(kind):
    """The first line has the requested size, the process's memory and the remedy."""
    error, asked = SHORTAGES[kind]

    reason = reason_of(error)
    first = str(WorkerError.of(reason, host="h", worker=1)).splitlines()[0]

    assert reason.startswith("Memory ran out")
    assert asked in reason
    assert (" requested)" in reason) == bool(asked)
    assert " GiB" in reason or " MiB" in reason
    assert type(error).__name__ in reason or kind == "TensorFlow's without a word"
    assert memory.advice(reason) in first
    assert ADVICE not in first


@pytest.mark.parametrize(
    "error", [ValueError("memory"), SystemError("error return without exception set"), OSError(28, "full")]
)
def test_other_errors_are_left_alone(error):
    """Without a limit, an error that does not mention memory is reported as it is."""
    assert not reason_of(error).startswith("Memory")
    assert memory.advice(reason_of(error)) is None


def test_the_full_memory_of_a_gpu_is_not_the_machines():
    """The error for a full GPU says nothing about the process's memory."""
    error = XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes on GPU 0.")
    assert reason_of(error).startswith("Memory ran out (1 bytes requested): the GPU is full: ")


LIMITED = """
import os, resource
from sparkdl.process.reasons import reason_of
limit = 3 << 29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
if KIND == "allocation":
    import numpy as np
    try:
        np.ones(1 << 30)
    except MemoryError as error:
        print(reason_of(error))
else:
    import mmap
    held = [mmap.mmap(-1, 1 << 28) for _ in range(5)]
    print(reason_of(SystemError("error return without exception set")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.parametrize("kind", ["allocation", "system error"])
@pytest.mark.parametrize("of_spark", [True, False])
def test_the_limit_is_named(kind, of_spark):
    """The error names the limit in force, and Spark's setting if that one sets it."""
    environment = os.environ | ({"PYSPARK_EXECUTOR_MEMORY_MB": "1536"} if of_spark else {})
    environment["OPENBLAS_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.replace("KIND", repr(kind))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("Memory ran out")
    assert "of its address space limit of 1.5 GiB" in done.stdout
    assert ("spark.executor.pyspark.memory" in done.stdout) == of_spark
    assert memory.advice(done.stdout) == (memory.RAISE if of_spark else memory.RAISE_ADDRESS)


@pytest.mark.parametrize(
    ("own", "limits", "said"),
    [
        ("/", {"": "536870912"}, "512 MiB"),
        ("/job/worker", {"job/worker": "max", "job": "2147483648"}, "2.0 GiB"),
        ("/job/worker", {"job/worker": "2147483648", "job": "536870912"}, "512 MiB"),
        ("/of/the/host", {"": "536870912"}, "512 MiB"),  # in a container, whose own group is the root
        ("/", {"": "max"}, ""),
        ("/", {}, ""),
        ("/", {"": "much"}, ""),
    ],
)
def test_the_limit_of_a_container_is_named(tmp_path, monkeypatch, own, limits, said):
    """The error names the smallest limit of the process's control groups, and the setting to raise."""
    (tmp_path / "own").write_text(f"0::{own}\n")
    for name, limit in limits.items():
        (folder := tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")

    reason = reason_of(MemoryError("Unable to allocate 7.45 GiB"))

    assert bool(said) == (f" in a container limited to {said} (memory.max)" in reason)
    assert bool(said) == ("memory.max" in reason)
    assert memory.advice(reason) == (memory.RAISE_CONTAINER if said else memory.MEMORY)


class Cluster:
    """An application with given settings."""

    stopped, local = False, False

    def __init__(self, **settings):
        self._settings = settings

    def setting(self, name, default=""):
        return self._settings.get(name.replace(".", "_"), default)

    def hosts(self):
        return ["h"]


IMPORT = f"""Job aborted due to stage failure: Task 0.0 in stage 1.0 (TID 1) (10.0.0.1 executor 0)
PythonException: [PYTHON_EXCEPTION] The worker: Traceback (most recent call last):
  File "/sparkdl/spark/preflight.py", line 256, in task_main
    tasks.import_keras()
  File "/venv/lib/python3.11/site-packages/tensorflow/__init__.py", line 1, in <module>
    from tensorflow.python import pywrap_tensorflow
ImportError: {LOADER}

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""
DIED = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times\n"
    "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting "
    "'spark.python.worker.faulthandler.enabled' configuration to 'true' for the better Python traceback.\n"
)
KILLED = "Job aborted: ExecutorLostFailure (executor 1 exited): Container exited with exit code 137\n"


def test_an_import_that_fails_for_want_of_memory():
    """An import that fails for lack of memory names Spark's limit, from its text alone."""
    error = explain(Exception(IMPORT), Cluster(spark_executor_pyspark_memory="300m"))

    first = str(error).splitlines()[0]
    assert isinstance(error, WorkerError)
    assert first.startswith(
        "Memory ran out: spark.executor.pyspark.memory=300m limits the executor's Python: ImportError: lib"
    )
    assert "Raise spark.executor.pyspark.memory" in first


def test_a_limit_that_the_driver_does_not_know():
    """From an error's text alone, the driver names the limits that Spark's settings do not show."""
    first = str(explain(Exception(IMPORT), Cluster())).splitlines()[0]
    assert first.startswith(
        "Memory ran out: Spark sets no limit, but ulimit -v or a container may: ImportError"
    )
    assert memory.MEMORY in first


DEFAULT = "of spark.executor.memory and at least 384m"


@pytest.mark.parametrize(
    ("settings", "advised", "now"),
    [
        ({}, "1024m", f"Spark's default of 384m, 10% {DEFAULT}"),
        ({"spark_executor_memory": "8g"}, "1638m", f"Spark's default of 819m, 10% {DEFAULT}"),
        (
            {"spark_executor_memory": "8g", "spark_executor_memoryOverheadFactor": "0.25"},
            "4096m",
            f"Spark's default of 2048m, 25% {DEFAULT}",
        ),
        ({"spark_executor_memoryOverhead": "2g"}, "4096m", "2g"),
    ],
)
@pytest.mark.parametrize("killed", ["DIED", "KILLED"])
def test_a_worker_that_was_killed_has_too_little_overhead(killed, settings, advised, now):
    """The error for a killed process or executor says which overhead is in force, and how much to set."""
    error = explain(Exception({"DIED": DIED, "KILLED": KILLED}[killed]), Cluster(**settings))

    assert f"Set spark.executor.memoryOverhead to {advised} or more (now: {now})" in str(error)


def test_a_worker_that_was_killed():
    """The first line for a killed worker has the likely cause and the setting, without Spark's advice."""
    error = explain(Exception(DIED), Cluster())

    first = str(error).splitlines()[0]
    assert "crashed or was killed, most often by the operating system because memory ran out" in first
    assert "spark.executor.memoryOverhead to 1024m or more" in first
    assert first.endswith("Spark says: Python worker exited unexpectedly (crashed).")
    assert "faulthandler" not in str(error)


def test_numpy_says_what_it_asks_for():
    """The requested size is found in the message of the installed NumPy."""
    with pytest.raises(MemoryError) as raised:
        np.ones(1 << 50)
    assert "8.00 PiB requested" in reason_of(raised.value)

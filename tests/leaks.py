"""Detection of the resources that a test leaves behind."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path


def leaked_threads(before, seconds=5.0):
    """Return the names of threads that were not alive before and do not end in time."""
    deadline = time.monotonic() + seconds
    while new := [thread for thread in threading.enumerate() if thread not in before]:
        if time.monotonic() > deadline:
            break
        new[0].join(0.1)
    return [thread.name for thread in new]


def listening():
    """Return the ports that this process listens on."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            mine.add(os.readlink(descriptor))
    table = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in table if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def of_the_jvm(thread):
    """Return True for a thread that answers the JVM, which may call any time once a stream has a function."""
    return type(getattr(getattr(thread, "_target", None), "__self__", None)).__module__.startswith("py4j.")


def on_the_driver(spark):
    """Return the resources of this process and its application that a fit could leak."""
    context = spark.sparkContext
    tracker = context.statusTracker()
    return {
        "threads": {thread.name for thread in threading.enumerate() if not of_the_jvm(thread)},
        "listening": listening(),
        "jobs": tracker.getActiveJobsIds() + tracker.getActiveStageIds(),
        "broadcasts and files": set(os.listdir(context._temp_dir)),
        "temporary files": {
            name for name in os.listdir(os.environ["TMPDIR"]) if not name.startswith("hsperf")
        },
    }

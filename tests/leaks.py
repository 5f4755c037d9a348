"""Detection of the resources that a test leaves behind."""

import gc
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

# Modules of the objects that belong to one fit. Those of replicas are not among them: each worker keeps a few
# (see tests/keras/test_model_cache.py). The user's History keeps the record of its fit.
OF_A_FIT = (
    "flask.app",
    "sparkdl.driver.",
    "sparkdl.server.",
    "sparkdl.spark.jobs",
    "sparkdl.transport.",
    "sparkdl.worker.",
)


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


def objects_of_fits():
    """Return weak references to the living objects of OF_A_FIT."""
    return _finder()()


def _finder():
    """Return a function that finds the objects of OF_A_FIT; it can be sent to workers."""
    modules = OF_A_FIT

    def find():
        gc.collect()
        found = []
        for each in gc.get_objects():
            module = type(each).__module__
            if not isinstance(module, str) or not module.startswith(modules):
                continue
            with suppress(TypeError):  # a tuple has no weak references
                if type(each).__name__ != "TrainingRecord":
                    found.append(weakref.ref(each))
        return found

    return find


def kept_since(before):
    """Return the classes of the objects of OF_A_FIT that were made since ``before``, and are alive."""
    known = {id(reference) for reference in before}  # an object has one weak reference
    new = [reference() for reference in objects_of_fits() if id(reference) not in known]
    return sorted({type(each).__qualname__ for each in new if each is not None})


def in_the_workers(spark):
    """Return the leftovers of a fit in the Python workers, found by a Spark job."""
    find = _finder()

    def look(_):
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("sparkdl")]
        maps = Path("/proc/self/maps").read_text().splitlines()
        files = [line for line in maps if line.endswith("(deleted)") and "/dev/" not in line]
        for link in Path("/proc/self/fd").iterdir():
            if link.is_symlink() and "(deleted)" in os.readlink(link):
                files.append(os.readlink(link))
        kept = [type(reference()).__qualname__ for reference in find()]
        return [*threads, *files, *kept]

    return spark.sparkContext.parallelize(range(2), 2).mapPartitions(look).collect()

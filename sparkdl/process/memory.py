"""Explanations of failed allocations: the limit, the memory in use, and the setting to raise.

Each library reports a failed allocation in its own way, and none of them names the limit.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

SHORT = "Memory ran out"  # the beginning of the reason
SETTING = "spark.executor.pyspark.memory"
OVERHEAD = "spark.executor.memoryOverhead"
OF_SPARK = "PYSPARK_EXECUTOR_MEMORY_MB"  # set by Spark 3.5 to 4.3 if Spark limits the Python process
REPORTED = re.compile(  # messages of Python, NumPy, the dynamic linker, C++, TensorFlow, JAX, torch and Arrow
    r"\bMemoryError\b|ArrowMemoryError|[Cc]annot allocate memory|can't allocate memory|Unable to allocate|"
    r"failed to map segment from shared object|bad_alloc|ResourceExhausted|RESOURCE_EXHAUSTED|"
    r"OutOfMemoryError|[Oo]ut of memory|OOM when allocating|malloc of size \d+ failed"
)
ASKED = re.compile(
    r"[Uu]nable to allocate ([\d.]+ \w+)|allocat\w+ (?:memory: you tried to allocate )?(\d+ bytes)|"
    r"[Tt]ried to allocate ([\d.]+ \w+)|malloc of size (\d+)|shape\[([\d,]+)\]"
)
OF_GPU = re.compile(r"device:GPU|\bGPU\b|CUDA")
OWN_GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # the control groups of Linux
# Share of the address space limit above which an error that mentions no memory may be a failed allocation.
NEAR = 0.8
MEMORY = (
    f"Use a smaller batch_size or fewer workers per executor, or give executors more memory ({OVERHEAD})."
)
RAISE = f"Raise {SETTING}, or use a smaller batch_size."
RAISE_CONTAINER = f"Raise the limit ({OVERHEAD}), or use a smaller batch_size."
RAISE_ADDRESS = "Raise ulimit -v where the executors are started, or use a smaller batch_size."


def explained(error: BaseException, reason: str) -> str:
    """Return the reason for an error; if an allocation failed, it begins with "Memory ran out".

    Args:
        error: the exception.
        reason: its message, as one line.
    """
    if reason.startswith(SHORT) or not _is_shortage(error, reason):
        return reason
    requested = _requested(reason)
    state = "the GPU is full" if OF_GPU.search(reason) else _state()
    return f"{SHORT}{f' ({requested} requested)' if requested else ''}: {state}: {reason}"


def explained_by(reason: str, setting: str) -> str:
    """Return the reason for an error of which only the text is known, as ``explained`` does.

    Args:
        reason: the message of an executor's error, as one line.
        setting: the value of ``spark.executor.pyspark.memory``; empty if it is not set.
    """
    silent = bool(setting) and reason.startswith("SystemError")
    if reason.startswith(SHORT) or not (REPORTED.search(reason) or silent):
        return reason
    limit = "Spark sets no limit, but ulimit -v or a container may"
    limit = f"{SETTING}={setting} limits the executor's Python" if setting else limit
    return f"{SHORT}: {limit}: {reason}"


def advice(reason: str) -> str | None:
    """Return the remedy for a reason; None if memory did not run out."""
    if SETTING in reason:
        return RAISE
    if "RLIMIT_AS" in reason:
        return RAISE_ADDRESS
    if "memory.max" in reason:
        return RAISE_CONTAINER
    return MEMORY if reason.startswith(SHORT) or REPORTED.search(reason) else None


def _is_shortage(error: BaseException, reason: str) -> bool:
    """Return True if an error, one of its causes, or the reason reports a failed allocation."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            break
        if isinstance(seen, MemoryError) or isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        if _is_silent(seen) and _is_near_limit():
            return True
        with suppress(Exception):  # a foreign __str__ may raise anything
            if REPORTED.search(f"{type(seen).__name__}: {seen}"[:10_000]):
                return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return bool(REPORTED.search(reason))


def _is_silent(error: BaseException) -> bool:
    """Return True for the errors of a failed allocation that mention no memory.

    C code raises SystemError if it did not check the result of an allocation, and a thread needs a stack.
    """
    return isinstance(error, SystemError) or error.args == ("can't start new thread",)


def _requested(reason: str) -> str:
    """Return the size or shape of the failed allocation, if the reason contains it; else an empty string."""
    found = ASKED.search(reason)
    if not found:
        return ""
    if found[5]:
        return f"an array of shape ({found[5]})"
    return f"{found[4]} bytes" if found[4] else next(filter(None, found.groups()))


def _state() -> str:
    """Return the memory limits of this process and its usage."""
    size, resident = _of_status("VmSize"), _of_status("VmRSS")
    parts = []
    if limit := _address_limit():
        name = f"{SETTING}, RLIMIT_AS" if OF_SPARK in os.environ else "RLIMIT_AS"
        parts.append(f"the process used {_text(size)} of its address space limit of {_text(limit)} ({name})")
    if most := _cgroup_limit():
        parts.append(
            f"the process used {_text(resident)} in a container limited to {_text(most)} (memory.max)"
        )
    return " and ".join(parts) or f"the process used {_text(resident)} and has no limit"


def _is_near_limit() -> bool:
    limit = _address_limit()
    return limit is not None and _of_status("VmSize") > NEAR * limit


def _address_limit() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is none."""
    try:
        import resource  # not available on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup_limit() -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes; None if there is none."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        group = GROUPS / OWN_GROUP.read_text().rsplit("::", 1)[1].strip().lstrip("/")
        for folder in (group, *group.parents):
            file = folder / "memory.max"
            if file.exists() and (text := file.read_text().strip()) != "max":
                limits.append(int(text))
    return min(limits, default=None)


def _of_status(name: str) -> int:
    """Return the value of a line in /proc/self/status, in bytes; 0 if there is no such line."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"

"""Memory that ran out: which limit there is, what the process had, and which setting to raise.

Libraries report a failed allocation each in their own way, and none of them names the limit.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

SHORT = "Memory ran out"  # how the reason begins
SETTING = "spark.executor.pyspark.memory"
OVERHEAD = "spark.executor.memoryOverhead"
OF_SPARK = "PYSPARK_EXECUTOR_MEMORY_MB"  # set by Spark 3.5 to 4.3 for the workers that it limits
REPORTED = re.compile(  # by Python, NumPy, the loader, C++, TensorFlow, JAX, torch and Arrow
    r"\bMemoryError\b|ArrowMemoryError|[Cc]annot allocate memory|can't allocate memory|Unable to allocate|"
    r"failed to map segment from shared object|bad_alloc|ResourceExhausted|RESOURCE_EXHAUSTED|"
    r"OutOfMemoryError|[Oo]ut of memory|OOM when allocating|malloc of size \d+ failed"
)
ASKED = re.compile(
    r"[Uu]nable to allocate ([\d.]+ \w+)|allocat\w+ (?:memory: you tried to allocate )?(\d+ bytes)|"
    r"[Tt]ried to allocate ([\d.]+ \w+)|malloc of size (\d+)|shape\[([\d,]+)\]"
)
OF_GPU = re.compile(r"device:GPU|\bGPU\b|CUDA")
NEAR = 0.8  # the part of a limit from which on an error without words is taken for want of memory
MEMORY = (
    f"Take a smaller batch_size or fewer workers per executor, or give executors more memory ({OVERHEAD})."
)
RAISE = f"Raise {SETTING}, or take a smaller batch_size."
RAISE_LIMIT = f"Raise the limit ({OVERHEAD} in a container), or take a smaller batch_size."


def explained(error: BaseException, reason: str) -> str:
    """Return a reason that says first that memory ran out, if an error is of a failed allocation.

    Args:
        error: the exception.
        reason: what it says, in one line.
    """
    if reason.startswith(SHORT) or not _is_shortage(error, reason):
        return reason
    asked = _asked(reason)
    state = "the GPU is full" if OF_GPU.search(reason) else _state()
    return f"{SHORT}{f' ({asked} asked for)' if asked else ''}: {state}: {reason}"


def explained_by(reason: str, setting: str) -> str:
    """Return a reason that says first that memory ran out, where only the error's text is known.

    Args:
        reason: what the error of an executor says, in one line.
        setting: the value of ``spark.executor.pyspark.memory``; empty if it is not set.
    """
    silent = bool(setting) and reason.startswith("SystemError")
    if reason.startswith(SHORT) or not (REPORTED.search(reason) or silent):
        return reason
    limit = f"{SETTING}={setting} limits the executor's Python" if setting else "no limit of Spark's is set"
    return f"{SHORT}: {limit}: {reason}"


def advice(reason: str) -> str | None:
    """Return what to do about a reason; None if memory did not run out."""
    if SETTING in reason:
        return RAISE
    if "RLIMIT_AS" in reason or "memory.max" in reason:
        return RAISE_LIMIT
    return MEMORY if reason.startswith(SHORT) or REPORTED.search(reason) else None


def _is_shortage(error: BaseException, reason: str) -> bool:
    """Return whether an error, or what caused it, is of a failed allocation."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            break
        if isinstance(seen, MemoryError) or isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        if isinstance(seen, SystemError) and _is_near_limit():
            return True  # as C code says where it did not check what it was given
        with suppress(Exception):  # somebody else's __str__
            if REPORTED.search(f"{type(seen).__name__}: {seen}"[:10_000]):
                return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return bool(REPORTED.search(reason))


def _asked(reason: str) -> str:
    """Return what was asked for, where a reason says that."""
    found = ASKED.search(reason)
    if not found:
        return ""
    if found[5]:
        return f"an array of shape ({found[5]})"
    return f"{found[4]} bytes" if found[4] else next(filter(None, found.groups()))


def _state() -> str:
    """Return the limits of this process, and what it has."""
    size, resident = _of_status("VmSize"), _of_status("VmRSS")
    parts = []
    if limit := _address_limit():
        name = f"{SETTING}, RLIMIT_AS" if OF_SPARK in os.environ else "RLIMIT_AS"
        parts.append(f"the process had {_text(size)} of address space of {_text(limit)} ({name})")
    if most := _cgroup_limit():
        parts.append(f"the process had {_text(resident)} in a container of {_text(most)} (memory.max)")
    return " and ".join(parts) or f"the process had {_text(resident)}, without a limit"


def _is_near_limit() -> bool:
    limit = _address_limit()
    return limit is not None and _of_status("VmSize") > NEAR * limit


def _address_limit() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is none."""
    try:
        import resource  # which Windows does not have
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup_limit() -> int | None:
    """Return the limit of this process's control group in bytes; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        path = Path("/proc/self/cgroup").read_text().rsplit("::", 1)[1].strip()
        for folder in (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"):
            file = Path(folder, "memory.max")
            if file.exists() and (text := file.read_text().strip()) != "max":
                return int(text)
    return None


def _of_status(name: str) -> int:
    """Return a line of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"

"""The threads and GPUs that a task may use on its machine.

Both are set by environment variables before the backend is imported, so this module does not import it. The
variables are restored when the task ends. A Python process is bound to the GPUs that its backend saw first. A
task with other GPUs has to run in a new process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparkdl.errors import ConfigError, StaleWorkerError

VISIBLE = "CUDA_VISIBLE_DEVICES"
BACKENDS = "tensorflow", "jax", "torch"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # the minimum level of the log lines that TensorFlow prints
QUIET = "3"  # the level that workers use unless the user set one
NVIDIA = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU

_held: tuple[str, ...] = ()
_scheduled = False
_bound: tuple[str, ...] | None = None  # the GPUs that this process's backend saw at its import


@contextmanager
def hold(
    backend: str | None,
    threads: int,
    addresses: Sequence[str],
    place: int | None = None,
    *,
    apart: bool = True,
) -> Iterator[tuple[str, ...]]:
    """Set up the process of a task in a ``with`` block; yield the GPUs that are assigned to the task.

    Threads are limited because workers that each use every core compete: on two cores, two of them are slower
    than one.

    Args:
        backend: the Keras backend; None if it is unknown.
        threads: number of threads that the task may use.
        addresses: addresses of the GPUs that Spark gave the task: indices into the visible GPUs, or names.
        place: the task's number in local mode, where Spark gives no GPUs. It spreads tasks over the visible
            GPUs.
        apart: without ``addresses``, whether tasks have to be spread; if False, a process keeps the GPU that
            it is bound to.

    Raises:
        ConfigError: Spark gave the task a GPU that is not visible.
        StaleWorkerError: this process is bound to other GPUs.
    """
    global _held, _bound, _scheduled
    ids = choose_gpus(addresses, place)
    loaded = not sys.modules.keys().isdisjoint([backend] if backend else BACKENDS)
    if not addresses and loaded and not (apart and _bound):
        ids = _bound or ()  # (): a backend imported outside a task sees all GPUs
    if ids and loaded and _bound != ids:
        bound = f"the GPUs {', '.join(_bound)}" if _bound else "all GPUs"
        raise StaleWorkerError(
            f"This process is bound to {bound}, but its task was assigned the GPUs {', '.join(ids)}."
        )
    settings = {"KERAS_BACKEND": backend} if backend else {}
    if ids:
        settings[VISIBLE] = ",".join(ids)
    defaults = {LEVEL: QUIET, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    defaults["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"):
        defaults[name] = str(threads)
    settings.update((name, value) for name, value in defaults.items() if name not in os.environ)
    kept = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    _held = _bound = ids
    _scheduled = bool(addresses)
    try:
        yield ids
    finally:
        _held = ()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_quiet() -> bool:
    """Return False if the user asked for log lines of TensorFlow. Call it before ``hold`` sets the level.

    Some lines are printed at every level, before TensorFlow has read it.
    """
    return os.environ.get(LEVEL, QUIET) >= QUIET


def held() -> tuple[str, ...]:
    """Return the GPUs of the task that runs in this process."""
    return _held


def scheduled() -> bool:
    """Return True if Spark gave GPUs to the task that runs in this process."""
    return _scheduled


def choose_gpus(addresses: Sequence[str], place: int | None) -> tuple[str, ...]:
    """Return the GPUs of a task, as CUDA_VISIBLE_DEVICES names them; empty if none can be assigned.

    Raises:
        ConfigError: Spark gave the task a GPU that is not visible.
    """
    visible = visible_gpus()
    if addresses:
        limited = os.environ.get(VISIBLE) is not None
        return tuple(_within(visible, address) if limited else address for address in addresses)
    if place is None or not visible:
        return ()
    return (visible[place % len(visible)],)


def _within(visible: list[str], address: str) -> str:
    """Return the CUDA_VISIBLE_DEVICES entry for an address: an index is looked up, a name is kept."""
    if not address.isdecimal():
        return address
    if int(address) >= len(visible):
        raise ConfigError(
            f"Spark assigned GPU {address} to the task, but {VISIBLE} has only {len(visible)} GPUs "
            f"({','.join(visible)}), counted from 0. Let the discovery script of Spark "
            f"(spark.*.resource.gpu.discoveryScript) report indices within {VISIBLE}, or unset {VISIBLE}."
        )
    return visible[int(address)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees: those of CUDA_VISIBLE_DEVICES if it is set."""
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return [str(index) for index in range(len(list(NVIDIA.iterdir())))] if NVIDIA.exists() else []
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names

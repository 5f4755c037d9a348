"""Suppression of Spark's output about the tasks of a job: lines about failures, and its progress bar.

sparkdl raises a failure as one error, and draws its own progress bar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sparkdl.spark import spark_internals

LOGGERS = (
    "org.apache.spark.scheduler.TaskSetManager",  # "Lost task", "failed 4 times; aborting job"
    "org.apache.spark.executor.Executor",  # "Exception in task", where the executor is the driver's JVM
    "org.apache.spark.api.python.PythonRunner",  # "This may have been caused by a prior exception"
)
# Spark ends the Python process of a killed task after 2 s (spark.python.task.killTimeout). A call that fails
# waits for that.
SETTLE_SECONDS = 2.5
# On a busy machine it takes longer. The loggers stay off until then, but the call does not wait.
LONGEST_SECONDS = 30.0
# Spark logs the failure of a task from another thread, after the task has ended.
LOG_SECONDS = 1.0
_lock = threading.Lock()
_quiet: dict[Any, list[str]] = {}  # the loggers that are off, by SparkContext
_jobs: dict[Any, int] = {}  # the number of jobs that need them off


@contextmanager
def hidden(context: Any) -> Iterator[None]:
    """Hide Spark's progress bar and the lines of ``LOGGERS`` in a ``with`` block that runs a job.

    Loggers whose level the user set stay as they are.

    Args:
        context: the SparkContext; None over Spark Connect, whose server has its own log.
    """
    if context is None:
        yield
        return
    with _lock:
        _jobs[context] = _jobs.get(context, 0) + 1
        if _jobs[context] == 1:
            _quiet[context] = _silence(context)
        _hide_bar(context, hidden=True)
    try:
        yield
    except BaseException:
        (_release_later if _settle(context, SETTLE_SECONDS) else _release)(context)
        raise
    _release(context)


def _release(context: Any) -> None:
    """Restore the loggers and the progress bar, unless another job needs them off."""
    with _lock:
        _jobs[context] -= 1
        _hide_bar(context, hidden=bool(_jobs[context]))  # again: the end of a job brings it back
        if not _jobs[context]:
            del _jobs[context]
            _restore(context, _quiet.pop(context))


def _release_later(context: Any) -> None:
    """Restore the loggers in a new thread, once no task runs and the last line is logged."""

    def wait() -> None:
        _settle(context, LONGEST_SECONDS)
        time.sleep(LOG_SECONDS)
        _release(context)

    try:
        threading.Thread(target=wait, name="sparkdl-task-logs", daemon=True).start()
    except RuntimeError:  # The process cannot start more threads.
        _release(context)


def _hide_bar(context: Any, *, hidden: bool) -> None:
    with suppress(Exception):  # in a version of Spark where this is not possible, the bar stays
        spark_internals.hide_progress_bar(context, hidden=hidden)


def _silence(context: Any) -> list[str]:
    """Switch the loggers off; return the names of those that changed."""
    switched: list[str] = []
    with suppress(Exception):  # logging is never a reason to fail
        log4j = spark_internals.jvm(context).org.apache.logging.log4j
        known = log4j.LogManager.getContext(False).getConfiguration().getLoggers()
        for name in LOGGERS:
            if not known.containsKey(name):
                log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
                switched.append(name)
    return switched


def _restore(context: Any, switched: list[str]) -> None:
    with suppress(Exception):  # Spark may have been stopped
        log4j = spark_internals.jvm(context).org.apache.logging.log4j
        loggers = log4j.LogManager.getContext(False)
        for name in switched:
            loggers.getConfiguration().removeLogger(name)
        loggers.updateLoggers()


def _settle(context: Any, seconds: float) -> bool:
    """Wait up to ``seconds`` until no task runs; return False if the application has stopped."""
    deadline = time.monotonic() + seconds
    try:
        while any(each.numRunningTasks() for each in spark_internals.executors(context)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return not spark_internals.is_stopped(context)
    except Exception:  # noqa: BLE001 - the JVM or the application is gone
        return False

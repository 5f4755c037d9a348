"""Suppression of Spark's output about the tasks of a job: lines about failures, and its progress bar.

sparkdl raises a failure as one error, and draws its own progress bar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from sparkdl.spark import spark_internals

LOGGERS = (
    "org.apache.spark.scheduler.TaskSetManager",  # "Lost task", "failed 4 times; aborting job"
    "org.apache.spark.executor.Executor",  # "Exception in task", where the executor is the driver's JVM
    "org.apache.spark.api.python.PythonRunner",  # "This may have been caused by a prior exception"
)
# Spark ends the Python process of a killed task after 2 s (spark.python.task.killTimeout). A call that fails
# waits for that. On a busy machine it takes longer: the lines about the tasks of such a call stay hidden.
SETTLE_SECONDS = 2.5
_lock = threading.Lock()
_quiet: dict[Any, list[str]] = {}  # the loggers that are off, by SparkContext
_jobs: dict[Any, int] = {}  # the number of jobs that need them off
_failed: dict[Any, set[int]] = {}  # the stages of failed jobs, until the loggers are restored
# By SparkContext, the loggers that filter out the lines about failed jobs.
_filtered: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


@contextmanager
def hidden(context: Any, tag: str) -> Iterator[None]:
    """Hide Spark's progress bar and the lines of ``LOGGERS`` in a ``with`` block that runs a job.

    Loggers whose level the user set stay as they are.

    Args:
        context: the SparkContext; None over Spark Connect, whose server has its own log.
        tag: the tag of the job.
    """
    if context is None:
        yield
        return
    with _lock:
        _jobs[context] = _jobs.get(context, 0) + 1
        if _jobs[context] == 1:
            _quiet[context] = _silence(context)
        _hide_bar(context, hidden=True)
    stages: list[int] = []
    try:
        yield
    except BaseException:
        with suppress(Exception):  # Spark 3.5 does not find jobs by their tags; Spark may have been stopped
            stages = spark_internals.stage_ids(context, tag)
        _settle(context)
        raise
    finally:
        _release(context, stages)


def _release(context: Any, failed: list[int]) -> None:
    """Restore the loggers and the progress bar, unless another job needs them off.

    Args:
        context: the SparkContext.
        failed: stages whose tasks may still run. Lines about them stay hidden.
    """
    with _lock:
        _jobs[context] -= 1
        _hide_bar(context, hidden=bool(_jobs[context]))  # again: the end of a job brings it back
        _failed.setdefault(context, set()).update(failed)
        if not _jobs[context]:
            del _jobs[context]
            _restore(context, _quiet.pop(context), _failed.pop(context))


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
            if not known.containsKey(name) or name in _filtered.get(context, ()):
                log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
                switched.append(name)
    return switched


def _restore(context: Any, switched: list[str], failed: set[int]) -> None:
    """Switch loggers on again, except for the lines about tasks of failed stages."""
    with suppress(Exception):  # Spark may have been stopped
        log4j = spark_internals.jvm(context).org.apache.logging.log4j
        loggers = log4j.LogManager.getContext(False)
        configuration = loggers.getConfiguration()
        for name in switched:
            configuration.removeLogger(name)
            if failed:
                logger = log4j.core.config.LoggerConfig(name, None, True)
                logger.addFilter(_filter(log4j, failed))
                configuration.addLogger(name, logger)
        _filtered[context] = switched if failed else []
        loggers.updateLoggers()


def _filter(log4j: Any, stages: set[int]) -> Any:
    """Return a filter that rejects Spark's lines about the tasks of stages."""
    pattern = rf"(?s).*\bin stage ({'|'.join(map(str, sorted(stages)))})\b.*"
    result = log4j.core.Filter.Result
    return log4j.core.filter.RegexFilter.createFilter(pattern, None, False, result.DENY, result.NEUTRAL)


def _settle(context: Any) -> None:
    """Wait up to SETTLE_SECONDS until no task runs."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with suppress(Exception):  # the JVM or the application is gone
        while any(each.numRunningTasks() for each in spark_internals.executors(context)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

"""Spark's lines about the tasks of a failed call stay hidden, and those of all other jobs are shown."""

import contextlib
import threading
import time

import pytest
from leaks import leaked_threads

from sparkdl.spark import jobs, spark_internals, task_logs
from sparkdl.spark.application import application_of

pytestmark = pytest.mark.classic


@contextlib.contextmanager
def log_of(context):
    """Yield a function that returns the lines that the driver's JVM logs from now on, at the level WARN."""
    jvm = spark_internals.jvm(context)
    log4j, writer = jvm.org.apache.logging.log4j, jvm.java.io.StringWriter()
    loggers = log4j.LogManager.getContext(False)
    root = loggers.getConfiguration().getRootLogger()
    layout = log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = log4j.core.appender.WriterAppender.createAppender(layout, None, writer, "test", False, True)
    appender.start()
    root.addAppender(appender, None, None)
    root.setLevel(log4j.Level.WARN)
    loggers.updateLoggers()
    try:
        yield writer.toString
    finally:
        root.removeAppender("test")
        root.setLevel(log4j.Level.OFF)
        loggers.updateLoggers()


def failing(context):
    """Return a job whose task fails."""

    def fail(number):
        raise LookupError(number)

    return lambda: context.parallelize([0], 1).foreach(fail)


def waiting(context):
    """Return a job whose two tasks run until they are killed."""
    return lambda: context.parallelize(range(2), 2).foreach(lambda number: time.sleep(60))


def lines_about_a_failure(context, log):
    before = len(log())
    with pytest.raises(Exception, match="LookupError"):
        failing(context)()
    return log()[before:]


def test_the_lines_of_tasks_that_end_after_their_call(spark, eventually, monkeypatch):
    """Lines about killed tasks stay hidden when the call no longer waits for them, and no thread stays."""
    monkeypatch.setattr(task_logs, "SETTLE_SECONDS", 0.0)
    context, threads = spark.sparkContext, threading.enumerate()
    with log_of(context) as log:
        for _ in range(2):  # the second time, the loggers have the filter of the first one
            job = jobs.SparkJob(application_of(spark), waiting(context), "")
            assert eventually(lambda: spark_internals.running_tasks(context) == 2)
            job.cancel()

            assert [] == leaked_threads(threads, 0.0)
            assert "Lost task" in lines_about_a_failure(context, log)  # after a wait for slots

        job = jobs.SparkJob(application_of(spark), failing(context), "")
        assert job.wait(60)
        assert "LookupError" in str(job.error)
        failures = log().count("Lost task"), log().count("aborting job")
        assert (2, 2) == failures, log()
        assert "Attempting to kill Python Worker" not in log()
        assert "Lost task" in lines_about_a_failure(context, log)

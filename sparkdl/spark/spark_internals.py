"""Access to the private parts of Spark that this package depends on.

No other module uses them, except for one hook that ``ml/persistence.py`` overrides, and the name of
PySpark's signal handler in ``process/interrupts.py``.

The public API has no equivalent. A comment gives the versions that each was checked with. If a version of
Spark changes one, ``tests/spark/test_spark_internals.py`` fails and names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import SparkContext

# The application.


def active_context() -> Any:
    """Return the SparkContext of this process; None if there is none."""
    return SparkContext._active_spark_context  # PySpark 3.5 to 4.3


def jvm(context: Any) -> Any:
    """Return py4j's view of the classes in the driver's JVM."""
    return context._jvm  # PySpark 3.5 to 4.3


def is_stopped(context: Any) -> bool:
    """Return True if an application has been stopped; if its JVM is gone, py4j raises an error."""
    inner = context._jsc  # PySpark 3.5 to 4.3
    return inner is None or bool(inner.sc().isStopped())


def executors(context: Any) -> list[Any]:
    """Return the JVM's SparkExecutorInfo of each executor, and of the driver."""
    return list(_scala(context).statusTracker().getExecutorInfos())


def concurrent_tasks(context: Any, profile: Any) -> int:
    """Return the number of tasks with a ResourceProfile that can run at once; None: the default one."""
    scala = _scala(context)
    manager = scala.resourceProfileManager()  # Spark 3.5 to 4.3
    inner = manager.defaultResourceProfile()
    if profile is not None:
        inner = profile._java_resource_profile  # PySpark 3.5 to 4.3
        manager.addResourceProfile(inner)
    return int(scala.maxNumConcurrentTasks(inner))  # Spark 3.5 to 4.3


def hide_progress_bar(context: Any, *, hidden: bool) -> None:
    """Hide the bar of stages that Spark draws on the standard error, or show it again.

    Spark draws no bar until half a second after the end of the last job. To hide the bar, the time of
    that end is set to the far future.
    """
    option = _scala(context).progressBar()  # Spark 3.5 to 4.3
    if option.isDefined():
        option.get().finishAll()  # Spark 3.5 to 4.3; erases the bar, and sets that time to now
        if hidden:
            last_finish(option.get()).setLong(option.get(), 1 << 62)


def last_finish(bar: Any) -> Any:
    """Return the field of a bar of stages that holds the time at which the last job ended."""
    return _field(bar, "lastFinishTime")  # Spark 3.5 to 4.3


def stage_ids(context: Any, tag: str) -> list[int]:
    """Return the IDs of the stages of the jobs with a tag, also of jobs that have ended."""
    tracker = _scala(context).statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]  # Spark 4.0 to 4.3
    return sorted({int(stage) for job in jobs if job.isDefined() for stage in job.get().stageIds()})


def stages_of(context: Any, tag: str) -> list[tuple[bool, int]]:
    """Return, for each stage of the jobs with a tag, True if it was submitted, and its number of tasks."""
    tracker = _scala(context).statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in stage_ids(context, tag)]
    return [(each.get().submissionTime() > 0, each.get().numTasks()) for each in stages if each.isDefined()]


def running_tasks(context: Any) -> int:
    """Return the number of tasks that run now; those of Spark's status tracker may be seconds old."""
    return int(_scala(context).taskScheduler().rootPool().runningTasks())  # Spark 3.5 to 4.3


def other_jobs(context: Any, tag: str) -> list[int]:
    """Return the IDs of the active jobs that do not have this tag."""
    tracker = _scala(context).statusTracker()
    return sorted(set(tracker.getActiveJobIds()) - set(tracker.getJobIdsForTag(tag)))  # Spark 4.0 to 4.3


def hadoop_configuration(context: Any) -> Any:
    """Return the JVM's Hadoop configuration of an application."""
    return context._jsc.hadoopConfiguration()  # PySpark 3.5 to 4.3


def temporary_folder(context: Any) -> str:
    """Return the path of a local folder that the JVM removes, even if this process is killed."""
    return str(context._temp_dir)  # PySpark 3.5 to 4.3


def broadcast_file(shared: Any) -> str:
    """Return the path of the file that PySpark writes for a broadcast variable."""
    return str(shared._path)  # PySpark 3.5 to 4.3


def weak_reference(context: Any, shared: Any) -> Any:
    """Return a weak reference, in the JVM, to the broadcast behind a broadcast variable."""
    return jvm(context).java.lang.ref.WeakReference(shared._jbroadcast)  # PySpark 3.5 to 4.3


def cause_of(error: BaseException) -> Any:
    """Return the cause that PySpark keeps in an exception of the JVM; None for other exceptions."""
    return getattr(error, "_cause", None)  # PySpark 3.5 to 4.3


def _scala(context: Any) -> Any:
    return context._jsc.sc()  # PySpark 3.5 to 4.3


# The Python interpreter of functions that the JVM runs in Python workers.


def set_python(data: Any, before: str, python: str) -> None:
    """Change the Python interpreter of the functions in the lineage of an RDD or a DataFrame.

    Args:
        data: an RDD, or a DataFrame of a classic session.
        before: the interpreter to replace; functions with any other interpreter keep it.
        python: the new interpreter.
    """
    for rdd in _rdds_of(data):
        _set_python(rdd, before, python, set())


def _rdds_of(data: Any) -> Iterator[Any]:
    """Yield the JVM's RDDs that an RDD or a DataFrame is computed from."""
    if hasattr(data, "_jdf"):  # PySpark 3.5 to 4.3
        found = data._jdf.queryExecution().analyzed().collectLeaves()
        for index in range(found.size()):
            leaf = found.apply(index)
            if leaf.getClass().getSimpleName() == "LogicalRDD":  # Spark 3.5 to 4.3
                yield leaf.rdd()
        return
    # PySpark 3.5 to 4.3. Trailing Python functions that PySpark has not sent to the JVM yet need no change.
    made = getattr(data, "_jrdd_val", None) or getattr(data, "_prev_jrdd", None) or data._jrdd
    yield made.rdd()


def _set_python(rdd: Any, before: str, python: str, seen: set[int]) -> None:
    if rdd.id() in seen:
        return
    seen.add(rdd.id())
    if rdd.getClass().getSimpleName() == "PythonRDD":  # Spark 3.5 to 4.3
        function = _field(rdd, "func").get(rdd)
        executable = _field(function, "pythonExec")
        if executable.get(function) == before:
            executable.set(function, python)
    dependencies = rdd.dependencies()
    for index in range(dependencies.size()):
        _set_python(dependencies.apply(index).rdd(), before, python, seen)


def _field(owner: Any, name: str) -> Any:
    field = owner.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field


# Shuffles.


def shuffle_of(rdd: Any) -> int:
    """Return the id of the nearest shuffle in the lineage of an RDD, which its ``partitionBy`` made."""
    inner = rdd._jrdd.rdd()  # PySpark 3.5 to 4.3
    while (below := inner.dependencies().head()).getClass().getSimpleName() != "ShuffleDependency":
        inner = below.rdd()
    return int(below.shuffleId())


def shuffles_of(frame: Any, *, run: bool) -> list[int]:
    """Return the ids of the shuffles of a DataFrame that ran. ``run`` is True if its whole plan ran."""
    return list(_shuffles_of(frame._jdf.queryExecution().executedPlan(), run=run))  # PySpark 3.5 to 4.3


def _shuffles_of(plan: Any, *, run: bool) -> Iterator[int]:
    name = plan.getClass().getSimpleName()  # these names: Spark 3.5 to 4.3
    if name == "ShuffleExchangeExec" and run:  # reading the id of a shuffle that did not run would prepare it
        yield int(plan.shuffleDependency().shuffleId())
    if name == "AdaptiveSparkPlanExec":
        yield from _shuffles_of(plan.executedPlan(), run=run)
    elif name.endswith("QueryStageExec"):
        yield from _shuffles_of(plan.plan(), run=True)
    else:
        for index in range(plan.children().size()):
            yield from _shuffles_of(plan.children().apply(index), run=run)


def forget_shuffles(context: Any, ids: Iterable[int]) -> None:
    """Remove the files of shuffles, as Spark does after the JVM's garbage collector ran."""
    cleaner = _scala(context).cleaner()  # Spark 3.5 to 4.3
    for shuffle in ids:
        if cleaner.isDefined():
            cleaner.get().doCleanupShuffle(shuffle, False)  # Spark 3.5 to 4.3


# Spark ML.


def no_parent() -> Any:
    """Return the placeholder parent of a Param that is defined as a class attribute."""
    from pyspark.ml.param import Params  # loads all of pyspark.ml

    return Params._dummy()  # PySpark 3.5 to 4.3


def set_uid(stage: Any, uid: str) -> None:
    """Change the uid of a stage and of its Params."""
    stage._resetUid(uid)  # PySpark 3.5 to 4.3

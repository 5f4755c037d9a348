"""Spark: a gang of tasks, the slots for it, and the job that runs it.

A synchronous run starts as a barrier stage, for its all-or-nothing start only. Everything else, a run that
goes on without lost workers, which a barrier stage does not, and everything under dynamic allocation, which
barrier stages refuse, is an ordinary stage whose gang forms at the endpoint. Jobs run in a thread of their
own, under a tag by which they are cancelled, so that the user's own job group, description and scheduler
pool stay as they were.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple
from typing import Any
from weakref import WeakSet

from pyspark import SparkContext, cloudpickle
from pyspark.sql import DataFrame, functions, types

from sparkdl.core.pickling import pickled
from sparkdl.data import arrow
from sparkdl.errors import ClusterError, SparkDLError, StaleWorkerError
from sparkdl.process import interrupts
from sparkdl.spark import preflight, task_logs
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.failures import explain, lacks_package
from sparkdl.spark.slots import NOTICE_SECONDS
from sparkdl.transport.exchange import Endpoint
from sparkdl.worker import tasks

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
_used: WeakSet[SparkContext] = WeakSet()  # those whose Python workers may have Keras by now


class Claims:
    """The slots that gangs of this process have, or wait for in the order in which they came.

    Two gangs that each got a part of their slots would wait for each other.
    """

    def __init__(self) -> None:
        self._owners: list[int] = []  # the threads whose gangs have slots
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = 0

    @contextmanager
    def claim(self, wanted: int, slots: float) -> Iterator[None]:
        """Have so many of all slots in a ``with`` block, which begins when they are free of other gangs.

        Raises:
            ClusterError: this thread has a gang already, and would wait for itself.
        """
        turn, mine = object(), threading.get_ident()
        noticed = time.monotonic()
        with self._changed:
            if mine in self._owners and self._taken + wanted > slots:
                raise ClusterError(
                    f"A fit within another one, as in a callback, needs {wanted} slots beside the other's "
                    f"{self._taken}, and there are {slots:g}. Take fewer workers for each, or fit afterwards."
                )
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (self._taken and self._taken + wanted > slots):
                    self._changed.wait(POLL_SECONDS)
                    interrupts.check()
                    if time.monotonic() - noticed > NOTICE_SECONDS:
                        noticed = time.monotonic()
                        logger.warning("Waiting for %d slots that another fit of this process has.", wanted)
                self._taken += wanted
                self._owners.append(mine)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= wanted
                self._owners.remove(mine)
                self._changed.notify_all()


claims = Claims()


def claim(cluster: SparkApplication, num_workers: int) -> AbstractContextManager[None]:
    """Have the slots of a gang in a ``with`` block, which begins when no other gang has them."""
    return claims.claim(num_workers, float("inf") if cluster.dynamic else cluster.slots())


class Stage:
    """One kind of task of a job, with all that it takes along.

    Args:
        name: the stage, as ``tasks.run`` knows it.
        expected: what an executor has to have in common with the driver.
        endpoint: where the run's endpoint is, if it has one.
        generation: which start of the gang this is.
        shared: what ``SparkApplication.share`` returned.
        objects: the custom objects of the model.
        builder: the function that builds the model, where there is one.
        options: what else the stage takes. "profile", which stays here, is the ResourceProfile of its tasks.
    """

    def __init__(
        self,
        name: str,
        expected: dict[str, Any],
        *,
        endpoint: Endpoint | None = None,
        generation: int = 0,
        shared: Any = None,
        objects: Any = None,
        builder: Any = None,
        **options: Any,
    ) -> None:
        self.profile = options.pop("profile", None)
        # Spark unpickles plain values only, because an executor may have no sparkdl; the preflight
        # comes before it needs one to unpickle the rest.
        code = {"objects": objects, "builder": builder, "options": options}
        call = {
            "stage": name,
            "generation": generation,
            "shared": shared,
            "code": pickled(code, cloudpickle),
            "endpoint": endpoint and astuple(endpoint),
        }
        self.function = functools.partial(
            preflight.by_value(preflight.task_main),
            check=preflight.by_value(preflight.check),
            expected=expected,
            call=call,
        )
        if (context := active_context()) is not None:
            _used.add(context)


class Job:
    """A Spark job in a thread of its own, cancelled by its tag.

    Args:
        cluster: the Spark application.
        action: what runs the job.
    """

    def __init__(self, cluster: SparkApplication, action: Callable[[], Any]) -> None:
        self._cluster, self._action = cluster, action
        self._tag = f"sparkdl-{uuid.uuid4().hex}"
        self.error: Exception | None = None
        self.result: Any = None
        self._thread = cluster.thread(self._run, "sparkdl-job")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._cluster.tag(self._tag)
            with task_logs.hidden(self._cluster.log_context):
                self.result = self._action()
        except Exception as error:  # noqa: BLE001 - handed over to the thread that waits
            self.error = error

    @property
    def running(self) -> bool:
        """Whether the job has neither ended nor failed."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Cancel the job and wait for its thread."""
        deadline = time.monotonic() + interrupts.limited(30)
        while self.running:
            self._cluster.cancel(self._tag)  # again: it may not have been submitted yet
            self._thread.join(0.2)
            if time.monotonic() > deadline:
                return

    def wait(self, timeout: float) -> bool:
        """Wait for the job's end, or for an interrupt; return whether the end has come."""
        deadline = time.monotonic() + timeout
        while self.running and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, POLL_SECONDS))
            interrupts.check()
        return not self.running


def run(action: Callable[[], Any], cluster: SparkApplication, *, of_rows: bool = True) -> Any:
    """Return what a job gives; it is run again where executors lack sparkdl, or a process is bound otherwise.

    Args:
        action: runs the job.
        cluster: the Spark application.
        of_rows: whether it computes rows by a plan of the user's.

    Raises:
        SparkDLError: the job failed.
    """
    shipped, stale = False, 0
    while True:
        job = Job(cluster, action)
        try:
            job.wait(math.inf)
        except BaseException:
            with interrupts.held():
                job.cancel()
            raise
        if job.error is None:
            return job.result
        if isinstance(job.error, SparkDLError):
            raise job.error
        explained = explain(job.error, cluster, of_rows=of_rows)
        if isinstance(explained, StaleWorkerError) and stale < cluster.slots() + 2:
            stale += 1
        elif lacks_package(explained) and not shipped:
            cluster.ship_package()
            shipped = True
        else:
            raise explained from None


@contextmanager
def other_processes() -> Iterator[None]:
    """Have RDD jobs in a ``with`` block run in Python workers apart, which Spark tells by their environment.

    A job that leaves rows unread has its Python workers ended, keras and compiled functions and all. Before
    the first stage there is nothing to lose, and the workers apart would be one start more.
    """
    context = application_of().context
    environment = context.environment
    if context in _used:
        environment["SPARKDL_APART"] = "1"
    try:
        yield
    finally:
        environment.pop("SPARKDL_APART", None)  # a job of another thread may have been in here as well


def run_rdd(rdd: Any, stage: Stage, *, barrier: bool) -> Callable[[], Any]:
    """Return the action that runs a stage on the partitions of an RDD and collects what it yields."""

    def action() -> Any:
        tasks = (rdd.barrier() if barrier else rdd).mapPartitions(stage.function)
        return (tasks.withResources(stage.profile) if stage.profile else tasks).collect()

    return action


def run_dealt(dealt: Any, num_workers: int, stage: Stage, *, barrier: bool) -> Callable[[], Any]:
    """Return the action that shuffles an RDD of (worker, block) to the workers and runs a stage there."""

    def action() -> Any:
        blocks = dealt.partitionBy(num_workers, int)
        try:
            return run_rdd(blocks, stage, barrier=barrier)()
        finally:
            with suppress(Exception):  # what the job gave, or why it failed, is what counts
                _forget_shuffles(dealt.context, [_shuffle_of(blocks)])

    return action


def run_frame(
    frame: DataFrame, stage: Stage, schema: str, *, barrier: bool, streams: bool = False
) -> Callable[[], Any]:
    """Return the action that runs a stage on the Arrow batches of a DataFrame.

    Args:
        frame: the DataFrame.
        stage: the stage.
        schema: the rows that it yields.
        barrier: whether all tasks start together.
        streams: whether rows are given as partitions end, one after the other, and not all at the end.
    """
    profile = {"profile": stage.profile} if stage.profile else {}  # which Spark 3.5 does not know
    made = frame.mapInArrow(stage.function, schema, barrier=barrier, **profile)
    return made.toLocalIterator if streams else lambda: collect(made)


def relay(cluster: SparkApplication, endpoint: Endpoint, path: str, body: bytes) -> bytes:
    """Return what an endpoint answers that only executors reach, by a job of one task."""
    ask = functools.partial(tasks.relay, endpoint=endpoint, path=path, body=body)
    answer = cluster.session.range(1, numPartitions=1).mapInArrow(ask, "data binary")
    return b"".join(bytes(row.data) for row in run(answer.collect, cluster, of_rows=False))


def column_function(stage: Stage, kind: Any) -> Any:
    """Return the column function of Spark SQL that runs a stage on batches of its arguments.

    Args:
        stage: takes tuples of Arrow arrays, and gives an Arrow array for each.
        kind: the type of what it gives.
    """
    run = stage.function

    def on_arrow(batches: Any) -> Any:
        yield from run(batch if isinstance(batch, tuple) else (batch,) for batch in batches)

    def on_pandas(batches: Any) -> Any:
        from sparkdl.data import (
            arrow,  # pickled by value, this function would else need sparkdl to be unpickled
        )

        whole = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        for values in run(tuple(map(arrow.of_pandas, batch)) for batch in whole):
            yield arrow.to_pandas(values)

    if hasattr(functions, "arrow_udf"):  # which Spark has had since 4.1
        arrays = Iterator[arrow.ArrowArray]
        on_arrow.__annotations__ = {"batches": arrays, "return": arrays}
        return functions.arrow_udf(on_arrow, kind)
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    structs, series = Iterator[pd.DataFrame], Iterator[pd.Series]
    given = structs if isinstance(kind, types.StructType) else series
    on_pandas.__annotations__ = {"batches": series, "return": given}
    return pandas_udf(on_pandas, kind)  # type: ignore[call-overload]


def collect(frame: DataFrame) -> list[Any]:
    """Return the rows of a DataFrame, whose plan is run for this once."""
    done = False
    try:
        rows = frame.collect()
        done = True
        return rows
    finally:
        _forget_plan(frame, run=done)


def num_partitions(frame: DataFrame) -> int:
    """Return how many partitions a DataFrame has; what is below its last shuffle is run to know that."""
    try:
        return frame.rdd.getNumPartitions()
    finally:
        _forget_plan(frame, run=False)


def _forget_plan(frame: DataFrame, *, run: bool) -> None:
    """Have the files of the shuffles of a DataFrame removed; ``run``: all of it was run."""
    with suppress(Exception):  # what a job gave, or why it failed, is what counts
        plan = frame._jdf.queryExecution().executedPlan()
        _forget_shuffles(frame.sparkSession.sparkContext, _shuffles_of(plan, run=run))


def _shuffle_of(rdd: Any) -> int:
    """Return the id of the shuffle that an RDD's ``partitionBy`` made, the first one below it."""
    rdd = rdd._jrdd.rdd()
    while (below := rdd.dependencies().head()).getClass().getSimpleName() != "ShuffleDependency":
        rdd = below.rdd()
    return int(below.shuffleId())


def _shuffles_of(plan: Any, *, run: bool) -> Iterator[int]:
    """Yield the ids of the shuffles of a physical plan that were run; ``run``: all of it was."""
    name = plan.getClass().getSimpleName()
    if name == "ShuffleExchangeExec" and run:  # to ask another for its id would prepare it
        yield int(plan.shuffleDependency().shuffleId())
    if name == "AdaptiveSparkPlanExec":
        yield from _shuffles_of(plan.executedPlan(), run=run)
    elif name.endswith("QueryStageExec"):
        yield from _shuffles_of(plan.plan(), run=True)
    else:
        for index in range(plan.children().size()):
            yield from _shuffles_of(plan.children().apply(index), run=run)


def _forget_shuffles(context: Any, ids: Iterable[int]) -> None:
    """Have the files of shuffles removed, as Spark does when the JVM's garbage collector comes by."""
    cleaner = context._jsc.sc().cleaner()
    for shuffle in ids:
        if cleaner.isDefined():
            cleaner.get().doCleanupShuffle(shuffle, False)


def active_context() -> Any:
    """Return the SparkContext if there is one, else None."""
    return SparkContext._active_spark_context

"""Spark jobs: the slots of a worker group, the stages of its tasks, and the job that runs them.

A synchronous run, a hosted run and ``sparkdl.run`` start as a barrier stage: Spark starts all of its
tasks together, or none of them. In a hosted run the barrier also carries the endpoint's address.
Any other run is an ordinary stage, whose worker group forms at the endpoint. Some runs are always an
ordinary stage:

* runs that continue without lost workers, which a barrier stage cannot do;
* runs under dynamic allocation, for which Spark refuses barrier stages;
* runs on rows that Spark cannot compute in a barrier stage, such as those of coalesced partitions.

A job runs in a thread of its own and is cancelled by its tag. The user's job group, description and
scheduler pool stay as they were; a job that the user has not described gets a description.
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
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from pyspark import RDD, SparkContext, cloudpickle
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, functions, types

from sparkdl.core.pickling import pickled
from sparkdl.data import arrow
from sparkdl.data.blocks import Block
from sparkdl.errors import ClusterError, SparkDLError, StaleWorkerError
from sparkdl.process import interrupts
from sparkdl.spark import preflight, spark_internals, task_logs
from sparkdl.spark.application import TAG, SparkApplication, application_of
from sparkdl.spark.failures import explain, lacks_package
from sparkdl.spark.slots import NOTICE_SECONDS, Wait
from sparkdl.transport.exchange import Endpoint
from sparkdl.worker import tasks
from sparkdl.worker.tasks import Task
from sparkdl.worker.user_code import Code

logger = logging.getLogger(__name__)
R = TypeVar("R")
POLL_SECONDS = 0.1
_used: WeakSet[SparkContext] = WeakSet()  # contexts whose Python workers may have imported Keras


class Claims:
    """The slots that worker groups of this process hold or wait for, first come, first served.

    Two groups that each got a part of their slots would wait for each other.
    """

    def __init__(self) -> None:
        self._owners: list[int] = []  # the threads whose worker groups hold slots
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = 0

    @contextmanager
    def claim(self, wanted: int, slots: float) -> Iterator[None]:
        """Reserve ``wanted`` of ``slots`` slots for a ``with`` block; wait until they are free.

        Raises:
            ClusterError: too few slots are free while this thread holds some, so it would wait for itself.
        """
        turn, mine = object(), threading.get_ident()
        noticed = time.monotonic()
        with self._changed:
            if mine in self._owners and self._taken + wanted > slots:
                raise ClusterError(
                    f"A fit within another fit, for example in a callback, needs {wanted} free slots; got "
                    f"{slots:g} slots, of which {self._taken} are in use. Use fewer workers for each, or fit "
                    "afterwards."
                )
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (self._taken and self._taken + wanted > slots):
                    self._changed.wait(POLL_SECONDS)
                    interrupts.check()
                    if time.monotonic() - noticed > NOTICE_SECONDS:
                        noticed = time.monotonic()
                        logger.warning(
                            "Waiting until %d slots are free; other fits of this process hold slots.", wanted
                        )
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
    """Reserve the slots of a worker group for a ``with`` block; wait until they are free."""
    return claims.claim(num_workers, float("inf") if cluster.dynamic else cluster.slots())


@dataclass(frozen=True)
class Stage(Generic[R]):
    """A task as Spark runs it.

    Attributes:
        function: the function that runs the task, given the values of a partition.
        profile: the ResourceProfile of the tasks; None: the default one.
    """

    function: Callable[[Iterable[Any]], Iterator[R]]
    profile: ResourceProfile | None = None


@dataclass(frozen=True, kw_only=True)
class StageFactory:
    """Makes the stages of a job, which have all of these values in common.

    Attributes:
        expected: the properties that an executor must have in common with the driver.
        code: the user's code, for the tasks that need it.
        endpoint: the run's endpoint, if it has one.
        generation: the generation of the worker group.
        shared: the handle that ``SparkApplication.share`` returned.
        profile: the ResourceProfile of the tasks; None: the default one.
    """

    expected: preflight.Expected
    code: Code = field(default_factory=Code)
    endpoint: Endpoint | None = None
    generation: int = 0
    shared: object = None
    profile: ResourceProfile | None = None

    def make(self, task: Task[R]) -> Stage[R]:
        """Return the stage that runs a task."""
        # Spark unpickles plain values only, because an executor may have no sparkdl. The task, which needs
        # sparkdl, is unpickled after the preflight.
        call = preflight.Call(
            task=pickled(task, cloudpickle),
            uses_keras=task.uses_keras,
            spread=task.spread,
            endpoint=_fields(self.endpoint) if self.endpoint else None,
            generation=self.generation,
            shared=self.shared,
        )
        if (context := spark_internals.active_context()) is not None:
            _used.add(context)
        function = functools.partial(
            preflight.by_value(preflight.task_main),
            check=preflight.by_value(preflight.check),
            expected=self.expected,
            call=call,
        )
        return Stage(function, self.profile)


def _fields(endpoint: Endpoint) -> preflight.EndpointFields:
    return endpoint.host, endpoint.port, endpoint.token, endpoint.run, endpoint.certificate


class SparkJob:
    """A Spark job in a thread of its own, cancelled by its tag.

    Args:
        cluster: the Spark application.
        action: the function that runs the job.
        description: the description of the job in Spark's UI.
    """

    def __init__(self, cluster: SparkApplication, action: Callable[[], Any], description: str) -> None:
        self._cluster, self._action, self._description = cluster, action, description
        self._tag = f"{TAG}{uuid.uuid4().hex}"
        self.error: Exception | None = None
        self.result: Any = None
        self._thread = cluster.thread(self._run, "sparkdl-job")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._cluster.tag(self._tag)
            self._cluster.describe(self._description)
            with task_logs.hidden(self._cluster.log_context, self._tag):
                self.result = self._action()
        except Exception as error:  # noqa: BLE001 - handed over to the thread that waits
            self.error = error

    @property
    def running(self) -> bool:
        """True until the job ends or fails."""
        return self._thread.is_alive()

    def waits_for(self) -> Wait:
        """Return the reason why tasks of the job's last stage have not begun their work."""
        return self._cluster.wait_of(self._tag)

    def cancel(self) -> None:
        """Cancel the job, and wait up to 30 s for its thread."""
        deadline = time.monotonic() + interrupts.limited(30)
        while self.running:
            self._cluster.cancel(self._tag)  # again: it may not have been submitted yet
            self._thread.join(0.2)
            if time.monotonic() > deadline:
                return

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the job to end; return True if it has.

        An interrupt ends the wait with its exception.
        """
        deadline = time.monotonic() + timeout
        while self.running and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, POLL_SECONDS))
            interrupts.check()
        return not self.running


@contextmanager
def cancelled_if_interrupted(cluster: SparkApplication) -> Iterator[None]:
    """Let Ctrl-C cancel a job that the main thread starts in a ``with`` block and waits for.

    An exception during the main thread's request to the JVM would make py4j 0.10.9 close the connections of
    all threads, and send their requests again: the training job would run twice.
    """
    tag = f"{TAG}{uuid.uuid4().hex}"
    cluster.tag(tag)
    try:
        with interrupts.unblocked_by(functools.partial(cluster.cancel, tag)):
            yield
    finally:
        cluster.untag(tag)


def run(
    action: Callable[[], R],
    cluster: SparkApplication,
    *,
    of_rows: bool = True,
    description: str = "sparkdl: look at the rows",
) -> R:
    """Run a job and return its result; retry if executors lack sparkdl or a Python process is stale.

    A process is stale if it has Keras on another backend, or is bound to other GPUs.

    Args:
        action: the function that runs the job.
        cluster: the Spark application.
        of_rows: whether the job computes the rows from the user's own RDD or DataFrame.
        description: the description of the job in Spark's UI.

    Raises:
        SparkDLError: the job failed.
    """
    shipped, stale = False, 0
    while True:
        job = SparkJob(cluster, action, description)
        try:
            job.wait(math.inf)
        except BaseException:
            with interrupts.held():
                job.cancel()
            raise
        if job.error is None:
            result: R = job.result
            return result
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
    """Run RDD jobs of a ``with`` block in separate Python workers, which Spark keys by their environment.

    Spark ends the Python workers of a job that leaves rows unread, and Keras and compiled functions with
    them. Before the first stage there is nothing to lose, and separate workers would only cost another start.
    """
    context = application_of().context
    environment = context.environment
    if context in _used:
        environment["SPARKDL_APART"] = "1"
    try:
        yield
    finally:
        environment.pop("SPARKDL_APART", None)  # another thread may have removed it already


def run_rdd(rdd: RDD[Any], stage: Stage[R], *, barrier: bool) -> Callable[[], list[R]]:
    """Return the action that runs a stage on the partitions of an RDD and collects its results."""

    def action() -> list[R]:
        run = stage.function
        results = rdd.barrier().mapPartitions(run) if barrier else rdd.mapPartitions(run)
        return (results.withResources(stage.profile) if stage.profile else results).collect()

    return action


def run_dealt(
    dealt: RDD[tuple[int, Block]], num_workers: int, stage: Stage[R], *, barrier: bool
) -> Callable[[], list[R]]:
    """Return the action that shuffles an RDD of (worker, block) to the workers and runs a stage there."""

    def action() -> list[R]:
        blocks = dealt.partitionBy(num_workers, int)
        try:
            return run_rdd(blocks, stage, barrier=barrier)()
        finally:
            with suppress(Exception):  # a failed cleanup must not hide the job's result or error
                spark_internals.forget_shuffles(dealt.context, [spark_internals.shuffle_of(blocks)])

    return action


def run_frame(
    frame: DataFrame, stage: Stage[Any], schema: str, *, barrier: bool, streams: bool = False
) -> Callable[[], Iterable[Row]]:
    """Return the action that runs a stage on the Arrow batches of a DataFrame.

    Args:
        frame: the DataFrame.
        stage: the stage.
        schema: the schema of the rows that the stage yields.
        barrier: whether all tasks start together.
        streams: whether to return the rows one partition at a time, instead of all of them at the end.
    """
    profile = {"profile": stage.profile} if stage.profile else {}  # Spark 3.5 has no such argument
    made = frame.mapInArrow(stage.function, schema, barrier=barrier, **profile)
    return made.toLocalIterator if streams else lambda: collect(made)


def relay(cluster: SparkApplication, endpoint: Endpoint, path: str, body: bytes) -> bytes:
    """Return the response to a request that a job of one task sends to an endpoint in worker 0."""
    ask = functools.partial(tasks.relay, endpoint=endpoint, path=path, body=body)
    answer = cluster.session.range(1, numPartitions=1).mapInArrow(ask, "data binary")
    text = "sparkdl: ask the endpoint in worker 0"
    return b"".join(bytes(row.data) for row in run(answer.collect, cluster, of_rows=False, description=text))


def column_function(stage: Stage[Any], kind: types.DataType) -> Any:
    """Return the column function of Spark SQL that runs a stage on batches of its arguments.

    Args:
        stage: the stage, which maps each tuple of Arrow arrays to an Arrow array.
        kind: the type of its results.
    """
    run = stage.function

    def on_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        yield from run(batch if isinstance(batch, tuple) else (batch,) for batch in batches)

    def on_pandas(batches: Iterator[Any]) -> Iterator[Any]:
        from sparkdl.data import (
            arrow,  # imported here: this function is pickled by value, and must unpickle without sparkdl
        )

        whole = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        for values in run(arrow.arrays_of_pandas(batch) for batch in whole):
            yield arrow.to_pandas(values)

    if passes_arrow():
        arrays = Iterator[arrow.ArrowArray]
        on_arrow.__annotations__ = {"batches": arrays, "return": arrays}
        return functions.arrow_udf(on_arrow, kind)  # type: ignore[attr-defined]
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    structs, series = Iterator[pd.DataFrame], Iterator[pd.Series]
    given = structs if isinstance(kind, types.StructType) else series
    on_pandas.__annotations__ = {"batches": series, "return": given}
    predict = pandas_udf(on_pandas, kind)  # type: ignore[call-overload]

    @functools.wraps(predict)  # with the attributes that spark.udf.register reads
    def with_nulls(*columns: Any) -> Any:
        given = [functions.col(each) if isinstance(each, str) else each for each in columns]
        nulls = [each.isNull().alias(f"{arrow.NULL}_{place}") for place, each in enumerate(given)]
        return predict(*given, functions.struct(*nulls))

    return with_nulls


def passes_arrow() -> bool:
    """Return True if column functions get Arrow arrays, as since Spark 4.1; before, they get pandas."""
    return hasattr(functions, "arrow_udf")


def collect(frame: DataFrame) -> list[Row]:
    """Return the rows of a DataFrame whose plan runs only this once; remove its shuffle files."""
    done = False
    try:
        rows = frame.collect()
        done = True
        return rows
    finally:
        _forget_plan(frame, run=done)


def num_partitions(frame: DataFrame) -> int:
    """Return the number of partitions of a DataFrame; this runs its plan up to the last shuffle."""
    try:
        return frame.rdd.getNumPartitions()
    finally:
        _forget_plan(frame, run=False)


def _forget_plan(frame: DataFrame, *, run: bool) -> None:
    """Remove the shuffle files of a DataFrame. ``run`` is True if its whole plan ran."""
    with suppress(Exception):  # a failed cleanup must not hide the job's result or error
        shuffles = spark_internals.shuffles_of(frame, run=run)
        spark_internals.forget_shuffles(frame.sparkSession.sparkContext, shuffles)

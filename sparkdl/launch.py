"""Spark: a gang of tasks, the slots for it, and the job that runs it.

A synchronous run starts as a barrier stage, for its all-or-nothing start only. Everything else, and
everything under dynamic allocation, which barrier stages refuse, is an ordinary stage whose gang forms at
the endpoint. Jobs run in a thread of their own, under a tag by which they are cancelled, so that the
user's own job group, description and scheduler pool stay as they were.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pyspark import InheritableThread, SparkContext, SparkFiles, cloudpickle, errors
from pyspark.sql import DataFrame, SparkSession, functions, types

from sparkdl import frames, preflight
from sparkdl.code import pickled
from sparkdl.errors import (
    ClusterError,
    DataError,
    PreflightError,
    SparkDLError,
    StaleWorkerError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.exchange import Endpoint

logger = logging.getLogger(__name__)
BARRIER_REFUSED = "Barrier execution mode does not allow the following pattern of RDD chain"
# The exceptions of expressions and functions of the user's own, which no other try mends: PySpark's for
# DataFrames, and the JVM's in the message of an RDD's job.
OF_FRAMES = (
    errors.ArithmeticException, errors.ArrayIndexOutOfBoundsException, errors.DateTimeException,
    errors.IllegalArgumentException, errors.NumberFormatException, errors.SparkRuntimeException,
    errors.UnsupportedOperationException,
)  # fmt: skip
OF_ROWS = (
    r"(?:org\.apache\.spark\.Spark(?:Arithmetic|ArrayIndexOutOfBounds|DateTime|IllegalArgument|NumberFormat|"
    r"Runtime|UnsupportedOperation)Exception|org\.apache\.spark\.SparkException: \[FAILED_EXECUTE_UDF\]|"
    r"java\.lang\.(?:Arithmetic|ArrayIndexOutOfBounds|ClassCast|IllegalArgument|NumberFormat)Exception)"
)
OTHER_PYTHON = r"in worker has different version:? \(?(\d+)[., ]+(\d+)\)? than that in driver:? (\d+\.\d+)"
NOTICE_SECONDS = 10.0  # between one warning that something is waited for and the next
SETTLE_SECONDS = 2.0  # executors that register one after the other do so within this time


class Cluster:
    """The Spark application that the driver runs in."""

    def __init__(self) -> None:
        self.session: Any = SparkSession.builder.getOrCreate()
        self.context: Any = self.session.sparkContext

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting of the application."""
        return str(self.context.getConf().get(name, default))

    @property
    def dynamic(self) -> bool:
        """Whether executors come and go with the work there is."""
        return self.setting("spark.dynamicAllocation.enabled") == "true"

    @property
    def local(self) -> bool:
        """Whether tasks run in the driver's own JVM."""
        return bool(re.fullmatch(r"local(\[.*\])?", self.context.master))

    @property
    def task_bytes(self) -> int:
        """How many bytes of data go well into the message that starts a task."""
        return int(self.setting("spark.rpc.message.maxSize", "128")) << 18

    def slots(self) -> int:
        """Return how many tasks can run at the same time on the executors there are."""
        scala = self.context._jsc.sc()
        try:
            profile = scala.resourceProfileManager().defaultResourceProfile()
            return int(scala.maxNumConcurrentTasks(profile))
        except Exception as error:  # noqa: BLE001 - a private call; where it is refused, the public estimate serves
            logger.debug("maxNumConcurrentTasks was refused: %s", error)
            return int(self.context.defaultParallelism)

    def hosts(self) -> list[str]:
        """Return the hosts of the executors, and of a driver that is not one of them."""
        executors = self.context._jsc.sc().statusTracker().getExecutorInfos()
        return sorted({str(executor.host()) for executor in executors})

    def settled_slots(self, wanted: int | None, timeout: float) -> int:
        """Return the slots there are, once executors that are still starting have registered.

        Where there are none yet, or fewer than are wanted and the application has asked for, they are waited
        for; others have as long as Spark itself would wait for them.

        Args:
            wanted: how many are needed; more are not waited for.
            timeout: seconds to wait for the next one.
        """
        if self.local:
            return self.slots()
        registering = float(self._seconds("spark.scheduler.maxRegisteredResourcesWaitingTime", 30.0))
        young = time.time() - self.context.startTime / 1000 < registering
        asked = self._asked_slots()
        slots, since, noticed = self.slots(), time.monotonic(), time.monotonic()
        patience = max(SETTLE_SECONDS, registering if young or not slots else 0.0)
        while True:
            now = time.monotonic()
            if slots >= (wanted or 1) and (wanted or not young or now - since > SETTLE_SECONDS):
                return slots
            coming = not self.dynamic and (not slots or slots < (wanted or 0) <= asked)
            if now - since > (timeout if coming else min(timeout, patience)):
                return slots
            if now - noticed > NOTICE_SECONDS:
                noticed = now
                logger.warning("Waiting for executors: the application has %d slots as yet.", slots)
            time.sleep(0.1)
            if (found := self.slots()) != slots:
                slots, since = found, now

    def _asked_slots(self) -> int:
        """Return the slots that the application has asked for; 0 if it takes what there is."""
        master, cores = self.context.master, self.setting("spark.executor.cores")
        if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
            instances, cores = cluster.groups()
        elif master.startswith("spark://"):  # executors take whole machines if not told otherwise
            most = self.setting("spark.cores.max", "0")
            cores = cores or most
            instances = int(most) // max(1, int(cores))
        else:
            instances, cores = self.setting("spark.executor.instances", "0"), cores or "1"
        return int(instances) * (int(cores) // int(self.setting("spark.task.cpus", "1")))

    def _seconds(self, name: str, default: float) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|min)?", self.setting(name))
        if not match:
            return default
        return float(match[1]) * {"ms": 0.001, "m": 60.0, "min": 60.0}.get(match[2] or "s", 1.0)

    def most_slots(self) -> int:
        """Return how many tasks could run at the same time if dynamic allocation gave all it may."""
        most = self.setting("spark.dynamicAllocation.maxExecutors", "0")
        cores = int(self.setting("spark.executor.cores", "1"))
        cpus = int(self.setting("spark.task.cpus", "1"))
        return int(most) * max(1, cores // cpus) if most.isdigit() else 0

    def num_workers(self, wanted: int | None, most: int | None, timeout: float) -> tuple[int, str]:
        """Return how many workers to take, and why.

        Args:
            wanted: how many were asked for.
            most: how many can have a row in each batch; None if that is not known.
            timeout: seconds that executors may take to register.

        Raises:
            ClusterError: more than there are slots.
        """
        # Under dynamic allocation executors come when there is work for them, and not before.
        slots = self.slots() if self.dynamic and wanted else self.settled_slots(wanted, timeout)
        if self.dynamic:
            most_slots = self.most_slots()
            if wanted is not None and most_slots and wanted > most_slots:
                raise self._too_few(wanted, most_slots)
            slots = wanted or max(slots, 1)
        if wanted is not None:
            if wanted > slots:
                raise self._too_few(wanted, slots)
            return wanted, "as asked for"
        if slots < 1:
            raise self._too_few(1, slots)
        if most is not None and most < slots:
            return most, "one row of each batch per worker"
        return slots, "one per slot"

    def _too_few(self, wanted: int, slots: int) -> ClusterError:
        return ClusterError(
            f"num_workers={wanted} needs as many slots; the application has {slots} (executors x "
            f"spark.executor.cores / spark.task.cpus). Ask for {max(1, slots)} workers or fewer, or start "
            "more executors."
        )

    def addresses(self, bind: str | None, advertised: str | None) -> tuple[str, str]:
        """Return the address that the endpoint listens on, and the host that executors connect to."""
        host = self.setting("spark.driver.host", "127.0.0.1")
        listen = self.setting("spark.sparkdl.bindAddress") or self.setting("spark.driver.bindAddress", host)
        return bind or listen, advertised or self.setting("spark.sparkdl.advertisedHost") or host

    def ship_package(self) -> None:
        """Send sparkdl itself to the executors, for the Python workers that start from now on."""
        # Executors fetch the archive from where it lies when they start: it lasts as long as the application.
        archive = Path(SparkFiles.getRootDirectory(), "sparkdl-shipped", "sparkdl-shipped.zip")
        if not archive.exists():
            folder = Path(str(importlib.util.find_spec("sparkdl").submodule_search_locations[0]))  # type: ignore[union-attr, index]
            archive.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=archive.parent) as target:
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(folder, Path(target, "root", "sparkdl"), ignore=ignored)
                made = shutil.make_archive(str(Path(target, "made")), "zip", Path(target, "root"))
                Path(made).replace(archive)  # at once, for another fit may be sending it too
        self.context.addPyFile(str(archive))


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
                    self._changed.wait(1.0)
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


def claim(cluster: Cluster, num_workers: int) -> AbstractContextManager[None]:
    """Have the slots of a gang in a ``with`` block, which begins when no other gang has them."""
    return claims.claim(num_workers, float("inf") if cluster.dynamic else cluster.slots())


OWN = "distribution", "rule", "function"  # options that are code of the user's


class Stage:
    """One kind of task of a job, with all that it takes along.

    Args:
        name: the stage, as ``tasks.run`` knows it.
        expected: what an executor has to have in common with the driver.
        endpoint: where the run's endpoint is, if it has one.
        generation: which start of the gang this is.
        shared: a broadcast variable.
        objects: the custom objects of the model.
        builder: the function that builds the model, where there is one.
        options: what else the stage takes.
    """

    def __init__(
        self, name: str, expected: dict[str, Any], *, endpoint: Endpoint | None = None,
        generation: int = 0, shared: Any = None, objects: Any = None, builder: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        # Spark unpickles plain values only, because an executor may have no sparkdl; the preflight
        # comes before it needs one to unpickle the rest.
        code = {"objects": objects, "builder": builder, "options": options}
        own = [*(objects or {}).values(), builder, *map(options.get, OWN), *(options.get("held") or ())[:1]]
        own += (options.get("decode") or {}).values()
        call = {
            "stage": name, "generation": generation, "shared": shared,
            "code": pickled(code, own, cloudpickle),
            "endpoint": endpoint and (endpoint.host, endpoint.port, endpoint.token, endpoint.run),
        }  # fmt: skip
        self.function = functools.partial(
            preflight.by_value(preflight.task_main), check=preflight.by_value(preflight.check),
            expected=expected, call=call,
        )  # fmt: skip
        _used.add(Cluster().context)


class Job:
    """A Spark job in a thread of its own, cancelled by its tag.

    Args:
        context: the SparkContext.
        action: what runs the job.
    """

    def __init__(self, context: Any, action: Callable[[], Any]) -> None:
        self._context, self._action = context, action
        self._tag = f"sparkdl-{uuid.uuid4().hex}"
        self.error: Exception | None = None
        self.result: Any = None
        self._thread = InheritableThread(target=self._run, name="sparkdl-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.addJobTag(self._tag)
            self.result = self._action()
        except Exception as error:  # noqa: BLE001 - handed over to the thread that waits
            self.error = error

    @property
    def running(self) -> bool:
        """Whether the job has neither ended nor failed."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Cancel the job and wait for its thread."""
        deadline = time.monotonic() + 30
        while self.running and time.monotonic() < deadline:
            self._context.cancelJobsWithTag(self._tag)  # again: it may not have been submitted yet
            self._thread.join(0.2)

    def wait(self, timeout: float) -> bool:
        """Wait for the job's end; return whether it has come."""
        self._thread.join(timeout)
        return not self.running


def explain(error: Exception, cluster: Cluster) -> SparkDLError:
    """Return what a failed job's exception means, as an error of this package."""
    text = str(error)
    marked = re.search(rf"{re.escape(preflight.MARK)} (.+)", text)
    if marked:
        return (StaleWorkerError if preflight.STALE in marked[1] else PreflightError)(marked[1])
    for name in ("StaleWorkerError", "TransportError", "DataError", "ModelError", "ConfigError"):
        found = re.search(rf"sparkdl\.errors\.{name}: (.+)", text)
        if found:
            from sparkdl import errors as own

            kind: type[SparkDLError] = getattr(own, name)
            return kind(found[1])
    if other := re.search(OTHER_PYTHON, text):
        return PreflightError(
            f"An executor (hosts: {', '.join(cluster.hosts())}) runs Python {other[1]}.{other[2]}, the "
            f"driver {other[3]}. {preflight.REMEDY}"
        )
    if "RefusedError: " not in text and (raised := _raised(text)):
        return raised
    if refused := re.search(rf"{BARRIER_REFUSED}[^\n]*", text):
        return ClusterError(refused[0])
    if cancelled := re.search(r"\bJob \d+ cancelled\b[^\n]*", text):
        return ClusterError(f"Somebody cancelled the Spark job of this fit, or stopped Spark: {cancelled[0]}")
    if re.search(r"exit(ed)?( with)?( code| status)?:? (137|143)\b|Container killed|OOMKilled", text):
        return WorkerLostError(
            "An executor was killed, most likely because it used more memory than it was given (exit 137 or "
            f"143). Python's memory is outside of the JVM's heap: set spark.executor.memoryOverhead to "
            f"{_more_overhead(cluster)} or more, or take fewer workers per executor.\n{text[:2000]}"
        )
    of_rows = re.search(rf"{OF_ROWS}[^\n]*", text)
    if of_rows or isinstance(error, OF_FRAMES):
        return DataError(f"Spark could not compute the rows: {of_rows[0] if of_rows else text[:2000]}")
    lines = re.findall(r"[^\n]*(?:exited unexpectedly|ExecutorLostFailure|SparkException: )[^\n]*", text)
    return WorkerLostError("\n".join([*lines[-1:], text[:4000]]))


def _raised(text: str) -> WorkerError | None:
    """Return the Python exception that a failed task's message tells of, if there is one."""
    found = re.search(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)", text)
    if found is None:
        return None
    task = re.search(r"[Tt]ask (\d+)\.\d+ in stage \S+ \(TID \d+\) \(([^ )]+)", text)
    place = f"Task {task[1]} on {task[2]}" if task else "A task"
    return WorkerError(
        f"{place} failed: {found[1]}", traceback=found[0],
        host=task[2] if task else "", worker=int(task[1]) if task else -1,
    )  # fmt: skip


def run(action: Callable[[], Any], cluster: Cluster) -> Any:
    """Return what a job gives; it is run again where executors lack sparkdl, or a process is bound otherwise.

    Raises:
        SparkDLError: the job failed.
    """
    shipped, stale = False, 0
    while True:
        try:
            return action()
        except Exception as error:
            explained = explain(error, cluster)
            if isinstance(explained, StaleWorkerError) and stale < cluster.slots() + 2:
                stale += 1
            elif lacks_package(explained) and not shipped:
                cluster.ship_package()
                shipped = True
            else:
                raise explained from error


@contextmanager
def other_processes() -> Iterator[None]:
    """Have RDD jobs in a ``with`` block run in Python workers apart, which Spark tells by their environment.

    A job that leaves rows unread has its Python workers ended, keras and compiled functions and all. Before
    the first stage there is nothing to lose, and the workers apart would be one start more.
    """
    context = Cluster().context
    environment = context.environment
    if context in _used:
        environment["SPARKDL_APART"] = "1"
    try:
        yield
    finally:
        environment.pop("SPARKDL_APART", None)  # a job of another thread may have been in here as well


def refuses_barrier(error: SparkDLError) -> bool:
    """Return whether Spark would not start a barrier stage on an RDD such as a coalesced one."""
    return isinstance(error, ClusterError) and BARRIER_REFUSED in str(error)


def lacks_package(error: SparkDLError) -> bool:
    """Return whether a job failed only because executors have no sparkdl."""
    return isinstance(error, PreflightError) and preflight.MISSING in str(error)


def _more_overhead(cluster: Cluster) -> str:
    """Return twice the memory overhead of an executor, in MiB as Spark writes it."""
    units = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2}

    def mebibytes(text: str, default: float) -> float:
        match = re.fullmatch(r"(\d+)([kmgt])?b?", text.lower())
        return int(match[1]) * units[match[2] or "m"] if match else default

    memory = mebibytes(cluster.setting("spark.executor.memory"), 1024)
    present = mebibytes(cluster.setting("spark.executor.memoryOverhead"), max(384, 0.1 * memory))
    return f"{int(max(2 * present, 1024))}m"


def run_rdd(rdd: Any, stage: Stage, *, barrier: bool) -> Callable[[], Any]:
    """Return the action that runs a stage on the partitions of an RDD and collects what it yields."""

    def action() -> Any:
        source = rdd.barrier() if barrier else rdd
        return source.mapPartitions(stage.function).collect()

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


def run_frame(frame: DataFrame, stage: Stage, schema: str, *, barrier: bool) -> Callable[[], Any]:
    """Return the action that runs a stage on the Arrow batches of a DataFrame."""
    return lambda: collect(frame.mapInArrow(stage.function, schema, barrier=barrier))


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
        from sparkdl import frames  # pickled by value, this function would else need sparkdl to be unpickled

        whole = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        for values in run(tuple(map(frames.of_pandas, batch)) for batch in whole):
            yield frames.to_pandas(values)

    if hasattr(functions, "arrow_udf"):  # which Spark has had since 4.1
        arrays = Iterator[frames.ArrowArray]
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

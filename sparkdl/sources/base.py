"""Sources of rows (arrays and RDDs), and their division into partitions for workers.

The first row of a source determines the columns. The driver deals arrays by the rank of each row, and workers
get them from the endpoint. Without a random order, the batches that workers train on together are then those
of a single process (see ``data.batch_plan``). RDDs are dealt by a shuffle of blocks with a stable key, unless
each worker trains on partitions of its own.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike
from pyspark import RDD
from pyspark.sql import SparkSession

from sparkdl.core.vectors import LARGE, Array
from sparkdl.data.array_blocks import ArrayBlocks
from sparkdl.data.arrays import AnyRows, as_rows
from sparkdl.data.bad_values import Fault, Faults, KnownClasses
from sparkdl.data.batch_plan import even_split, ranks
from sparkdl.data.blocks import TRAINING, VALIDATION, Block, rows_per_block
from sparkdl.data.column import as_array
from sparkdl.data.schema import Counts, Sample, Schema, as_pair
from sparkdl.errors import DataError
from sparkdl.spark import jobs
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.jobs import StageFactory
from sparkdl.worker.task_rows import DealtRows, RddRows, ServedRows, TaskRows
from sparkdl.worker.tasks import DealTask, EvaluateTask, PredictBlocksTask, TrainTask

Action = Callable[[], Iterable[Any]]  # runs a job and returns the results of its tasks
MakeAction = Callable[[StageFactory, bool], Action]  # True: all tasks start together
Dealt = RDD[tuple[int, Block]]  # blocks, each with the index of its worker
SMALL_TASK_BYTES = 900 << 10  # Spark logs a warning about a task of more than 1,000 KiB


class NoRowsError(DataError):
    """A row was requested from a source without rows."""


class Source(ABC):
    """The user's rows, from arrays, an RDD, a DataFrame or a function.

    A new kind of rows is a subclass, and its case in ``resolve.make_source``.

    Attributes:
        kind: the kind of rows, as a phrase for error messages.
        partners: the kinds of validation rows that can be dealt together with these training rows, as a
            phrase. Kinds that can be dealt together have the same phrase.
        over_connect: whether the rows can be sent over Spark Connect, which has no RDDs.
        ordered: whether a job can compute the rows one after another in one task, as stateful layers need.
        reshaped: whether values take the shape of the model's input.
        schema: the columns of every row, known once the first row has been read.
        model_name: the name of the model that the rows are for, for the descriptions of jobs in Spark's UI.
        indicator: the column of booleans that marks validation rows, if there is one.
        workers: the number of tasks, once it is known.
        partitions: the number of partitions, if each stays whole on one worker; None: rows may move.
        session: the session of a DataFrame.
        of_a_plan: whether the job computes the rows from the user's own RDD or DataFrame.
        ahead: the number of tasks without rows that precede the workers' tasks. If there are any, results
            arrive task by task, in the order of the tasks, and not all at the end.
        held_batch: the number of rows in an evaluation batch. For evaluation, arrays are dealt in whole
            batches of this size.
        held_most: the number of leading validation rows that are evaluated; None: all.
        whole: whether arrays stay in one partition, because every batch needs the same number of rows or, to
            predict, because a layer carries its state from one batch to the next.
        served: the arrays that the endpoint of the job serves to its tasks; None: there are none.
        shared: the name under which executors keep the rows for other fits; empty: they do not.
    """

    kind: ClassVar[str]
    partners: ClassVar[str]
    over_connect: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    reshaped: ClassVar[bool] = False
    schema: Schema
    model_name = "a model"
    indicator: str | None = None
    workers = 1
    partitions: int | None = None
    session: SparkSession | None = None
    of_a_plan = False
    ahead = 0
    held_batch = 1
    held_most: int | None = None
    whole = False
    served: ArrayBlocks | None = None
    shared = ""

    @abstractmethod
    def peek(self) -> Sample:
        """Return the first row.

        Raises:
            DataError: there are no rows.
        """

    @abstractmethod
    def training(
        self,
        cluster: SparkApplication,
        num_workers: int,
        *,
        seed: int | None,
        validation: Source | None,
        split: float,
    ) -> MakeAction:
        """Return the function that makes the action of a training job."""

    @abstractmethod
    def evaluation(self, cluster: SparkApplication, stages: StageFactory) -> list[tuple[bytes, int]]:
        """Run an evaluation job; return the metric states and row count of each partition with rows."""

    def count(self) -> int | None:
        """Return the number of rows if it is known without a job."""
        return None

    def num_partitions(self) -> int | None:
        """Return the number of partitions; None if the rows are not partitioned."""
        return None

    def faults(self, classes: Mapping[int, KnownClasses], part: int) -> list[Fault]:
        """Return the faults that the driver can find, before workers check all other rows.

        Args:
            classes: the classes of label columns, by the index of the column.
            part: the part that the rows belong to, TRAINING or VALIDATION.
        """
        return []

    def rows_to_serve(self, cluster: SparkApplication, batch_size: int) -> ArrayBlocks | None:
        """Return the rows if an endpoint should serve them, because they are too large to travel in tasks.

        Args:
            cluster: the Spark application, with a task for each slot.
            batch_size: the number of rows of a batch, which stay together.
        """
        return None


class ArraySource(Source):
    """NumPy arrays, or values that convert to arrays, on the driver.

    Args:
        sample: x, y and sample weights, or fewer of them, flattened.

    Raises:
        DataError: the arrays differ in their number of rows, or one is a single number.
    """

    kind, partners, ordered = "arrays", "arrays (x, y) or an RDD of (x, y)", True

    def __init__(self, sample: Sample) -> None:
        self.arrays = tuple(map(as_rows, sample.values, sample.names))
        self.sample = sample
        lengths = [len(array) if array.shape else -1 for array in self.arrays]
        if min(lengths) < 0:
            raise DataError("x and y should be arrays of rows; got a single number.")
        if len(set(lengths)) > 1:
            raise DataError(
                "x and y should have equal numbers of rows; got "
                + ", ".join(f"{name} with {n}" for name, n in zip(sample.names, lengths, strict=True))
                + "."
            )

    def peek(self) -> Sample:
        """Return the first row."""
        if not self.count():
            raise NoRowsError("There are no rows: x has length 0.")
        return self.sample.first_of(self.arrays)

    def faults(self, classes: Mapping[int, KnownClasses], part: int) -> list[Fault]:
        """Return the faults in the arrays; ``part`` is TRAINING or VALIDATION."""
        found = Faults(self.schema, classes)
        columns, keys = self._columns(), np.arange(self.count(), dtype=np.uint64)
        for start in range(0, self.count(), 1 << 16):
            some = slice(start, start + (1 << 16))
            found.note(Block(keys[some], part, tuple(column[some] for column in columns)))
        return found.found()

    def like_a_row(self) -> Sample:
        """Return a row of zeros, or of empty strings, with the shapes and dtypes of the arrays."""
        rows = [
            np.full((1, *array.shape[1:]), "" if array.dtype.kind in "OST" else 0, array.dtype)
            for array in self.arrays
        ]
        return self.sample.first_of(rows)

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.arrays[0])

    def split(self, fraction: float) -> tuple[ArraySource, ArraySource]:
        """Return the leading rows and the last ``fraction`` of rows, as Keras's validation_split does.

        Raises:
            DataError: one of the two parts has no rows.
        """
        at = int(self.count() * (1 - fraction))
        if not 0 < at < self.count():
            raise DataError(
                f"validation_split={fraction} leaves {at} of {self.count()} rows for training and "
                f"{self.count() - at} for validation; both parts need at least one row."
            )
        return self._part(slice(None, at)), self._part(slice(at, None))

    def _part(self, rows: slice) -> ArraySource:
        part = ArraySource(self.sample._replace(values=tuple(array[rows] for array in self.arrays)))
        part.schema, part.held_batch, part.held_most = self.schema, self.held_batch, self.held_most
        return part

    def _columns(self) -> list[AnyRows]:
        """Return the arrays as columns of the schema."""
        pairs = zip(self.schema.columns, self.arrays, strict=True)
        return [column.of(array, "x and y") for column, array in pairs]

    def deal(self, blocks: ArrayBlocks, num_workers: int, seed: int | None, part: int) -> None:
        """Add each worker's rows to ``blocks``. ``ranks`` selects them from the order of all rows.

        Validation rows are dealt in whole batches, so that losses and metrics match those of one process.
        """
        columns = self._columns()
        order = np.arange(self.count())
        if seed is not None and part == TRAINING:
            order = np.random.default_rng(seed).permutation(self.count())
        rows = even_split(self.count(), num_workers)
        size = rows_per_block(self.schema.columns)
        held = order[: self.held_most]
        for worker in range(num_workers):
            if part == VALIDATION:
                places = held[held // self.held_batch % num_workers == worker]
            else:
                places = order[ranks(rows, worker)]
            blocks.add(worker, columns, places, part=part, size=size)

    def training(
        self,
        cluster: SparkApplication,
        num_workers: int,
        *,
        seed: int | None,
        validation: Source | None,
        split: float,
    ) -> MakeAction:
        """Return the function that makes the action of a job over the arrays, which the endpoint serves."""
        source, held = self.split(split) if split else (self, validation)
        self.served = ArrayBlocks(num_workers)
        source.deal(self.served, num_workers, seed, TRAINING)
        shuffled = held if isinstance(held, RddSource) else None
        if isinstance(held, ArraySource):
            held.deal(self.served, num_workers, None, VALIDATION)
        rows = ServedRows(self.served.counts, dealt=DealtRows() if shuffled else None)
        checked = frozenset((TRAINING,) if shuffled else (TRAINING, VALIDATION))

        def make(stages: StageFactory, barrier: bool) -> Action:
            train = stages.make(TrainTask(stages.code, rows, checked=checked))
            if shuffled is None:
                return jobs.run_rdd(_empty(cluster, num_workers), train, barrier=barrier)
            blocks = shuffled.dealt(num_workers, None, stages, part=VALIDATION)
            return jobs.run_dealt(blocks, num_workers, train, barrier=barrier)

        return make

    @property
    def nbytes(self) -> int:
        """The size in bytes of the arrays, or of the columns made from them if that is more."""
        columns = self.count() * sum(column.nbytes for column in self.schema.columns)
        return max(columns, sum(array.nbytes for array in self.arrays))

    def rows_to_serve(self, cluster: SparkApplication, batch_size: int) -> ArrayBlocks | None:
        """Return the rows if a task's share of them exceeds SMALL_TASK_BYTES, with at most one task per slot.

        They are in order, divided among these tasks, in blocks of whole batches.
        """
        num_tasks, size = self._num_tasks(cluster.slots()), rows_per_block(self.schema.columns)
        if self.nbytes <= SMALL_TASK_BYTES * num_tasks:
            return None
        return self._divided(num_tasks, max(size - size % batch_size, batch_size))

    def _num_tasks(self, wanted: int) -> int:
        """Return the number of tasks, at most one per evaluation batch."""
        return 1 if self.whole else max(1, min(wanted, -(-self.count() // self.held_batch)))

    def _divided(self, num_tasks: int, size: int) -> ArrayBlocks:
        """Return the rows in order, divided into tasks of whole evaluation batches.

        Args:
            num_tasks: the number of tasks.
            size: the number of rows of a block.
        """
        blocks, columns = ArrayBlocks(num_tasks), self._columns()
        edges = np.linspace(0, -(-self.count() // self.held_batch), num_tasks + 1).astype(int)
        edges = np.minimum(edges * self.held_batch, self.count())
        for task, (start, stop) in enumerate(pairwise(edges.tolist())):
            blocks.add_range(task, columns, start, stop, size=size)
        return blocks

    def _tasks(self, cluster: SparkApplication) -> tuple[RDD[Any], TaskRows]:
        """Return an RDD with a partition for each task, and the form in which tasks get the rows."""
        if self.served is not None:
            counts = self.served.counts
            return _empty(cluster, len(counts)), ServedRows(counts)
        num_tasks = self._num_tasks(max(cluster.slots(), -(-self.nbytes // cluster.task_bytes)))
        blocks = self._divided(num_tasks, self.count())
        dealt = [(task, blocks.block(task, 0)) for task in range(num_tasks)]
        return _distributed(cluster, dealt, num_tasks), DealtRows()

    def evaluation(self, cluster: SparkApplication, stages: StageFactory) -> list[tuple[bytes, int]]:
        """Run an evaluation job; return the metric states and row count of each partition with rows."""
        tasks, rows = self._tasks(cluster)
        action = jobs.run_rdd(tasks, stages.make(EvaluateTask(stages.code, rows)), barrier=False)
        return jobs.run(
            action, cluster, of_rows=self.of_a_plan, description=f"sparkdl: evaluate {self.model_name}"
        )

    def predictions(self, cluster: SparkApplication, stages: StageFactory) -> list[Any]:
        """Run a prediction job; return the predictions in row order, as a list of parts."""
        tasks, rows = self._tasks(cluster)
        action = jobs.run_rdd(tasks, stages.make(PredictBlocksTask(stages.code, rows)), barrier=False)
        return jobs.run(
            action, cluster, of_rows=self.of_a_plan, description=f"sparkdl: predict with {self.model_name}"
        )


def _empty(cluster: SparkApplication, num_tasks: int) -> RDD[int]:
    """Return an RDD of one small partition per task."""
    rdd: RDD[int] = cluster.context.parallelize(range(num_tasks), num_tasks)
    return rdd


_in_the_jvm = 0  # bytes of rows sent to the JVM since the last garbage collection


def _distributed(cluster: SparkApplication, blocks: list[tuple[int, Block]], parts: int) -> Dealt:
    """Return an RDD of blocks; first free the rows of earlier calls if there were many.

    The JVM keeps the rows of an RDD until Python deletes the objects for it. Py4J's objects refer to each
    other, so that only the garbage collector frees them, and it seldom examines long-lived objects.
    """
    global _in_the_jvm
    if _in_the_jvm > LARGE:
        gc.collect()
        _in_the_jvm = 0
    _in_the_jvm += sum(block.nbytes for _, block in blocks)
    rdd: Dealt = cluster.context.parallelize(blocks, parts)
    return rdd


_first_rows: WeakKeyDictionary[RDD[Any], Any] = WeakKeyDictionary()


def first_row(rdd: RDD[Any], model_name: str) -> Any:
    """Return the first row of an RDD. One small job per RDD reads it, without the other rows."""
    if rdd not in _first_rows:
        with jobs.other_processes():
            text = f"sparkdl: first row for {model_name}"
            rows = jobs.run(lambda: rdd.take(1), application_of(), description=text)
        if not rows:
            raise NoRowsError("There are no rows: the RDD is empty.")
        _first_rows[rdd] = rows[0]
    return _first_rows[rdd]


def sample_of(row: Any, counts: Counts, *, labels: bool = True) -> Sample:
    """Return a row of an RDD as a sample.

    Args:
        row: (x, y) or (x, y, sample_weight); (x,) if ``counts`` has one entry.
        counts: the number of arrays that the model takes for x and for y.
        labels: whether rows must have labels; else (x,) or x is accepted too.

    Raises:
        DataError: the row is not such a tuple.
    """
    row = as_pair(row)
    lengths = (1,) if len(counts) == 1 else (2, 3) if labels else (1, 2, 3)
    if not labels and not (isinstance(row, tuple) and len(row) in lengths) and not _is_labelled(row):
        row = (row,)
    if not isinstance(row, tuple | list) or len(row) not in lengths:
        raise DataError(
            f"Expected an RDD of tuples (x, y), or (x, y, sample_weight); the first row is {str(row)[:80]!r}."
        )
    sample = Sample.of(row, counts)
    return sample.of_row(list(map(first_value, sample.names, sample.values)), sample.values)


def _is_labelled(row: object) -> bool:
    """Return True if a row is a list [x, y] or [x, y, sample_weight], not a list of numbers."""
    return isinstance(row, list) and len(row) in (2, 3) and any(np.ndim(part) for part in row)


def first_value(name: str, value: object, dtype: DTypeLike | None = None) -> Array:
    """Return a value of the first row as an array.

    Raises:
        DataError: the value does not convert to an array.
    """
    try:
        return as_array(value) if dtype is None else np.asarray(value, dtype)
    except (TypeError, ValueError):
        raise DataError(
            f"Expected {name} to be numbers, or arrays of equal shape without nulls; the first row has "
            f"{str(value)[:80]}."
        ) from None


class RddSource(Source):
    """An RDD of tuples.

    Args:
        rdd: the RDD.
        counts: the number of arrays that the model takes for x and for y; one count for rows of x alone.
        labels: whether rows must have labels.
    """

    kind, partners, of_a_plan = "an RDD", ArraySource.partners, True

    def __init__(self, rdd: RDD[Any], counts: Counts = (None, None), *, labels: bool = True) -> None:
        self.rdd, self.counts, self.labels = rdd, counts, labels
        application_of().rebind(rdd)

    def peek(self) -> Sample:
        """Return the first row, which a small job reads."""
        return sample_of(first_row(self.rdd, self.model_name), self.counts, labels=self.labels)

    def num_partitions(self) -> int:
        """Return the number of partitions."""
        return int(jobs.run(self.rdd.getNumPartitions, application_of()))

    def training(
        self,
        cluster: SparkApplication,
        num_workers: int,
        *,
        seed: int | None,
        validation: Source | None,
        split: float,
    ) -> MakeAction:
        """Return the function that makes the action of a job over the RDD, shuffled only if needed."""
        fits = self.num_partitions() == num_workers
        in_place = self.partitions is not None or seed is None and validation is None and fits
        # Coalesced once for all generations of the worker group, so that a worker keeps its partitions.
        rdd = self.rdd if fits or not in_place else self.rdd.coalesce(num_workers)
        if isinstance(validation, ArraySource):
            self.served = ArrayBlocks(num_workers)
            validation.deal(self.served, num_workers, None, VALIDATION)

        def make(stages: StageFactory, barrier: bool) -> Action:
            if in_place:
                place = "partition" if fits else "worker"
                own = RddRows(schema=self.schema, place=place, split=split, split_seed=seed or 0)
                train = stages.make(TrainTask(stages.code, own))
                return jobs.run_rdd(rdd, train, barrier=barrier and fits)
            blocks = self.dealt(num_workers, seed, stages, split=split)
            if isinstance(validation, RddSource):
                blocks = blocks.union(validation.dealt(num_workers, None, stages, part=VALIDATION))
            dealt = DealtRows(held_out=bool(split))
            rows = dealt if self.served is None else ServedRows(self.served.counts, dealt)
            checked = frozenset(() if self.served is None else (VALIDATION,))
            train = stages.make(TrainTask(stages.code, rows, checked=checked, shuffled=seed is not None))
            return jobs.run_dealt(blocks, num_workers, train, barrier=barrier)

        return make

    def dealt(
        self,
        num_workers: int,
        seed: int | None,
        stages: StageFactory,
        *,
        part: int = TRAINING,
        split: float = 0.0,
    ) -> Dealt:
        """Return the RDD of (worker, block) that deals the rows, in random order if seeded.

        Args:
            num_workers: the number of workers.
            seed: the seed of the rows' order; None deals by index.
            stages: the stage factory.
            part: the part that the rows belong to, TRAINING or VALIDATION.
            split: the fraction of the rows that is moved to the validation part.
        """
        rows = RddRows(schema=self.schema, part=part, split=split, split_seed=seed or 0)
        return self.rdd.mapPartitions(stages.make(DealTask(rows, num_workers, seed)).function)

    def evaluation(self, cluster: SparkApplication, stages: StageFactory) -> list[tuple[bytes, int]]:
        """Run an evaluation job; return the metric states and row count of each partition with rows."""
        stage = stages.make(EvaluateTask(stages.code, RddRows(schema=self.schema)))
        action = jobs.run_rdd(self.rdd, stage, barrier=False)
        return jobs.run(
            action, cluster, of_rows=self.of_a_plan, description=f"sparkdl: evaluate {self.model_name}"
        )

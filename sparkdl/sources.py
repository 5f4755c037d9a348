"""What a user hands to fit, evaluate or predict, and how it becomes the partitions of workers.

A source is looked at once on the driver, one row deep, which settles the columns; the rest is read on the
executors. Rows are dealt to workers so that an epoch has the batches of one process (see ``batches``):
arrays by rank on the driver, RDDs and DataFrames by a shuffle of blocks or rows with a stable key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from pyspark import RDD
from pyspark.sql import DataFrame, functions, types

from sparkdl import feed, frames, launch
from sparkdl.batches import even_split, ranks
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed import TRAINING, UNKNOWN, VALIDATION, Block
from sparkdl.heads import AS_IT_IS, Classes, Head
from sparkdl.launch import Cluster, Stage
from sparkdl.schema import Counts, Sample, Schema, as_array, as_pair
from sparkdl.weights import Array


class Source(ABC):
    """Rows from somewhere.

    Attributes:
        schema: what the rows have to be, which is settled once the first of them was looked at.
        indicator: the column of booleans that says which rows are for validation, if there is one.
    """

    schema: Schema
    indicator: str | None = None

    @abstractmethod
    def peek(self) -> Sample:
        """Return the first row.

        Raises:
            DataError: there is none.
        """

    @abstractmethod
    def training(
        self, cluster: Cluster, num_workers: int, *, seed: int | None, validation: Source | None,
        split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job: a function of (how to make a stage, barrier)."""

    @abstractmethod
    def evaluation(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""

    def count(self) -> int | None:
        """Return the number of rows if that is known without a job."""
        return None


class ArraySource(Source):
    """NumPy arrays, or what can be made one, that the driver holds.

    Args:
        sample: x, y and sample weights, or fewer, taken apart.

    Raises:
        DataError: the arrays do not have as many rows.
    """

    def __init__(self, sample: Sample) -> None:
        self.arrays = tuple(_array(value) for value in sample.values)
        self.sample = sample
        lengths = [len(array) if array.ndim else -1 for array in self.arrays]
        if min(lengths) < 0:
            raise DataError("x and y should be arrays of rows; got a single number.")
        if len(set(lengths)) > 1:
            raise DataError(
                "x and y should have as many rows; got "
                + ", ".join(f"{name} with {n}" for name, n in zip(sample.names, lengths, strict=True))
                + "."
            )

    def peek(self) -> Sample:
        """Return the first row."""
        if not self.count():
            raise DataError("There are no rows to train on: x has length 0.")
        return self.sample._replace(values=tuple(as_array(array[0]) for array in self.arrays))

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.arrays[0])

    def split(self, fraction: float) -> tuple[ArraySource, ArraySource]:
        """Return all but the last rows, and the last ones, as Keras's validation_split does."""
        at = int(self.count() * (1 - fraction))
        if not 0 < at < self.count():
            raise DataError(
                f"validation_split={fraction} leaves {at} of {self.count()} rows to train on and "
                f"{self.count() - at} to validate; both parts need rows."
            )
        return self._part(slice(None, at)), self._part(slice(at, None))

    def _part(self, rows: slice) -> ArraySource:
        part = ArraySource(self.sample._replace(values=tuple(array[rows] for array in self.arrays)))
        part.schema = self.schema
        return part

    def _columns(self) -> list[Array]:
        """Return the arrays as columns of the schema."""
        pairs = zip(self.schema.columns, self.arrays, strict=True)
        return [column.of(array, "x and y") for column, array in pairs]

    def dealt(
        self, cluster: Cluster, num_workers: int, seed: int | None, part: int
    ) -> Iterator[tuple[int, Block]]:
        """Yield each worker's rows as blocks: those that rank as its own in the order of the run."""
        arrays = self._columns()
        order = np.arange(self.count())
        if seed is not None and part == TRAINING:
            order = np.random.default_rng(seed).permutation(self.count())
        rows = even_split(self.count(), num_workers)
        size = feed.rows_per_block(self.schema.columns, cluster.task_bytes)
        for worker in range(num_workers):
            places = order[ranks(rows, worker)]
            for start in range(0, len(places), size):
                chosen = places[start : start + size]
                keys = np.arange(start, start + len(chosen), dtype=np.uint64)
                yield worker, Block(keys, part, tuple(array[chosen] for array in arrays))

    def training(
        self, cluster: Cluster, num_workers: int, *, seed: int | None, validation: Source | None,
        split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the arrays, dealt on the driver."""
        source, held = self.split(split) if split else (self, validation)
        dealt = list(source.dealt(cluster, num_workers, seed, TRAINING))
        shuffled: RddSource | None = None
        if isinstance(held, ArraySource):
            dealt += held.dealt(cluster, num_workers, None, VALIDATION)
        elif held is not None:
            assert isinstance(held, RddSource)  # noqa: S101 - require_partner saw to it
            shuffled = held
        rdd, in_place = self._parallelize(cluster, dealt, num_workers)

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            train = stage("train", encoding="dealt")
            if shuffled is not None:
                blocks = rdd.union(shuffled.dealt(num_workers, None, stage, part=VALIDATION))
                return launch.run_dealt(blocks, num_workers, train, barrier=barrier)
            if in_place:
                return launch.run_rdd(rdd, train, barrier=barrier)
            return launch.run_dealt(rdd, num_workers, train, barrier=barrier)

        return make

    def _slices(self, cluster: Cluster) -> Any:
        """Return the rows in their order, a block per slot, or more where they would not go into a task."""
        parts = max(cluster.slots(), -(-sum(array.nbytes for array in self._columns()) // cluster.task_bytes))
        parts = max(1, min(parts, self.count()))
        return cluster.context.parallelize(list(self._in_order(parts)), parts)

    def _in_order(self, parts: int) -> Iterator[tuple[int, Block]]:
        arrays = self._columns()
        edges = np.linspace(0, self.count(), parts + 1).astype(int)
        for index, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            keys = np.arange(start, stop, dtype=np.uint64)
            yield index, Block(keys, TRAINING, tuple(array[start:stop] for array in arrays))

    def evaluation(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        action = launch.run_rdd(self._slices(cluster), stage("evaluate", encoding="dealt"), barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]

    def predictions(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[Any]:
        """Return the predictions of the rows, in order and in a few parts, by a job."""
        action = launch.run_rdd(self._slices(cluster), stage("predict", encoding="dealt"), barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]

    @staticmethod
    def _parallelize(cluster: Cluster, dealt: list[tuple[int, Block]], num_workers: int) -> tuple[Any, bool]:
        """Return an RDD of blocks, and whether its partition k is worker k's, in slices of equal length."""
        piles: list[list[tuple[int, Block]]] = [[] for _ in range(num_workers)]
        for worker, block in dealt:
            piles[worker].append((worker, block))
        if max(sum(block.nbytes for _, block in pile) for pile in piles) > cluster.task_bytes:
            return _in_slices(cluster, dealt), False
        longest = max(map(len, piles))
        first = next(block for _, block in dealt)
        empty = feed.select(first, slice(0, 0))
        slots = [(piles[k] + [(k, empty)] * longest)[:longest] for k in range(num_workers)]
        return cluster.context.parallelize(sum(slots, []), num_workers), True


def _in_slices(cluster: Cluster, dealt: list[tuple[int, Block]]) -> Any:
    """Return an RDD of blocks, cut so that what a task begins with goes into the message that starts it."""
    most = max((block.nbytes for _, block in dealt), default=1)
    together = max(1, cluster.task_bytes // max(1, most))
    return cluster.context.parallelize(dealt, max(1, -(-len(dealt) // together)))


_first_rows: WeakKeyDictionary[RDD[Any], Any] = WeakKeyDictionary()


def first_row(rdd: RDD[Any]) -> Any:
    """Return the first row of an RDD, by a small job that leaves the rest unread, once for each RDD."""
    if rdd not in _first_rows:
        with launch.other_processes():
            rows = launch.run(lambda: rdd.take(1), Cluster())
        if not rows:
            raise DataError("There are no rows to train on: the RDD is empty.")
        _first_rows[rdd] = rows[0]
    return _first_rows[rdd]


def sample_of(row: Any, counts: Counts) -> Sample:
    """Return a row of an RDD, taken apart.

    Args:
        row: (x, y) or (x, y, sample_weight); (x,) where ``counts`` has only that of x.
        counts: how many arrays the model takes for x and for y.

    Raises:
        DataError: it is no such tuple.
    """
    row = as_pair(row)
    if not isinstance(row, tuple | list) or len(row) not in ((2, 3) if len(counts) > 1 else (1,)):
        raise DataError(
            f"Expected an RDD of tuples (x, y), or (x, y, sample_weight); the first row is {str(row)[:80]!r}."
        )
    sample = Sample.of(row, counts)
    return sample._replace(values=tuple(map(_first, sample.names, sample.values)))


def _first(name: str, value: Any, dtype: Any = None) -> Array:
    """Return a value of the first row as an array.

    Raises:
        DataError: it is none.
    """
    try:
        return as_array(value) if dtype is None else np.asarray(value, dtype)
    except (TypeError, ValueError):
        raise DataError(
            f"Expected {name} to be numbers, or arrays of one shape without nulls; the first row has "
            f"{str(value)[:80]}."
        ) from None


class RddSource(Source):
    """An RDD of tuples.

    Args:
        rdd: the RDD.
        counts: how many arrays the model takes for x and for y; one count for rows of x alone.
    """

    def __init__(self, rdd: RDD[Any], counts: Counts = (None, None)) -> None:
        self.rdd, self.counts = rdd, counts

    def peek(self) -> Sample:
        """Return the first row, which is computed by a small job."""
        return sample_of(first_row(self.rdd), self.counts)

    def training(
        self, cluster: Cluster, num_workers: int, *, seed: int | None, validation: Source | None,
        split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the RDD, shuffled only when it must be."""
        common = {"split": split, "split_seed": seed or 0}
        as_it_is = seed is None and validation is None and self.rdd.getNumPartitions() == num_workers

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            if as_it_is:
                train = stage("train", encoding="rows", schema=self.schema, **common)
                return launch.run_rdd(self.rdd, train, barrier=barrier)
            blocks = self.dealt(num_workers, seed, stage, **common)
            if isinstance(validation, RddSource):
                blocks = blocks.union(validation.dealt(num_workers, None, stage, part=VALIDATION))
            elif isinstance(validation, ArraySource):
                held = list(validation.dealt(cluster, num_workers, None, VALIDATION))
                blocks = blocks.union(_in_slices(cluster, held))
            train = stage("train", encoding="dealt")
            return launch.run_dealt(blocks, num_workers, train, barrier=barrier)

        return make

    def dealt(self, num_workers: int, seed: int | None, stage: Callable[..., Stage], **options: Any) -> Any:
        """Return the RDD of (worker, block) that deals the rows, in their own order unless seeded."""
        deal = stage("deal", schema=self.schema, num_workers=num_workers, seed=seed, **options)
        return self.rdd.mapPartitions(deal.function)

    def evaluation(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        run = stage("evaluate", encoding="rows", schema=self.schema)
        action = launch.run_rdd(self.rdd, run, barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]


class FrameSource(Source):
    """Columns of a DataFrame.

    Args:
        frame: the DataFrame.
        sample: the names of the columns of x, y and the sample weights, or fewer, taken apart; a list of
            names is an array of what these columns hold.
        indicator: the column of booleans that says which rows are for validation, if there is one.

    Raises:
        ConfigError: a column is missing, or of a type that is not numbers.
    """

    def __init__(self, frame: DataFrame, sample: Sample, indicator: str | None = None) -> None:
        self.frame, self.indicator = frame, indicator
        if indicator is not None:
            _require_booleans(frame, indicator)
        labels = [value if isinstance(value, str) else ", ".join(value) for value in sample.values]
        self.sample = sample._replace(names=tuple(labels))
        self.selected = [_column(frame, value).alias(f"c{i}") for i, value in enumerate(sample.values)]

    def peek(self) -> Sample:
        """Return the first row, which is computed by a small job."""
        rows = launch.run(lambda: launch.collect(self.frame.select(*self.selected).limit(1)), Cluster())
        if not rows:
            raise DataError("There are no rows to train on: the DataFrame is empty.")
        for name, value in zip(self.sample.names, rows[0], strict=True):
            if value is None:
                raise DataError(
                    f"Expected no nulls in {name}; the first row has one. Drop or fill them first."
                )
        fields = self.frame.select(*self.selected).schema.fields
        kinds = [_numpy_type(field.dataType) for field in fields]
        return self.sample._replace(values=tuple(map(_first, self.sample.names, rows[0], kinds)))

    def _rows(self, width: int, *more: Any) -> DataFrame:
        """Return the columns, a key, and more; weights that are missing are 1."""
        ones = [functions.lit(1.0).alias(f"c{i}") for i in range(len(self.selected), width)]
        key = functions.monotonically_increasing_id().alias(frames.KEY)
        return self.frame.select(*self.selected, *ones, key, *more)

    def training(
        self, cluster: Cluster, num_workers: int, *, seed: int | None, validation: Source | None,
        split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the DataFrame's Arrow batches."""
        schemas = [self.schema, *([validation.schema] if validation is not None else [])]
        schema = max(schemas, key=lambda each: len(each.columns))
        part = functions.lit(TRAINING)
        if self.indicator is not None:
            held = functions.col(f"`{self.indicator}`")
            part = functions.when(held.isNull(), UNKNOWN).when(held, VALIDATION).otherwise(TRAINING)
        frame = self._rows(len(schema.columns), part.cast("int").alias(frames.PART))
        if split:
            drawn = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
            part = functions.when(
                functions.pmod(drawn, functions.lit(1 << 30)) < int(split * (1 << 30)), VALIDATION
            ).otherwise(TRAINING)
            frame = frame.withColumn(frames.PART, part.cast("int"))
        if validation is not None:
            assert isinstance(validation, FrameSource)  # noqa: S101 - require_partner saw to it
            part = functions.lit(VALIDATION).cast("int").alias(frames.PART)
            frame = frame.unionByName(validation._rows(len(schema.columns), part))
        placed = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
        frame = frame.repartition(num_workers, placed)

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            train = stage("train", encoding="arrow", schema=schema, seed=seed)
            return launch.run_frame(frame, train, "nothing int", barrier=barrier)

        return make

    def evaluation(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        part = functions.lit(TRAINING).cast("int").alias(frames.PART)
        run = stage("evaluate", encoding="arrow", schema=self.schema, seed=None)
        frame = self._rows(len(self.schema.columns), part)
        action = launch.run_frame(frame, run, "states binary, rows long", barrier=False)
        return [tuple(row) for row in launch.run(action, cluster)]


Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a row's prediction; by output, if several


def column_of_predictions(
    stage: Callable[..., Stage], schema: Schema, output: Shapes, head: Head = AS_IT_IS
) -> Any:
    """Return the function of Spark SQL that predicts from columns.

    Args:
        stage: what makes stages.
        schema: what every row has to be.
        output: the shape of one row's prediction, or a dict of them.
        head: what the output is; of a classifier's, it gives a struct of prediction, probability and raw.
    """
    kind: Any
    if head.classifies:
        array = types.ArrayType(types.DoubleType())
        pairs = zip(Classes._fields, (types.DoubleType(), array, array), strict=True)
        kind = types.StructType([types.StructField(*pair) for pair in pairs])
    elif isinstance(output, dict):
        kind = types.StructType([types.StructField(name, _nested(shape)) for name, shape in output.items()])
    else:
        kind = _nested(output)
    run = stage("predict", encoding="arrow", schema=schema, output=output, head=head)
    return launch.column_function(run, kind)


def _nested(shape: tuple[int, ...]) -> Any:
    """Return the type of a value of some shape: a float, or an array of such."""
    kind: Any = types.FloatType()
    for _ in () if shape in ((), (1,)) else shape:
        kind = types.ArrayType(kind)
    return kind


def _column(frame: DataFrame, name: str | list[str]) -> Any:
    """Return a column, or several that hold a number each as one of arrays."""
    if isinstance(name, str):
        return _numeric(frame, name)
    return functions.array(*(_numeric(frame, each).cast("double") for each in name))


def _numeric(frame: DataFrame, name: str) -> Any:
    """Return a column as numbers or arrays of numbers, vectors as arrays."""
    if name not in frame.columns:
        raise ConfigError(f"Expected a column {name!r}; the DataFrame has {', '.join(frame.columns)}.")
    kind, column = frame.schema[name].dataType, functions.col(f"`{name}`")
    if kind.typeName() == "vectorudt" or type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column, "float32")
    element = kind
    while isinstance(element, types.ArrayType):
        element = element.elementType
    if not isinstance(element, types.NumericType | types.BooleanType) or isinstance(
        element, types.DecimalType
    ):
        raise ConfigError(
            f"Expected column {name!r} to hold numbers, arrays of numbers or vectors; it holds "
            f'{element.simpleString()}. Convert it first, for one with df.withColumn("{name}", '
            f'df["{name}"].cast("double")).'
        )
    return column


def _numpy_type(kind: Any) -> Any:
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    names = {
        "float": np.float32, "double": np.float64, "tinyint": np.int8, "smallint": np.int16,
        "int": np.int32, "bigint": np.int64, "boolean": np.bool_,
    }  # fmt: skip
    return names[kind.simpleString()]


def make_source(parts: tuple[Any, ...], columns: tuple[Any, ...], counts: Counts, what: str = "x") -> Source:
    """Return the source of what a user handed over.

    Args:
        parts: x, y and sample weights, of which all but the first may be None or missing. x: an array or
            pandas, or a structure of such; an RDD; or a DataFrame.
        columns: the columns of a DataFrame for x and, where rows have labels, for y: a name, or a list or a
            dict of names.
        counts: how many arrays the model takes for x and, where rows have labels, for y.
        what: what errors call x.

    Raises:
        ConfigError: it is none of these; says what to use instead.
        DataError: the arrays have different lengths.
    """
    x, y, weights = (*parts, None, None)[:3]
    if isinstance(x, RDD | DataFrame) or type(x).__module__.startswith("pyspark.sql"):
        if y is not None:
            raise ConfigError(f"y should be left out where {what} is an RDD or a DataFrame with its labels.")
        if isinstance(x, RDD):
            if weights is not None:
                raise ConfigError(
                    f"sample_weight should be left out where {what} is an RDD; its rows may be (x, y, "
                    "sample_weight)."
                )
            return RddSource(x, counts)
        return frame_source(x, (*columns, weights) if weights is not None else columns, counts)
    kind = f"{type(x).__module__}.{type(x).__name__}"
    homes = {base.__module__.split(".")[0] for base in type(x).__mro__}
    if homes & {"tensorflow", "torch", "keras"} or hasattr(x, "__next__") or callable(x):
        raise ConfigError(
            f"{what} should be NumPy arrays or pandas with y, an RDD of (x, y), or a DataFrame; got a "
            f"{kind}. tf.data, generators and torch loaders live in one process: pass the arrays behind "
            "them, or write the data to files and read these with Spark."
        )
    if x is None or isinstance(x, str):
        raise ConfigError(
            f"{what} should be NumPy arrays or pandas with y, an RDD of (x, y), or a DataFrame; got {kind}."
        )
    if len(counts) == 1:
        return ArraySource(Sample.of((x,), counts, (what,)))
    if y is None:
        raise ConfigError(f"y should be given with {what}={kind}; got None.")
    given = (x, y) if weights is None else (x, y, weights)
    return ArraySource(Sample.of(given, counts))


def _require_booleans(frame: DataFrame, name: str) -> None:
    """Check that a column says yes or no.

    Raises:
        ConfigError: there is none of this name, or it holds something else.
    """
    kind = frame.schema[name].dataType if name in frame.columns else None
    if not isinstance(kind, types.BooleanType):
        what = f"it holds {kind.simpleString()}" if kind else f"the DataFrame has {', '.join(frame.columns)}"
        raise ConfigError(
            f"Expected a column {name!r} of booleans, which say what rows are for validation; {what}."
        )


def frame_source(
    frame: DataFrame, columns: tuple[Any, ...], counts: Counts, indicator: str | None = None
) -> FrameSource:  # fmt: skip
    """Return the source of a DataFrame's columns; a list of them for one input is an array.

    Args:
        frame: the DataFrame.
        columns: those of x, y and the sample weights, or fewer: names, or lists or dicts of names.
        counts: how many arrays the model takes for x and for y.
        indicator: the column that says which rows are for validation.
    """
    lengths = [
        len(value) if isinstance(value, list | tuple) and count != 1 else 1
        for value, count in zip(columns, (*counts, None), strict=False)
    ]
    return FrameSource(frame, Sample.of(columns, tuple(lengths)), indicator)


def require_partner(source: Source, held: Source) -> None:
    """Check that validation rows can be dealt together with the training rows.

    Raises:
        ConfigError: they cannot; says what they should be.
    """
    if isinstance(source, FrameSource) is not isinstance(held, FrameSource):
        what = "a DataFrame" if isinstance(source, FrameSource) else "arrays (x, y) or an RDD of (x, y)"
        raise ConfigError(
            f"validation_data should be {what} where the training rows are "
            f"{_kind(source)}; got {_kind(held)}."
        )


def _kind(source: Source) -> str:
    kinds = {ArraySource: "arrays", RddSource: "an RDD", FrameSource: "a DataFrame"}
    return kinds[type(source)]


def _array(values: Any) -> Array:
    return values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)


def share_weights(source: Source, held: Source | None) -> Schema:
    """Return what the rows of a run are: weighted, if those for training or for validation are."""
    schema = source.schema
    if held is None:
        return schema
    held.schema = schema.held(held.schema)
    return schema if schema.weights else schema.with_weights(held.schema)

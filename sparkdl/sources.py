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
from sparkdl.feed import TRAINING, VALIDATION, Block, Column
from sparkdl.launch import Cluster, Stage
from sparkdl.weights import Array

Row = tuple[Array, ...]


def columns_like(row: Row, floatx: str, names: tuple[str, ...]) -> tuple[Column, ...]:
    """Return the columns that rows like this one have: floats in Keras's float type, the rest kept.

    Raises:
        DataError: a value of the row is not made of numbers.
    """
    columns = []
    for name, value in zip(names, row, strict=True):
        if value.dtype.kind not in "biuf":
            raise DataError(f"Expected {name} to be numbers; the first row has {value.dtype} values.")
        columns.append(Column(name, value.shape, floatx if value.dtype.kind == "f" else value.dtype.name))
    return tuple(columns)


class Source(ABC):
    """Rows from somewhere. ``names`` are what errors call the parts of a row."""

    names: tuple[str, ...] = ("features", "label")
    floatx = "float32"

    @abstractmethod
    def peek(self) -> Row:
        """Return the first row.

        Raises:
            DataError: there is none.
        """

    @abstractmethod
    def training(
        self, cluster: Cluster, columns: tuple[Column, ...], num_workers: int, *, seed: int | None,
        validation: Source | None, split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job: a function of (how to make a stage, barrier)."""

    @abstractmethod
    def evaluation(
        self, cluster: Cluster, columns: tuple[Column, ...], stage: Callable[..., Stage]
    ) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""

    def count(self) -> int | None:
        """Return the number of rows if that is known without a job."""
        return None


class ArraySource(Source):
    """NumPy arrays, or what can be made one, that the driver holds.

    Args:
        arrays: one array per part of a row, of equal length.
        names: what errors call them.
    """

    def __init__(self, arrays: tuple[Any, ...], names: tuple[str, ...] = ("x", "y")) -> None:
        self.arrays, self.names = tuple(np.asarray(array) for array in arrays), names[: len(arrays)]
        lengths = [len(array) if array.ndim else -1 for array in self.arrays]
        if min(lengths) < 0:
            raise DataError("x and y should be arrays of rows; got a single number.")
        if len(set(lengths)) > 1:
            raise DataError(
                "x and y should have as many rows; got "
                + ", ".join(f"{name} with {n}" for name, n in zip(self.names, lengths, strict=True))
                + "."
            )

    def peek(self) -> Row:
        """Return the first row."""
        if not len(self.arrays[0]):
            raise DataError("There are no rows to train on: x has length 0.")
        return tuple(array[0] for array in self.arrays)

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
        return tuple(
            ArraySource(tuple(array[part] for array in self.arrays), self.names)
            for part in (slice(None, at), slice(at, None))
        )  # type: ignore[return-value]

    def dealt(
        self, columns: tuple[Column, ...], num_workers: int, seed: int | None, part: int
    ) -> Iterator[tuple[int, Block]]:
        """Yield each worker's rows as blocks: those that rank as its own in the order of the run."""
        arrays = [
            column.of(array, "x and y") if array.dtype == np.object_ else column.cast(array, "x and y")
            for column, array in zip(columns, self.arrays, strict=True)
        ]
        order = np.arange(self.count())
        if seed is not None and part == TRAINING:
            order = np.random.default_rng(seed).permutation(self.count())
        rows, size = even_split(self.count(), num_workers), feed.rows_per_block(columns)
        for worker in range(num_workers):
            places = order[ranks(rows, worker)]
            for start in range(0, len(places), size):
                chosen = places[start : start + size]
                keys = np.arange(start, start + len(chosen), dtype=np.uint64)
                yield worker, Block(keys, part, tuple(array[chosen] for array in arrays))

    def training(
        self, cluster: Cluster, columns: tuple[Column, ...], num_workers: int, *, seed: int | None,
        validation: Source | None, split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the arrays, dealt on the driver."""
        source, held = self.split(split) if split else (self, validation)
        dealt = list(source.dealt(columns, num_workers, seed, TRAINING))
        shuffled: Any = None
        if isinstance(held, ArraySource):
            dealt += held.dealt(columns, num_workers, None, VALIDATION)
        elif held is not None:
            shuffled = held
        rdd = self._parallelize(cluster, dealt, num_workers)

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            blocks = rdd
            if shuffled is not None:
                options = {"columns": columns, "num_workers": num_workers, "seed": None}
                deal = stage("deal", part=VALIDATION, **options)
                blocks = rdd.union(shuffled.rdd.mapPartitions(deal.function))
                blocks = blocks.partitionBy(num_workers, int)
            return launch.run_rdd(blocks, stage("train", encoding="dealt"), barrier=barrier)

        return make

    def _slices(self, cluster: Cluster, columns: tuple[Column, ...]) -> Any:
        """Return the rows in their order as one block, or a few, per slot."""
        parts = max(1, min(cluster.slots(), self.count()))
        return cluster.context.parallelize(list(self._in_order(columns, parts)), parts)

    def _in_order(self, columns: tuple[Column, ...], parts: int) -> Iterator[tuple[int, Block]]:
        arrays = [column.cast(array, "x and y") for column, array in zip(columns, self.arrays, strict=True)]
        edges = np.linspace(0, self.count(), parts + 1).astype(int)
        for index, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            keys = np.arange(start, stop, dtype=np.uint64)
            yield index, Block(keys, TRAINING, tuple(array[start:stop] for array in arrays))

    def evaluation(
        self, cluster: Cluster, columns: tuple[Column, ...], stage: Callable[..., Stage]
    ) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        rdd = self._slices(cluster, columns)
        action = launch.run_rdd(rdd, stage("evaluate", encoding="dealt"), barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]

    def predictions(
        self, cluster: Cluster, columns: tuple[Column, ...], stage: Callable[..., Stage]
    ) -> list[Array]:
        """Return the prediction of each row, in order, by a job."""
        rdd = self._slices(cluster, columns)
        action = launch.run_rdd(rdd, stage("predict", encoding="dealt"), barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]

    @staticmethod
    def _parallelize(cluster: Cluster, dealt: list[tuple[int, Block]], num_workers: int) -> Any:
        """Return an RDD whose partition k holds worker k's blocks: slices of equal length."""
        piles: list[list[tuple[int, Block]]] = [[] for _ in range(num_workers)]
        for worker, block in dealt:
            piles[worker].append((worker, block))
        longest = max(map(len, piles))
        first = next(block for _, block in dealt)
        empty = feed.select(first, slice(0, 0))
        slots = [(piles[k] + [(k, empty)] * longest)[:longest] for k in range(num_workers)]
        return cluster.context.parallelize(sum(slots, []), num_workers)


_first_rows: WeakKeyDictionary[RDD[Any], Any] = WeakKeyDictionary()


class RddSource(Source):
    """An RDD of tuples.

    Args:
        rdd: the RDD.
        names: what errors call the parts of a tuple.
    """

    def __init__(self, rdd: RDD[Any], names: tuple[str, ...] = ("x", "y")) -> None:
        self.rdd, self.names = rdd, names

    def peek(self) -> Row:
        """Return the first row, which is computed by a small job, once for each RDD.

        Such a job leaves its partition unread, and Spark ends a Python worker that does, keras and all.
        """
        if self.rdd not in _first_rows:
            rows = launch.run(lambda: self.rdd.take(1), Cluster())
            if not rows:
                raise DataError("There are no rows to train on: the RDD is empty.")
            _first_rows[self.rdd] = rows[0]
        row = _first_rows[self.rdd]
        if not isinstance(row, tuple | list) or len(row) != len(self.names):
            raise DataError(
                f"Expected an RDD of tuples ({', '.join(self.names)}); the first row is {str(row)[:80]!r}."
            )
        return tuple(np.asarray(part.toArray() if hasattr(part, "toArray") else part) for part in row)

    def training(
        self, cluster: Cluster, columns: tuple[Column, ...], num_workers: int, *, seed: int | None,
        validation: Source | None, split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the RDD, shuffled only when it must be."""
        common = {"columns": columns, "split": split, "split_seed": seed or 0}
        as_it_is = seed is None and validation is None and self.rdd.getNumPartitions() == num_workers

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            if as_it_is:
                return launch.run_rdd(self.rdd, stage("train", encoding="rows", **common), barrier=barrier)
            deal = stage("deal", num_workers=num_workers, seed=seed, **common)
            blocks = self.rdd.mapPartitions(deal.function)
            if validation is not None:
                blocks = blocks.union(self._held(cluster, validation, columns, num_workers, stage))
            return launch.run_rdd(
                blocks.partitionBy(num_workers, int), stage("train", encoding="dealt"), barrier=barrier
            )

        return make

    def evaluation(
        self, cluster: Cluster, columns: tuple[Column, ...], stage: Callable[..., Stage]
    ) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        run = stage("evaluate", encoding="rows", columns=columns)
        action = launch.run_rdd(self.rdd, run, barrier=False)
        return launch.run(action, cluster)  # type: ignore[no-any-return]

    def _held(
        self, cluster: Cluster, validation: Source, columns: tuple[Column, ...], num_workers: int,
        stage: Callable[..., Stage],
    ) -> Any:  # fmt: skip
        if isinstance(validation, ArraySource):
            dealt = list(validation.dealt(columns, num_workers, None, VALIDATION))
            return cluster.context.parallelize(dealt, num_workers)
        assert isinstance(validation, RddSource)  # noqa: S101 - require_partner saw to it
        options = {"columns": columns, "num_workers": num_workers, "seed": None}
        deal = stage("deal", part=VALIDATION, **options)
        return validation.rdd.mapPartitions(deal.function)


class FrameSource(Source):
    """Columns of a DataFrame.

    Args:
        frame: the DataFrame.
        columns: the names of the features column and the label column.

    Raises:
        ConfigError: a column is missing, or of a type that is not numbers.
    """

    def __init__(self, frame: DataFrame, columns: tuple[str, ...]) -> None:
        self.frame, self.names = frame, columns
        for name in columns:
            if name not in frame.columns:
                present = ", ".join(frame.columns)
                raise ConfigError(f"Expected a column {name!r}; the DataFrame has {present}.")
        self.selected = [_numeric(frame, name).alias(f"c{i}") for i, name in enumerate(columns)]

    def peek(self) -> Row:
        """Return the first row, which is computed by a small job."""
        rows = launch.run(lambda: self.frame.select(*self.selected).take(1), Cluster())
        if not rows:
            raise DataError("There are no rows to train on: the DataFrame is empty.")
        for name, value in zip(self.names, rows[0], strict=True):
            if value is None:
                raise DataError(
                    f"Expected no nulls in {name}; the first row has one. Drop or fill them first."
                )
        fields = self.frame.select(*self.selected).schema.fields
        return tuple(
            np.asarray(value, _numpy_type(field.dataType))
            for value, field in zip(rows[0], fields, strict=True)
        )

    def training(
        self, cluster: Cluster, columns: tuple[Column, ...], num_workers: int, *, seed: int | None,
        validation: Source | None, split: float,
    ) -> Callable[[Callable[..., Stage], bool], Callable[[], Any]]:  # fmt: skip
        """Return what makes the action of a job over the DataFrame's Arrow batches."""
        part = functions.lit(TRAINING)
        key = functions.monotonically_increasing_id().alias(frames.KEY)
        frame = self.frame.select(*self.selected, key)
        if split:
            drawn = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
            part = functions.when(
                functions.pmod(drawn, functions.lit(1 << 30)) < int(split * (1 << 30)), VALIDATION
            ).otherwise(TRAINING)
        frame = frame.withColumn(frames.PART, part.cast("int"))
        if validation is not None:
            assert isinstance(validation, FrameSource)  # noqa: S101 - require_partner saw to it
            held = validation.frame.select(*validation.selected, key)
            frame = frame.unionByName(held.withColumn(frames.PART, functions.lit(VALIDATION).cast("int")))
        placed = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
        frame = frame.repartition(num_workers, placed)

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            train = stage("train", encoding="arrow", columns=columns, seed=seed)
            return launch.run_frame(frame, train, "nothing int", barrier=barrier)

        return make

    def evaluation(
        self, cluster: Cluster, columns: tuple[Column, ...], stage: Callable[..., Stage]
    ) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        key = functions.monotonically_increasing_id().alias(frames.KEY)
        part = functions.lit(TRAINING).cast("int").alias(frames.PART)
        run = stage("evaluate", encoding="arrow", columns=columns, seed=None)
        frame = self.frame.select(*self.selected, key, part)
        action = launch.run_frame(frame, run, "states binary, rows long", barrier=False)
        return [tuple(row) for row in launch.run(action, cluster)]


def with_predictions(
    source: FrameSource, stage: Callable[..., Stage], output: tuple[int, ...], output_col: str
) -> DataFrame:
    """Return the source's DataFrame with a column of predictions, lazily.

    Args:
        source: the DataFrame and its features column.
        stage: what makes stages.
        output: the shape of one row's prediction.
        output_col: the name of the new column.

    Raises:
        ConfigError: the DataFrame has such a column already.
    """
    frame = source.frame
    if output_col in frame.columns:
        raise ConfigError(f"The DataFrame has a column {output_col!r} already; pass another output_col.")
    kind: Any = types.FloatType()
    for _ in () if output in ((), (1,)) else output:
        kind = types.ArrayType(kind)
    schema = types.StructType([*frame.schema.fields, types.StructField(output_col, kind)])
    run = stage("predict", encoding="arrow", output=output, output_col=output_col)
    return frame.select("*", *source.selected).mapInArrow(run.function, schema)


def _numeric(frame: DataFrame, name: str) -> Any:
    """Return a column as numbers or arrays of numbers, vectors as arrays."""
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


def make_source(x: Any, y: Any, columns: tuple[str, ...], what: str = "x") -> Source:
    """Return the source of what a user handed over.

    Args:
        x: arrays, pandas, an RDD or a DataFrame.
        y: labels that go with arrays.
        columns: the features column of a DataFrame and, where rows have labels, the label column.
        what: what errors call ``x``.

    Raises:
        ConfigError: it is none of these; says what to use instead.
        DataError: x and y have different lengths.
    """
    labels = len(columns) > 1
    if isinstance(x, RDD | DataFrame) or type(x).__module__.startswith("pyspark.sql"):
        if y is not None:
            raise ConfigError(f"y should be left out where {what} is an RDD or a DataFrame with its labels.")
        if isinstance(x, RDD):
            return RddSource(x, ("x", "y") if labels else ("x",))
        return FrameSource(x, columns)
    kind = f"{type(x).__module__}.{type(x).__name__}"
    if kind.startswith(("tensorflow", "torch", "keras")) or hasattr(x, "__next__") or callable(x):
        raise ConfigError(
            f"{what} should be NumPy arrays or pandas with y, an RDD of (x, y), or a DataFrame; got a "
            f"{kind}. tf.data, generators and torch loaders live in one process: pass the arrays behind "
            "them, or write the data to files and read these with Spark."
        )
    if x is None or isinstance(x, dict | tuple | str):
        raise ConfigError(
            f"{what} should be NumPy arrays or pandas with y, an RDD of (x, y), or a DataFrame; got {kind}. "
            "Models with several inputs are not supported yet."
        )
    if not labels:
        return ArraySource((_array(x),), (what,))
    if y is None:
        raise ConfigError(f"y should be given with {what}={kind}; got None.")
    return ArraySource((_array(x), _array(y)))


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

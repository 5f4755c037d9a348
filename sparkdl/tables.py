"""DataFrames: which columns are rows, how they reach workers, and functions of columns that predict.

Rows are dealt to workers by a shuffle, each with a stable key, and travel as Arrow batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, functions, types

from sparkdl import frames, launch
from sparkdl.cluster import Cluster, cluster_of
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed import TRAINING, UNKNOWN, VALIDATION
from sparkdl.heads import AS_IT_IS, Classes, Head
from sparkdl.launch import Stage
from sparkdl.schema import Column, Counts, Sample, Schema
from sparkdl.sources import NoRowsError, Source, first_value
from sparkdl.weights import Array

INDEX_BITS = 33  # of what monotonically_increasing_id gives: the place in a partition
EXACT = types.FloatType, types.ShortType, types.ByteType, types.BooleanType  # which 32-bit floats hold


class FrameSource(Source):
    """Columns of a DataFrame.

    Args:
        frame: the DataFrame.
        sample: the names of the columns of x, y and the sample weights, or fewer, taken apart; a list of
            names is an array of what these columns hold.
        indicator: the column of booleans that says which rows are for validation, if there is one.
        decode: functions that make arrays of the values of columns, by their names.

    Raises:
        ConfigError: a column is missing, or of a type that is not numbers.

    Attributes:
        decode: the same functions by the places of their columns.
    """

    of_a_plan = True

    def __init__(
        self, frame: DataFrame, sample: Sample, indicator: str | None = None,
        decode: Mapping[str, frames.Decode] | None = None,
    ) -> None:  # fmt: skip
        self.frame, self.indicator, self.session = frame, indicator, frame.sparkSession
        cluster_of(self.session).rebind(frame)
        known = decode or {}
        self.decode = {
            place: known[value]
            for place, value in enumerate(sample.values)
            if isinstance(value, str) and value in known
        }
        if indicator is not None:
            _require_booleans(frame, indicator)
        self._names = sample.values
        labels = [value if isinstance(value, str) else ", ".join(value) for value in sample.values]
        self.sample = sample._replace(names=tuple(labels))
        self.selected = self._select()

    def features(self) -> list[Any]:
        """Return the columns for a function that predicts: vectors as they store their numbers."""
        return self._select(sparse=[place for place in self._vectors() if place not in self.decode])

    def _vectors(self) -> list[int]:
        return [place for place, name in enumerate(self._names) if _is_vector(self.frame, name)]

    def _select(self, raw: Sequence[int] = (), sparse: Sequence[int] = ()) -> list[Any]:
        """Return the columns as numbers and arrays; some as they are, some vectors without zeros."""
        kept = {*self.decode, *raw}
        return [
            _column(self.frame, name, raw=place in kept, sparse=place in sparse).alias(f"c{place}")
            for place, name in enumerate(self._names)
        ]

    def peek(self) -> Sample:
        """Return the first row, which is computed by a small job.

        Raises:
            ConfigError: the DataFrame is a stream.
            DataError: there is no row, or it does not do.
        """
        if self.frame.isStreaming:
            raise ConfigError(
                "The DataFrame is a stream, whose rows never end. Train on each of its batches, with "
                "df.writeStream.foreachBatch(lambda batch, number: spark_model.fit(batch)), or predict it."
            )
        first = self.frame.select(*self._select(raw=self._vectors())).limit(1)
        rows = launch.run(lambda: launch.collect(first), cluster_of(self.session))
        if not rows:
            raise NoRowsError("There are no rows: the DataFrame is empty.")
        for name, value in zip(self.sample.names, rows[0], strict=True):
            if value is None:
                raise DataError(
                    f"Expected no nulls in {name}; the first row has one. Drop or fill them first."
                )
        fields = self.frame.select(*self.selected).schema.fields
        values = [self._first(place, value, fields[place]) for place, value in enumerate(rows[0])]
        undecoded = [None if place in self.decode else value for place, value in enumerate(rows[0])]
        return self.sample.of_row(values, undecoded)

    def _first(self, place: int, value: Any, field: Any) -> Array:
        name = self.sample.names[place]
        if place not in self.decode:
            kind = _numpy_type(field.dataType)
            return first_value(name, value.toArray() if hasattr(value, "toArray") else value, kind)
        found = frames.decoded(_as_on_executors(value), name, "the first row", self.decode[place])
        return first_value(name, found)

    def num_partitions(self) -> int:
        """Return how many partitions there are, as they are when rows are read.

        Raises:
            ConfigError: nobody tells, over Spark Connect.
        """
        cluster = cluster_of(self.session)
        if cluster.remote:
            raise ConfigError(
                "preserve_partitions=True needs to know how many partitions there are, which Spark Connect "
                "does not tell. Leave it out, or take a SparkSession without remote()."
            )
        rows = self.frame.select(*self.selected)
        return int(launch.run(lambda: launch.num_partitions(rows), cluster))

    def _rows(self, columns: Sequence[Column], *more: Any) -> DataFrame:
        """Return the columns of a schema, a key, and more; weights that are missing are 1."""
        selected = self._select(sparse=[place for place, column in enumerate(columns) if column.sparse])
        ones = [functions.lit(1.0).alias(f"c{i}") for i in range(len(selected), len(columns))]
        key = functions.monotonically_increasing_id().alias(frames.KEY)
        return self.frame.select(*selected, *ones, key, *more)

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
        frame = self._rows(schema.columns, part.cast("int").alias(frames.PART))
        if split:
            drawn = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
            part = functions.when(
                functions.pmod(drawn, functions.lit(1 << 30)) < int(split * (1 << 30)), VALIDATION
            ).otherwise(TRAINING)
            frame = frame.withColumn(frames.PART, part.cast("int"))
        if validation is not None:
            assert isinstance(validation, FrameSource)  # noqa: S101 - require_partner saw to it
            part = functions.lit(VALIDATION).cast("int").alias(frames.PART)
            frame = frame.unionByName(validation._rows(schema.columns, part))
        moves = seed is not None or validation is not None or self.ahead or cluster.remote
        if self.partitions is None and not moves and self.num_partitions() == num_workers:
            self.partitions = num_workers
        coalesced = self.partitions is not None and self.partitions > num_workers
        if coalesced:
            frame = frame.coalesce(num_workers)
        elif self.partitions is None:
            if hasattr(frame, "repartitionById"):  # Spark 4.1
                placed = _worker_of(num_workers, seed or 0) + self.ahead
                frame = frame.repartitionById(num_workers + self.ahead, placed.cast("int"))
            else:
                placed = functions.xxhash64(functions.col(frames.KEY), functions.lit(seed or 0))
                frame = frame.repartition(num_workers, placed)

        def make(stage: Callable[..., Stage], barrier: bool) -> Callable[[], Any]:
            order = seed if self.partitions is None else None
            train = stage("train", encoding="arrow", schema=schema, seed=order, decode=self.decode)
            return launch.run_frame(
                frame, train, "data binary", barrier=barrier and not coalesced, streams=bool(self.ahead)
            )

        return make

    def evaluation(self, cluster: Cluster, stage: Callable[..., Stage]) -> list[tuple[bytes, int]]:
        """Return the metric states and the rows of each partition, by a job."""
        part = functions.lit(TRAINING).cast("int").alias(frames.PART)
        run = stage("evaluate", encoding="arrow", schema=self.schema, seed=None, decode=self.decode)
        frame = self._rows(self.schema.columns, part)
        action = launch.run_frame(frame, run, "states binary, rows long", barrier=False)
        return [tuple(row) for row in launch.run(action, cluster)]


def _worker_of(num_workers: int, seed: int) -> Any:
    """Return the worker of each row by its key: the rows of a partition go to the workers in turn.

    Which worker a turn begins with is drawn from the seed, the partition and the number of the turn. Shares
    of a partition differ by one row at most, since its last turn may end early.
    """
    key, count = functions.col(frames.KEY), functions.lit(num_workers)
    position = key.bitwiseAND(functions.lit((1 << INDEX_BITS) - 1))
    turn = functions.floor(position / count)
    drawn = functions.xxhash64(functions.shiftright(key, INDEX_BITS), turn, functions.lit(seed))
    return functions.pmod(position + functions.pmod(drawn, count), count)


Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a row's prediction; by output, if several


def column_of_predictions(
    stage: Callable[..., Stage], schema: Schema, output: Shapes, head: Head = AS_IT_IS,
    decode: Mapping[int, frames.Decode] | None = None,
) -> Any:  # fmt: skip
    """Return the function of Spark SQL that predicts from columns.

    Args:
        stage: what makes stages.
        schema: what every row has to be.
        output: the shape of one row's prediction, or a dict of them.
        head: what the output is; of a classifier's, it gives a struct of prediction, probability and raw.
        decode: what makes arrays of the values of some columns, by their places.
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
    run = stage("predict", encoding="arrow", schema=schema, output=output, head=head, decode=decode)
    return launch.column_function(run, kind)


def _nested(shape: tuple[int, ...]) -> Any:
    """Return the type of a value of some shape: a float, or an array of such."""
    kind: Any = types.FloatType()
    for _ in () if shape in ((), (1,)) else shape:
        kind = types.ArrayType(kind)
    return kind


def _as_on_executors(value: Any) -> Any:
    """Return a value that Spark brought to the driver as Arrow gives it to executors."""
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "asDict"):
        return {name: _as_on_executors(part) for name, part in value.asDict().items()}
    return [_as_on_executors(part) for part in value] if isinstance(value, list) else value


def _column(frame: DataFrame, name: str | list[str], *, raw: bool, sparse: bool) -> Any:
    """Return a column, or several that hold a number each as one of arrays.

    Args:
        frame: the DataFrame.
        name: of the column, or of several.
        raw: whether it is left as it is.
        sparse: whether it is to be vectors, as structs of what they store.
    """
    if sparse and _is_vector(frame, name):
        return functions.unwrap_udt(_existing(frame, str(name)))
    if sparse:
        from pyspark.ml.functions import array_to_vector

        return functions.unwrap_udt(array_to_vector(_column(frame, name, raw=False, sparse=False)))
    if isinstance(name, str):
        return _existing(frame, name) if raw else _numeric(frame, name)
    columns = [_numeric(frame, each) for each in name]
    narrow = all(isinstance(frame.schema[each].dataType, EXACT) for each in name)
    return functions.array(*(column.cast("float" if narrow else "double") for column in columns))


def _existing(frame: DataFrame, name: str) -> Any:
    if name not in frame.columns:
        raise ConfigError(f"Expected a column {name!r}; the DataFrame has {', '.join(frame.columns)}.")
    return functions.col(f"`{name}`")


def _is_vector(frame: DataFrame, name: str | list[str]) -> bool:
    """Return whether a column holds vectors of Spark ML."""
    kind = frame.schema[name].dataType if isinstance(name, str) and name in frame.columns else None
    return type(kind).__name__ == "VectorUDT"


def _numeric(frame: DataFrame, name: str) -> Any:
    """Return a column as numbers or arrays of numbers, vectors as arrays."""
    column = _existing(frame, name)
    kind = frame.schema[name].dataType
    if _is_vector(frame, name):
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column, "float32")
    element, depth = kind, 0
    while isinstance(element, types.ArrayType):
        element, depth = element.elementType, depth + 1
    if not isinstance(element, types.NumericType | types.BooleanType) or isinstance(
        element, types.DecimalType
    ):
        convert = frames.remedy(f'df["{name}"]', element.simpleString(), depth)
        raise ConfigError(
            f"Expected column {name!r} to hold numbers, arrays of numbers or vectors; it holds "
            f"{kind.simpleString()}. {f'Convert it first, {convert}, or pass' if convert else 'Pass'} "
            f'decode={{"{name}": function}}, which makes an array of a value.'
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


def require_free(frame: DataFrame, *names: str) -> None:
    """Check that a DataFrame has no columns of names of ours, and that these differ, as Spark compares names.

    Raises:
        ConfigError: it has one, or two are the same.
    """
    exact = str(frame.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    taken = {each if exact else each.lower() for each in frame.columns}
    ours: set[str] = set()
    for name in names:
        key = name if exact else name.lower()
        if key in taken:
            raise ConfigError(f"The DataFrame has a column {name!r} already; choose another name for ours.")
        if key in ours:
            raise ConfigError(f"Two of our columns would be called {name!r}; give each a name of its own.")
        ours.add(key)


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
    frame: DataFrame, columns: tuple[Any, ...], counts: Counts, indicator: str | None = None,
    decode: Any = None,
) -> FrameSource:  # fmt: skip
    """Return the source of a DataFrame's columns; a list of them for one input is an array.

    Args:
        frame: the DataFrame.
        columns: those of x, y and the sample weights, or fewer: names, or lists or dicts of names.
        counts: how many arrays the model takes for x and for y.
        indicator: the column that says which rows are for validation.
        decode: functions that make arrays of the values of columns, by their names.

    Raises:
        ConfigError: ``decode`` is something else, or a column is missing or cannot be read.
    """
    if decode is not None and not (isinstance(decode, dict) and all(map(callable, decode.values()))):
        raise ConfigError(f"decode should be a dict of functions by the names of columns; got {decode!r}.")
    lengths = [
        len(value) if isinstance(value, list | tuple) and count != 1 else 1
        for value, count in zip(columns, (*counts, None), strict=False)
    ]
    sample = Sample.of(columns, tuple(lengths))
    unread = set(decode or ()).difference(value for value in sample.values if isinstance(value, str))
    if unread and len(counts) > 1:  # one that reads features only may be told of labels too
        raise ConfigError(
            f"decode has functions for {', '.join(map(repr, sorted(unread)))}, and the columns that are read "
            f"are {', '.join(map(repr, sample.values))}."
        )
    made = functools.partial(FrameSource, frame, sample, indicator, decode)
    return launch.run(made, cluster_of(frame.sparkSession))  # type: ignore[no-any-return]

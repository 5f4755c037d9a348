"""DataFrames as sources of rows, and column functions that predict.

A shuffle deals the rows to workers, unless partitions are kept. Each row has a key, its position in
the DataFrame's partitions. Rows travel as Arrow batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np
from pyspark.sql import Column as SqlColumn
from pyspark.sql import DataFrame, functions, types

from sparkdl.core.tree import leaves
from sparkdl.core.vectors import Array
from sparkdl.data import arrow
from sparkdl.data.blocks import TRAINING, UNKNOWN, VALIDATION
from sparkdl.data.column import LISTS, Column, natural
from sparkdl.data.decoding import ArrowDecode, Decode, plain
from sparkdl.data.schema import Counts, Sample, Schema
from sparkdl.errors import ConfigError, DataError
from sparkdl.modeling.classification import AS_IT_IS, ClassPredictions, OutputKind, Shapes
from sparkdl.sources.base import Action, MakeAction, NoRowsError, Source, first_value
from sparkdl.sources.columns import (
    contains_null,
    decodable,
    depth_of,
    folded,
    is_text,
    is_vector,
    numeric,
    numpy_type,
    require_booleans,
    resolve,
    stored,
)
from sparkdl.spark import jobs
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.jobs import StageFactory
from sparkdl.worker.task_rows import ArrowRows
from sparkdl.worker.tasks import EvaluateFrameTask, EvaluateTask, PredictColumnsTask, TrainTask

INDEX_BITS = 33  # the low bits of monotonically_increasing_id: the row's position in its partition
EXACT = types.FloatType, types.ShortType, types.ByteType, types.BooleanType  # exact as 32-bit floats
WHOLE = types.IntegralType, types.BooleanType


class FrameSource(Source):
    """Columns of a DataFrame.

    Args:
        frame: the DataFrame.
        sample: the column names of x; of x and y; or of x, y and the sample weights, flattened. A list of
            names stands for one array made of these columns.
        indicator: the column of booleans that marks validation rows, if there is one.
        decode: functions that convert values of columns to arrays, by column name.
        texts: whether columns of x may hold strings.

    Raises:
        ConfigError: a column is missing or of an unsupported type, or the columns of a list cannot make one
            array.

    Attributes:
        decode: the same functions for values that come from Arrow, by the index of the column in the
            flattened sample.
    """

    kind = partners = "a DataFrame"
    of_a_plan = over_connect = reshaped = True

    def __init__(
        self,
        frame: DataFrame,
        sample: Sample,
        *,
        indicator: str | None = None,
        decode: Mapping[str, Decode] | None = None,
        texts: bool = False,
    ) -> None:
        self.frame, self.indicator, self.session = frame, indicator, frame.sparkSession
        application_of(self.session).rebind(frame)
        self._names = [(value,) if isinstance(value, str) else tuple(value) for value in sample.values]
        self._found = resolve(frame, [*chain(*self._names), *([indicator] if indicator is not None else [])])
        fold = folded(self.session)
        known = {fold(name): function for name, function in (decode or {}).items()}
        single = {place: names[0] for place, names in enumerate(self._names) if len(names) == 1}
        self.decode = {
            place: ArrowDecode(known[fold(name)], decodable(name, self._found[name]))
            for place, name in single.items()
            if fold(name) in known
        }
        if indicator is not None:
            require_booleans(indicator, self._found[indicator].kind)
        self._texts = {
            place for place in leaves(sample.form[:1]) if texts and self._holds_texts(self._names[place])
        }
        parts = tuple(
            len(names) if self._joins(place, names) else 1 for place, names in enumerate(self._names)
        )
        self.sample = sample._replace(names=tuple(map(", ".join, self._names)), parts=parts)
        self.selected = self._select()

    def _holds_texts(self, names: Sequence[str]) -> bool:
        """Return True if columns hold strings.

        Raises:
            ConfigError: only some columns of the list hold strings.
        """
        texts = [name for name in names if is_text(self._found[name].kind)]
        if texts and len(texts) < len(names):
            raise ConfigError(
                f"Expected columns that form one array; got strings in {', '.join(texts)}, but not in all of "
                f"{', '.join(names)}. {LISTS}"
            )
        return bool(texts)

    def _joins(self, place: int, names: Sequence[str]) -> bool:
        """Return True if columns travel separately and executors join them.

        Raises:
            ConfigError: the columns cannot make one array.
        """
        if len(names) == 1:
            return False
        depths = [depth_of(self._found[name].kind) for name in names]
        if max(depths) > 1 and len(set(depths)) > 1:
            kinds = ", ".join(f"{name} {self._found[name].kind.simpleString()}" for name in names)
            raise ConfigError(f"Expected columns that form one array; got {kinds}. {LISTS}")
        return max(depths) > 0 or place in self._texts

    def require_kinds(self, schema: Schema) -> None:
        """Require strings where a schema has strings, numbers where it has numbers, and as many as it has.

        The lengths of arrays and vectors are not known before a job.

        Raises:
            ConfigError: a column holds the wrong kind, or there is a wrong number of columns. The message
                names them.
        """
        for place, (names, column) in enumerate(zip(self._names, schema.columns, strict=True)):
            if place in self.decode:
                continue
            for name in names:
                if column.texts and place not in self._texts:
                    kind = self._found[name].kind.simpleString()
                    raise ConfigError(
                        f"Expected column {name!r} to hold strings; it holds {kind}. Convert it, for "
                        f'example with df.withColumn("{name}", df["{name}"].cast("string")).'
                    )
                if not column.texts:
                    numeric(name, self._found[name])
            single = not any(depth_of(self._found[name].kind) for name in names)
            if single and len(names) != prod(column.shape):
                raise ConfigError(
                    f"The model takes rows of shape {column.shape}; the columns {', '.join(names)} form rows "
                    f"of shape {(len(names),)}. Pass as many columns as a row has values."
                )

    def features(self) -> list[SqlColumn]:
        """Return the columns for a function that predicts; vectors as structs of their stored fields."""
        vectors = [
            place
            for place, names in enumerate(self._names)
            if place not in self.decode and any(is_vector(self._found[name].kind) for name in names)
        ]
        columns = self._select(sparse=vectors)
        if jobs.passes_arrow():
            return columns
        # pandas represents a null in an array of floats by NaN, so the whole array becomes null.
        kinds = [field.dataType for field in self.frame.select(*columns).schema.fields]
        return [
            functions.when(contains_null(column, kind), functions.lit(None)).otherwise(column)
            if isinstance(kind, types.ArrayType)
            else column
            for column, kind in zip(columns, kinds, strict=True)
        ]

    def _select(self, raw: bool = False, sparse: Sequence[int] = ()) -> list[SqlColumn]:
        """Return the columns as numbers and arrays.

        Args:
            raw: whether vectors are left unchanged.
            sparse: the indices in the sample at which vectors, or a single column of arrays, become structs
                of the fields that a vector stores.
        """
        selected = []
        for place, names in enumerate(self._names):
            if len(names) > self.sample.parts[place]:
                selected.append(self._array(names).alias(f"c{place}"))
                continue
            for index, name in enumerate(names):
                found = self._found[name]
                if place in self.decode or place in self._texts or (raw and is_vector(found.kind)):
                    column = found.column
                elif place in sparse and (is_vector(found.kind) or len(names) == 1):
                    column = stored(name, found)
                else:
                    column = numeric(name, found)
                selected.append(column.alias(f"c{place}" if len(names) == 1 else f"c{place}_{index}"))
        return selected

    def _array(self, names: Sequence[str]) -> SqlColumn:
        """Return several columns of numbers as one column of arrays; whole numbers stay whole."""
        kinds = [self._found[name].kind for name in names]
        whole = all(isinstance(kind, WHOLE) for kind in kinds)
        narrow = all(isinstance(kind, EXACT) for kind in kinds)
        target = "bigint" if whole else "float" if narrow else "double"
        return functions.array(*(numeric(name, self._found[name]).cast(target) for name in names))

    def peek(self) -> Sample:
        """Return the first row, which a small job reads.

        Raises:
            ConfigError: the DataFrame is a stream.
            DataError: there are no rows, or the first row cannot be used.
        """
        if self.frame.isStreaming:
            raise ConfigError(
                "The DataFrame is a stream, which has no end. Train on each micro-batch with "
                "df.writeStream.foreachBatch(lambda batch, number: spark_model.fit(batch))."
            )
        first = self.frame.select(*self._select(raw=True)).limit(1)
        text = f"sparkdl: first row for {self.model_name}"
        rows = jobs.run(lambda: jobs.collect(first), application_of(self.session), description=text)
        if not rows:
            raise NoRowsError("There are no rows: the DataFrame is empty.")
        given, fields = iter(rows[0]), iter(self.frame.select(*self.selected).schema.fields)
        values, undecoded = [], []
        for place, parts in enumerate(self.sample.parts):
            own = list(islice(given, parts))
            if any(value is None for value in own):
                raise DataError(
                    f"Expected no nulls in {self.sample.names[place]}; the first row contains one. Drop or "
                    "fill them first."
                )
            arrays = [self._first(place, value, next(fields)) for value in own]
            values.append(natural(arrays) if parts > 1 else arrays[0])
            undecoded.append(None if place in self.decode else tuple(own) if parts > 1 else own[0])
        return self.sample.of_row(values, undecoded)

    def _first(self, place: int, value: object, field: types.StructField) -> Array:
        name = self.sample.names[place]
        if place not in self.decode:
            kind = numpy_type(field.dataType)
            value = value.toArray() if hasattr(value, "toArray") else plain(value)
            return first_value(name, value, kind)
        found = arrow.decoded(plain(value), name, "the first row", self.decode[place].function)
        return first_value(name, found)

    def num_partitions(self) -> int:
        """Return the number of partitions of the rows as they are read.

        Raises:
            ConfigError: the session is one of Spark Connect, which does not report the number.
        """
        cluster = application_of(self.session)
        if cluster.remote:
            raise ConfigError(
                "preserve_partitions=True needs the number of partitions, which Spark Connect does not "
                "report. Leave preserve_partitions out, or use a classic SparkSession, without remote()."
            )
        rows = self.frame.select(*self.selected)
        return int(jobs.run(lambda: jobs.num_partitions(rows), cluster))

    def _rows(self, columns: Sequence[Column], *more: SqlColumn) -> DataFrame:
        """Return the columns of a schema, a key, and further columns; missing weights are 1."""
        selected = self._select(sparse=[place for place, column in enumerate(columns) if column.sparse])
        ones = [
            _ones(column.shape).alias(f"c{place}")
            for place, column in enumerate(columns[len(self._names) :], len(self._names))
        ]
        key = functions.monotonically_increasing_id().alias(arrow.KEY)
        return self.frame.select(*selected, *ones, key, *more)

    def training(
        self,
        cluster: SparkApplication,
        num_workers: int,
        *,
        seed: int | None,
        validation: Source | None,
        split: float,
    ) -> MakeAction:
        """Return the function that makes the action of a job over the DataFrame's Arrow batches."""
        schema = self.schema if validation is None else self.schema.with_held(validation.schema)
        part = functions.lit(TRAINING)
        if self.indicator is not None:
            marks = self._found[self.indicator].column
            part = functions.when(marks.isNull(), UNKNOWN).when(marks, VALIDATION).otherwise(TRAINING)
        frame = self._rows(schema.columns, part.cast("int").alias(arrow.PART))
        if split:
            drawn = functions.xxhash64(functions.col(arrow.KEY), functions.lit(seed or 0))
            part = functions.when(
                functions.pmod(drawn, functions.lit(1 << 30)) < int(split * (1 << 30)), VALIDATION
            ).otherwise(TRAINING)
            frame = frame.withColumn(arrow.PART, part.cast("int"))
        if validation is not None:
            assert isinstance(validation, FrameSource)  # noqa: S101 - require_partner ensures this
            part = functions.lit(VALIDATION).cast("int").alias(arrow.PART)
            held = validation._rows(schema.columns, part)
            frame = _numbers(frame, held).unionByName(_numbers(held, frame))
        moves = seed is not None or validation is not None or self.ahead or cluster.remote
        if self.partitions is None and not moves and self.num_partitions() == num_workers:
            self.partitions = num_workers
        coalesced = self.partitions is not None and self.partitions > num_workers
        if coalesced:
            frame = frame.coalesce(num_workers)
        elif self.partitions is None:
            if cluster.places_rows:
                placed = _worker_of(num_workers, seed or 0) + self.ahead
                frame = frame.repartitionById(num_workers + self.ahead, placed.cast("int"))
            else:
                placed = functions.xxhash64(functions.col(arrow.KEY), functions.lit(seed or 0))
                frame = frame.repartition(num_workers, placed)

        order = seed if self.partitions is None else None
        rows = ArrowRows(schema=schema, seed=order, decode=self.decode)

        def make(stages: StageFactory, barrier: bool) -> Action:
            train = stages.make(TrainTask(stages.code, rows, shuffled=order is not None))
            return jobs.run_frame(
                frame, train, "data binary", barrier=barrier and not coalesced, streams=bool(self.ahead)
            )

        return make

    def evaluation(self, cluster: SparkApplication, stages: StageFactory) -> list[tuple[bytes, int]]:
        """Run an evaluation job; return the metric states and row count of each partition with rows."""
        part = functions.lit(TRAINING).cast("int").alias(arrow.PART)
        task = EvaluateTask(stages.code, ArrowRows(schema=self.schema, decode=self.decode))
        frame = self._rows(self.schema.columns, part)
        stage = stages.make(EvaluateFrameTask(task))
        action = jobs.run_frame(frame, stage, "states binary, rows long", barrier=False)
        found = jobs.run(action, cluster, description=f"sparkdl: evaluate {self.model_name}")
        return [(row.states, row.rows) for row in found]


def _ones(shape: tuple[int, ...]) -> SqlColumn:
    """Return a column of ones: numbers, or nested arrays of a shape."""
    ones = functions.lit(1.0)
    for size in reversed(shape):
        ones = functions.array_repeat(ones, size)
    return ones


def _numbers(frame: DataFrame, other: DataFrame) -> DataFrame:
    """Return a DataFrame for a union with another one: with 0 and 1 for booleans where that has numbers."""
    kinds = [(field.name, field.dataType, other.schema[field.name].dataType) for field in frame.schema.fields]
    return frame.withColumns(
        {
            name: functions.col(name).cast(kind.simpleString().replace("boolean", "tinyint"))
            for name, kind, theirs in kinds
            if numpy_type(kind) is np.bool_ and numpy_type(theirs) is not np.bool_
        }
    )


def _worker_of(num_workers: int, seed: int) -> SqlColumn:
    """Return the worker of each row by its key: the rows of a partition go to the workers round-robin.

    The first worker of each pass is drawn from the seed, the partition and the number of the pass. Workers'
    shares of a partition differ by at most one row, because its last pass may end early. ``worker.rebalance``
    then evens out the totals.
    """
    key, count = functions.col(arrow.KEY), functions.lit(num_workers)
    position = key.bitwiseAND(functions.lit((1 << INDEX_BITS) - 1))
    turn = functions.floor(position / count)
    drawn = functions.xxhash64(functions.shiftright(key, INDEX_BITS), turn, functions.lit(seed))
    return functions.pmod(position + functions.pmod(drawn, count), count)


def column_of_predictions(
    stages: StageFactory,
    output: Shapes,
    head: OutputKind = AS_IT_IS,
    decode: Mapping[int, Decode] | None = None,
) -> Any:
    """Return the function of Spark SQL that predicts from columns.

    Args:
        stages: the stage factory.
        output: the shape of one row's prediction, or a dict of shapes.
        head: the kind of output; a classifier gives a struct of prediction, probability and raw.
        decode: functions that convert values of some columns to arrays, by the index of the column.
    """
    kind: types.DataType
    if head.classifies:
        array = types.ArrayType(types.DoubleType())
        pairs = zip(ClassPredictions._fields, (types.DoubleType(), array, array), strict=True)
        kind = types.StructType([types.StructField(*pair) for pair in pairs])
    elif isinstance(output, dict):
        kind = types.StructType([types.StructField(name, _nested(shape)) for name, shape in output.items()])
    else:
        kind = _nested(output)
    task = PredictColumnsTask(code=stages.code, output=output, head=head, decode=decode or {})
    return jobs.column_function(stages.make(task), kind)


def _nested(shape: tuple[int, ...]) -> types.DataType:
    """Return the Spark type of a value of a shape: a float, or nested arrays of floats."""
    kind: types.DataType = types.FloatType()
    for _ in () if shape in ((), (1,)) else shape:
        kind = types.ArrayType(kind)
    return kind


def require_free(frame: DataFrame, *names: str) -> None:
    """Require names for new columns that are distinct and that the DataFrame does not have yet.

    Whether case matters follows ``spark.sql.caseSensitive``.

    Raises:
        ConfigError: the DataFrame has a column of such a name, or two names are the same.
    """
    fold = folded(frame.sparkSession)
    taken = set(map(fold, frame.columns))
    ours: set[str] = set()
    for name in names:
        key = fold(name)
        if key in taken:
            raise ConfigError(
                f"The DataFrame already has a column {name!r}. Choose another name for the new column."
            )
        if key in ours:
            raise ConfigError(f"Two new columns would have the name {name!r}. Give each a name of its own.")
        ours.add(key)


def frame_source(
    frame: DataFrame,
    columns: tuple[Any, ...],
    counts: Counts,
    indicator: str | None = None,
    decode: Mapping[str, Decode] | None = None,
    *,
    texts: bool = False,
    unread: Collection[str] = (),
) -> FrameSource:
    """Return the source of a DataFrame's columns; a list of columns for one input makes one array.

    Args:
        frame: the DataFrame.
        columns: the columns of x; of x and y; or of x, y and the sample weights: names, or lists or dicts of
            names.
        counts: the number of arrays that the model takes for x and for y.
        indicator: the column that marks validation rows.
        decode: functions that convert values of columns to arrays, by column name.
        texts: whether columns of x may hold strings.
        unread: columns for which ``decode`` may have a function although they are not read.

    Raises:
        ConfigError: ``decode`` is not a dict of functions, or names a column that is not read as a column of
            its own; or ``FrameSource`` refuses a column.
    """
    if decode is not None and not (
        isinstance(decode, dict)
        and all(isinstance(name, str) and callable(function) for name, function in decode.items())
    ):
        raise ConfigError(f"decode should be a dict from column name to function; got {decode!r}.")
    parts = [_alone(value) for value in columns]
    known = (*counts, *counts[-1:])  # there are as many sample weights as labels
    lengths = [
        len(value) if isinstance(value, list | tuple) and count != 1 else 1
        for value, count in zip(parts, known, strict=False)
    ]
    sample = Sample.of(parts, tuple(lengths))

    def make() -> FrameSource:
        if decode:
            fold = folded(frame.sparkSession)
            known = {fold(value) for value in (*sample.values, *unread) if isinstance(value, str)}
            others = [name for name in decode if fold(name) not in known]
            if others:
                raise ConfigError(
                    f"decode has functions for {', '.join(map(repr, sorted(others)))}, but the columns that "
                    f"are read are {', '.join(map(repr, sample.values))}. Use these names; columns of a list "
                    "cannot be decoded."
                )
        return FrameSource(frame, sample, indicator=indicator, decode=decode, texts=texts)

    return jobs.run(make, application_of(frame.sparkSession))


def _alone(columns: Any) -> Any:
    """Return column names, with each one-element list replaced by its element."""
    if isinstance(columns, Mapping):
        return {name: _alone(each) for name, each in columns.items()}
    if not isinstance(columns, list | tuple):
        return columns
    return _alone(columns[0]) if len(columns) == 1 else [_alone(each) for each in columns]

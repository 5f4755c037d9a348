"""Reading and writing of TFRecord files as DataFrames, on executors, without a jar and without TensorFlow.

Reading uses Spark's binaryFile source on any Hadoop file system. Each file is read as a whole by a single
task; files that end in ``.gz`` are decompressed. Executors write through pyarrow's file systems (local, hdfs,
s3, gs) to a temporary folder. The driver then moves the files of the tasks that succeeded, so that the rows
of a task that ran twice appear once.
"""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import math
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession, functions, types

from sparkdl.data import arrow
from sparkdl.data.arrow import RecordBatch
from sparkdl.data.column import remedy
from sparkdl.errors import ConfigError, DataError, short
from sparkdl.process import interrupts
from sparkdl.spark import files, jobs
from sparkdl.spark.application import SparkApplication, application_of, ship
from sparkdl.tfrecords import records
from sparkdl.tfrecords.records import Record, Value

WHOLE = types.LongType, types.IntegerType, types.ShortType, types.ByteType, types.BooleanType
LIMITS = dict(zip(WHOLE, (1 << 63, 1 << 31, 1 << 15, 1 << 7, 0), strict=True))  # booleans take only 0 and 1
REAL = types.FloatType, types.DoubleType
FLOAT_LIMIT = 2.0**128 - 2.0**103  # the least number that rounds to an infinite 32-bit float
TEXT = types.StringType, types.BinaryType
ORDER = {"int64": 0, "float": 1, "bytes": 2}  # float covers int64; bytes do not mix with numbers
INFERRED = {"int64": types.LongType(), "float": types.FloatType(), "bytes": types.BinaryType()}


@short
def read_tfrecords(
    path: str | list[str],
    schema: types.StructType | str | None = None,
    *,
    sequences: bool = False,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Return the records of TFRecord files as rows.

    Args:
        path: files, folders or patterns, as ``spark.read.load`` takes them.
        schema: the columns, a StructType or a string such as "label bigint, image binary, words
            array<string>". A record without a column's feature has a null there; features without a column
            are ignored. None infers the columns by a pass over all records: a feature with at most one value
            in every record is a number or binary, any other an array.
        sequences: whether records are SequenceExamples, whose feature lists become arrays of arrays.
        spark: the session; the active one by default.

    Raises:
        ConfigError: the type of a column matches no kind of feature.
        DataError: without a schema, a feature is bytes in some records and numbers in others, or a record
            cannot be read. Jobs that read the DataFrame fail with it if a record is truncated or corrupt,
            is not an Example, or does not fit a column.
    """
    cluster = application_of(spark)
    session: SparkSession = cluster.session
    ship(cluster)
    found = session.read.format("binaryFile").option("recursiveFileLookup", "true").load(path)
    found = found.select("path", "content")
    kind: Any = schema
    if schema is None:
        kind = _infer(found, cluster, sequences=sequences)
    elif isinstance(schema, str):
        kind = types.StructType.fromDDL(schema)
    for field in kind.fields:
        _kind_of(field, sequences=sequences)

    def rows(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        for name, data in _records_in(batches):
            columns: list[list[object]] = [[] for _ in kind.fields]
            for number, record in enumerate(data):
                place = f"record {number} of {name}"
                parsed = records.parse(record, place, sequence=sequences)
                for column, field in zip(columns, kind.fields, strict=True):
                    column.append(_from_record(parsed, field, place))
                if len(columns) and len(columns[0]) == arrow.ROWS_PER_BATCH:
                    yield arrow.batch_of(columns, kind)
                    columns = [[] for _ in kind.fields]
            yield arrow.batch_of(columns, kind)

    return found.mapInArrow(rows, kind)


def _records_in(batches: Iterator[RecordBatch]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name and the records of each file."""
    for batch in batches:
        for name, content in zip(batch.column(0), batch.column(1), strict=True):
            path, file = name.as_py(), io.BytesIO(content.as_py())
            yield path, _unpacked(file, path) if path.endswith(".gz") else records.read(file, path)


def _unpacked(file: io.BytesIO, path: str) -> Iterator[bytes]:
    """Yield the records of a compressed file."""
    try:
        yield from records.read(gzip.GzipFile(fileobj=file), path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"Expected {path} to be a complete gzip file; reading it failed ({error}). Write the file "
            "again, or remove .gz from its name if it is not compressed."
        ) from error


def _from_record(record: Record, field: types.StructField, place: str) -> object:
    """Return the value of a column in a record; None if the record has none.

    Raises:
        DataError: the feature's values, or their number, do not fit the column.
    """
    kind = field.dataType
    if record.lists is not None and field.name in record.lists:
        lists = record.lists[field.name]
        if not isinstance(kind, types.ArrayType) or not isinstance(kind.elementType, types.ArrayType):
            raise _misfit(field, place, f"a list of {len(lists)} features")
        return [[_cast(each, kind.elementType.elementType, field, place) for each in part] for part in lists]
    values = record.features.get(field.name)
    if values is None:
        return None
    if isinstance(kind, types.ArrayType):
        if isinstance(kind.elementType, types.ArrayType):
            raise _misfit(field, place, "a single feature, not a list of features")
        return [_cast(each, kind.elementType, field, place) for each in values]
    if len(values) != 1:
        if not values:
            return None
        raise _misfit(field, place, f"{len(values)} values")
    return _cast(values[0], kind, field, place)


def _cast(value: Any, kind: types.DataType, field: types.StructField, place: str) -> object:
    if isinstance(kind, types.StringType) and isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _misfit(field, place, "bytes that are not UTF-8") from None
    if isinstance(kind, types.BooleanType) and value in (0, 1):
        return bool(value)
    expected: Any = int if isinstance(kind, WHOLE) else int | float
    expected = bytes if isinstance(kind, types.BinaryType) else expected
    if isinstance(kind, types.StringType) or not isinstance(value, expected):
        raise _misfit(field, place, f"{type(value).__name__} values")
    if isinstance(kind, WHOLE) and not -LIMITS[type(kind)] <= value < LIMITS[type(kind)]:
        raise _misfit(field, place, str(value))
    return float(value) if isinstance(kind, REAL) else value


def _misfit(field: types.StructField, place: str, given: str) -> DataError:
    kind = field.dataType.simpleString()
    return DataError(f"Expected {kind} for the column {field.name!r}; {place} has {given}.")


def _kind_of(field: types.StructField, *, sequences: bool) -> str:
    """Return the kind of feature that holds a column: "int64", "float" or "bytes".

    Raises:
        ConfigError: no kind of feature can hold the column.
    """
    kind, depth = field.dataType, 0
    while isinstance(kind, types.ArrayType):
        kind, depth = kind.elementType, depth + 1
    for name, kinds in (("int64", WHOLE), ("float", REAL), ("bytes", TEXT)):
        if isinstance(kind, kinds) and depth <= 1 + sequences:
            return name
    raise ConfigError(
        f"The column {field.name!r} is {field.dataType.simpleString()}; a record holds numbers, strings, "
        "binary values and arrays of these, and with sequences=True arrays of arrays. "
        f"{_advice(field.name, kind, depth)}, or change its type in the schema that you pass to "
        "read_tfrecords."
    )


def _advice(name: str, kind: types.DataType, depth: int) -> str:
    """Return advice on converting a column to one that a record can hold, as a clause.

    Args:
        name: its name.
        kind: the type of its values, or of the elements of its arrays.
        depth: the nesting depth of its arrays.
    """
    convert = remedy(f'df["{name}"]', kind.simpleString(), depth)
    if isinstance(kind, (*WHOLE, *REAL, *TEXT)):
        return "Pass sequences=True" if depth == 2 else "Flatten the arrays first, with functions.flatten"
    if isinstance(kind, types.StructType):
        return "Select the fields of the struct as columns first"
    if isinstance(kind, types.MapType):
        return "Split the map first into arrays, with functions.map_keys and functions.map_values"
    return f"Convert the column first{', ' * bool(convert)}{convert}"


def _infer(found: DataFrame, cluster: SparkApplication, *, sequences: bool) -> types.StructType:
    """Return the columns that hold the features of all records."""

    def look(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        seen: dict[tuple[str, str], int] = {}
        for name, data in _records_in(batches):
            for number, record in enumerate(data):
                parsed = records.parse(record, f"record {number} of {name}", sequence=sequences)
                for feature, values in parsed.features.items():
                    _note(seen, feature, values, 0 if len(values) <= 1 else 1)
                for feature, lists in (parsed.lists or {}).items():
                    for values in lists or [[]]:
                        _note(seen, feature, values, 2)
        names, depths = list(seen), list(seen.values())
        yield arrow.record(
            {"name": [name for name, _ in names], "kind": [kind for _, kind in names], "depth": depths}
        )

    schema = "name string, kind string, depth long"
    rows = jobs.run(lambda: found.mapInArrow(look, schema).collect(), cluster)
    columns: dict[str, tuple[set[str], int]] = {}
    for name, kind, depth in rows:
        kinds, deepest = columns.get(name, (set(), 0))
        columns[name] = kinds | ({kind} - {""}), max(deepest, depth)
    return types.StructType([_inferred(name, *columns[name]) for name in sorted(columns)])


def _note(seen: dict[tuple[str, str], int], name: str, values: list[Value], depth: int) -> None:
    kinds = {bytes: "bytes", float: "float", int: "int64"}
    key = name, kinds[type(values[0])] if values else ""
    seen[key] = max(seen.get(key, 0), depth)


def _inferred(name: str, kinds: set[str], depth: int) -> types.StructField:
    if "bytes" in kinds and len(kinds) > 1:
        raise DataError(f"The feature {name!r} is bytes in some records and numbers in others.")
    kind: types.DataType = INFERRED[max(kinds, key=lambda each: ORDER[each], default="bytes")]
    for _ in range(depth):
        kind = types.ArrayType(kind)
    return types.StructField(name, kind)


@short
def write_tfrecords(
    frame: DataFrame, path: str, *, sequences: bool = False, overwrite: bool = False, compression: str = ""
) -> int:
    """Write a DataFrame as TFRecord files, one per partition.

    Args:
        frame: columns of numbers, booleans, strings and binary values, of arrays of these, and of vectors.
            64-bit floats become 32-bit floats, the only floats that a record holds. A column
            that is null in a row is left out of its record.
        path: the folder; a plain path is a path of Spark's default file system.
        sequences: whether rows become SequenceExamples: arrays of arrays are their feature lists, all other
            columns their context.
        overwrite: whether to replace an existing folder, once everything is written. If that fails, the old
            folder is restored, or its content is in a folder that the error names.
        compression: "" or "gzip".

    Returns:
        The number of rows written.

    Raises:
        ConfigError: a column has a type that records cannot hold, the compression is unknown, or the session
            is one of Spark Connect.
        DataError: an array has a null in it, a number is beyond the range of 32-bit floats, or Spark cannot
            compute or write the rows.
        FileExistsError: the folder exists, and ``overwrite`` is False.
        OSError: a folder cannot be created, moved or removed.
    """
    if compression not in ("", "gzip"):
        raise ConfigError(f'compression should be "" or "gzip"; got {compression!r}.')
    names = frame.columns
    # mapInArrow looks columns up by name, and fails on a backtick.
    frame = frame.select([_writable(field).alias(f"c{i}") for i, field in enumerate(frame.schema.fields)])
    kinds = (field.dataType for field in frame.schema.fields)
    fields = [types.StructField(name, kind) for name, kind in zip(names, kinds, strict=True)]
    for field in fields:
        _kind_of(field, sequences=sequences)
    context = (cluster := application_of(frame.sparkSession)).context
    if files.exists(path, context=context, of_spark=True) and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it.")
    ship(cluster)
    made = f"{path.rstrip('/')}.{uuid.uuid4().hex}"
    part = functools.partial(
        _write_part,
        folder=f"{files.qualified(made, context=context)}/_temporary",
        fields=fields,
        sequences=sequences,
        packed=compression == "gzip",
    )
    # Only the driver creates the folder, so that a task that outlives its failed job cannot write.
    files.make_folder(f"{made}/_temporary", context=context)
    try:
        write = frame.mapInArrow(part, "name string, rows long").collect
        written = jobs.run(write, cluster, description="sparkdl: write TFRecords")
        for name, _ in written:
            files.move(f"{made}/_temporary/{name}", f"{made}/{name}", context=context)
        files.remove(f"{made}/_temporary", context=context)
    except BaseException:
        with interrupts.held():
            files.remove(made, context=context)
        raise
    files.replace_folder(made, path, context=context)
    return sum(count for _, count in written)


def _write_part(
    batches: Iterator[RecordBatch],
    *,
    folder: str,
    fields: list[types.StructField],
    sequences: bool,
    packed: bool,
) -> Iterator[RecordBatch]:
    """Write a partition's rows; yield the file's name, unique to the task attempt, and the number of rows."""
    context: Any = TaskContext.get()
    name = f"part-{context.partitionId():05d}-{context.taskAttemptId()}.tfrecord{'.gz' * packed}"
    counter = itertools.count()

    def serialized() -> Iterator[bytes]:
        for batch in batches:
            for row in batch.to_pylist():
                place = f"row {next(counter)} of partition {context.partitionId()}"
                yield records.serialize(_to_record(row.values(), fields, place, sequences=sequences))

    with arrow.open_for_writing(f"{folder}/{name}") as file:
        if packed:
            with gzip.GzipFile(fileobj=file, mode="wb") as inner:
                records.write(inner, serialized())
        else:
            records.write(file, serialized())
    yield arrow.record({"name": [name], "rows": [next(counter)]})


def _writable(field: types.StructField) -> Column:
    """Return a column; vectors become arrays."""
    column = functions.col(f"`{field.name.replace('`', '``')}`")
    if type(field.dataType).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return functions.when(column.isNotNull(), vector_to_array(column))
    return column


def _to_record(row: Iterable[Any], fields: list[types.StructField], place: str, *, sequences: bool) -> Record:
    features: dict[str, list[Value]] = {}
    lists: dict[str, list[list[Value]]] = {}
    for field, value in zip(fields, row, strict=True):
        if value is None:
            continue
        make, kind = _plain(field), field.dataType
        try:
            if not isinstance(kind, types.ArrayType):
                features[field.name] = [make(value)]
            elif isinstance(kind.elementType, types.ArrayType):
                lists[field.name] = [list(map(make, part)) for part in value]
            else:
                features[field.name] = list(map(make, value))
        except TypeError:
            raise DataError(
                f"The column {field.name!r} has a null in an array of {place}, which a record cannot hold. "
                f'Fill or remove it first, for example with functions.array_compact("{field.name}").'
            ) from None
        except OverflowError as error:
            raise DataError(
                f"The column {field.name!r} has {error} in {place}, which is beyond the range of the 32-bit "
                "floats that a record holds. Scale the column first."
            ) from None
    return Record(features, lists if sequences else None)


def _plain(field: types.StructField) -> Callable[[Any], Value]:
    """Return the function that converts a column's values to the values of a record."""
    kind = field.dataType
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    if isinstance(kind, types.StringType):
        return str.encode
    return int if isinstance(kind, WHOLE) else _real if isinstance(kind, REAL) else bytes


def _real(value: Any) -> float:
    """Return a number as a float.

    Raises:
        OverflowError: it is finite, but rounds to an infinite 32-bit float.
    """
    number = float(value)
    if FLOAT_LIMIT <= abs(number) < math.inf:
        raise OverflowError(str(number))
    return number

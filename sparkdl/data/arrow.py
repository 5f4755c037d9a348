"""Conversion between Arrow batches and blocks: the path from DataFrame columns to NumPy.

Values that Arrow stores as NumPy does are not copied. This module does not import pyspark.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import fs

from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows
from sparkdl.data.blocks import TRAINING, UNKNOWN, Block, Keys, rows_per_block, scramble
from sparkdl.data.column import LISTS, Column, as_array, axis_of, joined, part_shape, remedy, row_of, share_of
from sparkdl.data.decoding import Decode
from sparkdl.data.sparse import SparseRows, TextRows, entry_of
from sparkdl.errors import DataError
from sparkdl.process.reasons import reason_of, text_of

KEY, PART, NULL = "sparkdl_key", "sparkdl_part", "sparkdl_null"
ArrowArray: TypeAlias = pa.Array
RecordBatch: TypeAlias = pa.RecordBatch
DECODE_INSTEAD = "or predict with decode, as in SparkModel.predict and KerasTransformer"
ROWS_PER_BATCH = 10_000  # Spark's default maximum for an Arrow batch
PIECE = 8 << 20  # maximum bytes of one row; a larger row may not fit into Spark Connect's messages
VECTOR_FIELDS = {"type", "size", "indices", "values"}
ARROW_TYPES = {
    "bigint": "int64",
    "int": "int32",
    "smallint": "int16",
    "tinyint": "int8",
    "boolean": "bool_",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "binary",
}


def column_array(
    values: pa.Array | list[pa.Array],
    column: Column,
    name_row: Callable[[int], str],
    decode: Decode | None = None,
) -> AnyRows:
    """Return an Arrow column as an array of shape (rows, *column.shape), or as sparse or text rows.

    Args:
        values: the column: numbers, strings, lists of any depth, or vectors in Spark ML's layout; or a list
            of columns, which are joined.
        column: the expected shape and dtype.
        name_row: a function that describes a row of the batch.
        decode: a function that converts each value to an array; None if values need no conversion.

    Raises:
        DataError: there are nulls, values of another kind, values that do not fit the dtype, or rows that
            have another shape or cannot be decoded; names the column and the first such row.
    """
    if isinstance(values, list):
        return joined_array(values, column, name_row)
    if not len(values):
        return column.of((), "a batch")
    if decode is not None:
        return _decoded(values, column, name_row, decode)
    if _is_vector(values.type) and not column.texts:
        return _vectors(values, column, name_row)
    flat = _flat_values(values, column, name_row)
    if column.texts:
        return _text_rows(flat, column.shape)
    return column.cast(flat.to_numpy(zero_copy_only=False).reshape(len(values), *column.shape), name_row)


def _text_rows(flat: pa.Array, shape: tuple[int, ...]) -> TextRows:
    """Return the rows of an Arrow array of strings or bytes, without creating Python objects."""
    flat = flat.cast(pa.large_binary())
    _, offsets, data = flat.buffers()
    edges = np.frombuffer(offsets, np.int64)[flat.offset : flat.offset + len(flat) + 1]
    found = np.frombuffer(data or b"", np.uint8)[edges[0] : edges[-1]]
    return TextRows.of_bytes(np.diff(edges).astype(np.int32), found, shape)


def _flat_values(values: pa.Array, column: Column, name_row: Callable[[int], str]) -> pa.Array:
    """Return the values of a column as one flat Arrow array, with the same number for each row.

    Raises:
        DataError: see ``column_array``.
    """
    count, size = len(values), prod(column.shape)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    lengths, nulls = np.ones(count, np.int64), np.asarray(values.is_null())
    (_require_texts if column.texts else _require_numbers)(values.type, column, name_row)
    levels: list[tuple[Array, Array]] = []  # per level: lengths of the arrays, number of arrays per row
    while _is_list(values.type):
        levels.append((np.diff(np.asarray(values.offsets)), lengths))
        lengths = _per_row(levels[-1][0], lengths)
        values = values.flatten()
        if values.null_count:
            nulls = nulls | (_per_row(np.asarray(values.is_null()), lengths) > 0)
    if nulls.any():
        raise _null(column, nulls, name_row)
    wrong = lengths != size
    if wrong.any():
        raise _misshapen(column, wrong, lengths, name_row)
    _require_levels(levels, column, name_row)
    return values


def _require_levels(
    levels: Sequence[tuple[Array, Array]], column: Column, name_row: Callable[[int], str]
) -> None:
    """Raise an error unless nested arrays have the lengths of the column's dimensions.

    ``_flat_values`` has already checked the number of values of each row.

    Raises:
        DataError: a length does not match.
    """
    if len(levels) < 2 or len(column.shape) < 2:
        return  # the values or the column are flat; only the number of values matters
    for (found, per_row), size in zip(levels, column.shape, strict=False):
        if (found != size).any():
            wrong = _per_row((found != size).astype(np.int64), per_row) > 0
            raise DataError(
                f"Expected {column.name} of shape {column.shape}; {name_row(int(np.argmax(wrong)))} has "
                f"nested arrays of other lengths. {share_of(int(wrong.sum()), len(wrong))}"
            )


def grouped(values: Sequence[pa.Array], columns: Sequence[Column]) -> list[pa.Array | list[pa.Array]]:
    """Return the Arrow array of each column, or a list of Arrow arrays if several are joined in one column.

    Raises:
        DataError: the number of Arrow arrays does not match the columns.
    """
    wanted = sum(column.parts for column in columns)
    if len(values) != wanted:
        raise DataError(
            f"Expected {wanted} columns, {', '.join(column.name for column in columns)}; got {len(values)}."
        )
    rest = iter(values)
    return [
        next(rest) if column.parts == 1 else list(itertools.islice(rest, column.parts)) for column in columns
    ]


def joined_array(values: Sequence[pa.Array], column: Column, name_row: Callable[[int], str]) -> AnyRows:
    """Return Arrow columns as one array of shape (rows, *column.shape), or as sparse or text rows.

    Args:
        values: the columns; each has numbers, strings, lists or vectors.
        column: the column that they form.
        name_row: a function that describes a row of the batch.

    Raises:
        DataError: see ``column_array``; or the columns together have a different number of values.
    """
    if not len(values[0]):
        return column.of((), "a batch")
    if any(value.null_count for value in values):
        raise _null(column, np.any([np.asarray(value.is_null()) for value in values], axis=0), name_row)
    shapes = list(map(_shape_of_first, values))
    axis, sizes = axis_of(column.shape, shapes), list(map(prod, shapes))
    if sum(sizes) != prod(column.shape):
        raise DataError(
            f"Expected the columns of {column.name} to form shape {column.shape} ({prod(column.shape)} "
            f"values); {name_row(0)} has {' + '.join(map(str, sizes))} values. {LISTS}"
        )
    parts = []
    for value, shape in zip(values, shapes, strict=True):
        own = replace(column, shape=part_shape(column.shape, axis, prod(shape)), parts=1)
        parts.append(column_array(value, own, name_row))
    if column.texts:
        texts = joined([_with_zeros(part) for part in parts], column.shape)
        return TextRows.of_texts(texts.ravel().tolist(), column.shape)
    if not column.sparse:
        return joined(parts, column.shape)  # type: ignore[arg-type]
    if axis == -1:
        whole = joined([_with_zeros(part) for part in parts], column.shape)
        return SparseRows.of_array(whole, column.shape, column.dtype)
    rows = [
        part if isinstance(part, SparseRows) else SparseRows.of_array(part, part.shape[1:], column.dtype)
        for part in parts
    ]
    return SparseRows.beside(rows, column.shape)


def _with_zeros(rows: AnyRows) -> Array:
    return rows.toarray() if isinstance(rows, SparseRows) else rows


def _shape_of_first(values: pa.Array) -> tuple[int, ...]:
    """Return the shape of an Arrow column's first row; for ragged arrays, its number of values."""
    first = values.slice(0, 1)
    if _is_vector(first.type):
        _, size, _, numbers = first.flatten()
        return (int(size[0].as_py() if size[0].is_valid else len(numbers.flatten())),)
    shape: tuple[int, ...] = ()
    while _is_list(first.type):
        lengths = np.diff(np.asarray(first.offsets))
        first = first.flatten()
        shape = (*shape, int(lengths[0]) if len(lengths) else 0)
    return shape if prod(shape) == len(first) else (len(first),)


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == VECTOR_FIELDS


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _require_texts(kind: pa.DataType, column: Column, name_row: Callable[[int], str]) -> None:
    """Raise an error unless a column holds strings or bytes, or arrays of them."""
    element = kind
    while _is_list(element):
        element = element.value_type
    if not _is_text(element) and not pa.types.is_null(element):
        raise DataError(
            f"Expected {column.name} to hold strings, or arrays of strings; {name_row(0)} has {kind}."
        )


def _is_text(kind: pa.DataType) -> bool:
    of = pa.types
    strings = of.is_string(kind) or of.is_large_string(kind)
    return bool(strings or of.is_binary(kind) or of.is_large_binary(kind))


def _require_numbers(kind: pa.DataType, column: Column, name_row: Callable[[int], str]) -> None:
    """Raise an error unless a column holds numbers, or arrays of numbers."""
    element, depth = kind, 0
    while _is_list(element):
        element, depth = element.value_type, depth + 1
    known = pa.types.is_boolean(element) or pa.types.is_integer(element) or pa.types.is_floating(element)
    if not known and not pa.types.is_null(element):
        convert = remedy("column", str(element), depth) or DECODE_INSTEAD
        raise DataError(
            f"Expected {column.name} to hold numbers, arrays of numbers or vectors; {name_row(0)} has "
            f"{kind}. Convert the column first, {convert}."
        )


def _decoded(values: pa.Array, column: Column, name_row: Callable[[int], str], decode: Decode) -> AnyRows:
    if column.texts:
        made = [decoded(each.as_py(), column.name, name_row(i), decode) for i, each in enumerate(values)]
        return column.of(made, "a batch")
    rows = np.empty((len(values), *column.shape), column.dtype)
    for index, value in enumerate(values):
        if not value.is_valid:
            raise _null(column, np.asarray(values.is_null()), name_row)
        array = decoded(value.as_py(), column.name, name_row(index), decode)
        if not _alike(array.shape, column.shape):
            raise DataError(
                f"Expected {column.name} of shape {column.shape}; the decoded {name_row(index)} has shape "
                f"{array.shape}."
            )
        array = array.reshape(1, *column.shape)
        rows[index] = column.cast(array, functools.partial(_one_row, name_row(index)))[0]
    return rows


def _one_row(name: str, row: int) -> str:
    return name


def decoded(value: object, name: str, row: str, decode: Decode) -> Array:
    """Return the array that the user's function makes of a value.

    Raises:
        DataError: the function failed; names the column and the row.
    """
    try:
        return as_array(decode(value))
    except Exception as error:
        raise DataError(
            f"The function that decodes {name} failed on {row}: {reason_of(error)}", traceback=text_of(error)
        ) from error


def _alike(given: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return True if an array of one shape can be passed to a model that expects the other.

    Both shapes must have the same size. In addition, they must be equal, or differ only by a last dimension
    of 1, or one of them must be flat.
    """
    if prod(given) != prod(expected):
        return False
    return given in (expected, (*expected, 1)) or (*given, 1) == expected or 1 in (len(given), len(expected))


def _vectors(values: pa.Array, column: Column, name_row: Callable[[int], str]) -> AnyRows:
    """Return Spark's vectors, dense or sparse, as one array, or as sparse rows for a sparse column.

    Arrow holds each vector as a struct of type, size, indices and values.
    """
    size = int(np.prod(column.shape, dtype=int))
    nulls = np.asarray(values.is_null())
    if nulls.any():
        raise _null(column, nulls, name_row)
    kinds, sizes, indices, numbers = values.flatten()
    counts = np.diff(np.asarray(numbers.offsets))
    dense = kinds.to_numpy(zero_copy_only=False) == 1
    sizes = np.where(dense, counts, sizes.fill_null(0).to_numpy(zero_copy_only=False))
    wrong = sizes != size
    if wrong.any():
        raise _misshapen(column, wrong, sizes, name_row)
    flat = numbers.flatten().to_numpy(zero_copy_only=False)
    if dense.all() and not column.sparse:
        return column.cast(flat.reshape(len(values), *column.shape), name_row)
    entries, within = np.zeros(len(flat), entry_of(column.dtype)), np.repeat(dense, counts)
    entries["value"] = column.cast(flat, lambda entry: name_row(row_of(entry, counts)))
    entries["index"][within] = np.tile(np.arange(size), int(dense.sum()))
    entries["index"][~within] = indices.flatten().to_numpy(zero_copy_only=False)
    rows = SparseRows.packed(counts, entries, column.shape)
    return rows if column.sparse else rows.toarray()


def _null(column: Column, nulls: Array, name_row: Callable[[int], str]) -> DataError:
    return DataError(
        f"Expected no nulls in {column.name}; {name_row(int(np.argmax(nulls)))} is null or contains one. "
        f"Drop or fill them first, for example with df.dropna(). {share_of(int(nulls.sum()), len(nulls))}"
    )


def _misshapen(column: Column, wrong: Array, lengths: Array, name_row: Callable[[int], str]) -> DataError:
    size, bad = int(np.prod(column.shape, dtype=int)), int(np.argmax(wrong))
    return DataError(
        f"Expected {column.name} of shape {column.shape} ({size} values); {name_row(bad)} has "
        f"{lengths[bad]} values. {share_of(int(wrong.sum()), len(wrong))}"
    )


def _per_row(counts: Array, lengths: Array) -> Array:
    """Return the sum of the counts of each row, where ``lengths[i]`` successive counts belong to row i."""
    sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    ends = np.cumsum(lengths)
    summed: Array = sums[ends] - sums[ends - lengths]
    return summed


def blocks_of_batches(
    batches: Iterable[pa.RecordBatch],
    columns: Mapping[int, Sequence[Column]],
    seed: int | None,
    decode: Mapping[int, Decode] | None = None,
) -> Iterator[Block]:
    """Yield the rows of Arrow batches as blocks.

    Args:
        batches: record batches with the columns that form each expected column, then key and part.
        columns: the expected columns of each part.
        seed: the seed of the rows' order; None keeps the order of the keys.
        decode: functions that convert values to arrays, by the index of the column.
    """
    decode = decode or {}
    for batch in _parts(batches, rows_per_block(columns[TRAINING])) if decode else batches:
        keys = batch.column(batch.schema.get_field_index(KEY)).to_numpy().astype(np.uint64)
        parts = batch.column(batch.schema.get_field_index(PART)).to_numpy()
        if (parts == UNKNOWN).any():
            row = _name_row(keys, int(np.argmax(parts == UNKNOWN)))
            raise DataError(
                f"Expected True or False in the column that marks validation rows; {row} has null."
            )
        for part in np.unique(parts).tolist():
            mask = parts == part
            values = batch.columns[:-2] if mask.all() else batch.filter(pa.array(mask)).columns[:-2]
            own = keys[mask]
            arrays = tuple(
                column_array(value, column, functools.partial(_name_row, own), decode.get(index))
                for index, (value, column) in enumerate(
                    zip(grouped(values, columns[part]), columns[part], strict=True)
                )
            )
            yield Block(own if seed is None else scramble(own, seed), part, arrays)


def _parts(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Yield slices of batches with at most ``size`` rows, because decoding may enlarge values."""
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            yield batch.slice(start, size)


def _name_row(keys: Keys, index: int) -> str:
    """Return the origin of a row, from the monotonically increasing id that Spark gave it."""
    partition, row = divmod(int(keys[index]), 1 << 33)
    return f"row {row} of partition {partition}"


def prediction_array(values: Array) -> pa.Array:
    """Return predictions as an Arrow column: one number per row, or lists as deep as the output."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    depth = values.ndim - 1
    return flat.cast(_list_type(flat, depth)) if depth else flat


def _list_type(array: pa.Array, depth: int) -> pa.DataType:
    kind = array.type
    for _ in range(depth):
        kind = kind.value_type
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def struct_array(names: list[str], columns: list[pa.Array]) -> pa.StructArray:
    """Return columns as one column of structs with these field names."""
    return pa.StructArray.from_arrays(columns, names=names)


def record(columns: Mapping[str, Sequence[object]]) -> pa.RecordBatch:
    """Return a record batch from lists of values by column name."""
    return pa.RecordBatch.from_pydict(columns)


def batch_of(columns: Sequence[Sequence[object]], schema: Any) -> pa.RecordBatch:
    """Return a record batch from columns of values.

    Args:
        columns: the values of each column, as nested lists for a column of arrays; None is a null.
        schema: the Spark columns, a StructType.
    """
    arrays = [
        pa.array(values, _arrow_type(field.dataType))
        for values, field in zip(columns, schema.fields, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[field.name for field in schema.fields])


def _arrow_type(kind: Any) -> pa.DataType:
    if hasattr(kind, "elementType"):
        return pa.list_(_arrow_type(kind.elementType))
    return getattr(pa, ARROW_TYPES[kind.simpleString()])()


def rows_of(data: bytes) -> Iterator[pa.RecordBatch]:
    """Yield bytes in pieces, as batches of one row each."""
    for start in range(0, len(data), PIECE):
        yield record({"data": [data[start : start + PIECE]]})


def open_for_writing(uri: str) -> pa.NativeFile:
    """Return a new file on one of pyarrow's file systems, open for writing; its folder must exist."""
    system, path = fs.FileSystem.from_uri(uri)
    return system.open_output_stream(path, compression=None)


def arrays_of_pandas(batch: Sequence[Any]) -> tuple[pa.Array, ...]:
    """Return columns in pandas as Arrow arrays.

    Args:
        batch: the columns: Series, or DataFrames for structs. The last one may be a DataFrame that marks the
            nulls of the others, since pandas represents a null among floats by NaN.
    """
    *columns, last = batch
    if not hasattr(last, "columns") or not str(last.columns[0]).startswith(NULL):
        return tuple(map(of_pandas, batch))
    masks = (last[name].to_numpy(bool) for name in last.columns)
    return tuple(map(of_pandas, columns, masks))


def of_pandas(values: Any, nulls: Array | None = None) -> pa.Array:
    """Return a pandas Series as an Arrow array, or a DataFrame with the fields of vectors as structs.

    Args:
        values: the Series or DataFrame. NaN is a number, and not a null.
        nulls: a mask of the nulls; None: None in a Series of objects, and a DataFrame's rows without values.
    """
    if hasattr(values, "columns"):
        parts = [of_pandas(values[name]) for name in values.columns]
        nulls = values.isna().all(axis=1).to_numpy() if nulls is None else nulls
        return pa.StructArray.from_arrays(parts, names=list(values.columns), mask=pa.array(nulls))
    if values.dtype.kind == "f":
        return pa.array(values.to_numpy(), mask=nulls, from_pandas=False)
    values = values.map(lambda value: value.toArray() if hasattr(value, "toArray") else value)
    return pa.array(values, from_pandas=False)


def to_pandas(values: pa.Array) -> Any:
    """Return an Arrow array as a pandas Series, structs as a DataFrame."""
    if pa.types.is_struct(values.type):
        return pa.RecordBatch.from_struct_array(values).to_pandas()
    return values.to_pandas()

"""Arrow batches to blocks and back: how the columns of a DataFrame reach NumPy.

Nothing here copies a value that Arrow holds as NumPy would, and nothing here imports pyspark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.errors import DataError
from sparkdl.feed import Block, Column, scramble
from sparkdl.weights import Array

KEY, PART = "sparkdl_key", "sparkdl_part"


def column_array(values: Any, column: Column, place: str) -> Array:
    """Return an Arrow column as one array of shape (rows, *column.shape).

    Raises:
        DataError: nulls, or rows of another shape; names the column and how many rows.
    """
    count, size = len(values), int(np.prod(column.shape, dtype=int))
    if values.null_count:
        raise DataError(
            f"Expected no nulls in {column.name}; {values.null_count} of {count} rows of a batch of {place} "
            "are null. Drop or fill them first, for one with df.dropna()."
        )
    lengths = np.ones(count, np.int64)
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        inner = np.diff(np.asarray(values.offsets))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        lengths = np.add.reduceat(np.append(inner, 0), starts[:-1]) * (lengths > 0) if count else lengths
        values = values.flatten()
    if values.null_count:
        raise DataError(
            f"Expected no nulls inside {column.name}; a batch of {place} has {values.null_count}."
        )
    wrong = lengths != size
    if wrong.any():
        raise DataError(
            f"Expected {column.name} of shape {column.shape}, {size} values; {int(wrong.sum())} of {count} "
            f"rows of a batch of {place} have another number, the first {int(lengths[np.argmax(wrong)])}."
        )
    array = values.to_numpy(zero_copy_only=False)
    return column.cast(array.reshape(count, *column.shape), place)


def blocks_of_batches(
    batches: Iterable[Any], columns: Sequence[Column], partition: int, seed: int | None
) -> Iterator[Block]:
    """Yield the rows of Arrow batches as blocks.

    Args:
        batches: record batches with one column per entry of ``columns``, then key and part.
        columns: what the values have to be.
        partition: the index of the partition, for messages.
        seed: what the order of the rows is drawn from; None keeps that of the keys.
    """
    place = f"partition {partition}"
    for batch in batches:
        keys = batch.column(batch.schema.get_field_index(KEY)).to_numpy().astype(np.uint64)
        parts = batch.column(batch.schema.get_field_index(PART)).to_numpy()
        arrays = tuple(
            column_array(batch.column(index), column, place) for index, column in enumerate(columns)
        )
        if seed is not None:
            keys = scramble(keys, seed)
        for part in np.unique(parts).tolist():
            mask = parts == part
            if mask.all():
                yield Block(keys, part, arrays)
            else:
                yield Block(keys[mask], part, tuple(array[mask] for array in arrays))


def prediction_array(values: Array) -> Any:
    """Return predictions as an Arrow column: one number a row, or lists as deep as the output is."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    depth = values.ndim - 1
    return flat.cast(_list_type(flat, depth)) if depth else flat


def _list_type(array: Any, depth: int) -> Any:
    kind = array.type
    for _ in range(depth):
        kind = kind.value_type
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def record(columns: dict[str, list[Any]]) -> Any:
    """Return a record batch of a few values per column."""
    return pa.RecordBatch.from_pydict(columns)


def append_column(batch: Any, name: str, values: Any) -> Any:
    """Return a record batch with one column more."""
    return pa.RecordBatch.from_arrays(
        [*batch.columns, values], schema=batch.schema.append(pa.field(name, values.type))
    )

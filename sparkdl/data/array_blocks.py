"""Blocks of arrays that the driver holds. Tasks get them from the endpoint, or from Spark.

A block is made when it is requested, so that the driver does not keep all blocks in memory. From the
endpoint, tasks request one block at a time, which travels as a record without pickle (``core.packing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.core import packing
from sparkdl.core.packing import Part
from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows
from sparkdl.data.blocks import TRAINING, Block
from sparkdl.data.sparse import TEXT, SparseRows, TextRows, entry_of, rows_of

Places = NDArray[np.int64]


class _Slice(NamedTuple):
    """The rows of a block, not yet copied."""

    columns: Sequence[AnyRows]
    places: Places | slice
    first: int
    part: int


class ArrayBlocks:
    """The rows of arrays, divided into blocks for each of several tasks.

    Args:
        num_tasks: the number of tasks.
    """

    def __init__(self, num_tasks: int) -> None:
        self._slices: list[list[_Slice]] = [[] for _ in range(num_tasks)]

    def add(self, task: int, columns: Sequence[AnyRows], places: Places, *, part: int, size: int) -> None:
        """Add rows to a task. The keys of the rows are their positions in ``places``.

        Args:
            task: the index of the task.
            columns: the arrays.
            places: the indices of the rows in the arrays.
            part: the kind of the rows, such as ``TRAINING`` or ``VALIDATION`` (``data.blocks``).
            size: the maximum number of rows of a block.
        """
        for start in range(0, len(places), size):
            self._slices[task].append(_Slice(columns, places[start : start + size], start, part))

    def add_range(self, task: int, columns: Sequence[AnyRows], start: int, stop: int, *, size: int) -> None:
        """Add the rows from ``start`` to ``stop`` to a task. Their keys are their indices in the arrays."""
        for first in range(start, stop, size):
            places = slice(first, min(stop, first + size))
            self._slices[task].append(_Slice(columns, places, first, TRAINING))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks of each task."""
        return tuple(map(len, self._slices))

    def block(self, task: int, index: int) -> Block:
        """Return a block of a task.

        Raises:
            IndexError: there is no such task or block.
        """
        columns, places, first, part = self._slices[task][index]
        taken = tuple(column[places] for column in columns)
        return Block(np.arange(first, first + len(taken[0]), dtype=np.uint64), part, taken)


def encode(block: Block) -> list[Part]:
    """Return a block as a record, in a list of buffers."""
    return packing.parts([block.keys, block.part, list(map(_values_of, block.columns))])


def decode(data: bytes) -> Block:
    """Return the block of a record; its arrays are views into it.

    Raises:
        ValueError: ``data`` is not the record of a block.
    """
    try:
        keys, part, columns = packing.unpack(memoryview(data))
        return Block(keys, part, tuple(map(_column_of, columns)))
    except (TypeError, AttributeError, SyntaxError) as error:  # a field has the wrong type
        raise ValueError(f"Expected the record of a block; got other data ({error}).") from error


def _values_of(column: AnyRows) -> object:
    """Return a column as values that a record can hold."""
    if not isinstance(column, SparseRows):
        return column
    own = column.compact()
    kind = TEXT if isinstance(own, TextRows) else own.dtype.name
    return [kind, own.shape[1:], own.spans, own.entries.view(np.uint8)]


def _column_of(values: Any) -> AnyRows:
    if not isinstance(values, list):
        array: Array = values
        return array
    kind, shape, spans, entries = values
    return rows_of(kind)(spans, entries.view(entry_of(kind)), tuple(shape))

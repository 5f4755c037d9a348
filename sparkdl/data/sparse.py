"""Rows of varying size: sparse rows, which store nonzero numbers only, and rows of strings.

The rows are stored one after another in one array. A pair of integers gives the start and the length of each
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparkdl.core.vectors import Array, aligned

Places = NDArray[np.int64]
TEXT = "string"  # Keras's name for the dtype of strings


def entry_of(dtype: str) -> np.dtype[Any]:
    """Return the dtype of an entry: a nonzero number with its index in the row, or a byte of a string."""
    return np.dtype(np.uint8) if dtype == TEXT else np.dtype([("index", np.int32), ("value", dtype)])


class SparseRows:
    """An array of rows that stores nonzero numbers only. Slices share its numbers.

    Args:
        spans: int64, (rows, 2): the start of each row's numbers in ``entries``, and their count.
        entries: the nonzero numbers, one row after another, each with its index in the flattened row. The
            dtype is ``entry_of(dtype)``.
        shape: the shape of a row.
    """

    def __init__(self, spans: Places, entries: Array, shape: tuple[int, ...]) -> None:
        self.spans, self.entries, self._row = spans, entries, shape

    @classmethod
    def of(cls, rows: Sequence[tuple[Array, Array]], shape: tuple[int, ...], dtype: str) -> SparseRows:
        """Create rows. Each one is given as a pair of indices and numbers."""
        counts = np.array([len(indices) for indices, _ in rows], np.int64)
        entries = np.empty(int(counts.sum()), entry_of(dtype))
        if len(entries):
            entries["index"] = np.concatenate([indices for indices, _ in rows])
            entries["value"] = np.concatenate([numbers for _, numbers in rows])
        return cls.packed(counts, entries, shape)

    @classmethod
    def of_array(cls, array: Array, shape: tuple[int, ...], dtype: str) -> SparseRows:
        """Create rows of ``shape`` from an array whose rows have the same number of elements."""
        flat = array.reshape(len(array), prod(shape))
        rows, indices = flat.nonzero()
        entries = np.empty(len(rows), entry_of(dtype))
        entries["index"], entries["value"] = indices, flat[rows, indices]
        return cls.packed(np.bincount(rows, minlength=len(flat)), entries, shape)

    @classmethod
    def beside(cls, parts: Sequence[SparseRows], shape: tuple[int, ...]) -> SparseRows:
        """Create rows that each join one row of every part, in the order of the parts."""
        counts = np.stack([part.spans[:, 1] for part in parts], axis=1)
        ends = np.cumsum(counts).reshape(counts.shape)
        entries = np.empty(int(counts.sum()), parts[0].entries.dtype)
        first = 0
        for part, own, after in zip(parts, counts.T, ends.T, strict=True):
            found = part.compact().entries
            places = np.arange(len(found)) + np.repeat(after - np.cumsum(own), own)
            entries["value"][places], entries["index"][places] = found["value"], found["index"] + first
            first += prod(part.shape[1:])
        return cls.packed(counts.sum(axis=1), entries, shape)

    @classmethod
    def packed(cls, counts: Places, entries: Array, shape: tuple[int, ...]) -> Self:
        """Create rows from entries in the order of the rows; ``counts`` is the number of entries per row."""
        return cls(np.column_stack([np.cumsum(counts) - counts, counts]), entries, shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows as an array."""
        return (len(self.spans), *self._row)

    @property
    def nbytes(self) -> int:
        """The size of these rows in bytes. Other rows in ``entries`` are not counted."""
        return self.spans.nbytes + int(self.spans[:, 1].sum()) * self.entries.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a number."""
        return self.entries.dtype["value"]

    @property
    def row(self) -> int:
        """The average number of entries in a row, rounded up and at least 1."""
        return max(1, -(-int(self.spans[:, 1].sum()) // max(1, len(self.spans))))

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, rows: Array | slice) -> Self:
        return type(self)(self.spans[rows], self.entries, self._row)

    def __reduce__(self) -> tuple[type[SparseRows], tuple[Places, Array, tuple[int, ...]]]:
        own = self.compact()
        return type(self), (own.spans, own.entries, self._row)

    def compact(self) -> Self:
        """Return the same rows with ``entries`` that hold no other rows."""
        starts, counts = self.spans.T
        shifts = np.repeat(starts - np.cumsum(counts) + counts, counts)
        return type(self).packed(counts, self.entries[shifts + np.arange(len(shifts))], self._row)

    def toarray(self) -> Array:
        """Return the rows as a dense array, aligned so that a backend can use it without a copy."""
        dtype = self.entries.dtype["value"]
        array = aligned(prod(self.shape) * dtype.itemsize).view(dtype).reshape(len(self), prod(self._row))
        array[:] = 0
        own = self.compact().entries
        array[np.repeat(np.arange(len(self)), self.spans[:, 1]), own["index"]] = own["value"]
        return array.reshape(self.shape)


class TextRows(SparseRows):
    """An array of rows of strings, stored as bytes.

    A row of one string is stored as its bytes. A row of several strings begins with the length of each string
    in bytes, as int32.
    """

    @classmethod
    def of_texts(cls, texts: Sequence[bytes], shape: tuple[int, ...]) -> TextRows:
        """Create rows from their strings, in the order of the rows."""
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        return cls.of_bytes(lengths, np.frombuffer(b"".join(texts), np.uint8), shape)

    @classmethod
    def of_bytes(cls, lengths: NDArray[np.int32], data: Array, shape: tuple[int, ...]) -> TextRows:
        """Create rows from the bytes of their strings.

        Args:
            lengths: the number of bytes of each string, in the order of the rows.
            data: the bytes of all strings, one after another, as uint8.
            shape: the shape of a row.
        """
        each = prod(shape)
        if each == 1:
            return cls.packed(lengths.astype(np.int64), data, shape)
        rows = lengths.reshape(-1, each)
        counts = rows.sum(axis=1, dtype=np.int64) + 4 * each
        headers = _places(np.cumsum(counts) - counts, 4 * each)
        entries, is_data = np.empty(int(counts.sum()), np.uint8), np.ones(int(counts.sum()), np.bool_)
        is_data[headers] = False
        entries[headers] = np.ascontiguousarray(rows).view(np.uint8).reshape(headers.shape)
        entries[is_data] = data
        return cls.packed(counts, entries, shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows as an array."""
        return np.dtype(object)

    def reshaped(self, shape: tuple[int, ...]) -> TextRows:
        """Return the rows in another shape, which must have the same number of strings per row."""
        return type(self)(self.spans, self.entries, shape)

    def toarray(self) -> Array:
        """Return the rows as an array of bytes objects."""
        each, flat = prod(self._row), np.empty(prod(self.shape), object)
        starts, counts = self.spans.T[:, :, None]
        if each != 1:
            headers = self.entries[_places(starts[:, 0], 4 * each)]
            counts = headers.view(np.int32).astype(np.int64)
            starts = starts + 4 * each + np.cumsum(counts, axis=1) - counts
        flat[:] = [piece.tobytes() for piece in self._pieces(starts, counts)]
        return flat.reshape(self.shape)

    def compact(self) -> Self:
        """Return the same rows with ``entries`` that hold no other rows."""
        return self.packed(self.spans[:, 1], np.frombuffer(b"".join(self.rows()), np.uint8), self._row)

    def rows(self) -> Iterator[memoryview]:
        """Yield the bytes of each row."""
        return self._pieces(*self.spans.T)

    def _pieces(self, starts: Places, counts: Places) -> Iterator[memoryview]:
        data = self.entries.data
        for start, count in zip(starts.ravel().tolist(), counts.ravel().tolist(), strict=True):
            yield data[start : start + count]


def _places(starts: Places, count: int) -> Places:
    """Return the indices of the first ``count`` entries of each row, of shape (rows, count)."""
    return starts[:, None] + np.arange(count)


def rows_of(dtype: str) -> type[SparseRows]:
    """Return the class of sparse or text rows for a column's dtype."""
    return TextRows if dtype == TEXT else SparseRows

"""A column of the rows: its shape and dtype, and the conversion of its values to arrays.

The first row determines shape and dtype, on the driver; the model may change the shape. Predictions take both
from the model, if it declares its inputs. A value that fits is stored in its column's dtype.
Any other value raises a DataError, which names the row where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows, as_bytes, detached
from sparkdl.data.sparse import TEXT, SparseRows, TextRows, entry_of
from sparkdl.errors import ConfigError, DataError

T = TypeVar("T")
Values = Sequence[object]  # the user's values, one per row
TEXT_BYTES = 256  # minimum estimate of a row's strings, in bytes: those of the first row may be short
TEXTS = "string", "large_string", "string_view"  # Spark's and Arrow's types of strings
LISTS = (
    "The columns in a list may hold numbers, vectors and one-dimensional arrays, which are concatenated in "
    "order, or arrays of equal shape, which are stacked along the first or the last dimension of the "
    "model's input or output. Combine other columns into one first, or pass a dict of columns if the model "
    "has several inputs."
)


@dataclass(frozen=True)
class Column:
    """The name, shape and dtype of one column of every row.

    Attributes:
        name: its name in errors.
        shape: the shape of one row's value.
        dtype: the NumPy dtype that it is stored in; "string" for strings.
        sparse: if only nonzero numbers are stored, an estimate of their number in a row; 0 if all
            numbers are stored. For strings, an estimate of the bytes of a row.
        parts: number of DataFrame columns that are joined in it; see ``axis_of``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: int = 0
    parts: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of one row's value as it is stored; an estimate for sparse values and strings."""
        if self.sparse:
            return self.sparse * entry_of(self.dtype).itemsize
        return self.whole_nbytes

    @property
    def whole_nbytes(self) -> int:
        """The bytes of one row's value including zeros; an estimate for strings."""
        return self.sparse if self.texts else prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def texts(self) -> bool:
        """True if the values are strings."""
        return self.dtype == TEXT

    def zeros(self, rows: int = 1) -> Array:
        """Return rows of zeros, or of empty strings."""
        shape = (rows, *self.shape)
        return np.full(shape, b"", object) if self.texts else np.zeros(shape, self.dtype)

    def of(self, values: Values | AnyRows, place: str, first: int = 0) -> AnyRows:
        """Return the values of some rows as an array of shape (rows, *shape), or as sparse or text rows.

        Args:
            values: one value per row.
            place: the source of the rows, for the message.
            first: the index of the first row in that source.

        Raises:
            DataError: a value has a different shape, or does not fit the dtype. The message names the
                first such row, or only ``place`` for strings in place of numbers and for sparse rows of a
                different shape.
        """
        if self.texts:
            return self._of_texts(values, place, first)
        if isinstance(values, TextRows):
            raise DataError(f"Expected {self.name} to be numbers ({self.dtype}); {place} has strings.")
        if isinstance(values, SparseRows):
            if values.shape[1:] != self.shape:
                raise DataError(
                    f"Expected {self.name} of shape {self.shape}; {place} has shape {values.shape[1:]}."
                )
            return self._of_sparse(values, place, first)
        if self.sparse:
            return SparseRows.of(self._each(self._numbers, values, place, first), self.shape, self.dtype)
        try:
            array = np.asarray(values)
            if array.dtype != np.object_ and array.shape[1:] == self.shape:
                return self.cast(array, lambda row: f"row {first + row} of {place}")
        except (ValueError, TypeError, RuntimeError):
            pass  # Ragged, not only numbers, or torch's tensors; the rows are checked one by one.
        rows = self._each(self._row, values, place, first)
        return np.stack(rows) if rows else np.empty((0, *self.shape), self.dtype)

    def _of_texts(self, values: Values | AnyRows, place: str, first: int) -> TextRows:
        """Return the strings of some rows as bytes."""
        if isinstance(values, TextRows) and prod(values.shape[1:]) == prod(self.shape):
            return values.reshaped(self.shape)
        whole = values.toarray() if isinstance(values, SparseRows) else values
        texts = self._each(self._texts, whole, place, first)
        return TextRows.of_texts([text for row in texts for text in row], self.shape)

    def _of_sparse(self, rows: SparseRows, place: str, first: int) -> AnyRows:
        """Return sparse rows in this column's dtype; as an array if the column is dense."""

        def name_row(entry: int) -> str:
            return f"row {first + row_of(entry, own.spans[:, 1])} of {place}"

        own = rows.compact() if rows.entries.dtype != entry_of(self.dtype) else rows
        if own is not rows:
            entries = np.empty(len(own.entries), entry_of(self.dtype))
            entries["index"] = own.entries["index"]
            entries["value"] = self.cast(own.entries["value"], name_row)
            own = SparseRows(own.spans, entries, self.shape)
        return own if self.sparse else own.toarray()

    def _each(
        self, take: Callable[[Any, str, int], T], values: Values | Array, place: str, first: int
    ) -> list[T]:
        """Return the result of ``take`` for each row.

        Raises:
            DataError: ``take`` refused a row. The message names the first such row, and has the number of
                refused rows.
        """
        try:
            return [take(value, place, first + index) for index, value in enumerate(values)]
        except DataError as error:
            refused = sum(not self._takes(take, value) for value in values)
            raise DataError(f"{error} {share_of(refused, len(values))}") from None

    @staticmethod
    def _takes(take: Callable[[Any, str, int], object], value: object) -> bool:
        try:
            take(value, "", 0)
        except DataError:
            return False
        return True

    def _texts(self, value: object, place: str, index: int) -> list[bytes]:
        """Return the strings of a row, as bytes."""
        flat = [value] if isinstance(value, str | bytes) else np.asarray(value, object).ravel().tolist()
        if len(flat) != prod(self.shape) or not all(isinstance(each, str | bytes) for each in flat):
            raise DataError(
                f"Expected {self.name} to be strings of shape {self.shape}; row {index} of {place} has "
                f"{short(value)}."
            )
        return [as_bytes(each, f"{self.name}, row {index} of {place},") for each in flat]

    def _numbers(self, value: Any, place: str, index: int) -> tuple[Array, Array]:
        """Return the indices and the values of a row's nonzero numbers."""
        if not is_sparse(value) or value.size != prod(self.shape):
            flat = self._row(value, place, index).ravel()
            (indices,) = flat.nonzero()
            return indices, flat[indices]
        return value.indices, self.cast(value.values, lambda _: f"row {index} of {place}")

    def _row(self, value: object, place: str, index: int) -> Array:
        try:
            array = as_array(value)
            if array.dtype == object:
                array = _of_objects(array, self.dtype)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"Expected {self.name} to be numbers of shape {self.shape}; row {index} of {place} has "
                f"{short(value)}."
            ) from None
        if array.shape != self.shape:
            raise DataError(
                f"Expected {self.name} of shape {self.shape}; row {index} of {place} has shape {array.shape}."
            )
        cast: Array = self.cast(array[None], lambda _: f"row {index} of {place}")[0]
        return cast

    def first(self, value: Array) -> Array:
        """Return the value of the first row as an array of one row.

        Args:
            value: the value; if several columns are joined in this one, the result of ``natural``.
        """
        shape = (1, *self.shape)
        if self.parts > 1 and len(value) == self.parts:
            value = joined([part[None] for part in value], self.shape)
        if self.texts:
            return self.of(np.reshape(value, shape), "the first rows").toarray()  # type: ignore[union-attr]
        return self.cast(np.reshape(value, shape), lambda _: "the first row")

    def cast(self, array: Array, name_row: Callable[[int], str]) -> Array:
        """Return the rows in this column's dtype.

        Args:
            array: the rows.
            name_row: a function that describes a row.

        Raises:
            DataError: the values are not numbers, or some of them do not fit an integer or boolean dtype.
        """
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {self.name} to be numbers ({self.dtype}); {name_row(0)} has "
                f"{short(array.ravel()[:1].tolist())}."
            )
        with np.errstate(invalid="ignore"):  # NaN is not a whole number; the check below finds it
            result = array.astype(self.dtype, copy=False)
        if result.dtype != array.dtype and result.dtype.kind in "biu" and not (result == array).all():
            bad = int(np.argmax((result != array).reshape(len(array), -1).any(axis=1)))
            raise DataError(
                f"Expected {self.name} to be whole numbers that fit {self.dtype}, as in the first row; "
                f"{name_row(bad)} has {short(array[bad].tolist())}."
            )
        return result


def axis_of(shape: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> int | None:
    """Return the axis along which the columns of a list are stacked into a row of a given shape.

    Args:
        shape: the shape of a row.
        parts: the shape of each column's value.

    Returns:
        0 or -1 if the columns are arrays that are stacked as the first or last dimension of the shape; None
        if their numbers are joined one after the other.
    """
    core, own = _core(shape), _core(parts[0])
    if len(core) < 2 or len(set(parts)) > 1 or len(parts) * prod(own) != prod(core):
        return None
    inner = {0: core[1:], -1: core[:-1]}
    fits = {
        axis for axis, rest in inner.items() if core[axis] == len(parts) and (len(own) < 2 or own == rest)
    }
    return 0 if 0 in fits else -1 if fits else None


def part_shape(shape: tuple[int, ...], axis: int | None, size: int) -> tuple[int, ...]:
    """Return the shape of one column of a list: without the stacked axis, or flat with ``size`` numbers."""
    return (size,) if axis is None else _core(shape)[1:] if axis == 0 else _core(shape)[:-1]


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without trailing dimensions of 1."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def joined(parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return the columns of a list as one array of shape (rows, *shape).

    Args:
        parts: an array per column, all with the same number of rows.
        shape: the shape of a row.
    """
    rows = len(parts[0])
    axis = axis_of(shape, [part.shape[1:] for part in parts])
    if axis == -1:
        inner = part_shape(shape, axis, 0)
        return np.stack([part.reshape(rows, *inner) for part in parts], axis=-1).reshape(rows, *shape)
    return np.concatenate([part.reshape(rows, -1) for part in parts], axis=1).reshape(rows, *shape)


def natural(parts: Sequence[Array]) -> Array:
    """Return the first row's values of the columns in a list as one array.

    Values of one shape are stacked. Otherwise numbers and one-dimensional arrays are joined.

    Raises:
        ConfigError: there are nested arrays of different shapes.
    """
    if len({part.shape for part in parts}) == 1:
        return np.stack(parts)
    if max(part.ndim for part in parts) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ConfigError(f"Expected columns that form one array; the first row has shapes {shapes}. {LISTS}")
    return np.concatenate([part.ravel() for part in parts])


def is_sparse(value: object) -> bool:
    """Return True if a value is a sparse vector of Spark."""
    return hasattr(value, "toArray") and hasattr(value, "indices")


def count_sparse(value: Any) -> int:
    """Return the number of entries to store for a row's value in sparse form; 0 to store an array.

    The sparse form is used if it stores fewer than a quarter of the numbers. Dense parts of a
    joined value are counted with their zeros.

    Args:
        value: the value; a tuple of values if several columns are joined.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if not any(map(is_sparse, parts)):
        return 0
    stored = sum(len(part.indices) if is_sparse(part) else as_array(part).size for part in parts)
    size = sum(part.size if is_sparse(part) else as_array(part).size for part in parts)
    return max(1, stored) if 4 * stored < size else 0


def as_array(value: object) -> Array:
    """Return the value of a row, which may be a Spark vector or a tensor, as an array."""
    return np.asarray(value.toArray() if hasattr(value, "toArray") else detached(value))


def share_of(refused: int, rows: int) -> str:
    """Return a sentence with the number of rows that cannot be used, among those that were read together."""
    return f"{refused} of the {rows} rows that were read together cannot be used."


def row_of(entry: int, counts: Array) -> int:
    """Return the index of the row that has an entry, where ``counts`` has each row's number of entries."""
    return int(np.searchsorted(np.cumsum(counts), entry, side="right"))


def remedy(column: str, kind: str, depth: int) -> str:
    """Return advice on converting a column to numbers, as the end of a sentence; empty if there is none.

    Args:
        column: the column, as it is written in code.
        kind: Spark's or Arrow's name for the type of its values, or of the elements of its arrays.
        depth: the nesting depth of its arrays.
    """

    def cast(target: str) -> str:
        return f'.cast("{"array<" * depth}{target}{">" * depth}")'

    if kind.startswith("decimal"):
        return f"with {column}{cast('double')}"
    if kind.startswith(("date", "timestamp")):
        return f"with {column}{cast('timestamp')}{cast('double')}"
    if kind in TEXTS or kind.startswith(("char(", "varchar(", "string collate ")):
        stage = "HashingTF" if depth else "StringIndexer"
        return (
            f"with pyspark.ml.feature.{stage} if it holds words or {column}{cast('double')} if it holds "
            "numerals"
        )
    return ""


def _of_objects(array: Array, dtype: str) -> Array:
    """Return an array of objects in a dtype, or as float64 if they do not fit an integer or boolean dtype.

    Raises:
        TypeError: it contains None, which NumPy would convert to NaN.
    """
    if any(value is None for value in array.ravel()):
        raise TypeError("None is not a number.")
    with suppress(OverflowError):
        result = array.astype(dtype)
        if result.dtype.kind not in "biu" or np.array_equal(result, array):
            return result
    return array.astype(np.float64)


def short(value: object) -> str:
    """Return a value as shown in errors, with at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

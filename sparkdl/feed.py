"""Rows to columnar blocks to batches.

Rows are decoded once. What comes out of a Spark partition is cut into *blocks*: one array per column and
a key per row, large enough that a shuffle moves few records and small enough that no list of Python row
objects outlives one of them. A worker *spools* the blocks of its partition to a file in Spark's local
directories, whose name is gone as soon as it is open, so that a killed worker leaves nothing, and maps
it: every epoch reads from there, and memory that is short is the page cache's affair.

A row's key is (source partition, index) or a seeded hash of it. Workers order their rows by key, so that
the order is the same when Spark computes a partition again, in whatever order a shuffle brings the rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.backends.base import Batch
from sparkdl.errors import DataError
from sparkdl.structure import Template, assemble, flatten, leaves, paths, template_of
from sparkdl.weights import Array, aligned
from sparkdl.wire import as_bytes

Keys = NDArray[np.uint64]
BLOCK_BYTES = 4 << 20
TRAINING, VALIDATION = 0, 1
Counts = tuple[int | None, ...]  # how many arrays a model takes for x and for y; None: not known
PARTS = "x", "y", "sample_weight"


@dataclass(frozen=True)
class Column:
    """What one column of every row has to be.

    Attributes:
        name: how errors call it.
        shape: the shape of one row's value.
        dtype: the NumPy dtype that it is stored in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of one row's value."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def of(self, values: Sequence[Any] | Array, place: str, first: int = 0) -> Array:
        """Return the values of some rows as one array of shape (rows, *shape).

        Args:
            values: one value per row.
            place: where the rows are, for the message.
            first: the index of the first row there.

        Raises:
            DataError: a value has another shape or cannot be a number of this dtype; names the row.
        """
        try:
            array = np.asarray(values)
            if array.dtype != np.object_ and array.shape[1:] == self.shape:
                return self.cast(array, place, first)
        except ValueError:
            pass  # Ragged; the rows are looked at one by one.
        rows = [self._row(value, place, first + index) for index, value in enumerate(values)]
        return np.stack(rows) if rows else np.empty((0, *self.shape), self.dtype)

    def _row(self, value: Any, place: str, index: int) -> Array:
        try:
            array = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
            if array.dtype == object:
                array = _present(array).astype(self.dtype)
        except (TypeError, ValueError):
            raise DataError(
                f"Expected {self.name} to be numbers of shape {self.shape}; row {index} of {place} has "
                f"{_short(value)}."
            ) from None
        if array.shape != self.shape:
            raise DataError(
                f"Expected {self.name} of shape {self.shape}; row {index} of {place} has shape {array.shape}."
            )
        cast: Array = self.cast(array[None], place, index)[0]
        return cast

    def cast(self, array: Array, place: str, first: int = 0) -> Array:
        """Return the rows in this column's dtype.

        Raises:
            DataError: they are not numbers, or whole numbers are expected and some are not.
        """
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {self.name} to be numbers ({self.dtype}); row {first} of {place} has "
                f"{_short(array.ravel()[:1].tolist())}."
            )
        result = array.astype(self.dtype, copy=False)
        if array.dtype.kind == "f" and result.dtype.kind in "iu" and not (result == array).all():
            bad = first + int(np.argmax((result != array).reshape(len(array), -1).any(axis=1)))
            raise DataError(
                f"Expected {self.name} to be whole numbers ({self.dtype}), as in the first row; row {bad} of "
                f"{place} has {_short(array[bad - first].tolist())}."
            )
        return result


def _present(array: Array) -> Array:
    """Return an array of objects; None, which NumPy would make a NaN of, is no number."""
    if any(value is None for value in array.ravel()):
        raise TypeError("None is not a number.")
    return array


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Schema:
    """What every row has to be: its flat columns, and how they make what Keras takes.

    Attributes:
        columns: those of x, then of y, then of the sample weights.
        template: (x, y) or (x, y, sample_weight), or (x,) to predict, with the place of a column, or a
            structure of such places, for each.
        form: the same of rows as they come, where one weight may be that of several outputs.
    """

    columns: tuple[Column, ...]
    template: tuple[Template, ...]
    form: tuple[Template, ...]

    @property
    def weights(self) -> tuple[Column, ...]:
        """The columns of the sample weights."""
        return self.columns[min(leaves(self.template[2])) :] if len(self.template) > 2 else ()

    def without_weights(self) -> Schema:
        """Return the schema of rows that have no sample weights."""
        columns = self.columns[: len(self.columns) - len(self.weights)]
        return Schema(columns, self.template[:2], self.form[:2])

    def with_weights(self, other: Schema) -> Schema:
        """Return the schema of rows like these with the sample weights of another schema."""
        weights = other.template[2], other.form[2]
        both = zip((self.template, self.form), weights, strict=True)
        return Schema((*self.columns, *other.weights), *((*part[:2], last) for part, last in both))

    def held(self, other: Schema) -> Schema:
        """Return the schema of validation rows, which may have other weights than training rows like these.

        Raises:
            DataError: x or y of those rows are other than here.
        """
        mine, theirs = self.without_weights(), other.without_weights()
        if mine.template != theirs.template:
            raise DataError(
                f"validation_data should have rows like x and y: {', '.join(c.name for c in mine.columns)}; "
                f"got {', '.join(c.name for c in theirs.columns)}."
            )
        for ours, given in zip(mine.columns, theirs.columns, strict=True):
            if ours.shape != given.shape:
                raise DataError(
                    f"validation_data should have rows like x: {ours.name} of shape {ours.shape}; got "
                    f"{given.shape}."
                )
        return Schema((*mine.columns, *other.weights), other.template, other.form)

    def flatten(self, row: Any, place: str, index: int) -> tuple[Any, ...]:
        """Return the values of a row, one per column.

        Raises:
            DataError: the row is not a tuple, or its parts have another structure; names it.
        """
        try:
            return tuple(flatten(self.form, row))
        except TypeError as error:
            names = ", ".join(column.name for column in self.columns)
            raise DataError(
                f"Expected a tuple ({names}); row {index} of {place} is {_short(row)}. {error}"
            ) from None

    def batch(self, arrays: Sequence[Array]) -> Batch:
        """Return the arrays of some rows, one per column, as Keras takes them."""
        return Batch(*assemble(self.template, arrays))


class Sample(NamedTuple):
    """A row, or the arrays behind all rows: flat values, and how they make what Keras takes.

    Attributes:
        template: how the values make (x, y) or (x, y, sample_weight), or (x,).
        form: the same of rows as they come.
        names: what errors call each value.
        values: the values.
    """

    template: tuple[Template, ...]
    form: tuple[Template, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, parts: Sequence[Any], counts: Counts, names: Sequence[str] = PARTS) -> Sample:
        """Take apart x, y and sample weights, or fewer.

        One array of weights beside several outputs is that of each of them, as in Keras.

        Args:
            parts: for each an array or a structure of arrays.
            counts: how many arrays the model takes for x and for y.
            names: what errors call them.
        """
        form: list[Template] = []
        labels: list[str] = []
        values: list[Any] = []
        for value, count, name in zip(parts, (*counts, counts[-1]), names, strict=False):
            form.append(template_of(value, count, len(values)))
            labels += paths(form[-1], name)
            values += flatten(form[-1], value)
        template = list(form)
        if len(form) > 2 and isinstance(form[2], int) and not isinstance(form[1], int):
            template[2] = assemble(form[1], dict.fromkeys(leaves(form[1]), form[2]))  # type: ignore[arg-type]
        return cls(tuple(template), tuple(form), tuple(labels), tuple(values))

    def schema(self, floatx: str) -> Schema:
        """Return what rows like this one are: floats in Keras's float type, the rest kept.

        Raises:
            DataError: a value of the row is not made of numbers.
        """
        weights = set(leaves(self.form[2:]))
        columns = []
        for index, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            if value.dtype.kind not in "biuf":
                raise DataError(f"Expected {name} to be numbers; the first row has {value.dtype} values.")
            kind = floatx if value.dtype.kind == "f" or index in weights else value.dtype.name
            columns.append(Column(name, value.shape, kind))
        return Schema(tuple(columns), self.template, self.form)


class Block(NamedTuple):
    """Some rows: a key each, the part that they are for, and one array per column."""

    keys: Keys
    part: int
    columns: tuple[Array, ...]


def row_keys(partition: int, indices: NDArray[np.uint64]) -> Keys:
    """Return the keys of rows of a source partition, which sort as (partition, index)."""
    return (np.uint64(partition) << np.uint64(40)) | indices.astype(np.uint64)


def scramble(keys: Keys, seed: int) -> Keys:
    """Return keys that sort in an order drawn from ``seed``: splitmix64 of key and seed, one to one."""
    with np.errstate(over="ignore"):
        z = keys + np.uint64((2 * seed + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def unit(keys: Keys) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each key, the same whenever it is asked."""
    return (scramble(keys, 0x5EED) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rows_per_block(columns: Sequence[Column]) -> int:
    """Return how many rows make a block."""
    return max(64, min(1 << 16, BLOCK_BYTES // max(1, sum(column.nbytes for column in columns))))


def blocks_of_rows(
    rows: Iterable[Any], schema: Schema, partition: int, part: int = TRAINING
) -> Iterator[Block]:
    """Yield the rows of an RDD's partition as blocks.

    Args:
        rows: tuples (x, y) or (x, y, sample_weight).
        schema: what they have to be.
        partition: the index of the partition, for keys and messages.
        part: what the rows are for.

    Raises:
        DataError: a row does not fit; names partition and row.
    """
    place, size, first = f"partition {partition}", rows_per_block(schema.columns), 0
    chunk: list[Any] = []
    for row in rows:
        chunk.append(schema.flatten(row, place, first + len(chunk)))
        if len(chunk) == size:
            yield _block(chunk, schema.columns, partition, first, part)
            first += len(chunk)
            chunk = []
    if chunk:
        yield _block(chunk, schema.columns, partition, first, part)


def _block(chunk: list[Any], columns: Sequence[Column], partition: int, first: int, part: int) -> Block:
    indices = np.arange(first, first + len(chunk), dtype=np.uint64)
    arrays = tuple(
        column.of(values, f"partition {partition}", first)
        for column, values in zip(columns, zip(*chunk, strict=True), strict=True)
    )
    return Block(row_keys(partition, indices), part, arrays)


def hold_out(blocks: Iterable[Block], fraction: float, seed: int) -> Iterator[Block]:
    """Yield blocks with a seeded choice of the rows moved to the validation part, the same every time."""
    for block in blocks:
        chosen = unit(scramble(block.keys, seed)) < fraction
        for part, mask in ((TRAINING, ~chosen), (VALIDATION, chosen)):
            if mask.any():
                yield select(block, mask)._replace(part=part)


def select(block: Block, which: Array | slice) -> Block:
    """Return some rows of a block, by mask, indices or slice."""
    return Block(block.keys[which], block.part, tuple(column[which] for column in block.columns))


def deal(blocks: Iterable[Block], num_workers: int, seed: int | None) -> Iterator[tuple[int, Block]]:
    """Yield each worker's rows of the blocks; with a seed in its order, else in turn."""
    for block in blocks:
        if seed is None:
            targets = block.keys % np.uint64(num_workers)
        else:
            block = block._replace(keys=scramble(block.keys, seed))
            targets = (block.keys >> np.uint64(3)) % np.uint64(num_workers)
        for worker in range(num_workers):
            mask = targets == worker
            if mask.any():
                yield worker, select(block, mask)


def weigh(blocks: Iterable[Block], schema: Schema, classes: dict[int, float] | None) -> Iterator[Block]:
    """Yield blocks that all have the sample weights of a schema.

    Args:
        blocks: blocks, some or all of them without weights.
        schema: what they are to be.
        classes: the weight of a training row by the class of its label; a class that is missing weighs 1.
    """
    for block in blocks:
        missing = schema.columns[len(block.columns) :]
        weights = [np.ones((len(block.keys), *column.shape), column.dtype) for column in missing]
        if missing and classes is not None and block.part == TRAINING:
            weights = [_class_weights(block.columns[schema.template[1]], classes, missing[0].dtype)]
        yield block._replace(columns=(*block.columns, *weights))


def _class_weights(labels: Array, classes: dict[int, float], dtype: str) -> Array:
    """Return the weight of each label's class, found as Keras finds it."""
    if labels.ndim > 1:
        labels = labels.argmax(axis=-1) if labels.shape[-1] != 1 else labels[..., 0]
    found, places = np.unique(np.round(labels).astype(np.int64), return_inverse=True)
    weights = np.array([classes.get(int(label), 1.0) for label in found], dtype)
    return weights[places.reshape(labels.shape)]


class Rows:
    """A worker's rows of one part, in the order of their keys; batches are views where they can be."""

    def __init__(self, columns: tuple[Array, ...], keys: Keys, schema: Schema) -> None:
        self.columns, self.count, self.schema = columns, len(keys), schema
        self._order = np.argsort(keys, kind="stable")
        self._sorted = bool((np.diff(self._order) == 1).all())

    def batch(self, order: NDArray[np.int64], start: int, stop: int) -> Batch:
        """Return the rows that stand from ``start`` to ``stop`` in an epoch's order."""
        places = order[start:stop]
        if self._sorted and _consecutive(places):
            return self.schema.batch([column[places[0] : places[-1] + 1] for column in self.columns])
        rows = places if self._sorted else self._order[places]
        return self.schema.batch([_take(column, rows) for column in self.columns])

    def one_class(self) -> bool:
        """Return whether every row has the same label, where labels are whole numbers."""
        if not isinstance(self.schema.template[1], int):
            return False
        labels = self.columns[self.schema.template[1]]
        return self.count > 1 and labels.dtype.kind in "biu" and bool((labels == labels[0]).all())


def _take(column: Array, rows: NDArray[np.int64]) -> Array:
    """Return some rows of a column, where a backend can use them without another copy."""
    shape = (len(rows), *column.shape[1:])
    memory = aligned(prod(shape) * column.itemsize).view(column.dtype).reshape(shape)
    return column.take(rows, axis=0, out=memory, mode="clip")  # "raise" would take them into a copy first


def _consecutive(places: NDArray[np.int64]) -> bool:
    if not len(places) or places[-1] - places[0] != len(places) - 1:
        return False
    return bool((np.diff(places) == 1).all())


class Spool:
    """Blocks on their way into a file, then the rows in it.

    Args:
        schema: what the blocks are.
        directory: where the file is made; it never has a name there for long.
    """

    def __init__(self, schema: Schema, directory: str) -> None:
        self.schema = schema
        self._files = {
            part: [tempfile.TemporaryFile(dir=directory) for _ in schema.columns]  # noqa: SIM115
            for part in (TRAINING, VALIDATION)
        }
        self._keys: dict[int, list[Keys]] = {TRAINING: [], VALIDATION: []}

    def extend(self, blocks: Iterable[Block]) -> None:
        """Write blocks out."""
        for block in blocks:
            self._keys[block.part].append(block.keys)
            for file, array in zip(self._files[block.part], block.columns, strict=True):
                if array.size:
                    file.write(as_bytes(np.ascontiguousarray(array)))

    def rows(self, part: int) -> Rows:
        """Return the rows of one part, mapped; the files are closed."""
        keys = np.concatenate([np.zeros(0, np.uint64), *self._keys[part]])
        columns = tuple(
            _map(file, column, len(keys))
            for file, column in zip(self._files[part], self.schema.columns, strict=True)
        )
        return Rows(columns, keys, self.schema)


def _map(file: IO[bytes], column: Column, count: int) -> Array:
    shape = (count, *column.shape)
    with file:
        if not count * column.nbytes:
            return np.empty(shape, column.dtype)
        file.flush()
        return np.memmap(file, column.dtype, "r", shape=shape).view(np.ndarray)


def local_directory() -> str:
    """Return a directory of Spark's for temporary files on this executor, else the system's."""
    for directory in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if directory and os.access(directory, os.W_OK):
            return directory
    return tempfile.gettempdir()

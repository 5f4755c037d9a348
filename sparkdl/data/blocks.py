"""Conversion of rows to columnar blocks.

Rows are decoded once, not in each epoch. The rows of a Spark partition are divided into *blocks*: one array
per column and a key per row. Blocks are large enough that a shuffle moves few records, and small enough that
lists of Python row objects are short-lived. ``spill`` stores the blocks on the worker.

A row's key is its position, such as (source partition, index), or a seeded hash of it. Workers order their
rows by key. So this order does not depend on the order in which a shuffle delivers rows, and is the same if
Spark recomputes the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows, as_rows
from sparkdl.data.column import Column
from sparkdl.data.fingerprint import GOLDEN, MASK, mixed, unmixed
from sparkdl.data.schema import Schema, as_row
from sparkdl.errors import DataError

Keys = NDArray[np.uint64]
BLOCK_BYTES = 4 << 20
TRAINING, VALIDATION, EMPTY = 0, 1, 2  # parts of blocks; EMPTY reports a partition without rows
UNKNOWN = 3  # part of rows whose validation indicator is null


class Block(NamedTuple):
    """Some rows: a key for each, the part they belong to, and one array per column."""

    keys: Keys
    part: int
    columns: tuple[AnyRows, ...]

    @property
    def nbytes(self) -> int:
        """The size of the rows, in bytes."""
        return self.keys.nbytes + sum(column.nbytes for column in self.columns)


def row_keys(partition: int, indices: NDArray[np.uint64]) -> Keys:
    """Return the keys of a source partition's rows, which sort by (partition, index)."""
    return (np.uint64(partition) << np.uint64(40)) | indices.astype(np.uint64)


def scramble(keys: Keys, seed: int) -> Keys:
    """Return keys that sort in an order given by ``seed``: splitmix64 of key and seed, a bijection."""
    with np.errstate(over="ignore"):
        return mixed(keys + np.uint64((2 * seed + 1) * GOLDEN & MASK))


def unscrambled(keys: Keys, seed: int) -> Keys:
    """Return the original keys: the inverse of ``scramble``."""
    with np.errstate(over="ignore"):
        return unmixed(keys) - np.uint64((2 * seed + 1) * GOLDEN & MASK)


def unit(keys: Keys) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for each key, which depends on the key alone."""
    return (scramble(keys, 0x5EED) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rows_per_block(columns: Sequence[Column], most: int = BLOCK_BYTES) -> int:
    """Return the number of rows per block, 1 to 65,536.

    A block of several rows has at most ``most`` bytes, and at most ``BLOCK_BYTES``. Sizes of sparse rows and
    strings are estimates.
    """
    row = max(1, sum(column.nbytes for column in columns))
    return max(1, min(1 << 16, min(most, BLOCK_BYTES) // row))


def blocks_of_rows(
    rows: Iterable[object], schema: Schema, partition: int, part: int = TRAINING, *, place: str = "partition"
) -> Iterator[Block]:
    """Yield the rows of an RDD's partition as blocks.

    Args:
        rows: tuples (x, y) or (x, y, sample_weight), or LabeledPoints; if the schema has no labels, x or
            (x,) instead.
        schema: the expected schema.
        partition: the index of the partition, for keys and messages.
        part: the part that the rows belong to.
        place: the word before the index in messages: "partition", or "worker" if a worker has several
            partitions.

    Raises:
        DataError: a row does not match the schema; the message names the partition and the row.
    """
    place, size, first = f"{place} {partition}", rows_per_block(schema.columns), 0
    chunk: list[tuple[object, ...]] = []
    for row in rows:
        chunk.append(schema.flatten(as_row(row, schema), place, first + len(chunk)))
        if len(chunk) == size:
            yield _block(chunk, schema.columns, partition, first=first, part=part, place=place)
            first += len(chunk)
            chunk = []
    if chunk:
        yield _block(chunk, schema.columns, partition, first=first, part=part, place=place)


def _block(
    chunk: list[tuple[object, ...]],
    columns: Sequence[Column],
    partition: int,
    *,
    first: int,
    part: int,
    place: str,
) -> Block:
    indices = np.arange(first, first + len(chunk), dtype=np.uint64)
    arrays = tuple(
        column.of(values, place, first)
        for column, values in zip(columns, zip(*chunk, strict=True), strict=True)
    )
    return Block(row_keys(partition, indices), part, arrays)


def parts_of(value: Any, *, labels: bool = True) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of arrays with some of the rows: (x, y), (x, y, sample_weight) or (x,).

    Args:
        value: a tuple of arrays, or of structures of arrays; a dataset with a length, such as
            keras.utils.PyDataset; or an iterable of batches, such as a generator, a tf.data.Dataset or a
            torch DataLoader.
        labels: whether rows must have labels; if not, x may stand for (x,).

    Raises:
        DataError: the value, or one of its batches, is none of these.
    """
    if isinstance(value, tuple):
        yield _part(value, labels)
    elif not labels and (hasattr(value, "ndim") or isinstance(value, Mapping)):
        yield (value,)
    elif hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "__iter__"):
        yield from (_part(value[index], labels, "dataset") for index in range(len(value)))
    elif hasattr(value, "__iter__"):
        yield from (_part(batch, labels, type(value).__name__) for batch in value)
    else:
        raise _no_rows(type(value).__name__, labels)


def _part(batch: Any, labels: bool, of: str = "") -> tuple[Any, ...]:
    if not labels and (hasattr(batch, "ndim") or isinstance(batch, Mapping)):
        return (batch,)
    if not isinstance(batch, tuple | list):
        raise _no_rows(f"{of} of {type(batch).__name__}", labels)
    if len(batch) not in ((2, 3) if labels else (1, 2, 3)):
        raise _no_rows(f"{of + ' of ' if of else ''}{type(batch).__name__} of length {len(batch)}", labels)
    return tuple(batch)


def _no_rows(given: str, labels: bool) -> DataError:
    forms = "(x, y) or (x, y, sample_weight)" if labels else "(x,), (x, y) or (x, y, sample_weight)"
    return DataError(
        f"The function that reads the rows should return a tuple of arrays {forms}, or an iterable of such "
        f"tuples (batches); got {given}. Return features and labels together in a tuple; a list is read as "
        "a list of batches."
    )


def blocks_of_parts(
    parts: Iterable[tuple[Any, ...]], schema: Schema, partition: int, part: int = TRAINING
) -> Iterator[Block]:
    """Yield a task's rows, given as arrays, as blocks.

    Args:
        parts: (x,), (x, y) or (x, y, sample_weight): arrays, or structures of arrays, with some rows of the
            task.
        schema: the expected schema.
        partition: the index of the task, for keys and messages.
        part: the part that the rows belong to.

    Raises:
        DataError: a row does not match the schema, or arrays have different lengths; the message names the
            worker and the row.
    """
    place, size, first = f"worker {partition}", rows_per_block(schema.columns), 0
    for whole in parts:
        pairs = zip(schema.flatten(whole, place, first), schema.columns, strict=True)
        arrays = [as_rows(array, column.name) for array, column in pairs]
        lengths = [len(array) if array.shape else -1 for array in arrays]
        if len(set(lengths)) > 1 or min(lengths) < 0:
            names = ", ".join(f"{c.name} {n}" for c, n in zip(schema.columns, lengths, strict=True))
            raise DataError(
                f"Expected arrays with equal numbers of rows; {place} has {names} after row {first}."
            )
        for start in range(0, lengths[0], size):
            stop = min(start + size, lengths[0])
            columns = tuple(
                column.of(array[start:stop], place, first + start)
                for column, array in zip(schema.columns, arrays, strict=True)
            )
            indices = np.arange(first + start, first + stop, dtype=np.uint64)
            yield Block(row_keys(partition, indices), part, columns)
        first += lengths[0]


def hold_out(blocks: Iterable[Block], fraction: float, seed: int) -> Iterator[Block]:
    """Yield blocks with a seeded random choice of rows moved to the validation part."""
    for block in blocks:
        chosen = unit(scramble(block.keys, seed)) < fraction
        for part, mask in ((TRAINING, ~chosen), (VALIDATION, chosen)):
            if mask.any():
                yield select(block, mask)._replace(part=part)


def select(block: Block, which: Array | slice) -> Block:
    """Return some rows of a block, by mask, indices or slice."""
    return Block(block.keys[which], block.part, tuple(column[which] for column in block.columns))


def deal(blocks: Iterable[Block], num_workers: int, seed: int | None) -> Iterator[tuple[int, Block]]:
    """Deal the rows of a partition's blocks to workers; yield pairs of a worker and a block of its rows.

    Without a seed, rows are dealt round-robin by index. With a seed, training rows are dealt in random order,
    one to each worker in turn, and leftover rows at the end at random; ``worker.rebalance`` then evens out
    the shares. Rows of other parts are dealt at random. An empty partition gives worker 0 an EMPTY block.
    """
    block = None
    turn: list[Block] = []  # rows of an incomplete turn
    for block in blocks:
        if seed is None:
            yield from _by_worker(block, block.keys % np.uint64(num_workers), num_workers)
            continue
        block = block._replace(keys=scramble(block.keys, seed))
        if block.part != TRAINING:
            yield from _by_worker(block, _drawn(block, num_workers), num_workers)
            continue
        order, whole = np.argsort(block.keys), (len(turn) + len(block.keys)) // num_workers * num_workers
        if whole:
            dealt = select(block, order[: whole - len(turn)])
            places = np.arange(len(turn), whole) % num_workers
            yield from enumerate(turn)
            yield from _by_worker(dealt, places, num_workers)
            order, turn = order[whole - len(turn) :], []
        turn += [select(block, order[place : place + 1]) for place in range(len(order))]
    for row in turn:
        yield int(_drawn(row, num_workers)[0]), row
    if block is None:
        yield 0, Block(np.zeros(0, np.uint64), EMPTY, ())


def _drawn(block: Block, num_workers: int) -> NDArray[np.uint64]:
    """Return a pseudorandom worker for each row, by its key."""
    targets: NDArray[np.uint64] = (block.keys >> np.uint64(3)) % np.uint64(num_workers)
    return targets


def _by_worker(block: Block, targets: Array, num_workers: int) -> Iterator[tuple[int, Block]]:
    """Yield each worker's rows of a block."""
    for worker in range(num_workers):
        mask = targets == worker
        if mask.any():
            yield worker, select(block, mask)


def weigh(blocks: Iterable[Block], schema: Schema, classes: dict[int, float] | None) -> Iterator[Block]:
    """Yield blocks with the sample weights of a schema; missing weights are added.

    Args:
        blocks: blocks with or without weights.
        schema: the schema to match.
        classes: the weight of a training row by the class of its label; a missing class has weight 1. The
            training rows then have no weights of their own, but a union with weighted validation rows may
            have given them ones, which are replaced.
    """
    for block in blocks:
        if block.part == EMPTY:
            yield block
            continue
        columns: tuple[AnyRows, ...] = block.columns
        if classes is not None and block.part == TRAINING:
            (weight,) = schema.weights
            columns = columns[: len(schema.columns) - 1]
            columns = *columns, _class_weights(columns[schema.template[1]], classes, weight.dtype)
        missing = schema.columns[len(columns) :]
        ones = [np.ones((len(block.keys), *column.shape), column.dtype) for column in missing]
        yield block._replace(columns=(*columns, *ones))


def _class_weights(labels: Any, classes: dict[int, float], dtype: str) -> Array:
    """Return the weight of each label's class; the class is found as in Keras."""
    if labels.ndim > 1:
        labels = labels.argmax(axis=-1) if labels.shape[-1] != 1 else labels[..., 0]
    found, places = np.unique(np.round(labels).astype(np.int64), return_inverse=True)
    weights = np.array([classes.get(int(label), 1.0) for label in found], dtype)
    return weights[places.reshape(labels.shape)]

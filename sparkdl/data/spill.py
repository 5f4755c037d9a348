"""A worker's rows on the executor's disk: blocks are written, batches are read.

Rows are written to files in a local directory of Spark. The files are unlinked as soon as they are open,
so a killed worker leaves nothing behind. They are memory-mapped: every epoch reads rows from them without
creating Python objects, and the system's page cache holds as many as memory allows.

Up to ``MEMORY`` bytes of rows are shuffled as a whole. If there are more, the rows are first moved into
*buckets*, each a random selection by key (without a seed, a range of keys). As many buckets as fit into
``MEMORY`` are then shuffled at a time (see ``batch_plan.Order``). So a pass reads from few places on the disk
at a time, for any number of rows, and the next buckets are read ahead during training on the current ones.
Of sparse rows and strings, only the spans (starts and lengths) are moved and read ahead. The keys and the
order of rows in buckets are in mapped files too.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import DTypeLike

from sparkdl.core.vectors import Array, aligned, as_bytes
from sparkdl.data.arrays import AnyRows
from sparkdl.data.batch import Batch
from sparkdl.data.batch_plan import MIXED, Integers
from sparkdl.data.blocks import EMPTY, VALIDATION, Block, Keys, scramble, select
from sparkdl.data.column import Column
from sparkdl.data.fingerprint import NOTHING, Fingerprint, fingerprint, total
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows, entry_of, rows_of

MEMORY = 256 << 20
COUNTS = "rows.json"  # the file of a folder with what ``SpillFile.load`` needs
INDEX_BYTES = 128  # minimum size assumed for a row, because shuffling needs memory for its indices
KEY, PLACE = Column("key", (), "uint64"), Column("place", (), "int64")
SPAN = Column("span", (2,), "int64")  # start and length of a row in the file of entries


class Rows:
    """A worker's rows of one part, in an order that their keys determine; batches are views if possible.

    Args:
        columns: an array per column of the schema.
        schema: the rows' schema.
        order: the index of each row in the arrays; None keeps the order of the arrays.
        buckets: number of rows in each bucket; the first bucket has the first rows.
    """

    def __init__(
        self,
        columns: tuple[AnyRows, ...],
        schema: Schema,
        order: Integers | None = None,
        buckets: tuple[int, ...] = (),
    ) -> None:
        self.columns, self.schema, self.count = columns, schema, len(columns[0])
        self.buckets = buckets or (self.count,)
        self._order, self._expected = order, np.zeros(0, np.int64)

    def batch(self, rows: Integers) -> Batch:
        """Return a batch of these rows."""
        places = rows if self._order is None else self._order[rows]
        if _consecutive(places):
            return self.schema.batch([column[places[0] : places[-1] + 1] for column in self.columns])
        return self.schema.batch([_take(column, places) for column in self.columns])

    def expect(self, buckets: Integers) -> None:
        """Read the next buckets into memory ahead of time, in a separate thread, as the disk may be slow."""
        if len(buckets) and not np.array_equal(buckets, self._expected):
            self._expected = buckets
            threading.Thread(target=self._touch, args=(buckets,), daemon=True).start()

    def _touch(self, buckets: Integers) -> None:
        edges = np.append(0, np.cumsum(self.buckets))
        for bucket in buckets:
            for column in self.columns:
                rows = _fixed(column)[edges[bucket] : edges[bucket + 1]]
                rows.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)

    def one_class(self) -> bool:
        """Return True if there are several rows, and all have the same label: whole numbers of any dtype.

        If the labels are floats, only the loss shows whether they are classes.
        """
        if not self.schema.labelled or not isinstance(self.schema.template[1], int):
            return False
        labels = self.columns[self.schema.template[1]]
        if isinstance(labels, SparseRows) or self.count < 2:
            return False
        if labels.dtype.kind == "f" and (labels[0] != np.rint(labels[0])).any():
            return False
        return all((labels[some] == labels[0]).all() for some in _slices(self.count, 1 << 20))


def _fixed(column: AnyRows) -> Array:
    """Return the part of a column with a fixed row size: the array, or the spans of sparse or text rows."""
    return column.spans if isinstance(column, SparseRows) else column


def _take(column: AnyRows, rows: Integers) -> AnyRows:
    """Return some rows of a column, in memory that a backend can use without another copy."""
    if isinstance(column, SparseRows):
        return column[rows]
    shape = (len(rows), *column.shape[1:])
    memory = aligned(prod(shape) * column.itemsize).view(column.dtype).reshape(shape)
    return column.take(rows, axis=0, out=memory, mode="clip")  # "raise" would make another copy


def _consecutive(places: Integers) -> bool:
    if not len(places) or places[-1] - places[0] != len(places) - 1:
        return False
    return bool((np.diff(places) == 1).all())


class SpillFile:
    """Files that blocks are written to, and that are then read as rows.

    Args:
        schema: the blocks' schema.
        directory: the directory of the files, which are unlinked at once.
        seed: the seed of the buckets; None keeps rows in the order of their keys.
        memory: maximum bytes of rows that are shuffled together.
        folder: a folder of the directory in which the files keep names, so that ``load`` finds them; None:
            they are unlinked at once.

    Attributes:
        empty: number of source partitions that were reported as empty.
        fingerprint: the fingerprint of the rows of every part, except those added with ``counted=False``.
    """

    def __init__(
        self,
        schema: Schema,
        directory: str,
        seed: int | None = None,
        *,
        memory: int = MEMORY,
        folder: str | None = None,
    ) -> None:
        self.schema, self.empty, self.fingerprint = schema, 0, NOTHING
        self._directory, self._seed, self._memory, self._folder = directory, seed, memory, folder
        self._piles: dict[int, _Pile] = {}

    def save(self) -> None:
        """Write the counts of the files in the folder, after the last block, for ``load``."""
        for pile in self._piles.values():
            pile.mapped()  # also writes and closes the files
        counts = {part: (pile.count, pile.sorted) for part, pile in self._piles.items()}
        values = {"empty": self.empty, "fingerprint": list(self.fingerprint), "piles": list(counts.items())}
        path = Path(str(self._folder), COUNTS)
        path.with_suffix(".part").write_text(json.dumps(values))
        path.with_suffix(".part").replace(path)

    def close(self) -> None:
        """Close the files of rows that could not be stored."""
        for pile in self._piles.values():
            pile.close()

    def load(self) -> bool:
        """Take over the rows that another process saved in the folder; return False if there are none."""
        try:  # os.path.exists would also return False if the disk fails, and rows in use would be overwritten
            values = json.loads(Path(str(self._folder), COUNTS).read_text())
        except FileNotFoundError:
            return False
        self.empty, self.fingerprint = values["empty"], Fingerprint.of(values["fingerprint"])
        for part, (count, in_order) in values["piles"]:
            pile = self._piles[part] = _Pile(self._schema(part), self._directory, self._prefix(part), "r+b")
            pile.count, pile.sorted = count, in_order
        return True

    def _schema(self, part: int) -> Schema:
        return self.schema.held_out if part == VALIDATION else self.schema

    def _prefix(self, part: int) -> str | None:
        return None if self._folder is None else os.path.join(self._folder, str(part))

    def extend(self, blocks: Iterable[Block], *, counted: bool = True) -> None:
        """Write blocks to the files.

        Args:
            blocks: the blocks.
            counted: whether to include them in the fingerprint.
        """
        for block in blocks:
            if block.part == EMPTY:
                self.empty += 1
            else:
                self._pile(block.part).add(block)
                if counted:
                    self.fingerprint = total([self.fingerprint, fingerprint(*block)])

    def count(self, part: int) -> int:
        """Return the number of rows of one part."""
        return self._piles[part].count if part in self._piles else 0

    def remove(self, part: int, count: int) -> Block:
        """Remove and return the ``count`` rows with the largest keys of a part; no rows may be added later.

        The fingerprint still includes the removed rows.
        """
        return self._pile(part).remove(part, count)

    def _pile(self, part: int) -> _Pile:
        if part not in self._piles:
            self._piles[part] = _Pile(self._schema(part), self._directory, self._prefix(part))
        return self._piles[part]

    def rows(self, part: int) -> Rows:
        """Return the rows of one part, memory-mapped, and close the files."""
        pile, schema = self._pile(part), self._schema(part)
        keys, columns = pile.mapped()
        row = max(INDEX_BYTES, sum(column.nbytes for column in (KEY, *schema.columns)))
        buckets = -(-pile.count * row * MIXED // self._memory)
        if pile.sorted and (buckets <= MIXED or self._seed is None):
            return Rows(tuple(columns), schema)
        if buckets <= MIXED:
            return Rows(tuple(columns), schema, np.argsort(keys, kind="stable"))
        return self._moved(schema, keys, columns, buckets, together=max(1, self._memory // MIXED // row))

    def _moved(
        self, schema: Schema, keys: Keys, columns: list[AnyRows], buckets: int, *, together: int
    ) -> Rows:
        """Return the rows after moving them into buckets, ``together`` rows at a time."""
        chunks, bounds = list(_slices(len(keys), together)), self._bounds(keys, buckets)
        found = (self._buckets(keys[chunk], bounds) for chunk in chunks)
        sizes = sum((np.bincount(each, minlength=buckets) for each in found), np.zeros(buckets, np.int64))
        edges = np.append(0, np.cumsum(sizes))
        sources, free = (keys, *map(_fixed, columns)), edges[:-1].copy()
        targets = [_made(self._directory, _stored(each), len(keys)) for each in (KEY, *schema.columns)]
        for chunk in chunks:
            places = _places(self._buckets(keys[chunk], bounds), free)
            for source, target in zip(sources, targets, strict=True):
                target[places] = source[chunk]
        order = _made(self._directory, PLACE, len(keys))
        for first, end in pairwise(edges.tolist()):
            order[first:end] = first + np.argsort(targets[0][first:end], kind="stable")
        for target in targets:
            target.flags.writeable = False
        moved = [
            type(column)(target, column.entries, column.shape[1:])
            if isinstance(column, SparseRows)
            else target
            for column, target in zip(columns, targets[1:], strict=True)
        ]
        return Rows(tuple(moved), schema, order, tuple(sizes.tolist()))

    def _bounds(self, keys: Keys, buckets: int) -> Keys:
        """Return the edges between buckets: equal parts of the hash range, or quantiles of sampled keys."""
        if self._seed is not None:
            return np.array([(index << 64) // buckets for index in range(1, buckets)], np.uint64)
        sample = np.sort(keys[:: max(1, len(keys) // (64 * buckets))])
        return sample[np.arange(1, buckets) * len(sample) // buckets]

    def _buckets(self, keys: Keys, bounds: Keys) -> Integers:
        """Return the bucket of each key."""
        marks = keys if self._seed is None else scramble(keys, self._seed)
        return np.searchsorted(bounds, marks, side="right")


class _Pile:
    """The rows of one part: a file of keys, and a file per column, or two if the column is sparse or text.

    Args:
        schema: the rows' schema.
        directory: the directory of files without names.
        prefix: the beginning of the files' paths; None: they have no names.
        mode: the mode in which files with names are opened.
    """

    def __init__(self, schema: Schema, directory: str, prefix: str | None = None, mode: str = "w+b") -> None:
        def opened(name: str) -> IO[bytes]:
            if prefix is None:
                return tempfile.TemporaryFile(dir=directory)
            return open(f"{prefix}-{name}", mode)

        self.count, self.sorted, self._last = 0, True, 0
        self._mapped: tuple[Keys, list[AnyRows]] | None = None
        self._columns = (KEY, *schema.columns)
        self._files = [opened(str(place)) for place in range(len(self._columns))]
        self._entries = {
            place: opened(f"{place}-entries") for place, column in enumerate(self._columns) if column.sparse
        }

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files, *self._entries.values()):
            file.close()

    def add(self, block: Block) -> None:
        """Write a block to the files."""
        if not len(block.keys):
            return
        rising = int(block.keys[0]) >= self._last and (block.keys[1:] >= block.keys[:-1]).all()
        self.sorted, self._last = self.sorted and bool(rising), int(block.keys[-1])
        self.count += len(block.keys)
        for place, array in enumerate((block.keys, *block.columns)):
            fixed = _fixed(array)
            if isinstance(array, SparseRows):
                file, own = self._entries[place], array.compact()
                fixed = own.spans + (file.tell() // own.entries.itemsize, 0)
                file.write(own.entries.tobytes())
            if fixed.size:
                self._files[place].write(as_bytes(np.ascontiguousarray(fixed)))

    def remove(self, part: int, count: int) -> Block:
        """Remove and return the rows with the largest keys; the last rows of the files fill the gaps."""
        keys, columns = self.mapped()
        rest = self.count - count
        taken = np.argsort(keys, kind="stable")[rest:]
        block = select(Block(keys, part, tuple(columns)), taken)
        holes, last = taken[taken < rest], np.setdiff1d(np.arange(rest, self.count), taken)
        for array in (keys, *map(_fixed, columns)):
            array.flags.writeable = True
            array[holes] = array[last]
            array.flags.writeable = False
        self._mapped = keys[:rest], [column[:rest] for column in columns]
        self.count, self.sorted = rest, False
        return block

    def mapped(self) -> tuple[Keys, list[AnyRows]]:
        """Return the keys and the columns, memory-mapped, and close the files."""
        if self._mapped is None:
            self._mapped = self._map()
        return self._mapped

    def _map(self) -> tuple[Keys, list[AnyRows]]:
        keys, *found = (
            _map(file, _stored(column).dtype, (self.count, *_stored(column).shape))
            for file, column in zip(self._files, self._columns, strict=True)
        )
        columns: list[AnyRows] = list(found)
        for place, file in self._entries.items():
            column, entry = self._columns[place], entry_of(self._columns[place].dtype)
            entries = _map(file, entry, (file.seek(0, os.SEEK_END) // entry.itemsize,))
            columns[place - 1] = rows_of(column.dtype)(found[place - 1], entries, column.shape)
        return keys, columns


def _stored(column: Column) -> Column:
    """Return the format of a column's first file."""
    return SPAN if column.sparse else column


def _map(file: IO[bytes], dtype: DTypeLike, shape: tuple[int, ...]) -> Array:
    """Return the contents of a file as an array, and close it."""
    size = prod(shape) * np.dtype(dtype).itemsize
    with file:
        if not size:
            return np.empty(shape, dtype)
        file.flush()
        memory = mmap.mmap(file.fileno(), size)
    array = np.frombuffer(memory, dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _made(directory: str, column: Column, count: int) -> Array:
    """Return a new array that is mapped to a file."""
    size = count * column.nbytes
    if not size:
        return np.empty((count, *column.shape), column.dtype)
    with tempfile.TemporaryFile(dir=directory) as file:
        if sys.platform == "linux":  # without reserved space, a full disk kills the process silently
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    return np.frombuffer(memory, column.dtype).reshape(count, *column.shape)


def _places(buckets: Integers, free: Integers) -> Integers:
    """Return the next free position in the bucket of each row, and update ``free``."""
    order, sizes = np.argsort(buckets, kind="stable"), np.bincount(buckets, minlength=len(free))
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) + np.repeat(free - np.cumsum(sizes) + sizes, sizes)
    free += sizes
    return places


def _slices(count: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``size`` rows that cover all ``count`` rows."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def local_directory() -> str:
    """Return a Spark directory for temporary files on this executor, or the system's if there is none."""
    for directory in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if directory and os.access(directory, os.W_OK):
            return directory
    return tempfile.gettempdir()

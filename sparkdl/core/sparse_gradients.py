"""Sparse gradients, which hold only the embedding rows that a batch looked up.

Keras on TensorFlow keeps such a gradient as *slices*: a row number and a gradient for each lookup. An
adaptive optimizer squares the slices one by one before it adds them up, so adding them up earlier would
change its step. So slices reach the workers' optimizers one by one, unless there are too many of them. They
are also small if a table has many more rows than a batch looks up.

In a message, a gradient with slices replaces the dense one, as float32 or int32 words:

* the dense variables, one after the other;
* for each variable with slices, in order: its slices, float32;
* for each of these variables: its row numbers, int32;
* the directory: for each of these variables, its index among the trainable variables and its number of
  slices, int32;
* the number of variables with slices, int32.

If the run has a codec, the float32 words are replaced by those of the codec.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.core.codecs import Codec
from sparkdl.core.reduction import Mean, Reduction
from sparkdl.core.vectors import EMPTY, Layout, Vector
from sparkdl.errors import WireError

Rows = NDArray[np.int32]
MOST_WORDS = 1 << 26  # limit for all updates of a round together; each may be as long as a dense one


class Table(NamedTuple):
    """A trainable variable as a table.

    Attributes:
        size: its number of elements.
        rows: its length along the first axis; 0 for a scalar.
    """

    size: int
    rows: int

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return self.size // self.rows if self.rows else 0


Tables = tuple[Table, ...]  # one for each trainable variable, in their order


class Slices(NamedTuple):
    """A gradient with slices.

    Attributes:
        rest: the flat gradient of the dense variables.
        lookups: by variable index, its row numbers (n,) and their gradients (n, width).
    """

    rest: Vector
    lookups: dict[int, tuple[Rows, Vector]]

    @property
    def num_slices(self) -> int:
        """The number of slices."""
        return sum(len(rows) for rows, _ in self.lookups.values())

    @property
    def parts(self) -> list[Vector]:
        """All numbers of the gradient, as flat vectors."""
        return [self.rest, *(values.reshape(-1) for _, values in self.lookups.values())]


def tables_of(layout: Layout) -> Tables:
    """Return the variables of a layout as tables."""
    pairs = zip(layout.sizes, layout.shapes, strict=True)
    return tuple(Table(size, shape[0] if shape else 0) for size, shape in pairs)


def most_words(size: int, num_workers: int) -> int:
    """Return the maximum number of words of an update with slices.

    Args:
        size: number of elements of the dense gradient.
        num_workers: number of workers that share the limit of a round.
    """
    return max(size, MOST_WORDS // num_workers)


def decode(vector: Vector, tables: Tables) -> Slices:
    """Return the gradient in a message, as views into it.

    Raises:
        WireError: the message does not hold a gradient for these tables.
    """
    words = vector.view(np.int32)
    num_sliced = int(words[-1]) if len(words) else 0
    if not 1 <= num_sliced <= min(len(tables), (len(words) - 1) // 2):
        raise WireError(
            f"Expected a sparse gradient with slices of 1 to {len(tables)} variables; got {num_sliced}."
        )
    directory = words[-1 - 2 * num_sliced : -1].reshape(-1, 2).tolist()
    _check_directory(directory, tables, len(words))
    rest = sum(table.size for table in tables) - sum(tables[index].size for index, _ in directory)
    start = rest
    values = []
    for index, count in directory:
        end = start + count * tables[index].width
        values.append(vector[start:end].reshape(count, tables[index].width))
        start = end
    lookups = {}
    for (index, count), value in zip(directory, values, strict=True):
        rows = words[start : start + count]
        if count and not (rows.min() >= 0 and rows.max() < tables[index].rows):
            raise WireError(
                f"Expected slices of variable {index} within its {tables[index].rows} rows; got rows "
                f"{rows.min()} to {rows.max()}."
            )
        lookups[index] = rows, value
        start += count
    return Slices(vector[:rest], lookups)


def _check_directory(directory: list[list[int]], tables: Tables, length: int) -> None:
    """Check a directory against these tables, and the length of its message.

    Raises:
        WireError: the directory or the length does not match.
    """
    before = -1
    expected = sum(table.size for table in tables) + 2 * len(directory) + 1
    for index, count in directory:
        if not before < index < len(tables) or not tables[index].rows or count < 0:
            raise WireError(
                f"Invalid directory of a sparse gradient: {count} slices of variable {index} after those of "
                f"variable {before}."
            )
        expected += count * (tables[index].width + 1) - tables[index].size
        before = index
    if expected != length:
        raise WireError(f"Expected a gradient of {expected} words with these slices; got {length}.")


def encode(slices: Slices) -> Vector:
    """Return a gradient with slices as the words of a message."""
    indices = sorted(slices.lookups)
    found = [slices.lookups[index] for index in indices]
    counts = [len(rows) for rows, _ in found]
    directory = [number for pair in zip(indices, counts, strict=True) for number in pair]
    parts = [slices.rest, *(values.reshape(-1) for _, values in found)]
    whole = [*(rows for rows, _ in found), np.array([*directory, len(found)])]
    return np.concatenate([*parts, *(part.astype(np.int32).view(np.float32) for part in whole)])


def compressed(vector: Vector, codec: Codec, place: tuple[int, int]) -> Vector:
    """Return the words of a message with the float32 words encoded by a codec.

    Args:
        vector: the words, as ``encode`` returns them.
        codec: the codec.
        place: as in ``Codec.encode``.
    """
    size = len(vector) - _num_integers(vector)
    return np.concatenate([codec.encode(vector[:size], place), vector[size:]])


def decompressed(words: Vector, codec: Codec, most: int | None = None) -> Vector:
    """Return the words of a message without a codec.

    Args:
        words: the words, as ``compressed`` returns them.
        codec: the codec.
        most: maximum number of words that are returned; None: no limit.

    Raises:
        WireError: the words do not hold a gradient, or too many words.
    """
    integers = _num_integers(words)
    start = len(words) - integers
    size = codec.size_of(words[:start])
    if most is not None and size + integers > most:
        raise WireError(f"Expected a sparse gradient of at most {most} words; got {size + integers}.")
    return np.concatenate([codec.decode(words[:start], size), words[start:]])


def _num_integers(vector: Vector) -> int:
    """Return the number of int32 words at the end of a message.

    Raises:
        WireError: the directory does not match the number of words.
    """
    words = vector.view(np.int32)
    num_sliced = int(words[-1]) if len(words) else 0
    if not 1 <= num_sliced <= (len(words) - 1) // 2:
        raise WireError(f"Expected a sparse gradient; got one with slices of {num_sliced} variables.")
    counts: list[int] = words[-2 * num_sliced : -1 : 2].tolist()
    integers = sum(counts) + 2 * num_sliced + 1
    if min(counts) < 0 or integers > len(words):
        raise WireError(f"Expected a sparse gradient of {len(words)} words; got one of {integers} or more.")
    return integers


def densified(slices: Slices, tables: Tables, keep: Collection[int] = ()) -> Slices:
    """Return a gradient with slices for the ``keep`` variables only; other slices are added up by row."""
    if slices.lookups.keys() <= set(keep):
        return slices
    parts, start = [], 0
    for index, table in enumerate(tables):
        if index not in slices.lookups:
            parts.append(slices.rest[start : start + table.size])
            start += table.size
        elif index not in keep:
            parts.append(_added_up(*slices.lookups[index], table))
    lookups = {index: found for index, found in slices.lookups.items() if index in keep}
    return Slices(np.concatenate(parts) if parts else EMPTY, lookups)


def _added_up(rows: Rows, values: Vector, table: Table) -> Vector:
    """Return the dense gradient of a table, flat."""
    dense = np.zeros((table.rows, table.width), np.float32)
    if len(rows):
        order = np.argsort(rows, kind="stable")
        found, starts = np.unique(rows[order], return_index=True)
        with np.errstate(over="ignore", invalid="ignore"):  # gradients of a scaled loss may be Inf
            dense[found] = np.add.reduceat(values[order], starts, axis=0)
    return dense.reshape(-1)


class SliceMean(Reduction):
    """The weighted mean of gradients, some of which may have slices.

    Slices are not added up: the mean has the slices of all gradients, one after the other, each scaled by its
    gradient's share of the weight. A variable is dense in the mean if it is dense in any of the gradients.

    Args:
        tables: the trainable variables.

    Attributes:
        sliced: whether the mean has slices; set by ``result``.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables, self.sliced = tables, False
        self._rest = Mean()
        self._lookups: dict[int, list[tuple[Rows, Vector, float]]] = {}
        self._weight = 0.0
        self._lone: Vector | None = None

    def add(self, vector: Vector, weight: float) -> None:
        """Add a dense gradient with its weight."""
        self._add(Slices(vector, {}), vector, weight)

    def add_encoded(self, vector: Vector, weight: float) -> int:
        """Add a gradient with slices, given as the words of a message; return its number of slices."""
        slices = decode(vector, self.tables)
        self._add(slices, vector, weight)
        return slices.num_slices

    def _add(self, slices: Slices, vector: Vector, weight: float) -> None:
        if not self._weight:
            self._lookups = {index: [] for index in slices.lookups}
        self._lone = None if self._weight else vector
        common = self._lookups.keys() & slices.lookups.keys()
        if len(common) < len(self._lookups):
            self._make_dense(common)
        kept = densified(slices, self.tables, common)
        self._rest.add(kept.rest, weight)
        self._weight += weight
        for index, (rows, values) in kept.lookups.items():
            self._lookups[index].append((rows, values, weight))

    def _make_dense(self, keep: Collection[int]) -> None:
        """Make all variables dense except these."""
        mean = densified(self._mean(), self.tables, keep)
        self._rest = Mean()
        self._rest.add(mean.rest, self._weight)
        self._lookups = {index: found for index, found in self._lookups.items() if index in keep}

    def _mean(self) -> Slices:
        lookups = {index: self._joined(found) for index, found in self._lookups.items()}
        return Slices(self._rest.result(), lookups)

    def _joined(self, found: Iterable[tuple[Rows, Vector, float]]) -> tuple[Rows, Vector]:
        """Return the slices of all gradients, each scaled by its share of the weight."""
        rows, values, weights = zip(*found, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = [
                value * np.float32(weight / self._weight)
                for value, weight in zip(values, weights, strict=True)
            ]
        return np.concatenate(rows), np.concatenate(scaled)

    def result(self) -> Vector:
        """Return the mean; if it has slices, as the words of a message."""
        self.sliced = bool(self._lookups)
        if self._lone is not None or not self._lookups:
            return self._rest.result() if self._lone is None else self._lone
        return encode(self._mean())

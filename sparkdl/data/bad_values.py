"""Numbers that no training can use, found while rows are written: NaN, Inf, and labels of no class.

A loss that becomes NaN says nothing about where it came from. So every row is looked at once, before the
first update: what is found is counted by column, with the first row of its kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows
from sparkdl.data.blocks import VALIDATION, Block, Keys, unscrambled
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows, TextRows
from sparkdl.errors import DataError

logger = logging.getLogger(__name__)
NAN, INF, CLASS = "NaN", "Inf", "labels"


class Classes(NamedTuple):
    """The classes that a loss knows.

    Attributes:
        number: how many there are, from 0 on.
        ignored: one that the loss leaves out, if there is one.
    """

    number: int
    ignored: int | None = None


class Fault(NamedTuple):
    """What is wrong with some rows of a column.

    Attributes:
        part: what the rows are for.
        column: the place of the column.
        kind: NAN, INF or CLASS.
        rows: how many rows.
        first: the key of the first of them, and how it is called.
    """

    part: int
    column: int
    kind: str
    rows: int
    first: tuple[int, str]


Origin = Callable[[int], str]  # names a row by its key


class Faults:
    """What is wrong with rows that are seen a block at a time.

    Args:
        schema: what rows are.
        classes: the classes of columns of labels, by the places of the columns.
        seeds: what keys of training rows and of validation rows were scrambled with; None: they were not.
        origin: names a row by the key that it had before.
    """

    def __init__(
        self,
        schema: Schema,
        classes: Mapping[int, Classes],
        seeds: tuple[int | None, int | None] = (None, None),
        origin: Origin = lambda key: f"row {key}",
    ) -> None:
        self.schema, self.classes, self.seeds, self.origin = schema, classes, seeds, origin
        self._found: dict[tuple[int, int, str], tuple[int, int]] = {}

    def note(self, block: Block) -> None:
        """Count what is wrong with the rows of a block."""
        if not len(block.keys):
            return
        for place, rows in enumerate(block.columns):
            if isinstance(rows, TextRows):
                continue  # strings have no NaN, and are no classes
            for kind, wrong in _wrong(rows, self.classes.get(place)):
                self._count((block.part, place, kind), block.keys[wrong], int(wrong.sum()))

    def _count(self, what: tuple[int, int, str], keys: Keys, rows: int) -> None:
        if rows:
            seed = self.seeds[what[0] == VALIDATION]
            keys = keys if seed is None else unscrambled(keys, seed)
            known, first = self._found.get(what, (0, int(keys[0])))
            self._found[what] = known + rows, min(first, int(keys.min()))

    def found(self) -> list[Fault]:
        """Return what is wrong, as values."""
        return [
            Fault(*what, rows, (first, self.origin(first)))
            for what, (rows, first) in sorted(self._found.items())
        ]


class Watched:
    """Blocks that are looked at as they pass.

    Args:
        blocks: the blocks.
        faults: where what is wrong with them is counted; None: nobody asks.
        shuffled: whether a shuffle dealt their training rows to workers.
    """

    def __init__(
        self, blocks: Iterable[Block], faults: Faults | None = None, *, shuffled: bool = False
    ) -> None:
        self.blocks, self.faults, self.shuffled = blocks, faults, shuffled

    def __iter__(self) -> Iterator[Block]:
        for block in self.blocks:
            if self.faults is not None:
                self.faults.note(block)
            yield block

    def found(self) -> list[Fault]:
        """Return what is wrong with the blocks that have passed."""
        return [] if self.faults is None else self.faults.found()


def _wrong(rows: AnyRows, classes: Classes | None) -> Iterable[tuple[str, Array]]:
    """Yield each kind of fault, and which rows have it."""
    values = rows.compact().entries["value"] if isinstance(rows, SparseRows) else rows
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        nan = _rows_with(rows, np.isnan(values))
        yield NAN, nan
        yield INF, _rows_with(rows, np.isinf(values)) & ~nan
    if classes is not None:
        outside = (values < 0) | (values >= classes.number)
        if classes.ignored is not None:
            outside &= values != classes.ignored
        yield CLASS, _rows_with(rows, outside)


def _rows_with(rows: AnyRows, values: Array) -> Array:
    """Return which rows have one of the marked values."""
    if isinstance(rows, SparseRows):
        counted = np.repeat(np.arange(len(rows)), rows.spans[:, 1])
        values, counted = values[values], counted[values]
        return np.asarray(np.bincount(counted, minlength=len(rows)) > 0)
    return np.asarray(values.reshape(len(rows), -1).any(axis=1))


def judge(words: str, nan: str) -> None:
    """Refuse rows that cannot be trained on, or warn of them.

    Args:
        words: what is wrong with them; empty if nothing is.
        nan: "error" or "warn".

    Raises:
        DataError: something is wrong, and rows with faults are an error.
    """
    if words and nan == "error":
        raise DataError(f'{words} Drop or mend these rows, or pass nan="warn" to train on them.')
    if words:
        logger.warning("%s", words)


def sentences_of(
    found: Iterable[Iterable[Any]], rows: Mapping[int, int], schema: Schema, classes: Mapping[int, Classes]
) -> str:
    """Return what is wrong with rows as sentences, all workers' together; empty if nothing is.

    Args:
        found: the faults of every worker.
        rows: how many rows there are, by what they are for.
        schema: what rows are.
        classes: the classes of columns of labels.
    """
    totals: dict[tuple[int, int, str], tuple[int, tuple[int, str]]] = {}
    for part, place, kind, count, first in found:
        known, earliest = totals.get((part, place, kind), (0, tuple(first)))
        totals[part, place, kind] = known + count, min(earliest, tuple(first))
    sentences = []
    for (part, place, kind), (count, (_, first)) in sorted(totals.items()):
        what = kind if kind != CLASS else f"labels outside of 0 to {classes[place].number - 1}"
        among = f"{rows[part]:,} {'validation rows' if part == VALIDATION else 'rows'}"
        sentences.append(
            f"{schema.columns[place].name} has {what} in {count:,} of {among}; the first is {first}."
        )
    return " ".join(sentences)

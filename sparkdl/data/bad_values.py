"""Checks for values that cannot be trained on: NaN, Inf and out-of-range labels.

A loss that becomes NaN does not show where the NaN came from. So every row of a fit is checked before the
first update: arrays on the driver, all other rows on the workers that store them. Faults are counted by part,
column and kind, and the first row with each is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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


class KnownClasses(NamedTuple):
    """The classes that a loss knows.

    Attributes:
        number: number of classes; labels are 0 to ``number`` - 1.
        ignored: a class that the loss ignores, if any.
    """

    number: int
    ignored: int | None = None


class Fault(NamedTuple):
    """A fault in some rows of a column.

    Attributes:
        part: the part that the rows belong to, such as VALIDATION.
        column: the index of the column.
        kind: NAN, INF or CLASS.
        rows: number of rows.
        first: the key of the first of them, and its description.
    """

    part: int
    column: int
    kind: str
    rows: int
    first: tuple[int, str]


Origin = Callable[[int], str]  # describes a row by its key


class Faults:
    """The faults in rows that are checked block by block.

    Args:
        schema: the rows' schema.
        classes: the classes of label columns, by the index of the column.
        seeds: the seeds with which the keys of training and of validation rows were scrambled; None: they
            were not.
        origin: describes a row by its original key.
        checked: the parts whose rows are not checked, because they have been.
    """

    def __init__(
        self,
        schema: Schema,
        classes: Mapping[int, KnownClasses],
        seeds: tuple[int | None, int | None] = (None, None),
        origin: Origin = lambda key: f"row {key}",
        *,
        checked: Container[int] = (),
    ) -> None:
        self.schema, self.classes, self.seeds, self.origin = schema, classes, seeds, origin
        self.checked = checked
        self._found: dict[tuple[int, int, str], tuple[int, int]] = {}

    def note(self, block: Block) -> None:
        """Count the faults in the rows of a block."""
        if not len(block.keys) or block.part in self.checked:
            return
        for place, rows in enumerate(block.columns):
            if isinstance(rows, TextRows):
                continue  # strings have no NaN, and are not classes
            for kind, wrong in _wrong(rows, self.classes.get(place)):
                self._count((block.part, place, kind), block.keys[wrong], int(wrong.sum()))

    def _count(self, what: tuple[int, int, str], keys: Keys, rows: int) -> None:
        if rows:
            seed = self.seeds[what[0] == VALIDATION]
            keys = keys if seed is None else unscrambled(keys, seed)
            known, first = self._found.get(what, (0, int(keys[0])))
            self._found[what] = known + rows, min(first, int(keys.min()))

    def found(self) -> list[Fault]:
        """Return the faults so far, in order of part, column and kind."""
        return [
            Fault(*what, rows, (first, self.origin(first)))
            for what, (rows, first) in sorted(self._found.items())
        ]


class Watched:
    """An iterable of blocks that checks each block as it passes.

    Args:
        blocks: the blocks.
        faults: the counter of their faults.
        shuffled: whether a shuffle dealt their training rows to workers.
    """

    def __init__(self, blocks: Iterable[Block], faults: Faults, *, shuffled: bool = False) -> None:
        self.blocks, self.faults, self.shuffled = blocks, faults, shuffled

    def __iter__(self) -> Iterator[Block]:
        for block in self.blocks:
            self.faults.note(block)
            yield block

    def found(self) -> list[Fault]:
        """Return the faults in the blocks that have passed."""
        return self.faults.found()


def _wrong(rows: AnyRows, classes: KnownClasses | None) -> Iterable[tuple[str, Array]]:
    """Yield each kind of fault, with a mask of the rows that have it. NaN and Inf in one row count as NaN."""
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
    """Return a mask of the rows with at least one of the marked values."""
    if isinstance(rows, SparseRows):
        counted = np.repeat(np.arange(len(rows)), rows.spans[:, 1])
        values, counted = values[values], counted[values]
        return np.asarray(np.bincount(counted, minlength=len(rows)) > 0)
    return np.asarray(values.reshape(len(rows), -1).any(axis=1))


def judge(words: str, nan: str) -> None:
    """Raise an error or log a warning about rows that cannot be trained on.

    Args:
        words: a description of the faults; empty if there are none.
        nan: "error" or "warn".

    Raises:
        DataError: there are faults, and ``nan`` is "error".
    """
    if words and nan == "error":
        raise DataError(f'{words} Drop or correct these rows, or pass nan="warn" to train on them.')
    if words:
        logger.warning("%s", words)


def sentences_of(
    found: Iterable[Iterable[Any]],
    rows: Mapping[int, int],
    schema: Schema,
    classes: Mapping[int, KnownClasses],
) -> str:
    """Return faults as sentences; an empty string if there are none.

    Args:
        found: the faults that the driver found, or those of all workers.
        rows: number of rows in each part.
        schema: the rows' schema.
        classes: the classes of label columns.
    """
    totals: dict[tuple[int, int, str], tuple[int, tuple[int, str]]] = {}
    for part, place, kind, count, first in found:
        known, earliest = totals.get((part, place, kind), (0, tuple(first)))
        totals[part, place, kind] = known + count, min(earliest, tuple(first))
    sentences = []
    for (part, place, kind), (count, (_, first)) in sorted(totals.items()):
        what = kind if kind != CLASS else f"labels outside the range 0 to {classes[place].number - 1}"
        among = f"{rows[part]:,} {'validation rows' if part == VALIDATION else 'rows'}"
        sentences.append(
            f"{schema.columns[place].name} has {what} in {count:,} of {among}; the first is {first}."
        )
    return " ".join(sentences)

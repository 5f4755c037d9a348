"""Rows with NaN, Inf or labels out of range are counted by column, and the first one is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.bad_values import Faults, KnownClasses, Watched, judge, sentences_of
from sparkdl.data.blocks import TRAINING, VALIDATION, Block, row_keys, scramble, unscrambled
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows
from sparkdl.errors import DataError

SCHEMA = Schema((Column("x", (2,), "float32"), Column("y", (), "int64")), (0, 1))
CLASSES = {1: KnownClasses(3)}


def block(x, y, first=0, part=TRAINING):
    keys = np.arange(first, first + len(x), dtype=np.uint64)
    return Block(keys, part, (np.array(x, np.float32), np.array(y)))


def said(*workers, rows, schema=SCHEMA, classes=CLASSES):
    """Return the sentences about the workers' findings, after a round trip through JSON."""
    found = []
    for blocks in workers:
        faults = Faults(schema, classes)
        watched = Watched(blocks, faults)
        assert list(watched) == blocks
        found += [list(fault) for fault in watched.found()]
    return sentences_of(found, rows, schema, classes)


def test_rows_of_all_workers_are_counted_together():
    """Totals cover all workers and blocks; the reported row is the first of all."""
    good, bad = [[0.0, 1.0]], [[np.nan, 1.0]]
    workers = [
        [block(good * 3, [0, 1, 2]), block(bad * 2, [0, 0], 12)],
        [block([*good, *bad], [5, -1], 7)],
    ]

    assert said(*workers, rows={TRAINING: 50_000}) == (
        "x has NaN in 3 of 50,000 rows; the first is row 8. "
        "y has labels outside the range 0 to 2 in 2 of 50,000 rows; the first is row 7."
    )
    assert not said([block(good, [0])], rows={TRAINING: 1})


def test_validation_rows_are_named_apart():
    """Held-out rows have a separate count."""
    sentence = said([block([[0.0, np.inf]], [0], 4, VALIDATION)], rows={TRAINING: 9, VALIDATION: 5})

    assert "x has Inf in 1 of 5 validation rows; the first is row 4." == sentence


def test_rows_that_were_checked_before_are_left_out():
    """Rows of a part that the driver has checked are not counted again by the workers."""
    faults = Faults(SCHEMA, CLASSES, checked={TRAINING})
    faults.note(block([[np.nan, 1.0]], [0]))
    faults.note(block([[np.inf, 1.0]], [0], 4, VALIDATION))

    assert [VALIDATION] == [fault.part for fault in faults.found()]


def test_numbers_of_sparse_rows_are_looked_at():
    """NaN in a sparse row is found."""
    rows = SparseRows.of([([0], [1.0]), ([], []), ([0, 1], [2.0, np.nan])], (2,), "float32")
    schema = Schema((Column("x", (2,), "float32", sparse=1),), (0,))
    blocks = [Block(np.arange(3, dtype=np.uint64), TRAINING, (rows,))]

    assert "x has NaN in 1 of 3 rows; the first is row 2." == said(
        blocks, rows={TRAINING: 3}, schema=schema, classes={}
    )


def test_a_class_that_the_loss_ignores_is_none_too_many():
    """The label that ignore_class names may lie outside the classes."""
    faults = Faults(SCHEMA, {1: KnownClasses(3, ignored=-1)})
    faults.note(block([[0.0, 0.0]] * 3, [-1, 2, 3]))

    assert [(1, "labels", 1)] == [(fault.column, fault.kind, fault.rows) for fault in faults.found()]


@given(partition=st.integers(0, 1 << 20), index=st.integers(0, 1 << 30), seed=st.integers(0, (1 << 31) - 1))
def test_a_scrambled_key_tells_where_its_row_comes_from(partition, index, seed):
    """Scrambling of keys is one to one and can be undone."""
    keys = row_keys(partition, np.array([index], np.uint64))

    np.testing.assert_array_equal(unscrambled(scramble(keys, seed), seed), keys)


def test_what_is_found_is_an_error_unless_a_warning_was_asked_for(caplog):
    """Faults raise an error unless nan="warn", and no faults log nothing."""
    judge("", "error")
    judge("x has NaN.", "warn")

    assert ["x has NaN."] == [record.getMessage() for record in caplog.records]
    with pytest.raises(DataError, match=r'x has NaN\. Drop or correct these rows, or pass nan="warn"'):
        judge("x has NaN.", "error")

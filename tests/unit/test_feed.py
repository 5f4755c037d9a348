"""Blocks on their way to a worker get the weights that they lack."""

import numpy as np
import pytest

from sparkdl.errors import DataError
from sparkdl.feed import Block, parts_of, weigh
from sparkdl.schema import Column, Schema

SCHEMA = Schema(
    (Column("x", (), "float32"), Column("y", (2,), "int64"), Column("w", (), "float32")), (0, 1, 2)
)


@pytest.mark.parametrize(
    ("part", "classes", "expected"),
    [(0, None, [1, 1, 1]), (0, {0: 3.0, 1: 0.5}, [3, 0.5, 0.5]), (1, {0: 3.0}, [1, 1, 1])],
)
def test_rows_without_weights_get_those_of_their_classes(part, classes, expected):
    """A label may be one-hot; validation rows, and classes without a weight, weigh 1."""
    labels = np.array([[1, 0], [0, 1], [0, 1]])
    block = Block(np.arange(3, dtype=np.uint64), part, (np.zeros(3, np.float32), labels))
    (weighed,) = weigh([block], SCHEMA, classes)

    assert expected == weighed.columns[2].tolist()


def test_rows_with_weights_keep_them():
    """What came with the rows is left alone."""
    columns = np.zeros(1, np.float32), np.zeros((1, 2), np.int64), np.array([7], np.float32)
    block = Block(np.zeros(1, np.uint64), 0, columns)

    assert [block] == list(weigh([block], SCHEMA, {0: 3.0}))


ROWS = np.zeros((5, 2))


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (ROWS, "ndarray of ndarray"),
        ([ROWS, ROWS[:, 0]], "list of ndarray"),
        ((ROWS,), "tuple of length 1"),
        (iter([ROWS]), "list_iterator of ndarray"),
        (None, "NoneType"),
        (5, "int"),
    ],
)
def test_what_a_function_of_rows_returns_without_labels_is_refused(made, given):
    """It says what came; a list of x and y is one of two batches."""
    with pytest.raises(DataError, match=rf"return a tuple \(x, y\) .*; got {given}\."):
        list(parts_of(made))


def test_batches_are_tuples_or_lists():
    """As torch's loaders have them."""
    assert [(1, 2), (3, 4)] == list(parts_of([[1, 2], (3, 4)]))

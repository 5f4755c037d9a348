"""Values of rows must match the shape and the dtype of their column."""

from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest

from sparkdl.data.column import Column
from sparkdl.errors import DataError


def test_none_is_no_number():
    """None in a number column raises; NumPy would make it NaN and training would go on."""
    column = Column("label", (), "float32")

    with pytest.raises(DataError, match="row 1 of partition 0 has None"):
        column.of([1.0, None, 2.0], "partition 0")


@pytest.mark.parametrize("sparse", [0, 1])
def test_how_many_rows_are_refused_is_said(sparse):
    """The error counts nulls and wrong shapes in the block."""
    column = Column("x", (2,), "float32", sparse)

    message = "row 1 of .* 3 of the 4 rows that were read together cannot be used.$"
    with pytest.raises(DataError, match=message):
        column.of([[1.0, 2.0], None, [1.0], [1.0, None]], "partition 0")


@pytest.mark.parametrize(
    ("dtype", "values", "bad"),
    [
        ("uint8", np.array([3, 300], "uint16"), 300),
        ("bool", np.array([1, 2]), 2),
        ("int64", np.array([1.0, 0.5]), 0.5),
        ("int64", np.array([1.0, np.nan]), "nan"),
    ],
)
def test_numbers_that_the_first_rows_type_does_not_hold_are_refused(dtype, values, bad):
    """A number that does not fit the first row's type is refused; it would wrap around."""
    with pytest.raises(DataError, match=f"numbers that fit {dtype}, .*; row 8 of partition 0 has {bad}"):
        Column("y", (), dtype).of(values, "partition 0", 7)


@pytest.mark.parametrize(("number", "shown"), [(1.5, "1.5"), (np.nan, "nan"), (3e9, "3000000000.0")])
def test_sparse_vectors_are_held_to_the_type_as_dense_ones_are(number, shown):
    """A number of a sparse vector that does not fit the column's type is refused, not truncated."""
    vectors = [
        SimpleNamespace(size=9, indices=np.array([2, 5]), values=np.array([1.0, value]))
        for value in (4.0, number, number)
    ]
    for vector in vectors:
        vector.toArray = lambda vector=vector: np.bincount(vector.indices, vector.values, vector.size)

    for sparse in (0, 1):
        with pytest.raises(DataError, match=f"fit int32, .*row 1 of a batch has .*{shown}.* 2 of the 3 rows"):
            Column("x", (9,), "int32", sparse).of(vectors, "a batch")


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("int32", Decimal("1.5")), ("uint8", 300), ("int32", 2**64), ("int64", Decimal("NaN"))],
)
def test_objects_are_held_to_the_type_as_numbers_are(dtype, number):
    """A number that is a Python object is refused if it does not fit the column's type."""
    with pytest.raises(DataError, match="row 1 of a batch has "):
        Column("x", (1,), dtype).of([np.array([1], object), np.array([number], object)], "a batch")


def test_objects_that_fit_are_taken_exactly():
    """Large whole numbers that are Python objects keep their last digit."""
    large = 2**60 + 1
    taken = Column("x", (2,), "int64").of([[Decimal(large), 7]], "a batch")

    assert [[large, 7]] == taken.tolist()


def test_numbers_of_another_width_that_fit_are_taken():
    """Numbers of another type that fit the column are accepted."""
    taken = Column("y", (), "uint8").of(np.array([3, 255], "int64"), "partition 0")

    assert (np.dtype("uint8"), [3, 255]) == (taken.dtype, taken.tolist())

"""Values of rows must match the shape and the dtype of their column."""

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


def test_numbers_of_another_width_that_fit_are_taken():
    """Numbers of another type that fit the column are accepted."""
    taken = Column("y", (), "uint8").of(np.array([3, 255], "int64"), "partition 0")

    assert (np.dtype("uint8"), [3, 255]) == (taken.dtype, taken.tolist())

"""Rows are taken apart and held to what the first of them was."""

import numpy as np
import pytest

from sparkdl.data.schema import Column, Sample
from sparkdl.errors import DataError

ARRAY = np.zeros(2)


def test_one_weight_is_that_of_every_output():
    """As in Keras, where several outputs have weights of one array."""
    sample = Sample.of((ARRAY, {"a": ARRAY, "b": ARRAY}, ARRAY), (1, 2))

    assert sample.form == (0, {"a": 1, "b": 2}, 3)
    assert sample.names == ("x", "y['a']", "y['b']", "sample_weight")
    assert sample.schema("float32").template == (0, {"a": 1, "b": 2}, {"a": 3, "b": 3})


def test_none_is_no_number():
    """NumPy would make a NaN of it, and training would go on."""
    column = Column("label", (), "float32")

    with pytest.raises(DataError, match="row 1 of partition 0 has None"):
        column.of([1.0, None, 2.0], "partition 0")


@pytest.mark.parametrize("sparse", [0, 1])
def test_how_many_rows_are_refused_is_said(sparse):
    """Nulls and wrong shapes alike, of those of one block."""
    column = Column("x", (2,), "float32", sparse)

    with pytest.raises(DataError, match="row 1 of .* Of the 4 rows read together, 3 cannot be taken.$"):
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
    """They would wrap around, and training would go on with other numbers."""
    with pytest.raises(DataError, match=f"numbers that fit {dtype}, .*; row 8 of partition 0 has {bad}"):
        Column("y", (), dtype).of(values, "partition 0", 7)


def test_numbers_of_another_width_that_fit_are_taken():
    """A row may be of another type than the first."""
    taken = Column("y", (), "uint8").of(np.array([3, 255], "int64"), "partition 0")

    assert (np.dtype("uint8"), [3, 255]) == (taken.dtype, taken.tolist())


def test_validation_weights_are_like_those_of_training_rows():
    """One number beside one per time step would be read as something else."""
    rows = [Sample.of((ARRAY, ARRAY, weight), (1, 1)) for weight in (np.ones(()), np.ones(2))]
    one, each = (sample.schema("float32") for sample in rows)

    assert one == one.held(one)
    assert each == one.without_weights().held(each)
    with pytest.raises(DataError, match=r"sample_weight of shape \(\); got sample_weight of shape \(2,\)"):
        one.held(each)

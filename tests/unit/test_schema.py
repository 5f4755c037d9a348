"""Rows are taken apart and held to what the first of them was."""

import numpy as np
import pytest

from sparkdl.errors import DataError
from sparkdl.schema import Column, Sample

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

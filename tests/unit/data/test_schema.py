"""Rows are split into columns and checked against the first row."""

import numpy as np
import pytest

from sparkdl.data.schema import Sample
from sparkdl.errors import DataError

ARRAY = np.zeros(2)


def test_one_weight_is_that_of_every_output():
    """One array of weights applies to every output, as in Keras."""
    sample = Sample.of((ARRAY, {"a": ARRAY, "b": ARRAY}, ARRAY), (1, 2))

    assert sample.form == (0, {"a": 1, "b": 2}, 3)
    assert sample.names == ("x", "y['a']", "y['b']", "sample_weight")
    assert sample.schema("float32").template == (0, {"a": 1, "b": 2}, {"a": 3, "b": 3})


def test_validation_weights_are_like_those_of_training_rows():
    """Validation weights must have the shape of training weights: one number differs from one per step."""
    rows = [Sample.of((ARRAY, ARRAY, weight), (1, 1)) for weight in (np.ones(()), np.ones(2))]
    one, each = (sample.schema("float32") for sample in rows)

    assert one == one.held(one)
    assert each == one.without_weights().held(each)
    with pytest.raises(DataError, match=r"sample_weight of shape \(\)\); got sample_weight of shape \(2,\)"):
        one.held(each)


@pytest.mark.parametrize(
    ("training", "held", "kept"),
    [
        ("int64", "float64", "float32"),
        ("uint8", "float32", "float32"),
        ("int32", "int64", "int64"),
        ("int64", "bool", "int64"),
        ("float32", "int64", "float32"),
    ],
)
def test_validation_rows_may_have_other_numbers(training, held, kept):
    """Validation rows keep numbers that the integers of the training rows cannot hold, as in Keras."""
    rows = [Sample.of((ARRAY, np.ones(2, kind)), (1, 1)).schema("float32") for kind in (training, held)]
    one, other = rows

    whole = one.with_held(one.held(other))

    assert one.columns == whole.columns
    assert [kept, "float32"] == [whole.held_out.columns[1].dtype, whole.held_out.columns[0].dtype]


def test_strings_among_validation_rows_are_named_as_such():
    """Strings in place of numbers are refused as a difference between validation and training rows."""
    numbers, texts = (
        Sample.of((array, ARRAY), (1, 1)).schema("float32") for array in (ARRAY, np.array(["a", "b"]))
    )

    with pytest.raises(DataError, match="validation_data should have numbers for x, as in the training rows"):
        numbers.held(texts)

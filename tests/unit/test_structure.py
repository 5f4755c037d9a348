"""Structures of arrays become flat columns and come back: laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed import Block, Column, Sample, Schema, weigh
from sparkdl.structure import assemble, flatten, leaves, paths, template_of

ARRAY = np.zeros(2)
structures = st.recursive(
    st.just(ARRAY),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, min_size=1),
    ),
    max_leaves=6,
)


@given(structures)
def test_a_structure_comes_back(value):
    """What is taken apart by a template is put together by it, and each part stands in one place."""
    template = template_of(value, None)
    parts = list(flatten(template, value))

    assert list(range(len(parts))) == sorted(leaves(template))
    assert template == template_of(assemble(template, parts), None)
    assert len(parts) == len(list(paths(template, "x")))


LISTS = [
    ([1.0, 2.0], None, 0),  # an array in the form of a list
    ([1.0, 2.0], 2, (0, 1)),  # two inputs, a number each
    ([1.0, 2.0], 1, 0),
    ([ARRAY, ARRAY], None, (0, 1)),
    ([ARRAY, ARRAY], 1, 0),
    ({"b": 1.0, "a": [1.0, 2.0]}, None, {"a": 0, "b": 1}),
]


@pytest.mark.parametrize(("value", "parts", "expected"), LISTS)
def test_a_list_is_an_array_or_a_structure_by_what_the_model_takes(value, parts, expected):
    """The number of inputs decides, and where it is not known whether the parts are arrays."""
    assert expected == template_of(value, parts)


def test_one_weight_is_that_of_every_output():
    """As in Keras, where several outputs have weights of one array."""
    sample = Sample.of((ARRAY, {"a": ARRAY, "b": ARRAY}, ARRAY), (1, 2))

    assert sample.template == (0, {"a": 1, "b": 2}, {"a": 3, "b": 3})
    assert sample.form == (0, {"a": 1, "b": 2}, 3)
    assert sample.names == ("x", "y['a']", "y['b']", "sample_weight")


SCHEMA = Schema(
    (Column("x", (), "float32"), Column("y", (2,), "int64"), Column("w", (), "float32")), (0, 1, 2), (0, 1, 2)
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

"""Structures of arrays are flattened into columns and restored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.tree import assemble, flatten, leaves, paths, template_of

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
    """Flattening by a template and restoring by it returns the structure, and each part has one place."""
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
    """A list is split by the number of inputs, or if that is unknown, only if its parts are arrays."""
    assert expected == template_of(value, parts)

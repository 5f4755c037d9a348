"""Structures of arrays are flattened into columns and restored."""

from collections import OrderedDict, UserDict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.tree import assemble, flatten, leaves, paths, plain, replaced, split, template_of

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


Pair = namedtuple("Pair", "first second")
NAMES = st.text(max_size=2)
OF_ANY_CLASS = st.recursive(
    st.none() | st.integers() | st.just(ARRAY) | st.just(deque([1, 2])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        *(
            st.dictionaries(NAMES, inner).map(kind)
            for kind in (dict, OrderedDict, UserDict, MappingProxyType)
        ),
    ),
    max_leaves=8,
)


def walk(value, path="x"):
    """Yield each leaf of a structure with its path, dicts by their sorted names."""
    if isinstance(value, dict | UserDict | MappingProxyType):
        for name in sorted(value):
            yield from walk(value[name], f"{path}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from walk(part, f"{path}[{index}]")
    else:
        yield path, value


@given(OF_ANY_CLASS)
def test_containers_of_any_class_are_walked_in_the_same_order(value):
    """Leaves, their paths and their replacements have one order, whatever the classes of the containers."""
    expected = list(walk(value))
    replacements = iter(range(len(expected)))

    changed = replaced(value, lambda leaf: next(replacements))

    assert [path for path, _ in expected] == paths(value, "x")
    assert all(one is other for (_, one), other in zip(expected, leaves(value), strict=True))
    assert list(walk(changed)) == [(path, place) for place, (path, _) in enumerate(expected)]


@given(OF_ANY_CLASS)
def test_a_form_is_filled_with_the_leaves_that_it_came_from(value):
    """A structure of Python's own containers comes back from its leaves and its form, in the same order."""
    value = plain(value)
    parts, form = split(value)

    again = form.unflatten(parts)

    assert repr(value) == repr(again)
    assert form == split(again)[1]
    assert hash(form) == hash(split(again)[1])


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

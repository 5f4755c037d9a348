"""Values are packed as bytes for the network and the disk, without pickle."""

import json
from collections import namedtuple
from mmap import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparkdl.core.packing import like, pack, parts, unpack


def test_a_record_comes_out_as_it_went_in():
    """Arrays keep their type and shape, bytes stay bytes, and a value that occurs twice is packed once."""
    weights = np.arange(1000, dtype="float32")
    value = {
        "a": weights,
        "b": [weights, b"state", b""],
        "c": {"x": None, "y": np.float32(1.5)},
        "d": np.zeros((0, 3), "int64"),
    }

    data = pack(value)
    found = unpack(data)

    assert len(data) < 1.2 * weights.nbytes
    for array in (found["a"], found["b"][0]):
        np.testing.assert_array_equal(weights, array, strict=True)
    assert ([b"state", b""], value["c"]) == (found["b"][1:], found["c"])
    assert ((0, 3), np.int64) == (found["d"].shape, found["d"].dtype)


ARRAYS = arrays.arrays(
    st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]), arrays.array_shapes(min_dims=0)
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | ARRAYS
)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, True)
    return one == other


@given(st.recursive(LEAVES, lambda of: st.lists(of) | st.tuples(of, of) | st.dictionaries(st.text(), of)))
def test_any_record_comes_out_as_it_went_in(value):
    """A tuple comes back as a list, and as a tuple if ``like`` is given the original."""
    found = unpack(pack(value))

    assert same(value, found)
    assert same(value, unpack(memoryview(pack(value))))
    assert type(like(value, found)) is type(value) or isinstance(value, np.ndarray)


def test_a_record_is_written_without_being_copied():
    """A record is written from the buffers of its arrays and mapped files, without a copy."""
    array = np.zeros(1000)
    mapped = mmap(-1, 5000)

    *_, first, second = parts([array, mapped])

    assert np.shares_memory(np.frombuffer(first, np.uint8), array)
    assert np.shares_memory(np.frombuffer(second, np.uint8), np.frombuffer(mapped, np.uint8))


def test_what_has_no_place_in_a_record_is_refused():
    """An unsupported value is refused with the name of its type."""
    with pytest.raises(TypeError, match="not 'complex'"):
        pack({"a": [1, 2j]})


@pytest.mark.parametrize("aside", [["float33", [1], 0], ["f4,(", [1], 0], ["int64", ["x"], 0], 7])
def test_what_is_no_record_is_refused(aside):
    """A record with an unknown dtype, or with another form, raises ValueError."""
    text = json.dumps([{"<aside>": aside}]).encode()

    with pytest.raises(ValueError, match="Expected a record; got other data"):
        unpack(len(text).to_bytes(8, "little") + text + bytes(8))


Pair = namedtuple("Pair", "first second")


def test_tuples_are_what_they_were():
    """``like`` restores tuples, named tuples and keys, and refuses another structure."""
    value = {"a": Pair(1, (2, [3])), 7: None}

    found = like(value, unpack(pack(value)))

    assert value == found
    assert isinstance(found["a"], Pair)
    for other in ({"a": [1, 2]}, {"a": [1], "7": None}, [1]):
        with pytest.raises(TypeError, match="Expected"):
            like(value, other)

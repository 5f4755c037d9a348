"""Variables packed as one vector or as bytes, and the memory for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparkdl.core.vectors import ALIGNMENT, Layout, address, aligned

DTYPES = st.sampled_from(["float32", "float64", "int32", "uint32", "bool"])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)
floats = st.lists(SHAPES, max_size=4).map(
    lambda shapes: [np.random.default_rng(len(s)).normal(size=s).astype(np.float32) for s in shapes]
)
anything = st.lists(st.tuples(DTYPES, SHAPES), max_size=4).map(
    lambda kinds: [np.ones(shape, dtype) for dtype, shape in kinds]
)


@given(floats)
def test_a_vector_holds_the_variables(variables):
    """Variables are packed into one contiguous float32 vector and unpacked unchanged."""
    layout = Layout.of(variables)
    vector = layout.pack(variables)

    assert ("float32", sum(v.size for v in variables)) == (vector.dtype, vector.size)
    for before, after in zip(variables, layout.unpack(vector), strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.shape == after.shape


@given(anything)
def test_bytes_hold_variables_of_any_dtype(variables):
    """A worker's state with variables of any dtype is restored from bytes unchanged."""
    layout = Layout.of(variables)
    data = layout.to_bytes(variables)

    assert layout.nbytes == len(data)
    for before, after in zip(variables, layout.from_bytes(data), strict=True):
        np.testing.assert_array_equal(before, after)
        assert (before.dtype, before.shape) == (after.dtype, after.shape)


@given(anything, anything)
def test_layouts_share_a_digest_only_if_they_are_the_same(first, second):
    """Layouts share a digest only if they are equal, so that updates of another model are detected."""
    one, other = Layout.of(first), Layout.of(second)

    assert (one == other) is (one.digest == other.digest)


@pytest.mark.parametrize("dtype", ["bool", "float32", "int64"])
@pytest.mark.parametrize("size", [0, 1, 8, 1000])
def test_memory_for_a_backend_is_aligned(dtype, size):
    """Memory for a backend is aligned, so that a tensor needs no copy of it."""
    memory = aligned(size * np.dtype(dtype).itemsize)

    assert not size or address(memory) % ALIGNMENT == 0
    assert size == memory.view(dtype).size

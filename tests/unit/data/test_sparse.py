"""Sparse rows equal their dense rows under any selection, and take no more space than their numbers."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pyspark.ml.linalg import Vectors

from sparkdl.data.column import Column
from sparkdl.data.schema import Sample
from sparkdl.data.sparse import SparseRows
from sparkdl.errors import DataError

numbers = st.sampled_from([0.0, 0.0, 0.0, 1.5, -2.0])
tables = arrays(np.float32, st.tuples(st.integers(0, 6), st.integers(1, 5)), elements=numbers)


def rows_of(table):
    """Return sparse rows."""
    return SparseRows.of([(row.nonzero()[0], row[row.nonzero()]) for row in table], (5,), "float32")


@given(tables.map(lambda table: np.pad(table, ((0, 0), (0, 5 - table.shape[1])))), st.data())
def test_any_choice_of_rows_is_that_of_the_array(table, data):
    """Slices, masks and positions select the rows of the array, also repeatedly and after pickling."""
    rows = rows_of(table)
    places = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=9) if len(table) else st.just([]))
    chosen, mask = np.array(places, np.int64), data.draw(arrays(bool, len(places)))

    np.testing.assert_array_equal(table, rows.toarray())
    np.testing.assert_array_equal(table[1:3], rows[1:3].toarray())
    found = rows[chosen][mask]
    for each in (found, pickle.loads(pickle.dumps(found))):
        np.testing.assert_array_equal(table[chosen][mask], each.toarray())
        assert table[chosen][mask].shape == each.shape


def test_a_selection_is_pickled_without_the_other_rows():
    """A selection is pickled without the other rows."""
    rows = SparseRows.of([(np.arange(100), np.ones(100))] * 1000, (1 << 20,), "float32")

    assert rows.nbytes > 800_000 > 2000 > len(pickle.dumps(rows[:1]))
    assert rows[:1].nbytes == len(rows[:1].compact().entries.tobytes()) + 16


VECTORS = [Vectors.sparse(9, {2: 1.0, 7: 3.0}), Vectors.dense(0, 5, *[0] * 7), np.arange(9)]


def test_vectors_of_an_rdd_are_kept_without_zeros():
    """A sparse first vector makes an RDD's column sparse; others may be dense, or arrays."""
    sample = Sample((0, 1), ("x", "y"), ()).of_row([VECTORS[0].toArray(), np.zeros(())], [VECTORS[0], 1.0])
    x, y = sample.schema("float32").columns

    assert (2, 0) == (x.sparse, y.sparse)
    rows = x.of(VECTORS, "partition 0")
    expected = [np.asarray(v.toArray() if hasattr(v, "toArray") else v, "float32") for v in VECTORS]
    np.testing.assert_array_equal(expected, rows.toarray())
    with pytest.raises(DataError, match=r"x of shape \(9,\); row 4 of partition 0 has shape \(8,\)"):
        x.of([VECTORS[0], Vectors.sparse(8, {})], "partition 0", 3)


@pytest.mark.parametrize("vector", [Vectors.dense([0.0] * 8), Vectors.sparse(4, {1: 1.0}), np.zeros(8)])
def test_what_zeros_do_not_fill_stays_an_array(vector):
    """Dense vectors, and sparse ones with a quarter or more of nonzeros, stay arrays."""
    sample = Sample((0,), ("x",), ()).of_row([np.zeros(4)], [vector])

    assert Column("x", (4,), "float32") == sample.schema("float32").columns[0]

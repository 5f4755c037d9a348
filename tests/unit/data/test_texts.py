"""Strings are stored as bytes of any length and come back unchanged."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import spill
from sparkdl.data.arrow import column_array
from sparkdl.data.blocks import TRAINING, Block
from sparkdl.data.column import Column
from sparkdl.data.fingerprint import fingerprint
from sparkdl.data.schema import Sample, Schema
from sparkdl.data.sparse import TextRows
from sparkdl.errors import DataError

SHAPES = st.sampled_from([(), (1,), (2,), (2, 1), (2, 2)])


def bytes_of(values, shape):
    flat = [each.encode() for each in np.asarray(values, object).ravel()]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(len(values), *shape)


@st.composite
def tables(draw):
    """Draw the shape of a row and rows of strings."""
    shape, rows = draw(SHAPES), draw(st.integers(1, 6))
    each = int(np.prod(shape, dtype=int))
    word = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    words = draw(st.lists(word, min_size=rows * each, max_size=rows * each))
    flat = np.empty(len(words), object)
    flat[:] = words
    return shape, flat.reshape(rows, *shape).tolist()


@given(tables(), st.data())
def test_strings_come_back_unchanged(table, data):
    """Rows and Arrow columns of strings become the same bytes, also in selections and after pickling."""
    shape, values = table
    column, expected = Column("words", shape, "string", 256), bytes_of(values, shape)

    rows = column.of(values, "a batch")

    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4))
    again = pickle.loads(pickle.dumps(rows[chosen]))
    assert type(again) is TextRows
    for found, wanted in (
        (rows, expected),
        (column_array(pa.array(values), column, str), expected),
        (column_array(pa.array([None, *values])[1:], column, str), expected),
        (column_array(pa.array(bytes_of(values, shape).tolist()), column, str), expected),
        (rows[chosen], expected[chosen]),
        (again, expected[chosen]),
        (rows[1:3], expected[1:3]),
    ):
        assert found.shape == wanted.shape
        assert found.toarray().tolist() == wanted.tolist()


@given(tables(), st.sampled_from([spill.MEMORY, 64]))
def test_strings_on_the_disk_stay_beside_their_labels(table, memory):
    """Every row keeps its string when blocks arrive out of order and when rows move into buckets."""
    shape, values = table
    columns = Column("words", shape, "string", 256), Column("label", (), "float32")
    rows, labels = columns[0].of(values, "a batch"), np.arange(len(values), dtype="float32")
    keys, last = np.arange(len(values), dtype=np.uint64), len(values) // 2
    file = spill.SpillFile(Schema(columns, (0, 1)), spill.local_directory(), seed=3, memory=memory)

    file.extend(
        Block(keys[part], TRAINING, (rows[part], labels[part]))
        for part in (slice(last, None), slice(0, last))
    )

    batch = file.rows(TRAINING).batch(np.arange(len(values)))
    assert sorted(batch.y.tolist()) == labels.tolist()
    assert batch.x.tolist() == bytes_of(values, shape)[batch.y.astype(int)].tolist()


@given(tables(), st.data())
def test_other_strings_have_another_fingerprint(table, data):
    """A byte that is added to a string changes the fingerprint of the rows."""
    shape, values = table
    column, keys = Column("words", shape, "string", 256), np.arange(len(values), dtype=np.uint64)
    expected = bytes_of(values, shape)
    rows = column.of(values, "a batch")
    changed = expected.copy()
    row = data.draw(st.integers(0, changed.size - 1))
    changed.reshape(-1)[row] += data.draw(st.sampled_from([b"a", b"\0"]))

    assert fingerprint(keys, 0, [rows]) != fingerprint(keys, 0, [column.of(changed, "a batch")])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["a", None],
            "Expected words to be strings of shape .*; row 1 of partition 0 has None. 1 of the 2 rows",
        ),
        (["a", 1.5], "row 1 of partition 0 has 1.5"),
        (["a", ["b", "c"]], "row 1 of partition 0 has ..b., .c..."),
        (pa.array(["a", None]), "Expected no nulls in words; 1 is null"),
        (pa.array([1.0, 2.0]), "Expected words to hold strings, or arrays of strings; 0 has double"),
        (pa.array([["a"], ["b", "c"]]), "Expected words of shape .* .1 values.; 1 has 2 values"),
    ],
)
def test_a_row_without_its_strings_is_named(values, message):
    """Nulls, numbers and rows of more strings than the first one raise a DataError that names the row."""
    column = Column("words", (), "string", 256)

    with pytest.raises(DataError, match=message):
        column_array(values, column, str) if isinstance(values, pa.Array) else column.of(
            values, "partition 0"
        )


def test_columns_of_a_list_hold_strings_together():
    """Two columns of one string each make rows of two strings."""
    column = Column("words", (2,), "string", 256, parts=2)

    found = column_array([pa.array(["a", "b"]), pa.array(["c", "d"]).dictionary_encode()], column, str)

    assert [[b"a", b"c"], [b"b", b"d"]] == found.toarray().tolist()


@pytest.mark.parametrize("kind", ["U", "S", "O"])
def test_features_may_be_strings_and_labels_may_not(kind):
    """A string in the first row of x makes a column of strings; one in y raises a DataError."""
    word, label = np.asarray("abc", kind), np.asarray(1.0)

    assert Sample((0, 1), ("x", "y"), (word, label)).schema("float32").columns[0].dtype == "string"
    with pytest.raises(DataError, match="Expected y to be numbers; the first row has strings.*StringIndexer"):
        Sample((0, 1), ("x", "y"), (label, word)).schema("float32")


def test_a_missing_string_in_the_first_row_is_named():
    """None as the first value of x raises a DataError that names x."""
    with pytest.raises(DataError, match="Expected no missing values in x; the first row has None"):
        Sample((0,), ("x",), (np.asarray(None, object),)).schema("float32")


def test_strings_are_not_taken_for_numbers():
    """Rows of strings in a column of numbers, and numbers in one of strings, raise a DataError."""
    strings = Column("words", (1,), "string", 256)

    with pytest.raises(DataError, match=r"Expected words to be strings of shape \(1,\); row 3 of a part has"):
        strings.of(np.ones((2, 1)), "a part", 3)
    with pytest.raises(DataError, match=r"Expected age to be numbers \(float32\); a part has strings"):
        Column("age", (1,), "float32").of(strings.of(["a"], "a part"), "a part")

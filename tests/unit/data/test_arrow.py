"""Errors in a batch of Arrow columns are found and reported with their row."""

import re
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from vectors import VECTORS, dense, sparse

from sparkdl.data.arrow import (
    KEY,
    PART,
    arrays_of_pandas,
    blocks_of_batches,
    column_array,
    of_pandas,
    to_pandas,
)
from sparkdl.data.blocks import TRAINING, UNKNOWN, VALIDATION
from sparkdl.data.column import Column, axis_of
from sparkdl.errors import DataError

SECOND = 1 << 33  # first id of a DataFrame's second partition


def blocks(values, shape, kind):
    count = len(values)
    columns = {
        "c0": pa.array(values, kind),
        KEY: pa.array(np.arange(SECOND, SECOND + count)),
        PART: pa.array(np.zeros(count, np.int32)),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    return list(blocks_of_batches([batch], {TRAINING: (Column("picture", shape, "float32"),)}, None))


NUMBERS, LISTS = pa.float32(), pa.list_(pa.float32())
NESTED = pa.list_(LISTS)
GOOD = [
    ([1, 2, 3], (), NUMBERS),
    ([[1, 2], [3, 4], [5, 6]], (2,), LISTS),
    ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], (2, 2), NESTED),
    ([[1, 2, 3, 4], [5, 6, 7, 8]], (2, 2), LISTS),
    ([], (2,), LISTS),
]
BAD = [
    ([1, None, 3], (), NUMBERS, "row 1 of partition 1 is null or contains one"),
    ([[1, 2], [3, 4], None], (2,), LISTS, "row 2 of partition 1 is null or contains one"),
    ([[1, 2], [3, None], [5, 6]], (2,), LISTS, "row 1 of partition 1 is null or contains one"),
    ([[1, 2], [], [5, 6]], (2,), LISTS, r"shape \(2,\) \(2 values\); row 1 of partition 1 has 0 values\."),
    ([[1, 2], [3, 4], [5, 6, 7]], (2,), LISTS, "row 2 of partition 1 has 3."),
    ([[[1, 2], [3, 4]], [[5, 6], [7]]], (2, 2), NESTED, "4 values.; row 1 of partition 1 has 3 values."),
    ([[[1, 2], [3, 4]], [[5, 6], None]], (2, 2), NESTED, "row 1 of partition 1 is null or contains one"),
    ([[[1, 2], [3, None]], [[5, 6], [7, 8]]], (2, 2), NESTED, "row 0 of partition 1 is null or contains one"),
]


DECODE = "or predict with decode, as in SparkModel.predict and KerasTransformer."


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ([Decimal("1.5")], 'with column.cast("double").'),
        ([date(2026, 11, 24)], 'with column.cast("timestamp").cast("double").'),
        ([datetime(2026, 11, 24)], 'with column.cast("timestamp").cast("double").'),
        ([["a"]], 'with pyspark.ml.feature.HashingTF if it holds words or column.cast("array<double>") if'),
        ([b"a"], DECODE),
        ([{"origin": "a.png", "data": b"a"}], DECODE),
        ([[{"origin": "a.png"}]], DECODE),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), DECODE),
    ],
)
def test_what_is_no_number_is_named_with_what_to_do(values, remedy):
    """A column that is not numeric raises with a remedy when the batch arrives, as in a SQL function."""
    message = f"Expected picture to hold numbers, .*; row 0 of partition 1 has .*first, {re.escape(remedy)}"

    with pytest.raises(DataError, match=message):
        blocks(values, (1,), None)


def test_a_number_that_does_not_fit_is_named_once():
    """A number that does not fit is named once, by its own row."""
    with pytest.raises(DataError, match=r"fit int32, as in the first row; 1 has 0\.5\."):
        column_array(pa.array([1.0, 0.5]), Column("x", (), "int32"), str)


@pytest.mark.parametrize(
    ("values", "shape", "kind", "count"),
    [
        ([1, None, None], (), NUMBERS, 2),
        ([[1, 2], None, [3, 4]], (2,), LISTS, 1),
        ([[1, 2], [3], []], (2,), LISTS, 2),
    ],
)
def test_how_many_rows_are_refused_is_said(values, shape, kind, count):
    """The error has the number of bad rows in the batch."""
    with pytest.raises(DataError, match=f"{count} of the 3 rows that were read together cannot be used.$"):
        blocks(values, shape, kind)


@pytest.mark.parametrize(
    "rows",
    [
        [dense(1, 0, 2), dense(0, 3, 0)],
        [sparse(3, _0=1, _2=2), sparse(3, _1=3)],
        [dense(1, 0, 2), sparse(3, _1=3)],
        [sparse(3, _0=1, _2=2), dense(0, 3, 0)],
    ],
)
def test_vectors_of_spark_become_arrays(rows):
    """Dense, sparse and mixed vectors have the same numbers, stored with or without zeros."""
    (block,) = blocks(rows, (3,), VECTORS)
    without = column_array(pa.array(rows, VECTORS), Column("x", (3,), "float32", sparse=1), str)

    for array in (block.columns[0], without.toarray()):
        np.testing.assert_array_equal([[1, 0, 2], [0, 3, 0]], array)
        assert np.float32 == array.dtype


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "row 1 of partition 1 is null or contains one"),
        (dense(1, 2), r"shape \(3,\) \(3 values\); row 1 of partition 1 has 2 values\."),
        (sparse(4, _3=1), "row 1 of partition 1 has 4."),
    ],
)
def test_a_vector_that_does_not_fit_is_named(row, message):
    """A null, or a vector of another size, is named by its row."""
    with pytest.raises(DataError, match=message):
        blocks([dense(1, 2, 3), row], (3,), VECTORS)


def test_a_row_that_does_not_say_whether_it_is_held_out_is_named():
    """A null in the indicator column is named by its row."""
    columns = {"c0": [1.0, 2.0], KEY: [SECOND, SECOND + 1], PART: pa.array([0, UNKNOWN], pa.int32())}
    batch = pa.RecordBatch.from_pydict(columns)

    with pytest.raises(DataError, match="row 1 of partition 1 has null"):
        list(blocks_of_batches([batch], {TRAINING: (Column("points", (), "float32"),)}, None))


def test_validation_rows_may_have_a_dtype_of_their_own():
    """Rows of the two parts of a batch become columns of the dtypes of these parts."""
    columns = {
        "c0": [1.0, 2.5, 3.0],
        KEY: [SECOND, SECOND + 1, SECOND + 2],
        PART: pa.array([0, 1, 0], pa.int32()),
    }
    kinds = {part: (Column("y", (), kind),) for part, kind in ((TRAINING, "int64"), (VALIDATION, "float32"))}

    training, held = blocks_of_batches([pa.RecordBatch.from_pydict(columns)], kinds, None)

    assert ([1, 3], "int64") == (training.columns[0].tolist(), training.columns[0].dtype)
    assert ([2.5], [SECOND + 1]) == (held.columns[0].tolist(), held.keys.tolist())
    assert "float32" == held.columns[0].dtype


@pytest.mark.parametrize("rows", [[1.5, 2.5], [[1.0, 2.0], [3.0, 4.0]]])
def test_columns_come_and_go_as_pandas(rows):
    """Columns converted to pandas and back have the same values, for Spark without Arrow functions."""
    series = to_pandas(pa.array(rows))

    assert rows == [value.tolist() if isinstance(rows[0], list) else value for value in series]
    assert rows == of_pandas(series).to_pylist()


def test_pandas_nan_is_a_number_and_a_null_vector_is_null():
    """NaN in pandas is a number, and a missing vector is named as such, as on Arrow."""
    numbers = pd.Series([1.0, np.nan])
    vectors = to_pandas(pa.array([dense(1.0, 2.0), None], VECTORS))

    assert [False, False] == of_pandas(numbers).is_null().to_pylist()
    assert [False, True] == of_pandas(vectors).is_null().to_pylist()
    assert (0, 2) == column_array(
        of_pandas(pd.Series([], dtype=object)), Column("x", (2,), "float32"), str
    ).shape


def test_marks_tell_nulls_from_nan_in_pandas():
    """A last column of marks makes nulls of the floats that pandas represents by NaN; NaN stays a number."""
    marks = pd.DataFrame({"sparkdl_null_0": [True, False, False], "sparkdl_null_1": [False, True, False]})
    numbers, arrays = pd.Series([np.nan, np.nan, 1.0]), pd.Series([np.array([np.nan]), None, np.array([2.0])])

    found = arrays_of_pandas((numbers, arrays, marks))

    assert [[True, False, False], [False, True, False]] == [each.is_null().to_pylist() for each in found]
    assert found[1].flatten().null_count == 0
    assert 0 == arrays_of_pandas((numbers,))[0].null_count


def test_a_struct_in_a_list_of_columns_is_named():
    """A struct that is not a vector is named in a list of columns too."""
    parts = [pa.array([1.0]), pa.array([{"origin": "a.png"}])]

    with pytest.raises(DataError, match="Expected a, b to hold numbers, .*struct.*or predict with decode"):
        column_array(parts, Column("a, b", (2,), "float32", parts=2), str)


def test_structs_are_frames_of_pandas():
    """A struct column becomes a pandas DataFrame, and back."""
    structs = pa.array([{"a": 1.0, "b": [2.0]}, {"a": 3.0, "b": [4.0]}])

    assert ["a", "b"] == list(to_pandas(structs).columns)
    assert structs.to_pylist() == of_pandas(to_pandas(structs)).to_pylist()


@pytest.mark.parametrize(("values", "shape", "kind"), GOOD)
def test_columns_become_arrays(values, shape, kind):
    """Numbers, lists and nested lists get the values and the shape that the model takes."""
    array = np.concatenate(
        [np.empty((0, *shape)), *(block.columns[0] for block in blocks(values, shape, kind))]
    )

    np.testing.assert_array_equal(np.asarray(values, "float32").reshape(len(values), *shape), array)


@pytest.mark.parametrize(("values", "shape", "kind", "message"), BAD)
def test_a_row_that_does_not_fit_is_named(values, shape, kind, message):
    """A null at any depth, and too few or too many values, are named by their row."""
    with pytest.raises(DataError, match=message):
        blocks(values, shape, kind)


def pictures(values, decode):
    """Return the columns of the blocks of a batch of bytes, decoded to arrays of shape (2, 1)."""
    columns = {"c0": pa.array(values, pa.binary())}
    columns[KEY] = pa.array(np.arange(SECOND, SECOND + len(values)))
    columns[PART] = pa.array(np.zeros(len(values), np.int32))
    batch = pa.RecordBatch.from_pydict(columns)
    column = Column("picture", (2, 1), "uint8")
    return [
        block.columns[0] for block in blocks_of_batches([batch], {TRAINING: (column,)}, None, {0: decode})
    ]


def test_bytes_are_decoded_a_few_rows_at_once(monkeypatch):
    """Bytes are decoded in small blocks; a last dimension of 1 may be missing."""
    monkeypatch.setattr("sparkdl.data.blocks.BLOCK_BYTES", 4)  # two rows

    for decode in (lambda value: np.frombuffer(value, "uint8"), lambda value: [[value[0]], [value[1]]]):
        blocks = pictures([b"ab", b"cd", b"ef"], decode)

        assert [(2, 2, 1), (1, 2, 1)] == [block.shape for block in blocks]
        assert b"abcdef" == b"".join(block.tobytes() for block in blocks)
        assert "uint8" == blocks[0].dtype


def broken(value):
    raise LookupError("no such format")


@pytest.mark.parametrize(
    ("values", "decode", "message"),
    [
        ([b"ab", None], list, "Expected no nulls in picture; row 1 of partition 1"),
        ([b"ab", b"abc"], list, r"of shape \(2, 1\); the decoded row 1 of partition 1 has shape \(3,\)"),
        ([b"ab"], broken, r"decodes picture failed on row 0 of partition 1: LookupError: no such format"),
        ([b"ab"], lambda value: [value[0], 300], "whole numbers that fit uint8"),
        ([b"ab"], lambda value: ["a", "b"], "Expected picture to be numbers"),
    ],
)
def test_what_cannot_be_decoded_names_the_row(values, decode, message):
    """The error for nulls, exceptions, other shapes or non-numbers from a decode function names the row."""
    with pytest.raises(DataError, match=message):
        pictures(values, decode)


RANDOM = np.random.default_rng(1)


def drawn(*shape):
    return RANDOM.integers(1, 9, (4, *shape)).astype("float32")


def flat_join(parts):
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def stack_first(parts):
    return np.stack(parts, axis=1)


def stack_last(parts):
    return np.stack(parts, axis=-1)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize(
    ("inner", "shape", "join"),
    [
        ([(), (3,)], (4,), flat_join),
        ([(2,), (3,), ()], (6,), flat_join),
        ([(2,), (3,), ()], (2, 3), flat_join),
        ([(2,), (2,), (2,)], (6,), flat_join),
        ([(), (), ()], (3, 1), flat_join),
        ([(3,), (3,)], (2, 3), stack_first),
        ([(3,), (3,)], (3, 2), stack_last),
        ([(3,), (3,)], (3, 2, 1), stack_last),
        ([(2,), (2,)], (2, 2), stack_first),
        ([(6,), (6,)], (3, 2, 2), stack_last),
        ([(2, 3), (2, 3)], (2, 2, 3), stack_first),
        ([(2, 3), (2, 3)], (2, 3, 2), stack_last),
        ([(2, 3), (2, 3), (2, 3)], (3, 2, 3), stack_first),
        ([(3, 2), (3, 2), (3, 2)], (3, 2, 3), stack_last),
        ([(2, 3), (2, 3)], (12,), flat_join),
    ],
)
def test_columns_of_a_list_are_joined_or_stacked(inner, shape, join, vectors):
    """Arrow columns are joined or stacked into one array as by NumPy, with and without zeros."""
    parts = [drawn(*each) for each in inner]
    expected = join(parts).reshape(4, *shape)

    def arrow(part):
        if vectors and part.ndim == 2:
            return pa.array([dense(*row.tolist()) for row in part], VECTORS)
        return pa.array(part.tolist())

    for stored in (0, 1):
        column = Column("x", shape, "float32", sparse=stored, parts=len(parts))
        found = column_array([arrow(part) for part in parts], column, str)
        np.testing.assert_array_equal(expected, found.toarray() if stored else found)


@pytest.mark.parametrize("stored", [0, 2])
@pytest.mark.parametrize("number", [1.5, np.nan, 3e9])
@pytest.mark.parametrize(
    "bad", [lambda number: sparse(9, _1=2, _4=number), lambda number: dense(*[number] * 9)]
)
def test_vectors_are_held_to_the_type_of_the_column(stored, number, bad):
    """A number of a vector that does not fit an integer column is refused beside vectors of both kinds."""
    rows = [sparse(9, _3=1), dense(*range(9)), sparse(9), bad(number), bad(number)]
    column = Column("x", (9,), "int32", sparse=stored)

    fitting = column_array(pa.array(rows[:3], VECTORS), column, str)
    assert np.dtype("int32") == fitting.dtype
    with pytest.raises(DataError, match=f"whole numbers that fit int32, .*; 3 has {number}"):
        column_array(pa.array(rows, VECTORS), column, str)


def test_sparse_vectors_in_a_list_stay_sparse():
    """Sparse vectors stay sparse beside a number column in a list."""
    rows = [sparse(1000, _3=1), dense(*[0.0] * 999, 2.0)]
    column = Column("x", (1002,), "float32", sparse=2, parts=3)

    found = column_array([pa.array([5.0, 0.0]), pa.array(rows, VECTORS), pa.array([7, 8])], column, str)

    assert [3, 1001] == found.spans[:, 1].tolist()
    expected = np.zeros((2, 1002))
    expected[0, [0, 4, 1001]] = 5, 1, 7
    expected[1, [1000, 1001]] = 2, 8
    np.testing.assert_array_equal(expected, found.toarray())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [pa.array([1.0, 2.0]), pa.array([[1.0], [2.0]])],
            "form shape .3,. .3 values.; 0 has 1 . 1 values. The columns",
        ),
        (
            [pa.array([1.0, 2.0]), pa.array([[1.0, 2.0], [2.0]])],
            "Expected x of shape .2,. .2 values.; 1 has 1 values.",
        ),
        ([pa.array([1.0, None]), pa.array([[1.0, 2.0]] * 2)], "Expected no nulls in x; 1 is null"),
        ([pa.array([1.0, 2.0]), pa.array([None, [1.0, 2.0]])], "Expected no nulls in x; 0 is null"),
        ([pa.array([1.0, 2.0]), pa.array([[1.0, 2.0], [None, 1.0]])], "Expected no nulls in x; 1 is null"),
    ],
)
def test_a_row_that_makes_no_such_array_is_named(columns, message):
    """The error for nulls, and for too few or too many values, names the row."""
    with pytest.raises(DataError, match=message):
        column_array(columns, Column("x", (3,), "float32", parts=2), str)


def test_arrays_of_several_lengths_are_never_stacked():
    """Arrays of different lengths are never stacked, even with the right number of values."""
    assert axis_of((2, 3), [(2,), (4,)]) is None

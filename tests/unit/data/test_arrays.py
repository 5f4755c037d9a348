"""Arrays in the forms that Keras takes, as NumPy arrays: pandas tables and sparse matrices."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as shapes

from sparkdl.data.arrays import array_of, as_rows
from sparkdl.data.column import Column
from sparkdl.data.sparse import SparseRows, TextRows
from sparkdl.errors import DataError

FORMATS = [
    f"{kind}_{of}" for kind in ("csr", "csc", "coo", "lil", "dok", "bsr", "dia") for of in ("matrix", "array")
]
TABLE = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.0, 2.0]})


@pytest.mark.parametrize("form", FORMATS)
@given(values=shapes.arrays(np.float64, (3, 4), elements=st.sampled_from([0.0, 0.0, 1.0, -2.5])))
def test_sparse_matrices_of_every_format_are_rows_without_zeros(form, values):
    """Rows of a sparse matrix of any format have its numbers, in the column's type or their own."""
    rows = as_rows(getattr(scipy.sparse, form)(values), "x")

    assert isinstance(rows, SparseRows)
    np.testing.assert_array_equal(rows.toarray(), values)
    column = Column("x", (4,), "float32", sparse=1)
    np.testing.assert_array_equal(column.of(rows, "x").toarray(), values.astype("float32"))
    np.testing.assert_array_equal(Column("x", (4,), "float32").of(rows, "x"), values)


def test_numbers_of_one_place_of_a_matrix_are_added():
    """A matrix may store one entry more than once; the values are added."""
    twice = scipy.sparse.csr_matrix(([1.0, 2.0, 4.0], [1, 1, 0], [0, 2, 3]), shape=(2, 2))

    assert [[0, 3], [4, 0]] == as_rows(twice, "x").toarray().tolist()
    assert twice.nnz == 3


def test_whole_numbers_of_a_matrix_that_do_not_fit_are_named_by_their_row():
    """A matrix value that does not fit the first row's type is named by its row, stored sparsely or not."""
    rows = as_rows(scipy.sparse.csr_matrix([[1.0, 0.0], [0.0, 0.5]]), "x")

    with pytest.raises(DataError, match="whole numbers that fit int32.*; row 6 of a part has 0.5"):
        Column("x", (2,), "int32", sparse=1).of(rows, "a part", 5)


NAN = np.nan
WITH = {
    "Int64": (pd.array([1, 2, 3], "Int64"), [1, 2, 3]),
    "Int8": (pd.array([1, None, 3], "Int8"), [1, NAN, 3]),
    "Float64": (pd.array([1.5, None, 3], "Float64"), [1.5, NAN, 3]),
    "bool": ([True, False, True], [1, 0, 1]),
    "boolean": (pd.array([True, None, False], "boolean"), [1, NAN, 0]),
    "category": (pd.Categorical([3, 1, 3]), [3, 1, 3]),
    "object": (np.array([1, None, 3], object), [1, NAN, 3]),
    "arrow": (pd.array([1, 2, 3], "int64[pyarrow]"), [1, 2, 3]),
    "sparse": (pd.arrays.SparseArray([0, 0, 1]), [0, 0, 1]),
}


@pytest.mark.parametrize("kind", WITH)
def test_columns_of_pandas_that_hold_numbers_are_numbers(kind):
    """Numeric columns of every pandas type are numbers, with NaN for missing values."""
    given, expected = WITH[kind]
    array = as_rows(TABLE.assign(c=given), "x")

    assert array.dtype == np.float64
    np.testing.assert_array_equal(array[:, 2], expected)
    np.testing.assert_array_equal(array[:, :2], TABLE)
    np.testing.assert_array_equal(as_rows(pd.Series(given), "x"), expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["p", "q", "r"], "row 0 has 'p'"),
        (np.array([1, "2", 3], object), "row 1 has '2'"),
        (pd.Categorical(["p", "q", "p"]), "row 0 has 'p'. Convert the column to numbers first, for"),
        (pd.Categorical(pd.to_datetime(["2020-01-01"] * 3)), "categories that are not numbers"),
        (pd.to_datetime(["2020-01-01"] * 3), "row 0 has datetime64"),
        (pd.array(["a", "b", None], "string"), "row 0 has 'a'"),
    ],
)
def test_a_column_of_pandas_without_numbers_is_named(values, words):
    """The error for a pandas column without numbers has its name and a value."""
    with pytest.raises(DataError, match=r"Expected x\['city'\] to hold numbers") as caught:
        as_rows(TABLE.assign(city=values), "x")

    assert words in str(caught.value)


STRINGS = ["p", "", "ünd"]
FORMS_OF_STRINGS = {
    "list": STRINGS,
    "str": np.array(STRINGS),
    "object": np.array(STRINGS, object),
    "bytes": np.array([each.encode() for each in STRINGS]),
    "bytes objects": np.array([each.encode() for each in STRINGS], object),
    "StringDType": np.array(STRINGS, np.dtypes.StringDType()),
    "Series": pd.Series(STRINGS),
    "Series of string": pd.Series(STRINGS, dtype="string"),
    "Series of Arrow strings": pd.Series(STRINGS, dtype="string[pyarrow]"),
    "category": pd.Series(STRINGS, dtype="category"),
    "rows of one": np.array(STRINGS)[:, None],
    "DataFrame": pd.DataFrame({"text": STRINGS}),
    "DataFrame of two": pd.DataFrame({"text": STRINGS, "more": pd.Categorical(STRINGS)}),
    "nested": np.array([[STRINGS]] * 2, object),
}


@pytest.mark.parametrize("form", FORMS_OF_STRINGS)
def test_arrays_of_strings_of_every_form_are_rows_of_bytes(form):
    """Strings in every form of array become UTF-8 bytes, in the shape of the array."""
    given = FORMS_OF_STRINGS[form]
    rows = as_rows(given, "x")

    expected = np.asarray(given, object)
    assert isinstance(rows, TextRows)
    assert rows.shape == expected.shape
    found = [each.decode() for each in rows.toarray().ravel()]
    assert found == [each.decode() if isinstance(each, bytes) else each for each in expected.ravel().tolist()]


@pytest.mark.parametrize(
    ("values", "row"),
    [([missing, "p", "q"], 0) for missing in (None, np.nan, pd.NA)]
    + [(["p", "q", missing], 2) for missing in (None, np.nan, pd.NA, pd.NaT, 2.5, ["r"])],
)
@pytest.mark.parametrize("form", ["array", "Series", "DataFrame"])
def test_a_value_among_strings_that_is_no_string_is_named(form, values, row):
    """Missing values and numbers raise an error that names the column and the row."""
    made = {"array": np.array(values, object), "Series": pd.Series(values, dtype=object)}
    given = made.get(form, pd.DataFrame({"text": made["Series"]}))
    name = r"x\['text'\]" if form == "DataFrame" else "x"

    with pytest.raises(DataError, match=f"Expected {name} to hold strings; row {row} has"):
        as_rows(given, "x")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, "a"], "numbers; row 1 has 'a'"),
        ([[1.5, 2.0], [True, b"a"]], "numbers; row 1 has \"b'a'\""),
        ([np.array([1]), np.array(["a"])], "numbers; row 1 has 'a'"),
        (np.array([1, None, "a"], object), "numbers; row 2 has 'a'"),
        (pd.Series([1, "a"]), "numbers; row 1 has 'a'"),
        (["a", 1], "strings; row 1 has '1'"),
        ([float("nan"), "a"], "strings; row 0 has 'nan'"),
    ],
)
def test_numbers_and_strings_do_not_mix(values, words):
    """A list or an array of numbers and strings raises an error that names it and the first odd row."""
    with pytest.raises(DataError, match=f"Expected x to hold {words}"):
        as_rows(values, "x")


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [np.ones((2, 3)), np.ones((2, 4))]], ids=["lists", "arrays"])
def test_rows_of_unequal_shape_are_named(rows):
    """The error for rows of unequal shape names the argument and the remedy."""
    with pytest.raises(DataError, match="^x should be rows of equal shape, such as sequences padded to one"):
        as_rows(rows, "x")


def test_lists_of_strings_take_the_memory_of_their_strings():
    """A long string does not enlarge the others, and trailing zero bytes are kept."""
    rows = as_rows([b"a\0", b"", b"b" * 1000], "x")

    assert rows.toarray().tolist() == [b"a\0", b"", b"b" * 1000]
    assert array_of([["p", "q" * 1000]]).nbytes < 100


def test_half_of_a_surrogate_pair_is_no_text():
    """A string with half of a surrogate pair, which UTF-8 cannot encode, raises a DataError."""
    with pytest.raises(DataError, match="Expected x to hold text; .* cannot be encoded as UTF-8"):
        as_rows(np.array(["p", "\ud800"]), "x")


def test_a_sparse_array_of_one_dimension_has_no_rows():
    """A sparse array of one dimension is refused with its shape."""
    with pytest.raises(
        DataError, match=r"Expected x to be a sparse matrix of two dimensions; got shape \(3,\)"
    ):
        as_rows(scipy.sparse.coo_array(np.ones(3)), "x")

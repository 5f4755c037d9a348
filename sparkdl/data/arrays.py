"""Conversion to NumPy of all arrays that Keras takes: tensors of any backend, pandas, sparse matrices.

Arrays of strings become ``TextRows``, which keep the strings as bytes.

This module does not import the library of a value. It recognizes a type by its name or attributes, so that
executors need only the libraries of the types that occur in the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.core.vectors import Array
from sparkdl.data.sparse import SparseRows, TextRows, entry_of
from sparkdl.errors import DataError

AnyRows = Array | SparseRows
HOMES = {"tensorflow", "torch", "keras"}  # packages of arrays, but also of datasets and loaders


def is_array(value: object) -> bool:
    """Return True if a value is an array for Keras: a NumPy array, tensor, table or sparse matrix."""
    return hasattr(value, "__array__") or is_sparse_matrix(value)


def is_sparse_matrix(value: object) -> bool:
    """Return True if a value is a matrix or an array of scipy.sparse, or a tf.SparseTensor."""
    return hasattr(value, "tocsr") or (hasattr(value, "dense_shape") and hasattr(value, "indices"))


def as_rows(value: Any, name: str) -> AnyRows:
    """Return a NumPy array from an array in any form that Keras takes.

    A sparse matrix becomes ``SparseRows``, an array of strings ``TextRows``.

    Args:
        value: the array, or a list of numbers or strings, nested to any depth.
        name: its name in errors.

    Raises:
        DataError: a column of a table does not hold numbers (unless all columns hold strings), the categories
            of a column are neither numbers nor strings, a sparse array does not have two dimensions, the rows
            of a list differ in shape, some values of an array are strings and others are not, or a string
            cannot be encoded as UTF-8. The message names the array or column.
    """
    if isinstance(value, SparseRows):
        return value
    if is_sparse_matrix(value):
        return _of_matrix(value, name)
    if hasattr(value, "iloc"):
        return _of_strings(_of_pandas(value, name), name)
    try:
        array = value.to_numpy() if hasattr(value, "to_numpy") else array_of(value)
    except ValueError as error:
        raise DataError(
            f"{name} should be rows of equal shape, such as sequences padded to one length; got rows that "
            f"NumPy cannot combine: {error}"
        ) from None
    return _of_strings(array, name)


def array_of(value: Any) -> Array:
    """Return a NumPy array from an array, a tensor, a number, or a list nested to any depth.

    bfloat16, which NumPy lacks, becomes float32. The strings of a list become objects. NumPy would give all
    strings the length of the longest one, remove NUL characters at their ends, and convert numbers among
    them to strings.
    """
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    texts = isinstance(first, str | bytes) and first is not value
    array = np.asarray(detached(value), object if texts else None)
    if isinstance(value, list | tuple) and array.dtype.kind in "US":
        array = np.asarray(value, object)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def detached(value: Any) -> Any:
    """Return a tensor of torch, which may require a gradient or be on a GPU, as one that NumPy can read.

    Other values are returned as they are.
    """
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return value.float() if str(value.dtype) == "torch.bfloat16" else value


def _is_missing(value: object) -> bool:
    """Return True if a value is missing: None, NaN, or pandas's NA or NaT."""
    kind = type(value).__name__
    return value is None or kind in ("NAType", "NaTType") or isinstance(value, float) and value != value


def _of_strings(array: Array, name: str) -> AnyRows:
    """Return an array of strings as ``TextRows``; any other array as it is.

    Raises:
        DataError: some values are strings and others are not, or a string cannot be encoded as UTF-8.
    """
    if array.dtype.kind not in "USTO" or not array.ndim:
        return array
    values = array.ravel().tolist()
    if not any(isinstance(each, str | bytes) for each in values):
        return array
    strings = _holds_strings(array)
    for place, each in enumerate(values):
        if isinstance(each, str | bytes) != strings:
            row = place // max(1, array.size // len(array))
            raise DataError(
                f"Expected {name} to hold {'strings' if strings else 'numbers'}; row {row} has "
                f"{str(each)[:60]!r}. Drop or fill missing values and convert "
                f"{'other values to str' if strings else 'strings to numbers'} first."
            )
    return TextRows.of_texts([as_bytes(each, name) for each in values], array.shape[1:])


def _holds_strings(array: Array) -> bool:
    """Return True if the first value of an array that is not missing is a string."""
    if array.dtype.kind not in "USTO" or not array.ndim:
        return False
    return isinstance(next((each for each in array.flat if not _is_missing(each)), None), str | bytes)


def as_bytes(text: str | bytes, name: str) -> bytes:
    """Return a string as UTF-8 bytes; bytes as they are.

    Raises:
        DataError: the string contains half of a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise DataError(f"Expected {name} to hold text; {text[:60]!r} cannot be encoded as UTF-8.") from None


def _of_matrix(value: Any, name: str) -> SparseRows:
    shape = tuple(int(size) for size in value.shape)
    if len(shape) != 2:
        raise DataError(f"Expected {name} to be a sparse matrix of two dimensions; got shape {shape}.")
    if hasattr(value, "tocsr"):
        value = value.tocsr()
        if not value.has_canonical_format:  # numbers with equal indices are added
            value = value.copy()
            value.sum_duplicates()
        counts, places, numbers = np.diff(value.indptr), value.indices, value.data
    else:
        indices, numbers = np.asarray(value.indices), np.asarray(value.values)
        order = np.argsort(indices[:, 0], kind="stable")
        counts = np.bincount(indices[:, 0], minlength=shape[0])
        places, numbers = indices[order, 1], numbers[order]
    entries = np.empty(len(numbers), entry_of(numbers.dtype.name))
    entries["index"], entries["value"] = places, numbers
    return SparseRows.packed(counts.astype(np.int64), entries, shape[1:])


def _of_pandas(value: Any, name: str) -> Array:
    """Return a table, or one column of it, as an array of numbers, with NaN for missing values.

    A single column, or a table of strings only, may hold values other than numbers: a model may take them.
    """
    if not hasattr(value, "columns"):
        return _column(value, name)
    if not len(value.columns):
        return np.empty((len(value), 0), np.float32)
    names = [f"{name}[{label!r}]" for label in value.columns]
    columns = [_column(value.iloc[:, i], each) for i, each in enumerate(names)]
    refused = [i for i, column in enumerate(columns) if column.dtype.kind not in "biuf"]
    if refused and not (len(refused) == len(columns) and all(map(_holds_strings, columns))):
        raise _no_numbers(names[refused[0]], columns[refused[0]])
    if refused:
        pairs = zip(columns, names, strict=True)
        columns = [_of_strings(column, each).toarray() for column, each in pairs]  # type: ignore[union-attr]
    return np.column_stack(columns)


def _column(values: Any, name: str) -> Array:
    """Return a pandas column as an array: of numbers if it holds them, else as pandas converts it.

    An object column of numbers and None becomes an array of numbers.

    Raises:
        DataError: the column holds categories that are neither numbers nor strings.
    """
    kind = values.dtype
    if hasattr(kind, "categories"):
        if _holds_strings(np.asarray(kind.categories)):
            return np.asarray(values.astype(object))
        if kind.categories.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {name} to hold numbers; it holds categories that are not numbers, such as "
                f"{str(kind.categories[0])!r}. Pass their codes instead (df[...].cat.codes)."
            )
        values = values.astype(kind.categories.dtype if values.notna().all() else np.float64)
    elif hasattr(kind, "numpy_dtype") and kind.kind in "biuf":  # a pandas type that supports pandas.NA
        missing = bool(values.isna().any())
        wider = np.float32 if kind.itemsize < 3 else np.float64
        target = kind.numpy_dtype if not missing or kind.kind == "f" else np.dtype(wider)
        return np.asarray(values.to_numpy(target, na_value=target.type(np.nan) if missing else None))
    array = np.asarray(values.to_numpy())
    numbers = int | float | np.number | np.bool_ | None
    if array.dtype != object or not all(isinstance(each, numbers) for each in array):
        return array
    return np.array(array.tolist(), np.float64 if any(each is None for each in array) else None)


def _no_numbers(name: str, array: Array) -> DataError:
    kind = "" if array.dtype == object else f"{array.dtype} values, such as "
    for row, each in enumerate(array):
        if not isinstance(each, int | float | np.number | np.bool_ | None):
            return DataError(
                f"Expected {name} to hold numbers; row {row} has {kind}{str(each)[:60]!r}. Convert the "
                "column to numbers first, for example to the codes of categories (df[...].cat.codes), or "
                "leave it out."
            )
    return DataError(f"Expected {name} to hold numbers; it has {array.dtype} values.")

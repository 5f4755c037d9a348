"""Arrays in every form that Keras takes, as NumPy's: tensors of any backend, pandas, and sparse matrices.

Nothing here imports the library that a value comes from: a form is known by its module and its attributes,
so that executors need no more than the rows do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.errors import DataError
from sparkdl.sparse import SparseRows, entry_of
from sparkdl.weights import Array

AnyRows = Array | SparseRows
HOMES = {"tensorflow", "torch", "keras"}  # whose objects may be arrays, or datasets and loaders that are none


def is_array(value: Any) -> bool:
    """Return whether a value is an array in a form that Keras takes: of NumPy, a tensor, a table."""
    return hasattr(value, "__array__") or is_sparse_matrix(value)


def is_sparse_matrix(value: Any) -> bool:
    """Return whether a value is a matrix or an array of scipy.sparse, or a tf.SparseTensor."""
    return hasattr(value, "tocsr") or (hasattr(value, "dense_shape") and hasattr(value, "indices"))


def as_rows(value: Any, name: str) -> AnyRows:
    """Return an array of rows in any form that Keras takes as NumPy's; a sparse matrix without its zeros.

    Args:
        value: the array, or a list of numbers as deep as may be.
        name: how errors call it.

    Raises:
        DataError: a table has a column that does not hold numbers, or a sparse array no rows; names it.
    """
    if isinstance(value, SparseRows):
        return value
    if is_sparse_matrix(value):
        return _of_matrix(value, name)
    if hasattr(value, "iloc"):
        return _of_pandas(value, name)
    if hasattr(value, "detach"):  # of torch, which may follow its gradient or lie on another device
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _of_matrix(value: Any, name: str) -> SparseRows:
    shape = tuple(int(size) for size in value.shape)
    if len(shape) != 2:
        raise DataError(f"Expected {name} to be a sparse matrix of rows and columns; got shape {shape}.")
    if hasattr(value, "tocsr"):
        value = value.tocsr()
        if not value.has_canonical_format:  # numbers of one place are to be added
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
    """Return a table, or one column of it, as an array of numbers; where a value is missing, NaN.

    A column of its own, and a table of nothing but text, may hold something else, which the model may take.
    """
    if not hasattr(value, "columns"):
        return _column(value, name)
    if not len(value.columns):
        return np.empty((len(value), 0), np.float32)
    names = [f"{name}[{label!r}]" for label in value.columns]
    columns = [_column(value.iloc[:, i], each) for i, each in enumerate(names)]
    refused = [i for i, column in enumerate(columns) if column.dtype.kind not in "biuf"]
    text = all(isinstance(each, str) for i in refused for each in columns[i])
    if refused and not (text and len(refused) == len(columns)):
        raise _no_numbers(names[refused[0]], columns[refused[0]])
    return np.column_stack(columns)


def _column(values: Any, name: str) -> Array:
    """Return a column of pandas as an array, of objects where it does not hold numbers by its type."""
    kind = values.dtype
    if hasattr(kind, "categories"):
        if kind.categories.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {name} to hold numbers; it holds categories that are none, such as "
                f"{str(kind.categories[0])!r}. Take their codes, df[...].cat.codes, first."
            )
        values = values.astype(kind.categories.dtype if values.notna().all() else np.float64)
    elif hasattr(kind, "numpy_dtype") and kind.kind in "biuf":  # one of pandas's types that know pandas.NA
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
                f"Expected {name} to hold numbers; row {row} has {kind}{str(each)[:60]!r}. Make numbers of "
                "the column first, or leave it out."
            )
    return DataError(f"Expected {name} to hold numbers; it has {array.dtype} values.")

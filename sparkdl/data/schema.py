"""The schema of all rows, and the conversion of rows to the batches that Keras takes.

The first row determines the schema, on the driver. A ``Sample`` has the flat values of that row, or the
arrays of all rows. A ``Schema`` has a ``Column`` for each value, and the structure that the columns form as
x, y and sample weights. All other rows are checked against the schema wherever they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.tree import Template, assemble, flatten, leaves, paths, template_of
from sparkdl.core.vectors import Array
from sparkdl.data.arrays import AnyRows
from sparkdl.data.batch import Batch
from sparkdl.data.column import TEXT_BYTES, Column, as_array, count_sparse, short
from sparkdl.data.sparse import TEXT, SparseRows, TextRows
from sparkdl.errors import DataError

Counts = tuple[int | None, ...]  # number of arrays that a model takes for x and for y; None: unknown
PARTS = "x", "y", "sample_weight"


class Takes(NamedTuple):
    """The rows that a model takes.

    Attributes:
        labels: whether rows must have labels.
        texts: whether features may be strings.
    """

    labels: bool = True
    texts: bool = False


@dataclass(frozen=True)
class Schema:
    """The flat columns of every row, and the structure of the batches that Keras takes.

    Attributes:
        columns: the columns of x, then of y, then of the sample weights.
        form: the structure of a row: (x, y) or (x, y, sample_weight), or (x,) to predict and for models
            without labels. Each part is the index of a column, or a structure of such indices.
        held_dtypes: the dtypes of the columns in validation rows; empty: as in training rows.
    """

    columns: tuple[Column, ...]
    form: tuple[Template, ...]
    held_dtypes: tuple[str, ...] = ()

    @cached_property
    def labelled(self) -> bool:
        """True if rows have labels."""
        return len(self.form) > 1

    @cached_property
    def template(self) -> tuple[Template, ...]:
        """The structure that Keras takes: ``form``, but a single weight is repeated for each output."""
        if len(self.form) < 3 or not isinstance(self.form[2], int):
            return self.form
        x, y, weight = self.form
        return x, y, assemble(y, dict.fromkeys(leaves(y), weight))

    @property
    def weights(self) -> tuple[Column, ...]:
        """The columns of the sample weights."""
        return self.columns[len(leaves(self.form[:2])) :]

    def without_weights(self) -> Schema:
        """Return the schema of rows that have no sample weights."""
        return Schema(self.columns[: len(self.columns) - len(self.weights)], self.form[:2])

    def with_weights(self, other: Schema) -> Schema:
        """Return this schema with the sample weights of another one, if the other has any.

        This schema must have no sample weights.
        """
        return Schema((*self.columns, *other.weights), (*self.form, *other.form[2:]))

    @cached_property
    def held_out(self) -> Schema:
        """The schema of the validation rows of a fit with this schema."""
        dtypes = (*self.held_dtypes, *(column.dtype for column in self.columns[len(self.held_dtypes) :]))
        pairs = zip(self.columns, dtypes, strict=True)
        return Schema(tuple(replace(column, dtype=dtype) for column, dtype in pairs), self.form)

    def with_held(self, held: Schema) -> Schema:
        """Return the schema of a fit: with the weights and dtypes of validation rows, as from ``held``."""
        whole = self if self.weights else self.with_weights(held)
        dtypes = tuple(column.dtype for column in held.without_weights().columns)
        same = dtypes == tuple(column.dtype for column in self.without_weights().columns)
        return replace(whole, held_dtypes=() if same else dtypes)

    def held(self, other: Schema) -> Schema:
        """Return the schema of validation rows: x and y of this schema, with the other's sample weights.

        As in Keras, where this schema has integers, validation rows may have floats or other integers.

        Raises:
            DataError: the validation rows have a different x or y, or weights of a different form.
        """
        mine, theirs = self.without_weights(), other.without_weights()
        if mine.form != theirs.form:
            raise DataError(
                "validation_data should have the same structure as the training rows "
                f"({', '.join(c.name for c in mine.columns)}); got "
                f"{', '.join(c.name for c in theirs.columns)}."
            )
        for ours, given in zip(mine.columns, theirs.columns, strict=True):
            if ours.shape != given.shape:
                raise DataError(
                    f"validation_data should have {ours.name} of shape {ours.shape}, as in the training "
                    f"rows; got {given.shape}."
                )
            if ours.texts != given.texts:
                kinds = ("strings", "numbers") if ours.texts else ("numbers", "strings")
                raise DataError(
                    f"validation_data should have {kinds[0]} for {ours.name}, as in the training rows; got "
                    f"{kinds[1]}."
                )
        if self.weights and other.weights and _form_of(self) != _form_of(other):
            raise DataError(
                "validation_data should have the sample weights of the training rows "
                f"({', '.join(f'{c.name} of shape {c.shape}' for c in self.weights)}); got "
                f"{', '.join(f'{c.name} of shape {c.shape}' for c in other.weights)}."
            )
        columns = tuple(map(_held_column, mine.columns, theirs.columns))
        return Schema(columns, mine.form).with_weights(other)

    def flatten(self, row: object, place: str, index: int) -> tuple[Any, ...]:
        """Return the values of a row, one per column.

        Raises:
            DataError: the row is not a tuple, or its parts have a different structure. The message names the
                row.
        """
        try:
            return tuple(flatten(self.form, row))
        except TypeError as error:
            names = ", ".join(column.name for column in self.columns)
            raise DataError(
                f"Expected a tuple ({names}); row {index} of {place} is {short(row)}. {error}"
            ) from None

    def batch(self, arrays: Sequence[AnyRows]) -> Batch:
        """Return a batch from the arrays of some rows, one per column."""
        whole = [array.toarray() if isinstance(array, SparseRows) else array for array in arrays]
        return Batch(*assemble(self.template, whole))


def _held_column(ours: Column, given: Column) -> Column:
    """Return a column of validation rows: the training rows' column, with a dtype that holds both integers.

    If the training rows have floats, validation rows become floats too.
    """
    if ours.texts or np.dtype(ours.dtype).kind == "f":
        return ours
    common = np.result_type(ours.dtype, given.dtype)
    dtype = given.dtype if common.kind == "f" else common.name
    words = " of the validation rows"
    return replace(ours, name=ours.name.removesuffix(words) + words, dtype=dtype)


def _form_of(schema: Schema) -> tuple[tuple[Template, ...], list[tuple[int, ...]]]:
    """Return the structure and the shapes of a schema's sample weights."""
    return schema.form[2:], [column.shape for column in schema.weights]


class Sample(NamedTuple):
    """A row, or the arrays of all rows: flat values, and their structure as x, y and sample weights.

    Attributes:
        form: the structure of the values: (x, y) or (x, y, sample_weight), or (x,).
        names: the names of the values in errors.
        values: the values.
        sparse: for each value, the size of a row as in ``Column.sparse``: the number of stored
            entries if a value of x is stored in sparse form, the bytes of a row if it holds
            strings, else 0. Empty: 0 each.
        parts: number of DataFrame columns that are joined in each value. Empty: 1 each.
    """

    form: tuple[Template, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    sparse: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def first_of(self, arrays: Sequence[AnyRows]) -> Sample:
        """Return the sample with each array's first row, and the mean row size of sparse and text arrays.

        Raises:
            DataError: labels or weights are sparse. The message names the first such array.
        """
        sparse = [array.row if isinstance(array, SparseRows) else 0 for array in arrays]
        x = set(leaves(self.form[:1]))
        for place, name in enumerate(self.names):
            if sparse[place] and place not in x and not isinstance(arrays[place], TextRows):
                raise DataError(
                    f"Expected {name} to be dense, as in Keras; got a sparse matrix. Convert it with "
                    "toarray()."
                )
        firsts = (array[:1].toarray() if isinstance(array, SparseRows) else array for array in arrays)
        values = [as_array(first[0]) for first in firsts]
        return self._replace(values=tuple(values), sparse=tuple(sparse))

    def of_row(self, arrays: Sequence[Array], row: Sequence[object]) -> Sample:
        """Return the sample with the arrays of a row, and the sizes of its sparse values of x."""
        x = set(leaves(self.form[:1]))
        sparse = [count_sparse(value) if place in x else 0 for place, value in enumerate(row)]
        return self._replace(values=tuple(arrays), sparse=tuple(sparse))

    @classmethod
    def of(cls, parts: Sequence[Any], counts: Counts, names: Sequence[str] = PARTS) -> Sample:
        """Return the sample of x, of (x, y), or of (x, y, sample_weight).

        Args:
            parts: x, y and sample_weight, each an array or a structure of arrays.
            counts: number of arrays that the model takes for x and for y.
            names: the names of the parts in errors.
        """
        form: list[Template] = []
        labels: list[str] = []
        values: list[Any] = []
        for value, count, name in zip(parts, (*counts, counts[-1]), names, strict=False):
            form.append(template_of(value, count, len(values)))
            labels += paths(form[-1], name)
            values += flatten(form[-1], value)
        return cls(tuple(form), tuple(labels), tuple(values))

    def schema(self, floatx: str) -> Schema:
        """Return the schema of rows like this one.

        Floats and all sample weights get Keras's float type. Other dtypes are unchanged.

        Raises:
            DataError: a value holds neither numbers nor, in x, strings.
        """
        features, weights = set(leaves(self.form[:1])), set(leaves(self.form[2:]))
        columns = []
        for index, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            sparse = self.sparse[index] if self.sparse else 0
            parts = self.parts[index] if self.parts else 1
            if index in features and _holds_texts(value):
                size = max(TEXT_BYTES, sparse, sum(map(len, value.flat)))
                columns.append(Column(name, value.shape, TEXT, size, parts))
                continue
            if value.dtype.kind not in "biuf":
                raise _no_numbers(name, value)
            kind = floatx if value.dtype.kind == "f" or index in weights else value.dtype.name
            columns.append(Column(name, value.shape, kind, sparse, parts))
        return Schema(tuple(columns), self.form)


def _no_numbers(name: str, value: Array) -> DataError:
    """Return the error for a value of the first row that does not hold numbers."""
    if value.dtype.kind == "O" and any(each is None for each in value.flat):
        return DataError(f"Expected no missing values in {name}; the first row has None. Drop or fill them.")
    if _holds_texts(value):
        return DataError(
            f"Expected {name} to be numbers; the first row has strings. Convert them first, for "
            "example with StringIndexer of pyspark.ml.feature or keras.layers.StringLookup."
        )
    return DataError(f"Expected {name} to be numbers; the first row has {value.dtype} values.")


def _holds_texts(array: Array) -> bool:
    if array.dtype.kind in "UST":
        return True
    return array.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in array.flat)


NAMED = {"features", "label"}


def as_pair(row: Any) -> Any:
    """Return (x, y) of a row with features and a label, such as a LabeledPoint; any other row as it is.

    A Row of Spark is a tuple, and its fields may be in any order. So it is read by name if it has these two.
    """
    if type(row) is tuple or not (hasattr(row, "features") and hasattr(row, "label")):
        return row
    if isinstance(row, tuple) and set(getattr(row, "__fields__", ())) != NAMED:
        return row
    return row.features, row.label


def as_row(row: object, schema: Schema) -> object:
    """Return a row as the tuple that a schema expects; without labels, x may stand for (x,)."""
    row = as_pair(row)
    alone = not schema.labelled and not (isinstance(row, tuple) and len(row) == 1)
    return (row,) if alone else row

"""Columns of a DataFrame: find them by name as Spark does, and check and convert them by type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from pyspark import errors
from pyspark.sql import Column, DataFrame, SparkSession, functions, types

from sparkdl.data.column import remedy
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_settings


class Found(NamedTuple):
    """A column of a DataFrame that a name resolves to.

    Attributes:
        column: the Spark column.
        kind: its type.
    """

    column: Column
    kind: types.DataType


def folded(session: SparkSession) -> Callable[[str], str]:
    """Return a function that gives the same text for names that Spark treats as equal."""
    exact = str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"
    return str if exact else str.lower


def resolve(frame: DataFrame, names: Iterable[str]) -> dict[str, Found]:
    """Return the columns that names resolve to.

    A column's own name means that column, even if it contains dots. Spark resolves other names:
    ``person.age`` is a field of a struct, and backticks enclose a part of a name that contains dots.

    Args:
        frame: the DataFrame.
        names: the names.

    Raises:
        ConfigError: a name resolves to no column, or to more than one.
    """
    fold = folded(frame.sparkSession)
    own = set(map(fold, frame.columns))
    wanted = list(dict.fromkeys(names))
    paths = {name: f"`{name.replace('`', '``')}`" if fold(name) in own else name for name in wanted}
    try:
        return _analyzed(frame, paths)
    except (errors.PySparkException, ValueError):
        for name, path in paths.items():  # find the name that failed
            try:
                _analyzed(frame, {name: path})
            except (errors.PySparkException, ValueError) as error:
                raise _unresolved(frame, name, error) from None
        raise


def has(frame: DataFrame, names: Iterable[str]) -> bool:
    """Return True if Spark can resolve every name to a column."""
    try:
        resolve(frame, names)
    except ConfigError:
        return False
    return True


def _analyzed(frame: DataFrame, paths: dict[str, str]) -> dict[str, Found]:
    if not paths:
        return {}
    columns = [functions.col(path) for path in paths.values()]
    fields = frame.select(*(column.alias(f"c{i}") for i, column in enumerate(columns))).schema.fields
    pairs = zip(paths, columns, fields, strict=True)
    return {name: Found(column, field.dataType) for name, column, field in pairs}


def _unresolved(frame: DataFrame, name: str, error: Exception) -> ConfigError:
    """Return the error for a name that Spark cannot resolve, with Spark's reason if it adds something."""
    reason = str(error).split("\n")[0]
    if "AMBIGUOUS" in reason:
        fold = folded(frame.sparkSession)
        alike = [each for each in frame.columns if fold(each) == fold(name)]
        which = f": {', '.join(alike)}" if alike else ""
        return ConfigError(
            f"Expected one column {name!r}; Spark finds several in the DataFrame{which}. Rename them so "
            "that each name is unique."
        )
    more = "" if "UNRESOLVED_COLUMN" in reason else f" Spark says: {reason}"
    return ConfigError(f"Expected a column {name!r}; the DataFrame has {', '.join(frame.columns)}.{more}")


def stored(name: str, found: Found) -> Column:
    """Return a column of vectors or arrays as structs.

    The fields are those in which Spark stores a vector: type, size, indices and values. Arrays with a null in
    them become null.
    """
    if is_vector(found.kind):
        return functions.unwrap_udt(found.column)
    from pyspark.ml.functions import array_to_vector

    column = numeric(name, found)
    return functions.unwrap_udt(functions.when(~contains_null(column, found.kind), array_to_vector(column)))


def is_vector(kind: types.DataType) -> bool:
    """Return True if a column of this type holds vectors of Spark ML."""
    return type(kind).__name__ == "VectorUDT"


def depth_of(kind: types.DataType) -> int:
    """Return the number of dimensions of a column's values: 0 for numbers, 1 for vectors."""
    depth = int(is_vector(kind))
    while isinstance(kind, types.ArrayType):
        kind, depth = kind.elementType, depth + 1
    return depth


def is_text(kind: types.DataType) -> bool:
    """Return True if a column of this type holds strings or bytes, or arrays of them."""
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    return isinstance(kind, types.StringType | types.BinaryType | types.CharType | types.VarcharType)


def numeric(name: str, found: Found) -> Column:
    """Return a column as numbers or arrays of numbers; vectors become arrays.

    Raises:
        ConfigError: the column holds something else.
    """
    column, kind = found
    if is_vector(kind):
        from pyspark.ml.functions import vector_to_array

        width = "float64" if keras_settings.float_type() == "float64" else "float32"
        return functions.when(column.isNotNull(), vector_to_array(column, width))
    element, depth = kind, 0
    while isinstance(element, types.ArrayType):
        element, depth = element.elementType, depth + 1
    if not isinstance(element, types.NumericType | types.BooleanType) or isinstance(
        element, types.DecimalType
    ):
        convert = remedy(f'df["{name}"]', element.simpleString(), depth)
        raise ConfigError(
            f"Expected column {name!r} to hold numbers, arrays of numbers or vectors; it holds "
            f"{kind.simpleString()}. {f'Convert it first, {convert}, or pass' if convert else 'Pass'} "
            f'decode={{"{name}": function}} with a function that converts a value to an array.'
        )
    return column


def contains_null(column: Column, kind: types.DataType) -> Column:
    """Return a condition on a column of numbers or arrays: a value is null, or an array with a null in it."""
    if not isinstance(kind, types.ArrayType):
        return column.isNull()
    inner = kind.elementType
    return column.isNull() | functions.exists(column, lambda element: contains_null(element, inner))


def decodable(name: str, found: Found) -> types.DataType:
    """Return the type of a column whose values a function decodes.

    Raises:
        ConfigError: the column holds intervals of months, which Spark cannot convert to Python.
    """
    kinds = [found.kind]
    for kind in kinds:
        kinds += [field.dataType for field in getattr(kind, "fields", ())]
        kinds += [
            getattr(kind, part) for part in ("elementType", "keyType", "valueType") if hasattr(kind, part)
        ]
        if type(kind).__name__ in ("CalendarIntervalType", "YearMonthIntervalType"):
            raise ConfigError(
                f"Expected a column {name!r} whose values Spark can pass to Python; it holds "
                f"{kind.simpleString()}. Convert the intervals first, for example to a number of months."
            )
    return found.kind


def numpy_type(kind: types.DataType) -> type[np.generic]:
    """Return the NumPy type of the numbers in a column of this type; object for any other type."""
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    names: dict[str, type[np.generic]] = {
        "float": np.float32,
        "double": np.float64,
        "tinyint": np.int8,
        "smallint": np.int16,
        "int": np.int32,
        "bigint": np.int64,
        "boolean": np.bool_,
    }
    return names.get(kind.simpleString(), np.object_)


def require_booleans(name: str, kind: types.DataType) -> None:
    """Require a column of booleans.

    Raises:
        ConfigError: the column holds something else.
    """
    if not isinstance(kind, types.BooleanType):
        raise ConfigError(
            f"Expected a column {name!r} of booleans that marks the validation rows; it holds "
            f"{kind.simpleString()}."
        )

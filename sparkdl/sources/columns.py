"""Columns of a DataFrame by their names, as Spark resolves names: nested fields, backticks, case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pyspark import errors
from pyspark.sql import DataFrame, functions

from sparkdl.errors import ConfigError


class Found(NamedTuple):
    """A column of a DataFrame that a name resolves to.

    Attributes:
        column: the column, which Spark calls by the name.
        kind: its type.
    """

    column: Any
    kind: Any


def folded(session: Any) -> Callable[[str], str]:
    """Return a function whose results are equal for names that are the same to Spark."""
    exact = str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"
    return str if exact else str.lower


def resolve(frame: DataFrame, names: Iterable[str]) -> dict[str, Found]:
    """Return the columns that names stand for.

    A name that the DataFrame has is that column, dots and all. Any other name is Spark's to resolve:
    ``person.age`` is a field of a struct, and backticks enclose a part of a name that has dots of its own.

    Args:
        frame: the DataFrame.
        names: the names.

    Raises:
        ConfigError: no column, or more than one, has such a name.
    """
    fold = folded(frame.sparkSession)
    own = set(map(fold, frame.columns))
    wanted = list(dict.fromkeys(names))
    paths = {name: f"`{name.replace('`', '``')}`" if fold(name) in own else name for name in wanted}
    try:
        return _analyzed(frame, paths)
    except (errors.PySparkException, ValueError):
        for name, path in paths.items():  # one of them is at fault
            try:
                _analyzed(frame, {name: path})
            except (errors.PySparkException, ValueError) as error:
                raise _unresolved(frame, name, error) from None
        raise


def has(frame: DataFrame, names: Iterable[str]) -> bool:
    """Return whether Spark can resolve every name to a column."""
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
    """Return the error for a name that Spark cannot resolve, with Spark's reason where it tells more."""
    reason = str(error).split("\n")[0]
    if "AMBIGUOUS" in reason:
        fold = folded(frame.sparkSession)
        alike = [each for each in frame.columns if fold(each) == fold(name)]
        which = f": {', '.join(alike)}" if alike else ""
        return ConfigError(
            f"Expected one column {name!r}; Spark finds several in the DataFrame{which}. Rename them, so "
            "that each has a name of its own."
        )
    more = "" if "UNRESOLVED_COLUMN" in reason else f" Spark says: {reason}"
    return ConfigError(f"Expected a column {name!r}; the DataFrame has {', '.join(frame.columns)}.{more}")

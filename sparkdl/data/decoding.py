"""The values that a user's ``decode`` function gets: those of Spark's rows, with structs as dicts.

The driver reads the first row from Spark, and executors read all rows from Arrow batches. Arrow represents
maps, timestamps and user-defined types such as vectors in other forms, which are converted here with the
methods of Spark's types. This module does not import pyspark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Decode = Callable[[Any], Any]  # a user's function that converts a value to an array
SAME = {"binary", "boolean", "date", "decimal", "string", "void", "timestamp_ntz"}  # besides numbers


@dataclass(frozen=True)
class ArrowDecode:
    """A user's function for values of a column, which takes them as Arrow represents them.

    Attributes:
        function: the function; it takes the values of Spark's rows, with structs as dicts.
        kind: the column's Spark type.
    """

    function: Decode
    kind: Any

    def __call__(self, value: object) -> object:
        """Return the function's result for a value that comes from Arrow."""
        if self._converts:
            value = plain(self.kind.fromInternal(_internal(value, self.kind)))
        return self.function(value)

    @cached_property
    def _converts(self) -> bool:
        return _differs(self.kind)


def plain(value: object) -> object:
    """Return a value of one of Spark's rows with structs as dicts and binary values as bytes."""
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "asDict"):
        return {name: plain(part) for name, part in value.asDict().items()}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


def _differs(kind: Any) -> bool:
    """Return True if Arrow represents values of a Spark type in another form than Spark's rows do."""
    if hasattr(kind, "sqlType") or hasattr(kind, "keyType"):
        return True
    if hasattr(kind, "elementType"):
        return _differs(kind.elementType)
    if hasattr(kind, "fields"):
        return any(_differs(field.dataType) for field in kind.fields)
    return bool(kind.needConversion()) and kind.typeName() not in SAME


def _internal(value: Any, kind: Any) -> Any:
    """Return a value from Arrow in the form from which a Spark type makes the value of a row."""
    if value is None:
        return None
    if hasattr(kind, "sqlType"):
        return _internal(value, kind.sqlType())
    if hasattr(kind, "keyType"):
        pairs = value.items() if isinstance(value, dict) else value
        return {_internal(key, kind.keyType): _internal(part, kind.valueType) for key, part in pairs}
    if hasattr(kind, "elementType"):
        return [_internal(part, kind.elementType) for part in value]
    if hasattr(kind, "fields"):
        return tuple(_internal(value[field.name], field.dataType) for field in kind.fields)
    if not kind.needConversion() or isinstance(value, dict):  # a variant is a dict in both forms
        return value
    return kind.toInternal(value)

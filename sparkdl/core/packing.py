"""Encoding of values, arrays included, as bytes without pickle: for checkpoints and messages.

A record has three parts: eight bytes with the length of a JSON text (little-endian), the text, and the data
that JSON cannot hold. An array or bytes value is ``{"<aside>": [kind, shape, place]}`` in the text: ``kind``
is the NumPy dtype name or "bytes", and ``place`` the offset of its data after the text. An array
or bytes object that occurs several times in the value is stored once.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np

from sparkdl.core import tree

ASIDE = "<aside>"
Part = bytes | memoryview


def parts(value: object) -> list[Part]:
    """Return a record as a list of buffers, without copying contiguous arrays or bytes.

    Args:
        value: numbers, text, None, arrays and bytes, nested in lists, tuples and dicts with text keys.

    Raises:
        TypeError: the value contains an object of another type.
    """
    held: dict[int, tuple[object, memoryview, int]] = {}  # keeps each object, so no id is reused
    end = 0

    def aside(part: Any) -> object:
        nonlocal end
        if isinstance(part, np.generic):
            return part.item()
        array = isinstance(part, np.ndarray)
        if id(part) not in held:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if array else memoryview(part)
            held[id(part)] = part, data, end
            end += len(data)
        _, data, place = held[id(part)]
        kind, shape = (part.dtype.name, part.shape) if array else ("bytes", (len(data),))
        return {ASIDE: [kind, shape, place]}

    text = json.dumps(value, default=aside).encode()
    return [len(text).to_bytes(8, "little"), text, *(data for _, data, _ in held.values())]


def pack(value: object) -> bytes:
    """Return a record as bytes; see ``parts``."""
    return b"".join(parts(value))


def unpack(data: bytes | memoryview) -> Any:
    """Return the value of a record; its tuples become lists.

    Args:
        data: bytes or a memoryview. If it is a memoryview, arrays and bytes values are views into
            it.

    Raises:
        ValueError: ``data`` is not a record.
    """
    end = 8 + int.from_bytes(data[:8], "little")

    def whole(fields: dict[str, Any]) -> object:
        if fields.keys() != {ASIDE}:
            return fields
        kind, shape, place = fields[ASIDE]
        start = end + place
        size = prod(shape) * (1 if kind == "bytes" else np.dtype(kind).itemsize)
        part = data[start : start + size]
        return part if kind == "bytes" else np.frombuffer(part, kind).reshape(shape)

    try:
        return json.loads(bytes(data[8:end]), object_hook=whole)
    except (TypeError, SyntaxError) as error:  # NumPy's errors for a name that is not a dtype
        raise ValueError(f"Expected a record; got other data ({error}).") from error


def like(template: Any, value: Any) -> Any:
    """Return an unpacked value in the structure of a template.

    JSON turned tuples into lists and dict keys into strings; the template restores them.

    Raises:
        TypeError: the value has a different structure.
    """
    old, structure = tree.split(template)
    form = unpack(pack(structure.unflatten(range(len(old)))))
    new = dict(zip(tree.flatten(form, form), tree.flatten(form, value), strict=True))
    return structure.unflatten([new[place] for place in range(len(old))])


def alike(template: Any, value: Any) -> Any:
    """Return an unpacked value in the structure of a template, whose arrays it matches.

    Raises:
        TypeError: the value has a different structure, or an array of another shape or dtype.
    """
    made = like(template, value)
    for old, new in zip(tree.split(template)[0], tree.split(made)[0], strict=True):
        forms = [getattr(each, "dtype", None) and (each.dtype, each.shape) for each in (old, new)]
        if forms[0] != forms[1] and isinstance(old, np.ndarray):
            raise TypeError(f"Expected an array of {old.dtype} of shape {old.shape}.")
    return made

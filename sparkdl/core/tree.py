"""Nested dicts, lists and tuples, in which Keras takes several inputs, outputs and weights.

A *template* is such a structure with integers in place of arrays: the index of the flat column that belongs
there. Rows are sent and stored as flat columns; a template turns them into the structure a model takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Template = Any  # a number, or a dict, list or tuple of templates


def is_structure(value: Any, parts: int | None) -> bool:
    """Return True if a value is a structure of arrays, False if it is one array in the form of a list.

    Args:
        value: a dict, list or tuple, or any other object.
        parts: number of arrays that a model takes in its place; None if unknown.
    """
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple) or not value or parts == 1:
        return False
    return len(value) == parts or all(_is_part(each) for each in value)


def _is_part(value: Any) -> bool:
    return isinstance(value, np.ndarray | Mapping) or getattr(value, "ndim", 0) > 0


def template_of(value: Any, parts: int | None, first: int = 0) -> Template:
    """Return the template of a value, with dicts sorted by name; its leaves are numbered from ``first``."""
    places = iter(range(first, first + 1_000_000))

    def number(each: Any, count: int | None) -> Template:
        if not is_structure(each, count):
            return next(places)
        if isinstance(each, Mapping):
            return {name: number(each[name], None) for name in sorted(each, key=str)}
        return tuple(number(part, None) for part in each)

    return number(value, parts)


def leaves(template: Any) -> Iterator[Any]:
    """Yield the leaves of a structure, from left to right."""
    if isinstance(template, np.ndarray | int):
        yield template
    elif isinstance(template, Mapping):
        for part in template.values():
            yield from leaves(part)
    elif isinstance(template, list | tuple):
        for part in template:
            yield from leaves(part)
    else:
        yield template


def paths(template: Template, name: str) -> Iterator[str]:
    """Yield the name of each leaf of a template: x, x['image'] or x[0]."""
    if isinstance(template, Mapping):
        for key, part in template.items():
            yield from paths(part, f"{name}[{key!r}]")
    elif isinstance(template, list | tuple):
        for index, part in enumerate(template):
            yield from paths(part, f"{name}[{index}]")
    else:
        yield name


def flatten(template: Template, value: Any) -> Iterator[Any]:
    """Yield the leaves of a value that has the structure of a template.

    Raises:
        TypeError: the value has a different structure.
    """
    if isinstance(template, int):  # first, with Mapping last, since this runs for every row
        yield value
    elif isinstance(template, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(template):
            raise TypeError(f"Expected a tuple of {len(template)} parts.")
        for part, each in zip(template, value, strict=True):
            yield from flatten(part, each)
    elif isinstance(template, Mapping):
        if not isinstance(value, Mapping) or value.keys() != template.keys():
            raise TypeError(f"Expected a dict with {', '.join(map(repr, template))}.")
        for name, part in template.items():
            yield from flatten(part, value[name])


def assemble(template: Template, values: Sequence[Any]) -> Any:
    """Return the structure of a template with its integers replaced by the values they index."""
    if isinstance(template, int):
        return values[template]
    if isinstance(template, Mapping):
        return {name: assemble(part, values) for name, part in template.items()}
    if isinstance(template, list | tuple):
        return tuple([assemble(part, values) for part in template])
    raise TypeError(f"Expected a template; got {template!r}.")

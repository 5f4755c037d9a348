"""Nested dicts, lists and tuples: the structures in which Keras takes several inputs, outputs and weights.

A *template* is such a structure with whole numbers in the places of arrays: which of a row's flat columns
stands there. Rows travel and lie on disk as flat columns; a template makes of them what a model takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Template = Any  # a number, or a dict, list or tuple of templates


def is_structure(value: Any, parts: int | None) -> bool:
    """Return whether a value is a structure of arrays, and not an array in the form of a list.

    Args:
        value: a dict, list or tuple, or anything else.
        parts: how many arrays a model takes in its place; None if that is not known.
    """
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple) or not value or parts == 1:
        return False
    return len(value) == parts or all(_is_part(each) for each in value)


def _is_part(value: Any) -> bool:
    return isinstance(value, np.ndarray | Mapping) or getattr(value, "ndim", 0) > 0


def template_of(value: Any, parts: int | None, first: int = 0) -> Template:
    """Return the template of a value, whose leaves are the columns from ``first`` on, dicts by name."""
    places = iter(range(first, first + 1_000_000))

    def number(each: Any, count: int | None) -> Template:
        if not is_structure(each, count):
            return next(places)
        if isinstance(each, Mapping):
            return {name: number(each[name], None) for name in sorted(each, key=str)}
        return tuple(number(part, None) for part in each)

    return number(value, parts)


def leaves(template: Any) -> Iterator[Any]:
    """Yield what stands in the places of a structure, from left to right."""
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
    """Yield how to call each place of a template: x, x['image'] or x[0]."""
    if isinstance(template, Mapping):
        for key, part in template.items():
            yield from paths(part, f"{name}[{key!r}]")
    elif isinstance(template, list | tuple):
        for index, part in enumerate(template):
            yield from paths(part, f"{name}[{index}]")
    else:
        yield name


def flatten(template: Template, value: Any) -> Iterator[Any]:
    """Yield the parts of a value that has the structure of a template.

    Raises:
        TypeError: it has another structure.
    """
    if isinstance(template, int):  # first, and Mapping last, for this is done to every row
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
    """Return the structure of a template with a value in each of its places."""
    if isinstance(template, int):
        return values[template]
    if isinstance(template, Mapping):
        return {name: assemble(part, values) for name, part in template.items()}
    if isinstance(template, list | tuple):
        return tuple([assemble(part, values) for part in template])
    raise TypeError(f"Expected a template, got {template!r}.")

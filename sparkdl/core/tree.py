"""Nested dicts, lists and tuples, in which Keras takes several inputs, labels or sample weights.

A *leaf* is any other value, None included. optree, which Keras depends on, walks the structures. It
takes the items of a dict in the order of their sorted keys.

A *template* is such a structure with integers in place of arrays: the index of the flat column that belongs
there. Rows are sent and stored as flat columns; a template turns them into the structure a model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import optree

Template = Any  # a number, or a dict or tuple of templates


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple)


# By default optree also walks other containers, such as deque, and treats None as an empty one.
WALK: dict[str, Any] = {"is_leaf": _is_leaf, "none_is_leaf": True}


def plain(value: Any) -> Any:
    """Return a structure in Python's own dicts, lists and tuples.

    optree does not walk the wrappers in which TensorFlow puts a model's containers, nor the user's
    own subclasses, except named tuples. It walks an OrderedDict, but does not sort its keys.
    """
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return tuple([plain(part) for part in value]) if isinstance(value, tuple) else value


def split(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a structure, and its form, which can be hashed and filled with other leaves.

    Args:
        value: a structure in Python's own containers and named tuples.
    """
    return optree.tree_flatten(value, **WALK)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, from left to right."""
    return optree.tree_leaves(plain(value), **WALK)


def paths(value: Any, name: str) -> list[str]:
    """Return the name of each leaf of a structure: x, x['image'] or x[0]."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(plain(value), **WALK)]


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure with each leaf replaced by a function's result for it, from left to right."""
    return optree.tree_map(function, plain(value), **WALK)


def is_structure(value: Any, parts: int | None) -> bool:
    """Return True if a value is a structure of arrays, False if it is one array (or a list of numbers).

    Args:
        value: a dict, list or tuple, or any other object.
        parts: number of arrays that the model takes for this value; None if unknown.
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
    places = count(first)

    def number(each: Any, arrays: int | None) -> Template:
        if not is_structure(each, arrays):
            return next(places)
        whole: Any = dict(each) if isinstance(each, Mapping) else tuple(each)
        children, _, keys, _ = optree.tree_flatten_one_level(whole)
        made = [number(child, None) for child in children]
        return dict(zip(keys, made, strict=True)) if isinstance(whole, dict) else tuple(made)

    return number(value, parts)


def flatten(template: Template, value: Any) -> Iterator[Any]:
    """Yield the leaves of a value that has the structure of a template.

    This function does not use optree, which refuses a list or a Spark Row in place of a tuple.

    Raises:
        TypeError: the value has a different structure.
    """
    if isinstance(template, int):  # the cheapest test first: this runs for every row
        yield value
    elif isinstance(template, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(template):
            raise TypeError(f"Expected a tuple of {len(template)} parts.")
        for part, each in zip(template, value, strict=True):
            yield from flatten(part, each)
    elif isinstance(template, Mapping):
        if not isinstance(value, Mapping) or value.keys() != template.keys():
            raise TypeError(f"Expected a dict with {', '.join(map(repr, template)) or 'no keys'}.")
        for name, part in template.items():
            yield from flatten(part, value[name])


def assemble(template: Template, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Return the structure of a template with its integers replaced by the values they index."""
    return optree.tree_map(values.__getitem__, template)

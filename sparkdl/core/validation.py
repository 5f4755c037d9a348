"""Checks of single arguments. An error names the argument, the expected and the received value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from enum import StrEnum
from typing import Any

import numpy as np

from sparkdl.errors import ConfigError

Check = Callable[[str, Any], Any]  # takes the name and the value of an argument; returns the value to keep


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of some strings.

    Raises:
        ConfigError: the value is not one of them.
    """
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} should be one of {', '.join(map(repr, choices))}; got {value!r}.")
    return str(value)


def choose(name: str, value: object, choices: type[StrEnum]) -> Any:
    """Return the choice that ``value`` names.

    Raises:
        ConfigError: the value is not one of the choices.
    """
    return choices(one_of(name, value, (choice.value for choice in choices)))


def as_int(value: object) -> int | None:
    """Return a whole number of Python or NumPy as an int; None for any other value, and for bools."""
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def as_number(value: object) -> int | float | None:
    """Return a number of Python or NumPy as one of Python; None for any other value, and for bools."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    return value if isinstance(value, int | float) else value.item()


def whole_number(name: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``least``.

    Raises:
        ConfigError: the value is not such a number.
    """
    number = as_int(value)
    if number is None or number < least:
        raise ConfigError(f"{name} should be a whole number of at least {least}; got {value!r}.")
    return number


def require_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False.

    Raises:
        ConfigError: the value is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} should be True or False; got {value!r}.")
    return bool(value)


def text(name: str, value: object) -> str:
    """Return ``value`` if it is a string.

    Raises:
        ConfigError: the value is not a string.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name} should be a string; got {value!r}.")
    return value


def positive_seconds(name: str, value: object) -> float:
    """Return ``value`` if it is a positive number of seconds.

    Raises:
        ConfigError: the value is not a positive number.
    """
    return positive_number(name, value, unit="seconds")


def positive_number(name: str, value: object, *, unit: str) -> float:
    """Return ``value`` if it is a positive number.

    Raises:
        ConfigError: the value is not a positive number.
    """
    number = as_number(value)
    if number is None or not number > 0:
        raise ConfigError(f"{name} should be a positive number of {unit}; got {value!r}.")
    return number


def checked(default: Any, check: Check) -> Any:
    """Return a dataclass field whose values ``check_fields`` checks.

    Args:
        default: the default of the field; if it is None, None is not checked.
        check: the check.
    """
    return field(default=default, metadata={"check": check})


def check_fields(instance: Any) -> None:
    """Check the fields that ``checked`` made of a frozen dataclass; keep the values that the checks return.

    Raises:
        ConfigError: a value is invalid.
    """
    for each in fields(instance):
        value = getattr(instance, each.name)
        if "check" in each.metadata and not (value is None and each.default is None):
            object.__setattr__(instance, each.name, each.metadata["check"](each.name, value))

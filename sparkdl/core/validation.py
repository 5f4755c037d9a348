"""Checks of single arguments. An error names the argument, the expected and the received value."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sparkdl.errors import ConfigError


def choose(name: str, value: object, choices: type[StrEnum]) -> Any:
    """Return the choice that ``value`` names.

    Raises:
        ConfigError: the value is not one of the choices.
    """
    try:
        return choices(str(value))
    except ValueError:
        names = ", ".join(repr(choice.value) for choice in choices)
        raise ConfigError(f"{name} should be one of {names}; got {value!r}.") from None


def whole_number(name: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``least``.

    Raises:
        ConfigError: the value is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} should be a whole number of at least {least}; got {value!r}.")
    return value


def require_flag(name: str, value: object) -> None:
    """Raise an error unless an argument is True or False.

    Raises:
        ConfigError: the value is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} should be True or False; got {value!r}.")


def positive_seconds(name: str, value: object) -> None:
    """Raise an error unless an argument is a positive number of seconds.

    Raises:
        ConfigError: the value is not a positive number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} should be a positive number of seconds; got {value!r}.")

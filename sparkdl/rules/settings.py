"""Conversion of a rule to values that JSON can hold, and back."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.rules import RULES
from sparkdl.rules.base import Rule
from sparkdl.rules.outer import SGD, Adam

OUTER: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam}


def to_settings(merge: str | Rule | None) -> str | dict[str, object] | None:
    """Return a rule as settings, from which ``from_settings`` makes the same rule.

    Raises:
        ConfigError: the rule, or its optimizer, is not one of sparkdl's.
    """
    if not isinstance(merge, Rule):
        return merge
    if type(merge) is not RULES.get(merge.name):
        raise _unknown(merge)
    return {"rule": merge.name, **_values(merge)}


def _values(settings: object) -> dict[str, object]:
    return (
        {f.name: _value(getattr(settings, f.name)) for f in fields(settings)}
        if is_dataclass(settings)
        else {}
    )


def _value(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    names = [name for name, kind in OUTER.items() if type(value) is kind]
    if not names:
        raise _unknown(value)
    return {"outer": names[0], **_values(value)}


def _unknown(value: object) -> ConfigError:
    return ConfigError(
        f"merge should be a rule of sparkdl.rules if the settings are saved; got {value!r}. The "
        "optimizer of such a rule should be one of sparkdl.rules.outer. Save only the model with "
        "spark_model.model.save(), and pass merge= again after loading it."
    )


def from_settings(value: str | dict[str, Any] | None) -> str | Rule | None:
    """Return the rule for the settings that ``to_settings`` returned."""
    if not isinstance(value, dict):
        return value
    settings = dict(value)
    kind = RULES[settings.pop("rule")]
    made = {
        name: OUTER[part["outer"]](**{k: v for k, v in part.items() if k != "outer"})
        if isinstance(part, dict)
        else part
        for name, part in settings.items()
    }
    return kind(**made)

"""The parameters of a trial, in the words of Optuna and in those of KerasTuner, and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import floor, log, prod
from typing import Any

import numpy as np
from optuna import Trial
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from sparkdl.errors import ConfigError

LOG = "log"  # the third entry of a range whose values are drawn on a logarithmic scale


class Parameters:
    """The parameters of a trial; its methods return the values that Optuna chose.

    It has the methods of ``optuna.Trial`` (``suggest_float``, ``suggest_int``, ``suggest_categorical``) and
    those of ``keras_tuner.HyperParameters`` (``Int``, ``Float``, ``Choice``, ``Boolean``, ``Fixed``), so that
    functions written for either one run unchanged.

    Args:
        trial: the trial of Optuna.

    Attributes:
        trial: the trial of Optuna.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._fixed: dict[str, Any] = {}
        self._conditions: list[tuple[str, tuple[Any, ...]]] = []
        self._scopes: list[str] = []
        self._aliases: dict[str, str] = {}  # by name, the name in the study, if that is another one

    @property
    def values(self) -> dict[str, Any]:
        """The values chosen so far, by name."""
        chosen = self.trial.params
        return chosen | {name: chosen[alias] for name, alias in self._aliases.items()} | self._fixed

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trial, such as ``suggest_float``, ``report`` or ``number``."""
        if name == "trial" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.trial, name)

    def __contains__(self, name: str) -> bool:
        return self._scoped(name) in self.values

    def Int(  # noqa: N802, PLR0913 - KerasTuner's own signature
        self,
        name: str,
        min_value: int,
        max_value: int,
        step: int | None = None,
        sampling: str = "linear",
        default: int | None = None,
        parent_name: str | None = None,
        parent_values: Any = None,
    ) -> Any:
        """Return a whole number from ``min_value`` to ``max_value``, both included.

        Args:
            name: the name of the parameter.
            min_value: the smallest value.
            max_value: the largest value.
            step: the difference between neighbours; with "log" or "reverse_log" their ratio, which for
                "reverse_log" is counted from the upper end.
            sampling: the scale on which values are drawn: "linear", "log" or "reverse_log". Optuna lacks the
                last one, so without a step it is drawn as "linear".
            default: accepted for KerasTuner; not used.
            parent_name: the parameter that this one depends on, if it depends on one.
            parent_values: the values of the parent for which this parameter is active.

        Returns:
            The value; None if the parameter is not active.
        """
        if sampling != "linear" and step:
            return self._choose_ratio(
                name, (min_value, max_value, step), sampling, (parent_name, parent_values)
            )
        draw = partial(
            self.trial.suggest_int, low=min_value, high=max_value, step=step or 1, log=sampling == LOG
        )
        return self._draw(name, draw, (parent_name, parent_values))

    def Float(  # noqa: N802, PLR0913 - KerasTuner's own signature
        self,
        name: str,
        min_value: float,
        max_value: float,
        step: float | None = None,
        sampling: str = "linear",
        default: float | None = None,
        parent_name: str | None = None,
        parent_values: Any = None,
    ) -> Any:
        """Return a number from ``min_value`` to ``max_value``; the arguments are those of ``Int``."""
        if sampling != "linear" and step:
            return self._choose_ratio(
                name, (min_value, max_value, step), sampling, (parent_name, parent_values)
            )
        draw = partial(
            self.trial.suggest_float, low=min_value, high=max_value, step=step, log=sampling == LOG
        )
        return self._draw(name, draw, (parent_name, parent_values))

    def Choice(  # noqa: N802 - KerasTuner's own signature
        self,
        name: str,
        values: Sequence[Any],
        ordered: bool | None = None,
        default: Any = None,
        parent_name: str | None = None,
        parent_values: Any = None,
    ) -> Any:
        """Return one of several values; None if the parameter is not active."""
        draw = partial(self.trial.suggest_categorical, choices=_choices(name, values))
        return self._draw(name, draw, (parent_name, parent_values))

    def Boolean(  # noqa: N802 - KerasTuner's own name
        self,
        name: str,
        default: bool = False,
        parent_name: str | None = None,
        parent_values: Any = None,
    ) -> Any:
        """Return True or False; None if the parameter is not active."""
        return self.Choice(name, (False, True), parent_name=parent_name, parent_values=parent_values)

    def Fixed(  # noqa: N802 - KerasTuner's own name
        self, name: str, value: Any, parent_name: str | None = None, parent_values: Any = None
    ) -> Any:
        """Return ``value``; None if the parameter is not active."""
        if not self._active((parent_name, parent_values)):
            return None
        self._fixed[self._scoped(name)] = value
        return value

    def get(self, name: str) -> Any:
        """Return the value of a parameter that was chosen before.

        Raises:
            KeyError: there is no such parameter.
        """
        return self.values[self._scoped(name)]

    __getitem__ = get

    @contextmanager
    def conditional_scope(self, parent_name: str, parent_values: Any) -> Iterator[None]:
        """Make the parameters of a ``with`` block depend on the value of another parameter.

        Raises:
            ValueError: there is no such parameter.
        """
        if parent_name not in self and not self._conditions:
            raise ValueError(f"There is no parameter {parent_name!r} yet; ask for it first.")
        self._conditions.append((self._scoped(parent_name), _listed(parent_values)))
        try:
            yield
        finally:
            self._conditions.pop()

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put a prefix before the names of the parameters of a ``with`` block."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def _draw(self, name: str, draw: Callable[[str], Any], parent: tuple[str | None, Any]) -> Any:
        """Return the value of a parameter; None if it is not active.

        KerasTuner allows other values for the same name under another condition. A study does not, so there
        the second of these parameters has the condition in its name.
        """
        if not self._active(parent):
            return None
        name, conditions = self._scoped(name), self._conditions_with(parent)
        try:
            return draw(name)
        except ValueError:  # the study has other values
            if not conditions:
                raise
        texts = [f"{parent} = {' or '.join(map(str, values))}" for parent, values in conditions]
        alias = f"{name} ({', '.join(texts)})"
        value = draw(alias)
        self._aliases[name] = alias
        return value

    def _choose_ratio(
        self, name: str, limits: tuple[float, float, float], sampling: str, parent: tuple[str | None, Any]
    ) -> Any:
        """Return a value of a range whose neighbours have a constant ratio.

        Args:
            name: the name of the parameter.
            limits: the smallest and the largest value, and the ratio.
            sampling: "log" or "reverse_log".
            parent: the name and the values of the parameter that this one depends on.
        """
        low, high, ratio = limits
        count = floor(log(high / low) / log(ratio) + 1e-8)
        values = [low * ratio**power for power in range(count + 1)]
        if sampling == "reverse_log":
            values = [low + high - each for each in values]
        return self._draw(name, partial(self.trial.suggest_categorical, choices=tuple(values)), parent)

    def _conditions_with(self, parent: tuple[str | None, Any]) -> list[tuple[str, tuple[Any, ...]]]:
        name, wanted = parent
        return self._conditions + ([] if name is None else [(self._scoped(name), _listed(wanted))])

    def _active(self, parent: tuple[str | None, Any]) -> bool:
        conditions = self._conditions_with(parent)
        values = self.values if conditions else {}
        return all(values.get(name) in wanted for name, wanted in conditions)

    def _scoped(self, name: str) -> str:
        return "/".join([*self._scopes, name])


def _listed(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list | tuple) else (values,)


def space_of(space: object) -> dict[str, BaseDistribution]:
    """Return the distributions of a search space.

    Args:
        space: by name, a distribution of Optuna; a list of values to choose from; or a tuple (low, high) or
            (low, high, "log") of two whole numbers or two other numbers, both included.

    Raises:
        ConfigError: the space is empty, or has something else.
    """
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            "space should be a dict with the range of each parameter, such as "
            f'{{"units": (16, 256), "rate": (1e-4, 1e-1, "log"), "layers": [1, 2, 3]}}; got {space!r}.'
        )
    return {name: _distribution(name, each) for name, each in space.items()}


def _distribution(name: object, given: Any) -> BaseDistribution:
    if not isinstance(name, str):
        raise ConfigError(f"The names in space should be strings; got {name!r}.")
    if isinstance(given, BaseDistribution):
        return given
    try:
        if isinstance(given, list) and given:
            return CategoricalDistribution(_choices(name, given))
        if isinstance(given, tuple) and (len(given) == 2 or len(given) == 3 and given[2] == LOG):
            low, high = map(_python, given[:2])
            if isinstance(low, bool) or isinstance(high, bool):
                raise ValueError(f"its limits are not numbers; for a choice, pass a list: {[low, high]}.")
            whole = isinstance(low, int) and isinstance(high, int)
            made = IntDistribution if whole else FloatDistribution
            return made(low, high, log=len(given) == 3)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The range of {name} in space is invalid: {error}") from None
    raise ConfigError(
        f'space["{name}"] should be a list of values, a tuple (low, high) or (low, high, "log"), or a '
        f"distribution of Optuna; got {given!r}."
    )


def size_of(space: Mapping[str, BaseDistribution]) -> int:
    """Return the number of combinations of a finite space.

    Raises:
        ConfigError: the values of a parameter cannot be counted.
    """
    return prod(_count(name, each) for name, each in space.items())


def _count(name: str, distribution: BaseDistribution) -> int:
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    if isinstance(distribution, IntDistribution) and not distribution.log:
        return (distribution.high - distribution.low) // distribution.step + 1
    if isinstance(distribution, FloatDistribution) and distribution.step:
        return round((distribution.high - distribution.low) / distribution.step) + 1
    raise ConfigError(
        f'sampler="grid" needs a finite space; {name} has any number in a range. Give a list of values, or a '
        "distribution of Optuna with a step."
    )


def _python(value: Any) -> Any:
    """Return a NumPy scalar as a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _choices(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return values that a study can hold.

    Raises:
        ConfigError: one is neither None nor a bool, a number or a string.
    """
    found = tuple(map(_python, values))
    for each in found:
        if each is not None and not isinstance(each, bool | int | float | str):
            raise ConfigError(
                f"The values of {name} should be numbers, strings, bools or None; got {each!r:.100}. Choose "
                "among names, and look the object up in your function."
            )
    return found

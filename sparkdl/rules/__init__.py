"""How an update changes the center variable: one algorithm per file.

A rule is a pair of pure functions with a state between them, after optax's ``init`` and ``update``:
``init(center)`` returns the state before the first merge, ``update(delta, state, merge)`` what is added
to the center and the next state. delta is after minus before, so merging adds. What becomes of a
worker's own weights is the rule's worker half, ``adopt(local, center)``.
"""

from sparkdl.errors import ConfigError
from sparkdl.rules.average import Average
from sparkdl.rules.base import Merge, Rule
from sparkdl.rules.dynsgd import DynSGD
from sparkdl.rules.sum import Sum

__all__ = ["Average", "DynSGD", "Merge", "Rule", "Sum", "choose_rule"]

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Average, Sum, DynSGD)}


def choose_rule(name: str | None, *, synchronous: bool, window: int | None) -> Rule:
    """Return the rule of that name, or the default of the mode and frequency.

    Rounds average. Without rounds the step of a single batch is taken whole, as in DOWNPOUR and Hogwild,
    and a longer window is divided by its staleness, because a sum of those may diverge.

    Args:
        name: the rule, or None.
        synchronous: whether updates are merged in rounds.
        window: local batches per exchange; None is an epoch.

    Raises:
        ConfigError: no rule has that name, or it means nothing in this mode.
    """
    if name is None and synchronous:
        return Average()
    if name is None:
        return Sum() if window == 1 else DynSGD()
    if name not in RULES:
        names = ", ".join(repr(known) for known in RULES)
        raise ConfigError(f"merge should be one of {names}; got {name!r}.")
    if synchronous and name == DynSGD.name:
        raise ConfigError(
            'merge="dynsgd" divides an update by its staleness, and synchronous rounds have none; '
            'take merge="average", or mode="asynchronous".'
        )
    return RULES[name]()

"""Merge rules, which define how an update changes the center: one family of algorithms per file.

A rule is a pair of pure functions with a state between them, like optax's ``init`` and ``update``.
``init(center)`` returns the state before the first merge. ``update(delta, state, merge)`` returns the step to
add to the center, and the next state; ``merge`` has the facts about the update. A delta is a worker's weights
after a window minus those before it, so merging adds it. If updates are merged in rounds, the rule's
``reduction()`` first makes one delta of them. Workers continue from the center, except with an *elastic*
rule, whose method ``draw(local, center)`` computes the update on the worker.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sparkdl.errors import ConfigError
from sparkdl.rules.adag import ADAG
from sparkdl.rules.adasum import Adasum
from sparkdl.rules.average import Average
from sparkdl.rules.base import Merge, Rule, apply
from sparkdl.rules.bmuf import BMUF
from sparkdl.rules.dynsgd import DynSGD
from sparkdl.rules.easgd import AEASGD, EAMSGD
from sparkdl.rules.fedopt import DiLoCo, FedOpt
from sparkdl.rules.sum import Sum

__all__ = [
    "ADAG",
    "AEASGD",
    "BMUF",
    "EAMSGD",
    "STUDIED",
    "Adasum",
    "Average",
    "Choice",
    "DiLoCo",
    "DynSGD",
    "FedOpt",
    "Merge",
    "Rule",
    "Sum",
    "apply",
    "choose",
]

# A new rule is a file in this package, and its entries in KINDS, MergeName and __all__.
KINDS: tuple[type[Rule], ...] = Average, Sum, ADAG, DynSGD, AEASGD, EAMSGD, BMUF, FedOpt, DiLoCo, Adasum
RULES = {rule.name: rule for rule in KINDS}
MergeName = Literal[  # type checkers need each name written out; a test compares them with RULES
    "average", "sum", "adag", "dynsgd", "aeasgd", "eamsgd", "bmuf", "fedopt", "diloco", "adasum"
]
STUDIED = 8  # largest number of workers in the convergence study


class Choice(NamedTuple):
    """A rule, and the scaling of the workers' learning rate that goes with it.

    Attributes:
        rule: the rule.
        power: the workers' learning rate is multiplied by the number of workers with rows, at most
            ``STUDIED``, to this power.
    """

    rule: Rule
    power: float = 0.0

    def bound(self, num_workers: int) -> tuple[Rule, float]:
        """Return the rule for this many workers with rows, and the factor of their learning rate.

        If the rate is scaled, the number is capped at that of the study, ``STUDIED``.
        """
        num_workers = min(num_workers, STUDIED) if self.power else num_workers
        return self.rule.bound(num_workers), float(num_workers**self.power)


def default(mode: str, window: int | None) -> Choice:
    """Return the rule that experiments favour for a mode and frequency; see docs/explanation/modes.md.

    With several local steps per exchange, K workers use sqrt(K) times the learning rate, since the
    mean of their steps has one K-th of the variance of one step. In rounds, the momentum of
    BMUF multiplies the effect of each mean by another sqrt(K). K counts as at most ``STUDIED``. With one
    worker, each default gives the result of plain Keras.
    """
    if mode == "synchronous":
        return Choice(Average()) if window == 1 else Choice(BMUF(power=0.5), 0.5)
    return Choice(Sum()) if window == 1 else Choice(DynSGD(), 0.5)


def choose(merge: str | Rule | None, *, mode: str, window: int | None) -> Choice:
    """Return the given rule, with an unscaled learning rate, or the default for a mode and frequency.

    Args:
        merge: a rule, the name of one, or None for the default.
        mode: "synchronous", "asynchronous" or "hogwild".
        window: local batches per exchange; None is an epoch.

    Raises:
        ConfigError: the rule is not known, or does not work in this mode.
    """
    if merge is None:
        return default(mode, window)
    return Choice(_named(merge, mode))


def _named(merge: str | Rule, mode: str) -> Rule:
    if not isinstance(merge, Rule) and merge not in RULES:
        names = ", ".join(repr(known) for known in RULES)
        raise ConfigError(f"merge should be one of {names}, or a Rule; got {merge!r}.")
    rule = merge if isinstance(merge, Rule) else RULES[merge]()
    synchronous = mode == "synchronous"
    why = rule.rounds if synchronous else rule.alone
    if why is not None:
        updates = "in rounds" if synchronous else "one by one"
        raise ConfigError(
            f'merge="{rule.name}" cannot be used in a mode that merges updates {updates}: {why}.'
        )
    if mode == "hogwild" and type(rule).init is not Rule.init:
        raise ConfigError(
            f'merge="{rule.name}" keeps a state between updates, but mode="hogwild" merges parts of several '
            'updates at the same time. Set mode="asynchronous".'
        )
    return rule

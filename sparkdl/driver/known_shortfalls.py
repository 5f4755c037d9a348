"""Where the study of convergence ended below plain Keras: what the driver warns of.

``benchmarks/convergence.py --shortfalls`` prints these lines from its journal; docs/which-mode.md has the
study.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from sparkdl.rules import RULES, Rule


class Shortfall(NamedTuple):
    """A combination that did not reach plain Keras's score within what the study asks of it.

    Attributes:
        mode: "synchronous" or "asynchronous", as which hogwild counts too.
        frequency: "batch", "n" or "epoch".
        rule: the name of a rule with its default settings; "" is the default of mode and frequency.
        adaptive: whether the optimizer adapts a rate per weight (Adam) or not (SGD).
        workers: how many there were.
        points: hundredths of accuracy, or of R², below plain Keras; inf is a run that diverged.
        problem: on what.
    """

    mode: str
    frequency: str
    rule: str
    adaptive: bool
    workers: int
    points: float
    problem: str


SHORTFALLS: tuple[Shortfall, ...] = (
    Shortfall("asynchronous", "batch", "", True, 2, 1.6, "characters"),
    Shortfall("asynchronous", "batch", "", True, 4, 4.4, "characters"),
    Shortfall("asynchronous", "batch", "", True, 8, 8.5, "characters"),
    Shortfall("asynchronous", "batch", "adag", True, 2, 1.4, "characters"),
    Shortfall("asynchronous", "batch", "adag", True, 4, 4.9, "characters"),
    Shortfall("asynchronous", "batch", "adag", True, 8, 9.1, "characters"),
    Shortfall("asynchronous", "batch", "aeasgd", False, 4, 1.4, "tabular"),
    Shortfall("asynchronous", "batch", "aeasgd", False, 8, 2.9, "tabular"),
    Shortfall("asynchronous", "batch", "aeasgd", True, 1, 3.0, "characters"),
    Shortfall("asynchronous", "batch", "aeasgd", True, 2, 5.1, "characters"),
    Shortfall("asynchronous", "batch", "aeasgd", True, 4, 9.9, "characters"),
    Shortfall("asynchronous", "batch", "aeasgd", True, 8, 12.2, "characters"),
    Shortfall("asynchronous", "batch", "dynsgd", False, 4, 2.3, "fashion"),
    Shortfall("asynchronous", "batch", "dynsgd", False, 8, 2.3, "tabular"),
    Shortfall("asynchronous", "batch", "dynsgd", True, 2, 2.5, "characters"),
    Shortfall("asynchronous", "batch", "dynsgd", True, 4, 8.5, "characters"),
    Shortfall("asynchronous", "batch", "dynsgd", True, 8, 11.6, "characters"),
    Shortfall("asynchronous", "batch", "sum", True, 2, 1.4, "characters"),
    Shortfall("asynchronous", "batch", "sum", True, 4, 4.9, "characters"),
    Shortfall("asynchronous", "batch", "sum", True, 8, 9.1, "characters"),
    Shortfall("asynchronous", "epoch", "", True, 2, 3.4, "characters"),
    Shortfall("asynchronous", "epoch", "", True, 4, 7.9, "characters"),
    Shortfall("asynchronous", "epoch", "", True, 8, 11.9, "characters"),
    Shortfall("asynchronous", "epoch", "adag", False, 1, 102.5, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", False, 2, 85.6, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", False, 4, 42.5, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", False, 8, 12.2, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", True, 1, 101.0, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", True, 2, 81.9, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", True, 4, 40.6, "tabular"),
    Shortfall("asynchronous", "epoch", "adag", True, 8, 17.6, "characters"),
    Shortfall("asynchronous", "epoch", "aeasgd", False, 4, 1.4, "tabular"),
    Shortfall("asynchronous", "epoch", "aeasgd", False, 8, 3.3, "tabular"),
    Shortfall("asynchronous", "epoch", "aeasgd", True, 2, 5.6, "characters"),
    Shortfall("asynchronous", "epoch", "aeasgd", True, 4, 10.7, "characters"),
    Shortfall("asynchronous", "epoch", "aeasgd", True, 8, 12.8, "characters"),
    Shortfall("asynchronous", "epoch", "dynsgd", False, 4, 1.0, "tabular"),
    Shortfall("asynchronous", "epoch", "dynsgd", False, 8, 3.1, "tabular"),
    Shortfall("asynchronous", "epoch", "dynsgd", True, 2, 3.8, "characters"),
    Shortfall("asynchronous", "epoch", "dynsgd", True, 4, 10.4, "characters"),
    Shortfall("asynchronous", "epoch", "dynsgd", True, 8, 13.8, "characters"),
    Shortfall("asynchronous", "epoch", "sum", False, 2, 4.4, "tabular"),
    Shortfall("asynchronous", "epoch", "sum", False, 4, inf, "tabular"),
    Shortfall("asynchronous", "epoch", "sum", False, 8, inf, "tabular"),
    Shortfall("asynchronous", "epoch", "sum", True, 2, 7.9, "tabular"),
    Shortfall("asynchronous", "epoch", "sum", True, 4, inf, "tabular"),
    Shortfall("asynchronous", "epoch", "sum", True, 8, inf, "tabular"),
    Shortfall("asynchronous", "n", "", True, 2, 2.3, "characters"),
    Shortfall("asynchronous", "n", "", True, 4, 6.0, "characters"),
    Shortfall("asynchronous", "n", "", True, 8, 10.7, "characters"),
    Shortfall("asynchronous", "n", "adag", False, 1, 5.4, "tabular"),
    Shortfall("asynchronous", "n", "adag", False, 2, 5.4, "tabular"),
    Shortfall("asynchronous", "n", "adag", False, 4, 5.5, "tabular"),
    Shortfall("asynchronous", "n", "adag", False, 8, 4.8, "tabular"),
    Shortfall("asynchronous", "n", "adag", True, 1, 13.2, "characters"),
    Shortfall("asynchronous", "n", "adag", True, 2, 13.2, "characters"),
    Shortfall("asynchronous", "n", "adag", True, 4, 13.4, "characters"),
    Shortfall("asynchronous", "n", "adag", True, 8, 13.6, "characters"),
    Shortfall("asynchronous", "n", "aeasgd", False, 4, 1.3, "tabular"),
    Shortfall("asynchronous", "n", "aeasgd", False, 8, 3.1, "tabular"),
    Shortfall("asynchronous", "n", "aeasgd", True, 1, 3.2, "characters"),
    Shortfall("asynchronous", "n", "aeasgd", True, 2, 5.8, "characters"),
    Shortfall("asynchronous", "n", "aeasgd", True, 4, 10.4, "characters"),
    Shortfall("asynchronous", "n", "aeasgd", True, 8, 12.4, "characters"),
    Shortfall("asynchronous", "n", "dynsgd", False, 4, 1.0, "tabular"),
    Shortfall("asynchronous", "n", "dynsgd", False, 8, 3.2, "tabular"),
    Shortfall("asynchronous", "n", "dynsgd", True, 2, 3.4, "characters"),
    Shortfall("asynchronous", "n", "dynsgd", True, 4, 9.6, "characters"),
    Shortfall("asynchronous", "n", "dynsgd", True, 8, 13.0, "characters"),
    Shortfall("asynchronous", "n", "sum", False, 2, 9.1, "fashion"),
    Shortfall("asynchronous", "n", "sum", False, 4, inf, "tabular"),
    Shortfall("asynchronous", "n", "sum", False, 8, inf, "tabular"),
    Shortfall("asynchronous", "n", "sum", True, 2, 10.1, "tabular"),
    Shortfall("asynchronous", "n", "sum", True, 4, 26.9, "tabular"),
    Shortfall("asynchronous", "n", "sum", True, 8, inf, "tabular"),
    Shortfall("synchronous", "epoch", "", True, 2, 1.9, "characters"),
    Shortfall("synchronous", "epoch", "", True, 4, 4.9, "characters"),
    Shortfall("synchronous", "epoch", "", True, 8, 9.2, "characters"),
    Shortfall("synchronous", "epoch", "adasum", False, 2, 2.7, "fashion"),
    Shortfall("synchronous", "epoch", "adasum", False, 4, 12.3, "fashion"),
    Shortfall("synchronous", "epoch", "adasum", False, 8, 8.5, "fashion"),
    Shortfall("synchronous", "epoch", "adasum", True, 2, 2.2, "characters"),
    Shortfall("synchronous", "epoch", "adasum", True, 4, 14.4, "fashion"),
    Shortfall("synchronous", "epoch", "adasum", True, 8, 10.9, "characters"),
    Shortfall("synchronous", "epoch", "aeasgd", False, 4, 1.4, "tabular"),
    Shortfall("synchronous", "epoch", "aeasgd", False, 8, 3.2, "tabular"),
    Shortfall("synchronous", "epoch", "aeasgd", True, 1, 3.6, "characters"),
    Shortfall("synchronous", "epoch", "aeasgd", True, 2, 6.5, "characters"),
    Shortfall("synchronous", "epoch", "aeasgd", True, 4, 11.0, "characters"),
    Shortfall("synchronous", "epoch", "aeasgd", True, 8, 13.0, "characters"),
    Shortfall("synchronous", "epoch", "average", False, 8, 2.5, "tabular"),
    Shortfall("synchronous", "epoch", "average", True, 2, 3.6, "characters"),
    Shortfall("synchronous", "epoch", "average", True, 4, 9.7, "characters"),
    Shortfall("synchronous", "epoch", "average", True, 8, 12.2, "characters"),
    Shortfall("synchronous", "epoch", "bmuf", True, 2, 2.0, "characters"),
    Shortfall("synchronous", "epoch", "bmuf", True, 4, 7.7, "characters"),
    Shortfall("synchronous", "epoch", "bmuf", True, 8, 12.3, "characters"),
    Shortfall("synchronous", "epoch", "diloco", False, 8, 1.2, "tabular"),
    Shortfall("synchronous", "epoch", "diloco", True, 2, 5.0, "characters"),
    Shortfall("synchronous", "epoch", "diloco", True, 4, 9.5, "characters"),
    Shortfall("synchronous", "epoch", "diloco", True, 8, 12.0, "characters"),
    Shortfall("synchronous", "epoch", "fedopt", False, 1, 10.6, "tabular"),
    Shortfall("synchronous", "epoch", "fedopt", False, 2, 4.5, "tabular"),
    Shortfall("synchronous", "epoch", "fedopt", False, 4, 5.8, "tabular"),
    Shortfall("synchronous", "epoch", "fedopt", False, 8, 13.3, "tabular"),
    Shortfall("synchronous", "epoch", "fedopt", True, 1, 14.7, "characters"),
    Shortfall("synchronous", "epoch", "fedopt", True, 2, 13.9, "characters"),
    Shortfall("synchronous", "epoch", "fedopt", True, 4, 14.9, "characters"),
    Shortfall("synchronous", "epoch", "fedopt", True, 8, 16.4, "characters"),
    Shortfall("synchronous", "epoch", "sum", False, 2, 116.0, "tabular"),
    Shortfall("synchronous", "epoch", "sum", False, 4, inf, "tabular"),
    Shortfall("synchronous", "epoch", "sum", False, 8, inf, "tabular"),
    Shortfall("synchronous", "epoch", "sum", True, 2, 47.1, "tabular"),
    Shortfall("synchronous", "epoch", "sum", True, 4, inf, "tabular"),
    Shortfall("synchronous", "epoch", "sum", True, 8, inf, "tabular"),
    Shortfall("synchronous", "n", "", True, 2, 1.3, "characters"),
    Shortfall("synchronous", "n", "", True, 4, 3.6, "characters"),
    Shortfall("synchronous", "n", "", True, 8, 8.7, "characters"),
    Shortfall("synchronous", "n", "adasum", False, 2, 1.4, "fashion"),
    Shortfall("synchronous", "n", "adasum", False, 4, 6.1, "fashion"),
    Shortfall("synchronous", "n", "adasum", False, 8, 3.4, "tabular"),
    Shortfall("synchronous", "n", "adasum", True, 2, 4.4, "fashion"),
    Shortfall("synchronous", "n", "adasum", True, 4, 8.7, "characters"),
    Shortfall("synchronous", "n", "adasum", True, 8, 11.7, "characters"),
    Shortfall("synchronous", "n", "aeasgd", False, 4, 1.3, "tabular"),
    Shortfall("synchronous", "n", "aeasgd", False, 8, 3.1, "tabular"),
    Shortfall("synchronous", "n", "aeasgd", True, 1, 3.2, "characters"),
    Shortfall("synchronous", "n", "aeasgd", True, 2, 6.0, "characters"),
    Shortfall("synchronous", "n", "aeasgd", True, 4, 10.5, "characters"),
    Shortfall("synchronous", "n", "aeasgd", True, 8, 12.5, "characters"),
    Shortfall("synchronous", "n", "average", False, 8, 2.5, "tabular"),
    Shortfall("synchronous", "n", "average", True, 2, 3.0, "characters"),
    Shortfall("synchronous", "n", "average", True, 4, 9.4, "characters"),
    Shortfall("synchronous", "n", "average", True, 8, 12.0, "characters"),
    Shortfall("synchronous", "n", "bmuf", True, 2, 1.1, "characters"),
    Shortfall("synchronous", "n", "bmuf", True, 4, 4.5, "characters"),
    Shortfall("synchronous", "n", "bmuf", True, 8, 12.9, "characters"),
    Shortfall("synchronous", "n", "diloco", True, 1, 1.4, "mnist"),
    Shortfall("synchronous", "n", "diloco", True, 2, 1.5, "characters"),
    Shortfall("synchronous", "n", "diloco", True, 4, 6.1, "characters"),
    Shortfall("synchronous", "n", "diloco", True, 8, 11.7, "characters"),
    Shortfall("synchronous", "n", "fedopt", False, 8, 2.0, "tabular"),
    Shortfall("synchronous", "n", "fedopt", True, 2, 3.4, "characters"),
    Shortfall("synchronous", "n", "fedopt", True, 4, 10.7, "characters"),
    Shortfall("synchronous", "n", "fedopt", True, 8, 14.1, "characters"),
    Shortfall("synchronous", "n", "sum", False, 2, 3.2, "tabular"),
    Shortfall("synchronous", "n", "sum", False, 4, inf, "tabular"),
    Shortfall("synchronous", "n", "sum", False, 8, inf, "tabular"),
    Shortfall("synchronous", "n", "sum", True, 2, 9.6, "characters"),
    Shortfall("synchronous", "n", "sum", True, 4, 19.8, "tabular"),
    Shortfall("synchronous", "n", "sum", True, 8, inf, "characters"),
)


def shortfall(
    merge: str | Rule | None, *, mode: str, window: int | None, adaptive: bool, workers: int
) -> Shortfall | None:
    """Return the worst that the study saw of a combination with so many workers or fewer.

    Args:
        merge: a rule, the name of one, or None, as ``SparkModel`` takes it.
        mode: "synchronous", "asynchronous" or "hogwild".
        window: local batches per exchange; None is an epoch.
        adaptive: whether the optimizer is not SGD.
        workers: those that have rows.
    """
    mode = "asynchronous" if mode == "hogwild" else mode
    key = mode, {None: "epoch", 1: "batch"}.get(window, "n"), _name(merge), adaptive
    seen = [one for one in SHORTFALLS if one[:4] == key and one.workers <= workers]
    return max(seen, key=lambda one: one.points, default=None)


def _name(merge: str | Rule | None) -> str | None:
    """Return the name of a rule that has its default settings, "" for no rule."""
    if not isinstance(merge, Rule):
        return merge or ""
    kind = RULES.get(merge.name)
    usual = kind is type(merge) and vars(merge) == vars(kind())
    return merge.name if usual else None


def words_of(one: Shortfall) -> str:
    """Return a warning that says what was seen, and what was seen to do better."""
    frequency = "a number of batches" if one.frequency == "n" else f'"{one.frequency}"'
    rule = f' and merge="{one.rule}"' if one.rule else ""
    optimizer = "an adaptive optimizer" if one.adaptive else "SGD"
    ended = "diverged" if one.points == inf else f"ended {one.points:.1f} points below plain Keras"
    return (
        f'In the study of convergence, mode="{one.mode}" with frequency={frequency}{rule}, {optimizer} and '
        f"{one.workers} workers {ended} (problem: {one.problem}). "
        'mode="synchronous" with frequency="batch" is plain Keras with any number of workers.'
    )

"""Warnings about settings that scored below plain Keras in the convergence study.

The data file ``known_shortfalls.json`` lists them. ``benchmarks/convergence.py --shortfalls`` writes it from
the journal of the study; docs/explanation/which-mode-evidence.md describes the study.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any, NamedTuple

from sparkdl.driver.training_record import counted
from sparkdl.rules import RULES, Rule


class Shortfall(NamedTuple):
    """A combination of settings whose score is further below plain Keras's than the study allows.

    Attributes:
        mode: "synchronous" or "asynchronous", which includes hogwild.
        frequency: "batch", "n" (a number of batches), "epoch" or "auto".
        rule: the name of a rule with its default settings; "" is the default of mode and frequency.
        adaptive: whether the optimizer adapts a rate per weight (Adam) or not (SGD).
        workers: the number of workers.
        points: hundredths of accuracy, or of R², below plain Keras; inf for a run that diverged.
        problem: the problem with the largest shortfall.
        below: the next larger number of workers in the study, if it did not fall short; None: it did, or
            there is none.
    """

    mode: str
    frequency: str
    rule: str
    adaptive: bool
    workers: int
    points: float
    problem: str
    below: int | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Shortfall:
        """Return the shortfall of one record of the data file. Null ``points`` mean that the run diverged."""
        return cls(**record | {"points": inf if record["points"] is None else record["points"]})


@cache
def known() -> tuple[Shortfall, ...]:
    """Return the shortfalls of the data file."""
    text = files("sparkdl.driver").joinpath("known_shortfalls.json").read_text(encoding="utf-8")
    return tuple(Shortfall.of(record) for record in json.loads(text))


def shortfall(
    merge: str | Rule | None,
    *,
    mode: str,
    window: int | None,
    adaptive: bool,
    workers: int,
    joint_start: bool = False,
) -> Shortfall | None:
    """Return the shortfall of a combination in the study, for the nearest number of workers; None if none.

    The nearest is the largest number in the study that is at most ``workers``. Results with fewer workers
    differ in both directions, so their maximum may belong to another run: ADAG once per epoch scores 102.5
    points below plain Keras with one worker, but 12.2 points with eight.

    Args:
        merge: a rule, the name of one, or None, as ``SparkModel`` takes it.
        mode: "synchronous", "asynchronous" or "hogwild".
        window: local batches per exchange; None is an epoch.
        adaptive: whether the optimizer is not SGD.
        workers: the number of workers that have rows.
        joint_start: whether the windows follow a joint start, as with ``frequency="auto"``.
    """
    mode = "asynchronous" if mode == "hogwild" else mode
    frequency = "auto" if joint_start else {None: "epoch", 1: "batch"}.get(window, "n")
    key = mode, frequency, _name(merge), adaptive
    near = [one for one in known() if one[:4] == key and one.workers <= workers]
    seen = [one for one in near if one.below is None or workers < one.below]
    return max(seen, key=lambda one: one.workers, default=None)


def _name(merge: str | Rule | None) -> str | None:
    """Return the name of a rule if it has its default settings, else None; "" for no rule."""
    if not isinstance(merge, Rule):
        return merge or ""
    kind = RULES.get(merge.name)
    usual = kind is type(merge) and vars(merge) == vars(kind())
    return merge.name if usual else None


def words_of(one: Shortfall, mode: str) -> str:
    """Return the text of a warning: the result in the study, and the settings that did better.

    Args:
        one: the result.
        mode: the mode of the run.
    """
    frequency = "N (batches)" if one.frequency == "n" else f'"{one.frequency}"'
    rule = f' and merge="{one.rule}"' if one.rule else ""
    optimizer = "an adaptive optimizer" if one.adaptive else "SGD"
    ended = (
        "diverged"
        if one.points == inf
        else f"scored {one.points:.1f} points (hundredths of accuracy or R²) below plain Keras"
    )
    also = (
        ' The same holds for mode="hogwild", which computes the same in the study\'s simulation.'
        if mode == "hogwild"
        else ""
    )
    return (
        'In the convergence study of sparkdl (the page "Which mode: the evidence" of its documentation), '
        f'mode="{one.mode}" with frequency={frequency}{rule}, {optimizer} and '
        f"{counted(one.workers, 'worker')} {ended} on the data set {one.problem}.{also} "
        'mode="synchronous" with frequency="batch" matches plain Keras for any number of workers.'
    )

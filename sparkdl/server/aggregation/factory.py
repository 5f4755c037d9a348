"""The settings of an aggregation, and the function that makes one from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkdl.core.sparse_gradients import Tables
from sparkdl.core.vectors import Vector
from sparkdl.rules import Choice, Rule
from sparkdl.server.aggregation.asynchronous import Asynchronous
from sparkdl.server.aggregation.base import Aggregation
from sparkdl.server.aggregation.counted_rounds import CountedDeltaRounds, CountedRounds
from sparkdl.server.aggregation.delta_rounds import DeltaRounds
from sparkdl.server.aggregation.gradient_rounds import GradientRounds
from sparkdl.server.aggregation.hogwild import Hogwild
from sparkdl.server.aggregation.rounds import Hybrid


@dataclass(frozen=True)
class AggregationSpec:
    """Settings of an aggregation.

    Attributes:
        mode: "synchronous", "asynchronous" or "hogwild".
        joint: True to merge gradients, False to merge deltas.
        num_workers: number of workers that send updates.
        rule: merge rule for deltas.
        staleness: in modes without rounds, maximum number of exchanges that a worker may be ahead of the
            slowest one; None: no limit.
        hybrid: conditions under which a round closes without some of its workers; None: it waits for all that
            are not lost.
        tables: the trainable variables as tables, if gradients with slices may be merged; otherwise empty.
        power: power of the number of workers that scales their learning rate; see ``rules.Choice``.
        sharded: True if workers reduce gradients or deltas among themselves.
    """

    mode: str
    joint: bool
    num_workers: int
    rule: Rule
    staleness: int | None = None
    hybrid: Hybrid | None = None
    tables: Tables = ()
    power: float = 0.0
    sharded: bool = False


def make_aggregation(
    terms: AggregationSpec, parameters: Vector, statistics: Vector, decays: Vector | None = None
) -> Aggregation:
    """Return an aggregation with these settings.

    Args:
        terms: the settings.
        parameters: initial weights of the center.
        statistics: moving statistics.
        decays: share of each statistic that a training step keeps; nan if it is unknown, None if all are
            unknown.
    """
    start = parameters, statistics, terms.num_workers
    if terms.joint:
        return CountedRounds(*start) if terms.sharded else GradientRounds(*start, terms.hybrid, terms.tables)
    decays = np.full_like(statistics, np.nan) if decays is None else decays
    if terms.mode == "synchronous":
        rounds = CountedDeltaRounds if terms.sharded else DeltaRounds
        return rounds(*start, Choice(terms.rule, terms.power), decays, hybrid=terms.hybrid)
    kind = {"asynchronous": Asynchronous, "hogwild": Hogwild}[terms.mode]
    return kind(*start, terms.rule, decays, bound=terms.staleness)

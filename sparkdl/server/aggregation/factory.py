"""The settings of an aggregation, and the function that makes it from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkdl.core.sparse_gradients import Tables
from sparkdl.core.vectors import Vector
from sparkdl.rules import Rule
from sparkdl.server.aggregation.asynchronous import Asynchronous
from sparkdl.server.aggregation.base import Aggregation
from sparkdl.server.aggregation.delta_rounds import DeltaRounds
from sparkdl.server.aggregation.gradient_rounds import GradientRounds
from sparkdl.server.aggregation.hogwild import Hogwild
from sparkdl.server.aggregation.rounds import Hybrid


@dataclass(frozen=True)
class AggregationSpec:
    """The terms on which updates meet.

    Attributes:
        mode: "synchronous", "asynchronous" or "hogwild".
        joint: whether gradients are merged, and not deltas.
        num_workers: how many workers send updates.
        rule: what becomes of a delta.
        staleness: how many exchanges a worker may be ahead of the slowest one, where there are no rounds.
        hybrid: when a round closes without some of its workers; None: never.
        tables: the trainable variables, where gradients are merged that may have slices.
    """

    mode: str
    joint: bool
    num_workers: int
    rule: Rule
    staleness: int | None = None
    hybrid: Hybrid | None = None
    tables: Tables = ()


def make_aggregation(
    terms: AggregationSpec, parameters: Vector, statistics: Vector, decays: Vector | None = None
) -> Aggregation:
    """Return a center on which updates meet on these terms.

    Args:
        terms: the terms.
        parameters: the center variable.
        statistics: the moving statistics.
        decays: how much of each statistic a training step keeps; nan, or None for all: not known.
    """
    start = parameters, statistics, terms.num_workers
    if terms.joint:
        return GradientRounds(*start, terms.hybrid, terms.tables)
    decays = np.full_like(statistics, np.nan) if decays is None else decays
    if terms.mode == "synchronous":
        return DeltaRounds(*start, terms.rule, decays, hybrid=terms.hybrid)
    kind = {"asynchronous": Asynchronous, "hogwild": Hogwild}[terms.mode]
    return kind(*start, terms.rule, decays, bound=terms.staleness)

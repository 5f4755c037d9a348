"""Rounds of deltas: a merge rule updates the center.

All workers continue from the center, unless the rule is elastic.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.core.reduction import Reduction
from sparkdl.core.vectors import Vector, window_share
from sparkdl.rules import Merge, Rule, apply
from sparkdl.server.aggregation.rounds import Hybrid, SynchronousRounds
from sparkdl.transport.messages import Answer, Reply


class DeltaRounds(SynchronousRounds):
    """Rounds in which the rule turns the reduced delta into a step of the center."""

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        rule: Rule,
        decays: Vector,
        hybrid: Hybrid | None = None,
    ) -> None:
        self.rule, self.decays = rule, decays
        super().__init__(parameters, statistics, num_workers, hybrid)
        self.state = rule.init(parameters)

    def bind(self, working: int) -> None:
        """Set the number of workers with rows and bind the rule to it."""
        super().bind(working)
        self.rule = self.rule.bound(working)

    def _reduction(self) -> Reduction:
        """Return the rule's reduction of a round's deltas to one."""
        return self.rule.reduction()

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(parameters):
            merge = Merge(0, 1, center=self.parameters)
            step, self.state = apply(self.rule, parameters, self.state, merge)
            self.parameters = self.parameters + step
        if len(statistics):
            share = window_share(self.decays, self.steps, 1)
            self.statistics = self.statistics + share * (statistics - self.statistics)
        return replace(
            reply,
            kind=Answer.CENTER,
            version=self.version,
            parameters=self.parameters,
            statistics=self.statistics,
        )

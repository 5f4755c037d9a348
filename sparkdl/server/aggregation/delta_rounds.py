"""Rounds of deltas: a merge rule updates the center.

All workers continue from the center, unless the rule is elastic.
"""

from __future__ import annotations

from sparkdl.core.reduction import Reduction
from sparkdl.core.vectors import Vector, window_share
from sparkdl.rules import Choice, Merge, apply
from sparkdl.server.aggregation.rounds import Hybrid, SynchronousRounds
from sparkdl.transport.messages import Answer, Reply


class DeltaRounds(SynchronousRounds):
    """Rounds in which the rule turns the reduced delta into a change of the center.

    Args:
        parameters: trainable variables of the center.
        statistics: moving statistics.
        num_workers: number of workers that send updates.
        choice: the rule, and the power by which the workers' learning rate is scaled. If the rate is scaled,
            the rule's settings are those for at most ``STUDIED`` workers.
        decays: share of each statistic that a training step keeps.
        hybrid: conditions under which a round closes without some of its workers; None: it waits for all that
            are not lost.
    """

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        choice: Choice,
        decays: Vector,
        hybrid: Hybrid | None = None,
    ) -> None:
        self.choice, self.rule, self.decays = choice, choice.rule, decays
        super().__init__(parameters, statistics, num_workers, hybrid)
        self.state = self.rule.init(parameters)

    def bind(self, working: int) -> None:
        """Set the number of workers with rows, and take the rule's settings for that number."""
        super().bind(working)
        self.rule, _ = self.choice.bound(working)

    def _reduction(self) -> Reduction:
        """Return the rule's Reduction, which combines the deltas of a round into one."""
        return self.rule.reduction()

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(parameters):
            merge = Merge(0, 1, center=self.parameters)
            step, self.state = apply(self.rule, parameters, self.state, merge)
            self.parameters = self.parameters + step
        if len(statistics):
            share = window_share(self.decays, self.steps, 1)
            self.statistics = self.statistics + share * (statistics - self.statistics)
        reply.kind, reply.version = Answer.CENTER, self.version
        reply.parameters, reply.statistics = self.parameters, self.statistics
        return reply

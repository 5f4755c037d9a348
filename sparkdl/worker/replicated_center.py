"""A center that every worker keeps and updates itself, if no endpoint has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkdl.core import packing
from sparkdl.core.reduction import Reduction
from sparkdl.core.vectors import Vector
from sparkdl.errors import RuleError
from sparkdl.modeling.backends.base import Center
from sparkdl.rules import Choice, Merge, apply
from sparkdl.transport.messages import Answer, Reply, Update


class ReplicatedCenter:
    """One worker's copy of the center, and of the state of the merge rule.

    In each round all workers get the same reduced delta, and apply the same rule to it. So their copies stay
    equal, bit for bit.

    Args:
        choice: the rule, which is not bound to a number of workers yet.
        center: the weights and statistics that the run begins with.
    """

    def __init__(self, choice: Choice, center: Center) -> None:
        self.choice, self.rule = choice, choice.rule
        self.parameters, self.statistics = center
        self.state: Any = None
        self.initial: Any = None  # the state before the first update

    def reduction(self) -> Reduction:
        """Return the rule's Reduction, which combines the deltas of a round into one."""
        return self.rule.reduction()

    def bind(self, working: int) -> None:
        """Bind the rule to the number of workers with rows."""
        self.rule, _ = self.choice.bound(working)
        self.state = self.initial = self.choice.rule.init(self.parameters)

    def restore(self, state: bytes) -> None:
        """Continue with the state of the rule at a snapshot."""
        self.state = packing.like(self.initial, packing.unpack(state))

    def merge(self, delta: Vector, reply: Reply) -> Reply:
        """Update the center with the reduced delta of a round; return the round's reply with the center.

        Args:
            delta: the reduced delta; empty if no worker had rows.
            reply: the endpoint's reply, without parameters.
        """
        if len(delta):
            step, self.state = apply(self.rule, delta, self.state, Merge(0, 1, center=self.parameters))
            self.parameters = self.parameters + step
        if len(reply.statistics):
            self.statistics = reply.statistics
        return replace(reply, kind=Answer.CENTER, parameters=self.parameters)

    def take(self, reply: Reply) -> None:
        """Continue from the center in a reply, which a callback has changed or a snapshot holds."""
        self.parameters, self.statistics = reply.parameters, reply.statistics

    def report(self, update: Update) -> Update:
        """Return a report with the center and the state of the rule, which follows the worker's own state.

        Raises:
            RuleError: the state of the rule has another structure than its initial state.
        """
        try:
            state = packing.pack(self.state)
            packing.alike(self.initial, packing.unpack(state))
        except TypeError as error:
            raise RuleError(
                f"The state of the rule {self.rule.name!r} should keep the structure that init gave it, as "
                f'placement="executors" requires: {error} Set placement="driver", or correct the rule.'
            ) from None
        return replace(
            update, parameters=self.parameters, statistics=self.statistics, state=update.state + state
        )

"""Rounds whose gradients or deltas do not pass through the endpoint: workers reduce them among themselves."""

from __future__ import annotations

from typing import Any

from sparkdl.core import packing
from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.errors import ConfigError, RefusedError
from sparkdl.rules import Rule
from sparkdl.server.aggregation.delta_rounds import DeltaRounds
from sparkdl.server.aggregation.gradient_rounds import GradientRounds
from sparkdl.server.aggregation.rounds import SynchronousRounds
from sparkdl.transport.messages import Reply, Update

RULE_BYTES = 64 << 10  # bytes by which a rule's state may grow, since its numbers are text


class Counted(SynchronousRounds):
    """Rounds without parameters: the endpoint counts updates and averages the statistics.

    Workers reduce the parameters themselves (see ``worker.shards``), before they receive the reply of a
    round, which has no parameters.
    """

    def body_bytes(self) -> int:
        """Return the size of an update's sections in bytes."""
        return 4 * len(self.statistics)

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return True if an update may have this number of words: none."""
        return not (words or sliced)

    def _reduce(self, update: Update) -> None:
        """Add nothing."""


class CountedRounds(Counted, GradientRounds):
    """Rounds of gradients without parameters."""


def state_bytes(rule: Rule, state: Any) -> int:
    """Return the size in bytes of the state of a merge rule in a report.

    Raises:
        ConfigError: the state cannot be sent.
    """
    try:
        return sum(map(len, packing.parts(state)))
    except TypeError as error:
        raise ConfigError(
            f'placement="executors" sends the state of the merge rule, and that of {rule.name!r} cannot be '
            f"sent: {error}. Use only dicts, lists, tuples, numbers, strings and arrays in it, or set "
            'placement="driver".'
        ) from None


class CountedDeltaRounds(Counted, DeltaRounds):
    """Rounds of deltas without parameters. Each worker applies the rule to its own copy of the center.

    Worker 0 reports the center and the state of the rule at every snapshot.
    """

    has_replicas = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._rule_bytes = state_bytes(self.rule, self.state) + RULE_BYTES

    def rule_bytes(self) -> int:
        """Return the largest size of the rule's state in a report."""
        return self._rule_bytes

    def read_rule(self, record: bytes) -> Any:
        """Return the state of the rule that a worker has reported.

        Raises:
            RefusedError: the record is not a state of this rule.
        """
        try:
            return packing.alike(self.state, packing.unpack(record))
        except (TypeError, ValueError) as error:
            raise RefusedError(400, f"Expected a state of the rule {self.rule.name!r}: {error}") from None

    def reach(self, parameters: Vector) -> None:
        """Take the center of a snapshot, which the workers have reached."""
        self.parameters = parameters

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        reply = super()._conclude(EMPTY, statistics, reply)
        reply.parameters = EMPTY
        return reply

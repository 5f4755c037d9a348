"""Rounds whose gradients do not pass through the endpoint, because workers add them among themselves."""

from __future__ import annotations

from sparkdl.server.aggregation.gradient_rounds import GradientRounds
from sparkdl.transport.messages import Update


class CountedRounds(GradientRounds):
    """Rounds of gradients without parameters: the endpoint counts updates and averages the statistics.

    Workers average the gradients themselves (see ``worker.shards``), before they receive the reply of a
    round, which has no parameters.
    """

    def body_bytes(self) -> int:
        """Return the size of an update's sections in bytes."""
        return 4 * len(self.statistics)

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return True if a gradient may have this number of words: none."""
        return not (words or sliced)

    def _reduce(self, update: Update) -> None:
        """Add nothing."""

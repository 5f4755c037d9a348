"""Aggregation: merging of the updates of many workers into one center.

Updates are merged in synchronous rounds, one at a time, or (hogwild) concurrently, stripe by stripe. The
classes are interchangeable. ``push`` takes an update with unread sections and a function that reads them, so
that the body of an update can stay in its socket until its turn. It counts each (worker, sequence) once. No
class knows HTTP. Workers are identified by their numbers.
"""

from sparkdl.server.aggregation.asynchronous import Asynchronous
from sparkdl.server.aggregation.base import Aggregation, Read, check_current
from sparkdl.server.aggregation.delta_rounds import DeltaRounds
from sparkdl.server.aggregation.factory import AggregationSpec, make_aggregation
from sparkdl.server.aggregation.gradient_rounds import GradientRounds
from sparkdl.server.aggregation.hogwild import Hogwild
from sparkdl.server.aggregation.rounds import Hybrid, SynchronousRounds

__all__ = [
    "Aggregation",
    "AggregationSpec",
    "Asynchronous",
    "DeltaRounds",
    "GradientRounds",
    "Hogwild",
    "Hybrid",
    "Read",
    "SynchronousRounds",
    "check_current",
    "make_aggregation",
]

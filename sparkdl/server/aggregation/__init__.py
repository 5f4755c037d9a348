"""Aggregation: merging of the updates of many workers into one center.

Updates are merged in synchronous rounds, one at a time, or element by element. The classes are
interchangeable. ``push`` takes an update with unread sections and a function that reads them, so that a body
that has to wait its turn takes no memory. It counts each (worker, sequence) once. No class knows HTTP; a
worker is a number to them.
"""

from sparkdl.server.aggregation.asynchronous import Asynchronous
from sparkdl.server.aggregation.base import Aggregation, Read
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
    "make_aggregation",
]

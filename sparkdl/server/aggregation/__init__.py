"""Aggregation: how the updates of many workers become one center.

Synchronous rounds, one update at a time, or element by element. The classes are interchangeable. ``push``
takes an update whose sections are still unread and a function that reads them, so that a body that has to
wait its turn waits outside of memory, and counts each (worker, sequence) once. None of them knows HTTP; a
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

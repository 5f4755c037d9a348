"""Hosted runs: the endpoint runs in worker 0."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from sparkdl.core.vectors import Vector
from sparkdl.rules import Rule
from sparkdl.server.aggregation import AggregationSpec, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.state import RowsHeld, RunSpec
from sparkdl.transport.exchange import Endpoint


@dataclass(frozen=True)
class HostedRun:
    """Values from which worker 0 makes the endpoint of a run.

    They are the same for all tasks, so they can be sent once (``TrainJob.hosted``).

    Attributes:
        shape: settings of the run that the coordinator needs.
        terms: settings of the aggregation. The rule is sent separately.
        parameters: trainable variables as one vector.
        statistics: moving statistics as one vector.
        decays: share of each statistic that a training step keeps; nan if it is unknown, None if all are
            unknown.
        token: secret of the run.
        tls: True if the endpoint uses TLS.
        learning_rate: rate of all epochs. None if the process that called ``fit`` starts each
            epoch and sets its rate.
        held: rows of each worker in the run that this one continues; empty if there was none.
    """

    shape: RunSpec
    terms: AggregationSpec
    parameters: Vector
    statistics: Vector
    decays: Vector | None
    token: str
    tls: bool
    learning_rate: float | None
    held: tuple[RowsHeld, ...] = ()

    @property
    def ahead(self) -> int:
        """The number of extra tasks before that of worker 0: 1 without ``learning_rate``, else 0.

        The extra task has no rows. It sends the endpoint's address to the process that called
        ``fit``.
        """
        return int(self.learning_rate is None)

    def make_coordinator(self, rule: Rule | None, generation: int) -> Coordinator:
        """Return the coordinator for one start of the worker group."""
        terms = replace(self.terms, rule=rule or self.terms.rule)
        aggregation = make_aggregation(terms, self.parameters, self.statistics, self.decays)
        coordinator = Coordinator(self.shape, aggregation)
        coordinator.rows.expect(self.held, "the joint start")
        coordinator.state.generation = aggregation.generation = generation
        return coordinator


def endpoint_at(address: str, hosted: HostedRun) -> Endpoint:
    """Return a run's endpoint from its address: JSON of host, port and the certificate in hexadecimal."""
    host, port, certificate = json.loads(address)
    return Endpoint(host, port, hosted.token, hosted.shape.run, bytes.fromhex(certificate))

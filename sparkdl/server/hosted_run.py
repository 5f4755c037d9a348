"""A run whose endpoint is in worker 0: what that worker makes the endpoint of."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from sparkdl.core.vectors import Vector
from sparkdl.rules import Rule
from sparkdl.server.aggregation import Terms, make_merging
from sparkdl.server.coordinator import ParameterStore
from sparkdl.server.state import RunShape
from sparkdl.transport.exchange import Endpoint


@dataclass(frozen=True)
class HostedRun:
    """What worker 0 makes a store of: values only, so that tasks can share it.

    Attributes:
        shape: what the store has to know of the run.
        terms: how updates meet; the rule travels apart.
        parameters: the trainable variables as one vector.
        statistics: the moving statistics as one vector.
        decays: how much of each statistic a training step keeps.
        token: the run's secret.
        tls: whether its endpoint speaks TLS.
        learning_rate: that of all epochs; None: the client says when they begin, and at which.
    """

    shape: RunShape
    terms: Terms
    parameters: Vector
    statistics: Vector
    decays: Vector | None
    token: str
    tls: bool
    learning_rate: float | None

    @property
    def ahead(self) -> int:
        """How many tasks without rows there are before that of worker 0."""
        return int(self.learning_rate is None)

    def store(self, rule: Rule | None, generation: int) -> ParameterStore:
        """Return the store of a start of the gang."""
        terms = replace(self.terms, rule=rule or self.terms.rule)
        merging = make_merging(terms, self.parameters, self.statistics, self.decays)
        store = ParameterStore(self.shape, merging)
        store.generation = merging.generation = generation
        return store


def endpoint_at(address: str, hosted: HostedRun) -> Endpoint:
    """Return the endpoint of a run whose address is JSON: host, port, and its certificate in hexadecimal."""
    host, port, certificate = json.loads(address)
    return Endpoint(host, port, hosted.token, hosted.shape.run, bytes.fromhex(certificate))

"""The setup of a run's server: the settings of its coordinator, and where it runs.

The server runs on the driver, or with ``placement="worker"`` in worker 0.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdl.config import Placement, TrainConfig
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.driver.epochs import DriverModel
from sparkdl.driver.remote_server import AnyCoordinator, RemoteCoordinator
from sparkdl.driver.request import Request
from sparkdl.driver.training_record import counted
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_variables, optimizers
from sparkdl.modeling.backends.choice import sliced_tables
from sparkdl.modeling.keras_types import Callback
from sparkdl.rules import Average, Choice
from sparkdl.server.aggregation import AggregationSpec, Hybrid, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.hosted_run import HostedRun
from sparkdl.server.state import CarriedState, RunSpec
from sparkdl.settings import parse_quorum
from sparkdl.spark import jobs
from sparkdl.spark.application import SparkApplication
from sparkdl.transport import tls

SILENCE = 3.0  # seconds without a message after which a newer attempt may replace an older one


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """The settings for making a run's coordinator, or the driver's view of a coordinator in worker 0.

    Attributes:
        request: the request of the fit.
        driver: the driver's model, whose weights the run begins with.
        plan: the plan of the run, without row counts.
        choice: the merge rule, and the scaling of the workers' learning rate that goes with it.
        hybrid: the conditions for closing a round without some workers; None: rounds wait for all.
        first_step: the number of batches that the optimizer had seen before the run.
        evaluation_waits: whether workers wait with the evaluation until ``on_test_begin`` has been
            called, which may change the weights.
        factor: the factor of the learning rate as a function of the epochs done; None: no factor.
    """

    request: Request
    driver: DriverModel
    plan: BatchPlan
    choice: Choice
    hybrid: Hybrid | None
    first_step: float
    evaluation_waits: bool
    factor: Callable[[float], float] | None

    def make_coordinator(self, carried: CarriedState | None) -> AnyCoordinator:
        """Return the run's coordinator, or the driver's view of the coordinator in worker 0.

        Args:
            carried: the final state of the previous fit's workers and merge rule. It is not used if the
                coordinator is in worker 0.
        """
        config, cluster, model = self.request.config, self.request.cluster, self.request.model
        shape, terms = self._shape(), self._terms()
        start = self.driver.values()
        decays = keras_variables.decays(model)
        if config.placement is not Placement.WORKER:
            coordinator = Coordinator(shape, make_aggregation(terms, *start, decays), carried)
            coordinator.rows.expect(self.request.held, "the joint start")
            return coordinator
        hosted = HostedRun(
            shape=shape,
            # A placeholder: the user's rule is pickled with the custom objects.
            terms=replace(terms, rule=Average()),
            parameters=start[0],
            statistics=start[1],
            decays=decays,
            token=secrets.token_urlsafe(32),
            tls=tls.is_wanted(config.network.tls, cluster),
            learning_rate=None if self.request.spare_slot else optimizers.learning_rate(model),
            held=self.request.held,
        )
        return RemoteCoordinator(hosted, functools.partial(jobs.relay, cluster))

    def _shape(self) -> RunSpec:
        """Return the settings of the run that the coordinator needs."""
        request, layouts = self.request, self.driver.layouts
        config, fit = request.config, request.fit
        own = fit.validation_split > 0 or request.source.indicator is not None
        validating = request.validation is not None or own
        return RunSpec(
            run=secrets.token_bytes(16),
            layout=layouts.trainable.digest,
            num_workers=request.num_workers,
            plan=self.plan,
            epochs=request.end,
            evaluated=fit.evaluated if validating else frozenset(),
            evaluation_waits=validating and self.evaluation_waits,
            metrics=request.metrics.layout.nbytes,
            optimizer=layouts.optimizer.nbytes,
            generators=layouts.generators.nbytes,
            own=4 * layouts.trainable.size * self.choice.rule.elastic,
            first_step=self.first_step,
            scaled=config.joint and optimizers.scales_loss(request.model),
            factor=self.factor,
            silence=SILENCE,
            stall=config.fault_tolerance.stall_timeout,
            goes_on=config.goes_on,
            codec=config.codec,
            snapshot_intervals=tuple(
                every
                for every in (
                    config.fault_tolerance.recovery_every,
                    fit.checkpoint and fit.checkpoint.updates,
                )
                if every
            ),
        )

    def _terms(self) -> AggregationSpec:
        """Return the settings of the aggregation."""
        config = self.request.config
        return AggregationSpec(
            mode=config.mode.value,
            joint=config.joint,
            num_workers=self.request.num_workers,
            rule=self.choice.rule,
            power=self.choice.power,
            staleness=config.stragglers.staleness,
            hybrid=self.hybrid,
            tables=sliced_tables(self.driver.layouts.trainable, joint=config.joint),
            sharded=config.placement is Placement.EXECUTORS,
        )


def spare_slot(
    config: TrainConfig, cluster: SparkApplication, num_workers: int, callbacks: list[Callback]
) -> bool:
    """Return True if a slot is free for requests to an endpoint in worker 0.

    Raises:
        ConfigError: the endpoint cannot be in worker 0, or callbacks cannot be called.
    """
    if config.placement is not Placement.WORKER:
        return False
    if not cluster.remote or cluster.dynamic:
        why = (
            "this application uses dynamic allocation, under which workers do not start together"
            if cluster.remote
            else "this is a classic session"
        )
        raise ConfigError(
            f'placement="worker" needs a Spark Connect session without dynamic allocation, but {why}. Set '
            'placement="driver".'
        )
    slots = cluster.slots()
    spare = slots > num_workers and cluster.places_rows
    if callbacks and not spare:
        names = ", ".join(sorted({type(callback).__name__ for callback in callbacks}))
        if not cluster.places_rows:
            remedy = "Use a newer Spark"
        elif slots > 1:
            remedy = f"Set num_workers={slots - 1}"
        else:
            remedy = "Give the application more slots"
        raise ConfigError(
            f'With placement="worker", callbacks ({names}) need Spark 4.1 or newer and one slot more than '
            f"there are workers; got Spark {cluster.session.version}, {counted(slots, 'slot')} "
            f"and {counted(num_workers, 'worker')}. {remedy}, or leave callbacks out."
        )
    return spare


def hybrid_of(config: TrainConfig, num_workers: int) -> Hybrid | None:
    """Return the conditions for closing a round without some workers; None: rounds wait for all.

    Raises:
        ConfigError: the quorum is larger than the number of workers.
    """
    if not config.hybrid:
        return None
    limits = config.stragglers
    quorum = 1.0 if limits.quorum is None else limits.quorum
    return Hybrid(parse_quorum(quorum, num_workers), limits.straggler_timeout, limits.late_updates == "merge")

"""The Spark job of a run: the values that its tasks share, and the worker group that it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdl.config import Mode, Placement
from sparkdl.core.sparse_gradients import most_words
from sparkdl.core.vectors import trim
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.driver.epochs import DriverModel
from sparkdl.driver.remote_server import AnyCoordinator, RemoteCoordinator
from sparkdl.driver.request import Request
from sparkdl.driver.serving import serving
from sparkdl.driver.worker_group import WorkerGroup
from sparkdl.modeling import configuration, serialization
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.rules import Average, Choice
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.http_app import Traffic
from sparkdl.server.monitoring.page import Page
from sparkdl.sources.base import MakeAction
from sparkdl.spark import preflight
from sparkdl.spark.jobs import SparkJob, StageFactory
from sparkdl.worker.strategies import TrainSettings
from sparkdl.worker.train import TrainJob
from sparkdl.worker.user_code import Code


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The Spark job of a run.

    Attributes:
        request: the request of the fit.
        driver: the driver's model.
        plan: the plan of the run, without row counts.
        choice: the merge rule, and the scaling of the workers' learning rate that goes with it.
    """

    request: Request
    driver: DriverModel
    plan: BatchPlan
    choice: Choice

    def group(
        self,
        coordinator: AnyCoordinator,
        spec: serialization.ModelSpec,
        objects: configuration.Objects,
        *,
        traffic: Traffic,
        page: Page | None,
        stack: Cleanup,
    ) -> WorkerGroup:
        """Return the job's worker group, which has not been started yet.

        Args:
            coordinator: the run's coordinator, or the driver's view of the coordinator in worker 0.
            spec: the model, as values.
            objects: the custom objects of the model.
            traffic: the counts of requests to the endpoint.
            page: the live page of the run, if there is one.
            stack: the cleanup of the run, which releases the resources acquired here.
        """
        request, config, cluster = self.request, self.request.config, self.request.cluster
        with interrupts.held():
            shared = cluster.share(self._shared(coordinator, spec))
            stack.callback(cluster.forget, shared)
        trim(self.driver.layouts.trainable.nbytes)  # release the memory that serializing the model took
        request.source.ahead = int(request.spare_slot)
        make_action = request.source.training(
            cluster,
            request.num_workers,
            validation=request.validation,
            seed=self.plan.seed if request.fit.shuffle else None,
            split=request.fit.validation_split,
        )
        # If the coordinator is in worker 0, the run cannot restart after a loss: the coordinator is lost too.
        endpoint, restarts = None, 0
        if isinstance(coordinator, Coordinator):
            endpoint = stack.enter_context(
                serving(coordinator, cluster, config.network, traffic, page=page, rows=request.source.served)
            )
            restarts = config.fault_tolerance.max_restarts
        stages = StageFactory(
            expected=preflight.expectations(spec.backend, local=cluster.local),
            endpoint=endpoint,
            shared=shared,
            code=Code(objects, request.builder, request.distribution, self.choice.rule),
        )
        together = config.mode is Mode.SYNCHRONOUS and not config.goes_on and not cluster.dynamic
        group = WorkerGroup(
            cluster=cluster,
            coordinator=coordinator,
            submit=self._submitter(coordinator, stages, make_action),
            address=None if endpoint is None else endpoint.url,
            barrier=endpoint is None or together,
            restarts=restarts,
            start_timeout=config.fault_tolerance.start_timeout,
            of_rows=request.source.of_a_plan,
        )
        stack.callback(group.cancel)
        return group

    def _shared(self, coordinator: AnyCoordinator, spec: serialization.ModelSpec) -> TrainJob:
        """Return the values that the tasks share. Set each source's evaluation batch size and row limit."""
        request, fit, layout = self.request, self.request.fit, self.driver.layouts.trainable
        config, sharded = request.config, request.config.placement is Placement.EXECUTORS
        held = fit.validation_batch_size or self.plan.batch_size
        for source in (request.source, request.validation):
            if source is not None:
                source.held_batch, source.held_most = held, fit.validation_rows(held)
        slices = None if sharded else most_words(layout.size, request.num_workers) if config.joint else 0
        settings = TrainSettings(
            plan=self.plan,
            epochs=request.end,
            rounds=config.mode is Mode.SYNCHRONOUS,
            validation_batch_size=held,
            rule=Average(),
            power=self.choice.power,
            validation_rows=fit.validation_rows(held),
            profile=fit.traced,
            replicas=sharded and not config.joint,
            slices=slices,
            advises=request.switch is None,
        )
        return TrainJob(
            spec=spec,
            settings=settings,
            schema=request.schema,
            layout=layout.digest,
            class_weight=fit.class_weight,
            hosted=coordinator.hosted if isinstance(coordinator, RemoteCoordinator) else None,
            classes=request.classes,
            shards=request.num_workers if sharded else 0,
            codec=config.codec,
            shared=self._name_of_rows(),
        )

    def _name_of_rows(self) -> str:
        """Return the name under which executors keep the rows for other fits; empty if they do not.

        Two fits have the same name only if each worker has the same rows, in the same order.
        """
        request, fit = self.request, self.request.fit
        if not request.source.shared:
            return ""
        values = (
            request.num_workers,
            self.plan.seed if fit.shuffle else None,
            fit.validation_split,
            (request.source.held_batch, request.source.held_most) if request.num_workers > 1 else None,
            request.source.held_most,
            fit.class_weight,
            request.schema,
        )
        digest = hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
        return f"{request.source.shared}-{digest}"

    def _submitter(
        self, coordinator: AnyCoordinator, stages: StageFactory, make_action: MakeAction
    ) -> Callable[[int, bool], SparkJob]:
        """Return the function that submits the job of a generation, as a barrier stage or not."""
        request, cluster = self.request, self.request.cluster

        def submit(generation: int, barrier: bool) -> SparkJob:
            action = make_action(replace(stages, generation=generation, profile=cluster.profile), barrier)
            text = f"sparkdl: fit {request.model.name} with {request.num_workers} workers"
            text += f", start {generation}" if generation > 1 else ""
            if isinstance(coordinator, RemoteCoordinator):
                return SparkJob(cluster, lambda: coordinator.receive(action()), text)
            return SparkJob(cluster, action, text)

        return submit

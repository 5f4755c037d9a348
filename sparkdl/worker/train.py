"""One worker's task of a run: from its blocks of rows to the end of its training loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.core.codecs import Codec
from sparkdl.data import spill
from sparkdl.data.bad_values import KnownClasses, Watched
from sparkdl.data.blocks import TRAINING, VALIDATION, weigh
from sparkdl.data.schema import Schema
from sparkdl.modeling import optimizers
from sparkdl.modeling.backends.base import Center, Replica
from sparkdl.modeling.backends.choice import distributed, has_gpu, prepare_backend
from sparkdl.modeling.keras_variables import Layouts, set_generators
from sparkdl.modeling.serialization import ModelSpec
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Exchange, Notes
from sparkdl.transport.heartbeat import Heartbeat
from sparkdl.worker import devices, model_cache
from sparkdl.worker.loop import Loop
from sparkdl.worker.model_cache import take_replica
from sparkdl.worker.rebalance import rebalance
from sparkdl.worker.session import Attempt, membership
from sparkdl.worker.strategies import TrainSettings
from sparkdl.worker.user_code import Code


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """The values that the tasks of a run share. They can be broadcast.

    Attributes:
        spec: the model.
        settings: the loop's settings.
        schema: the schema that every row has to match.
        layout: the digest of the trainable variables' layout.
        class_weight: the weight of a training row by the class of its label, if rows have no weights.
        hosted: the HostedRun from which worker 0 makes the endpoint, if the run is hosted.
        classes: the classes of label columns, by the index of the column.
        shards: the number of workers, if they reduce updates among themselves; otherwise 0.
        codec: the codec of updates on the network, if there is one.
        shared: the name under which an executor keeps the rows for other runs (``data.shared_rows``); empty:
            it does not.
    """

    spec: ModelSpec
    settings: TrainSettings
    schema: Schema
    layout: bytes
    class_weight: dict[int, float] | None = None
    hosted: Any = None
    classes: Mapping[int, KnownClasses] = field(default_factory=dict)
    shards: int = 0
    codec: Codec | None = None
    shared: str = ""


def train_task(job: TrainJob, attempt: Attempt, blocks: Watched, code: Code) -> None:
    """Train one worker from its blocks; ``membership`` reports errors to the driver."""
    with membership(attempt, job.layout, job.codec) as (exchange, heartbeat):
        _train(job, attempt, blocks, code, exchange=exchange, heartbeat=heartbeat)


def _train(
    job: TrainJob,
    attempt: Attempt,
    blocks: Watched,
    code: Code,
    *,
    exchange: HttpExchange,
    heartbeat: Heartbeat,
) -> None:
    plan = job.settings.plan
    spill_file = _stored(job, attempt, blocks)
    if blocks.shuffled:
        rebalance(spill_file, attempt.worker, exchange)
    rows, validation = spill_file.rows(TRAINING), spill_file.rows(VALIDATION)
    prepare_backend(attempt.threads)
    gpus, visible = devices.held(), devices.visible_gpus()
    on_gpu = bool(visible) and (devices.scheduled() or has_gpu())
    taken = gpus or visible[: int(on_gpu)]  # without an assigned GPU, a backend uses the first visible one
    notes: Notes = {
        "one_class": rows.one_class(),
        "threads": attempt.threads,
        "empty": spill_file.empty,
        "gpus": list(taken),
        "on_gpu": on_gpu,
        "faults": blocks.found(),
    }
    with distributed(code.distribution, len(gpus)) as spread, ExitStack() as stack:
        if spread:
            model_cache.clear()
        replica = take_replica(job.spec, code.objects, code.builder, joint=plan.joint)
        set_generators(replica.model, job.spec.generators, attempt.worker)
        settings = replace(job.settings, rule=code.rule or job.settings.rule)
        loop = Loop(
            settings,
            attempt.worker,
            replica=replica,
            rows=rows,
            validation=validation,
            exchange=_exchange_of(job.shards, settings, replica, exchange, stack=stack),
            fingerprint=spill_file.fingerprint,
        )
        heartbeat.follow(loop)
        loop.run(notes)
        if spread:
            model_cache.clear()  # the variables lie on the devices of this task


def _stored(job: TrainJob, attempt: Attempt, blocks: Watched) -> spill.SpillFile:
    """Return the rows of the blocks on this executor's disk."""
    seed = job.settings.plan.seed if job.settings.plan.shuffle else None

    def add(rows: spill.SpillFile) -> None:
        rows.extend(weigh(blocks, job.schema, job.class_weight))

    if job.shared:
        from sparkdl.data.shared_rows import shared

        return shared(f"{job.shared}-{attempt.worker}", job.schema, seed, add)
    spill_file = spill.SpillFile(job.schema, spill.local_directory(), seed)
    add(spill_file)
    return spill_file


def _exchange_of(
    num_shards: int, settings: TrainSettings, replica: Replica, driver: HttpExchange, *, stack: ExitStack
) -> Exchange:
    """Return the exchange of the training loop: with the driver's endpoint, or with the workers' shards."""
    if not num_shards:
        return driver
    from sparkdl.worker import shards
    from sparkdl.worker.replicated_center import ReplicatedCenter

    size = Layouts.of(replica.model).trainable.size
    if settings.plan.joint:
        scaled = optimizers.scales_loss(replica.model)
        return stack.enter_context(shards.sharded(driver, size, num_shards, scaled=scaled))
    weights = replica.read()
    center = ReplicatedCenter(settings.choice, Center(weights.vector, weights.statistics))
    return stack.enter_context(shards.sharded(driver, size, num_shards, center=center))

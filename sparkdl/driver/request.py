"""A fit request: the checked settings and the data of a run, before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparkdl.config import FitConfig, TrainConfig
from sparkdl.data.bad_values import KnownClasses
from sparkdl.data.batch_plan import num_batches
from sparkdl.data.schema import Schema
from sparkdl.driver.epochs import Metrics
from sparkdl.driver.first_row import FirstRow
from sparkdl.driver.lease import Lease
from sparkdl.modeling import trainability
from sparkdl.modeling.keras_types import Callback, History, Model
from sparkdl.server.state import CarriedState, RowsHeld
from sparkdl.sources.base import Source
from sparkdl.spark.application import SparkApplication


class Switch(NamedTuple):
    """The point in a fit at which another run continues it.

    Attributes:
        epoch: the first epoch of that run.
        config: the settings of that run.
        local_batch_size: rows of a worker's batch in that run.
    """

    epoch: int
    config: TrainConfig
    local_batch_size: int


@dataclass(kw_only=True)
class Request:
    """A fit request whose arguments have all been checked.

    Attributes:
        model: the user's model.
        builder: the function that built the model, if there is one.
        custom_objects: the custom objects that the user named.
        config: the settings of the SparkModel.
        fit: the settings of this fit.
        cluster: the Spark application.
        num_workers: the number of workers.
        reason: the reason for this number of workers, as a phrase.
        source: the training rows.
        validation: the validation rows, if they are not held out from the training rows.
        schema: the columns of every row.
        callbacks: the user's callbacks.
        history: the History that gets the results.
        settled: the first row of ``validation`` if it is given, else of ``source``.
        metrics: the model's metrics.
        flags: the ``trainable`` flags that the model is trained with.
        carried: the final state of the previous fit's workers and merge rule, if this fit continues from it.
        distribution: the function that makes the distribution over a worker's devices, if there is one.
        spare_slot: whether a task slot is free for the driver's requests to an endpoint in worker 0.
        divides: whether workers exchange gradients of a loss that is divided by the sum of masks or weights,
            not by the number of rows.
        classes: the classes that sparse categorical cross-entropies accept, by the index of the label column.
        fixed_batch_size: the number of rows that every batch must have; None: any number.
        check: a function that raises an error if a restored copy of the model gives different results.
        lease: the lease of the checkpoint folder, if there is one.
        switch: the point at which another run continues the fit; None: this run trains to the end.
        continues: whether the run continues a fit that began with other settings.
        held: the rows of each worker in the run that this one continues; empty if there was none.
        local_batch_size: rows of a worker's batch where workers train locally; None: the fit's batch size.
    """

    model: Model
    builder: Callable[[], Model] | None
    custom_objects: dict[str, Any] | None
    config: TrainConfig
    fit: FitConfig
    cluster: SparkApplication
    num_workers: int
    reason: str
    source: Source
    validation: Source | None
    schema: Schema
    callbacks: list[Callback]
    history: History
    settled: FirstRow
    metrics: Metrics
    flags: trainability.Trainability
    carried: CarriedState | None = None
    distribution: Callable[[], Any] | None = None
    spare_slot: bool = False
    divides: bool = False
    classes: dict[int, KnownClasses] = field(default_factory=dict)
    fixed_batch_size: int | None = None
    check: Callable[[Model], None] | None = None
    lease: Lease | None = None
    switch: Switch | None = None
    continues: bool = False
    held: tuple[RowsHeld, ...] = ()
    local_batch_size: int | None = None

    @property
    def end(self) -> int:
        """The epoch before which this run ends: that of the switch, or the number of epochs of the fit."""
        return self.fit.epochs if self.switch is None else min(self.fit.epochs, self.switch.epoch)

    def known_steps(self, batch_size: int) -> int | None:
        """Return the number of batches of an epoch if it is known before any job runs, else None."""
        count = self.source.count()
        if self.fit.steps_per_epoch is not None or count is None or self.source.indicator is not None:
            return self.fit.steps_per_epoch
        return num_batches(int(count * (1 - self.fit.validation_split)), batch_size)

"""Preparation of a fit: check its arguments and build the fit request."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sparkdl.config import AUTO, CheckpointConfig, FitConfig, Placement, TrainConfig
from sparkdl.core.tree import leaves
from sparkdl.data.bad_values import KnownClasses, judge, sentences_of
from sparkdl.data.blocks import TRAINING, VALIDATION
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.driver.epochs import Metrics, check_callbacks
from sparkdl.driver.first_row import FirstRow, metrics_of, settle
from sparkdl.driver.lease import Lease, lease_of
from sparkdl.driver.request import Request
from sparkdl.driver.server_setup import hybrid_of, spare_slot
from sparkdl.errors import ConfigError
from sparkdl.modeling import (
    checks,
    keras_settings,
    keras_variables,
    losses,
    proof,
    serialization,
    signature,
    trainability,
)
from sparkdl.modeling.backends.choice import require_averageable
from sparkdl.modeling.keras_types import History, Model
from sparkdl.process.interrupts import Cleanup
from sparkdl.server.state import CarriedState
from sparkdl.sources import columns
from sparkdl.sources.base import Source
from sparkdl.sources.resolve import (
    make_source,
    require_partitions,
    require_partner,
    require_sendable,
    share_weights,
    whole_partitions,
)
from sparkdl.spark import spark_internals
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.failures import explained_if_stopped

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of one call of ``SparkModel.fit``, under the same names."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: object
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: object
    features_col: Any
    label_col: Any
    validation_indicator_col: str | None
    seed: int | None
    preserve_partitions: bool
    decode: dict[str, Callable[[Any], Any]] | None
    checkpoint: CheckpointConfig | str | None
    resume: bool
    nan: str
    profile: tuple[int, int] | None

    def settings(self, batch_size: int | None) -> FitConfig:
        """Return the settings of the fit; ``batch_size`` None is Keras's default.

        Raises:
            ConfigError: a setting cannot be honoured.
        """
        values = {each.name: getattr(self, each.name) for each in fields(FitConfig)}
        return FitConfig(**values | {"batch_size": 32 if batch_size is None else batch_size})

    def training_rows(self, model: Model) -> Source:
        """Return the source of the training rows.

        Raises:
            ConfigError: the rows are of a kind that cannot be trained on. The message names the alternatives.
            DataError: the arrays have different lengths.
        """
        return make_source(
            (self.x, self.y, self.sample_weight),
            (self.features_col, self.label_col),
            signature.count_parts(model),
            indicator=self.validation_indicator_col,
            decode=self.decode,
            takes=signature.takes(model),
        )

    def validation_rows(self, model: Model) -> Source | None:
        """Return the source of the rows of ``validation_data``; None without ``validation_data``.

        Raises:
            ConfigError: the rows are of a kind that cannot be evaluated, or ``validation_data`` is a tuple or
                list of the wrong length; or a DataFrame lacks some columns of sample weights. The message
                names the alternatives.
            DataError: the arrays have different lengths.
        """
        data = self.validation_data
        if data is None:
            return None
        names = self.features_col, self.label_col
        counts = signature.count_parts(model)
        make = functools.partial(
            make_source, counts=counts, what="validation_data", takes=signature.takes(model, "test_step")
        )
        if not isinstance(data, tuple | list):
            weight = leaves(self.sample_weight)
            named = hasattr(data, "sparkSession") and all(isinstance(name, str) for name in weight)
            missing = [name for name in weight if not columns.has(data, [name])] if named else weight
            if named and 0 < len(missing) < len(weight):
                raise ConfigError(
                    "validation_data should have all columns of sample weights "
                    f"({', '.join(map(repr, weight))}), or none of them; it lacks "
                    f"{', '.join(map(repr, missing))}."
                )
            given = data, None, None if missing else self.sample_weight
            return make(given, names, decode=self.decode)
        if len(data) not in (1, 2, 3):
            raise ConfigError(
                "validation_data should be (x, y) or (x, y, sample_weight), an RDD or a DataFrame; got a "
                f"{type(data).__name__} of length {len(data)}."
            )
        return make(tuple(data), names)


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """The model of a SparkModel, its settings, and the state that earlier fits left.

    Attributes:
        model: the compiled model.
        builder: the function that built the model, if there is one.
        custom_objects: the custom objects that the user named.
        config: the settings.
        distribution: the function that makes the distribution over a worker's devices, if there is one.
        original: the model that this one is a copy of, if it is a copy.
        flags: the ``trainable`` flags of the last fit, if there was one.
        carried: the number of workers of the last fit, the fingerprint of the model at its end, and the
            final state of its workers and merge rule, if the driver has it.
    """

    model: Model
    builder: Callable[[], Model] | None
    custom_objects: dict[str, Any]
    config: TrainConfig
    distribution: Callable[[], Any] | None = None
    original: Model | None = None
    flags: trainability.Trainability | None = None
    carried: tuple[int, bytes, CarriedState | None] | None = None

    def trainability(self) -> trainability.Trainability:
        """Return the model's ``trainable`` flags.

        On TensorFlow, the flags of the last fit apply until the model is compiled again.
        """
        return trainability.Trainability(self.model) if self.flags is None else self.flags.still()

    def carried_state(self, num_workers: int) -> CarriedState | None:
        """Return the final state of the last fit's workers and merge rule.

        None if there was no fit, or if the model or the number of workers has changed since.
        """
        if self.carried is None:
            return None
        workers, fingerprint, carried = self.carried
        same = workers == num_workers and fingerprint == keras_variables.fingerprint(self.model)
        return carried if same else None

    def metrics(self, row: FirstRow, *steps: str) -> Metrics:
        """Return the metrics of the model, named as the steps name their results."""
        return metrics_of(self.model, row, *steps, builder=self.builder, custom_objects=self.custom_objects)


def _require_traceable(fit: FitConfig, config: TrainConfig) -> None:
    """Require that the endpoint is on the driver if the fit is profiled.

    Raises:
        ConfigError: the fit is profiled, and the endpoint is in worker 0.
    """
    if fit.profile is not None and config.placement is Placement.WORKER:
        raise ConfigError(
            'profile needs placement="driver" or "executors", since the driver collects the trace; got '
            'placement="worker". Leave profile out.'
        )


def build_request(user: UserModel, arguments: FitArguments, history: History, stack: Cleanup) -> Request:
    """Check the arguments of a fit, look at the first rows, and return the request of the fit.

    Most checks that need no job come first.

    Args:
        user: the model, its settings, and the state that earlier fits left.
        arguments: the arguments of the fit.
        history: the History that gets the results.
        stack: the cleanup of the fit. It releases the lease of the checkpoint folder and, if Spark was
            stopped, replaces Spark's errors by one that says so.

    Raises:
        ConfigError: an argument cannot be honoured.
        ModelError: the model cannot be trained on workers.
        DataError: rows do not fit the model.
        CheckpointError: another run uses the checkpoint folder.
        ClusterError: there are too few slots, or the executors' Python does not match the driver's.
    """
    config, model = user.config, user.model
    fixed = signature.fixed_batch_size(
        model,
        batch_size=arguments.batch_size,
        validation_batch_size=arguments.validation_batch_size,
        batch_size_per_worker=config.batch_size_per_worker,
    )
    batch_size = fixed if arguments.batch_size is None else arguments.batch_size
    fit = arguments.settings(batch_size)
    _require_traceable(fit, config)
    callbacks = check_callbacks(arguments.callbacks)
    source, validation = arguments.training_rows(model), arguments.validation_rows(model)
    fit = _settle_steps(fit, source, validation, batch_size)
    if fit.preserve_partitions:
        require_partitions(source, validation)
    trainability.require_trainable(model)
    cluster = application_of(source.session, own_gpus=not config.share_gpus)
    stack.enter_context(explained_if_stopped(cluster))
    require_sendable(source, cluster)
    cluster.require_python(keras_settings.backend())
    most = min(fit.batch_size, source.count() or fit.batch_size)
    num_workers, reason = _num_workers(user, cluster, most, fixed)
    lease = hold_lease(fit.checkpoint, config, stack)
    if model.built and source.count() is None:
        with user.trainability().applied():
            # A model that cannot be serialized is refused before a job reads rows.
            serialization.freeze(model, user.builder, user.custom_objects)
    wanted = num_workers
    if fit.preserve_partitions:
        num_workers = whole_partitions(source, config.num_workers, wanted)
    hybrid_of(config, num_workers)  # refuses a quorum that is too large before a job reads rows
    spare = spare_slot(config, cluster, num_workers, callbacks)
    rows = _look_at_rows(user, fit, source, validation, num_workers)
    return Request(
        model=model,
        builder=user.builder,
        custom_objects=user.custom_objects,
        config=config,
        fit=fit,
        cluster=cluster,
        num_workers=num_workers,
        reason=reason if num_workers == wanted else "one per partition",
        source=source,
        validation=validation,
        schema=rows.schema,
        callbacks=callbacks,
        history=history,
        flags=user.trainability(),
        settled=rows.settled,
        metrics=user.metrics(rows.settled, "train_step", "test_step"),
        carried=user.carried_state(num_workers),
        distribution=user.distribution,
        spare_slot=spare,
        divides=rows.divides,
        classes=rows.classes,
        fixed_batch_size=fixed,
        check=functools.partial(proof.require_same, user.original or model, first=rows.first[:3]),
        lease=lease,
    )


def hold_lease(checkpoint: CheckpointConfig | None, config: TrainConfig, stack: Cleanup) -> Lease | None:
    """Acquire the lease of a checkpoint folder, so that no other run writes there until the fit ends.

    Args:
        checkpoint: the checkpoints of the fit, if there are any.
        config: the settings of the SparkModel.
        stack: the cleanup of the fit, which releases the lease.

    Raises:
        CheckpointError: another run uses the folder.
        ConfigError: the folder cannot be read or written.
    """
    # If the endpoint is in worker 0, checkpoint_policy refuses the checkpoints later.
    if checkpoint is None or config.placement is Placement.WORKER:
        return None
    lease = lease_of(checkpoint.uri, spark_internals.active_context())
    stack.callback(lease.release)
    lease.acquire()
    lease.start()
    return lease


def _settle_steps(
    fit: FitConfig, source: Source, validation: Source | None, batch_size: int | None
) -> FitConfig:
    """Return the settings of a fit on these rows.

    Without ``batch_size``, it is computed from ``steps_per_epoch``, if the number of rows is known.

    Raises:
        ConfigError: validation rows are given in two ways, or cannot be combined with the training rows.
    """
    if source.indicator is not None and (validation is not None or fit.validation_split):
        raise ConfigError(
            "validation_indicator_col, validation_data and validation_split each choose the validation "
            "rows; got more than one. Pass one of them."
        )
    if validation is not None:
        require_partner(source, validation)
        fit = replace(fit, validation_split=0.0)  # as in Keras, validation_data takes precedence
    if batch_size is not None:
        return fit
    count = source.count()
    rows = None if count is None else int(count * (1 - fit.validation_split))
    held = None if count is None or rows is None else count - rows
    return fit.with_steps_of(rows, held if validation is None else validation.count())


def _num_workers(user: UserModel, cluster: SparkApplication, most: int, fixed: int | None) -> tuple[int, str]:
    """Return the number of workers, and the reason for it.

    If the workers divide each batch, and the user did not set their number, it is at most ``most``.

    Raises:
        ConfigError: several workers were requested, and every batch of the model must have ``fixed`` rows.
        ClusterError: there are fewer slots than workers.
        ModelError: a layer needs the statistics of whole batches, which the workers divide.
    """
    config = user.config
    if fixed is not None and (config.num_workers or 1) > 1:
        raise ConfigError(
            f'The model "{user.model.name}" takes only batches of {fixed} rows, but several workers train '
            f"on batches of varying sizes; got num_workers={config.num_workers}. Set num_workers=1, or use "
            "an Input without a batch size and no stateful layers."
        )
    num_workers, why = cluster.num_workers(
        config.num_workers if fixed is None else 1,
        most if config.joint else None,
        config.fault_tolerance.start_timeout,
    )
    if config.joint:
        checks.require_divisible(user.model, num_workers)
    return num_workers, why if fixed is None else f"the model takes batches of {fixed} rows"


class _Rows(NamedTuple):
    """Properties of the rows, from their first row.

    Attributes:
        schema: the columns of every row.
        first: the first training row.
        settled: the first row of ``validation_data`` if it is given, else ``first``. It builds the metrics.
        divides: whether workers exchange gradients of a loss that is divided by the sum of masks or weights,
            not by the number of rows.
        classes: the classes that sparse categorical cross-entropies accept, by the index of the label column.
    """

    schema: Schema
    first: FirstRow
    settled: FirstRow
    divides: bool
    classes: dict[int, KnownClasses]


def _look_at_rows(
    user: UserModel, fit: FitConfig, source: Source, validation: Source | None, num_workers: int
) -> _Rows:
    """Determine the columns of the rows, and check that the model can be trained on them."""
    model = user.model
    source.workers = num_workers
    source.schema, first = settle(model, source, "train_step")
    settled = first
    trainability.require_trainable(model)  # again: the first row may have built the model
    if validation is not None:
        validation.workers = num_workers
        validation.schema, settled = settle(model, validation, "test_step")
    begins_joint = user.config.joint or user.config.frequency == AUTO
    if begins_joint and user.config.placement is Placement.EXECUTORS:
        require_averageable(model, first[:3], user.builder, user.custom_objects)
    schema = share_weights(source, validation)
    if fit.class_weight is not None:
        schema = _with_class_weights(source.schema, schema)
    divides = False
    if user.config.joint and num_workers > 1:
        weights = np.ones(1) if first.weights is None and fit.class_weight is not None else first.weights
        divides = losses.check(model, first.x, first.y, weights, first.predicted)
    classes = losses.classes_of(model, schema.template[1], first.predicted) if schema.labelled else {}
    _judge_rows(source, validation, classes, fit.nan)
    return _Rows(schema, first, settled, divides, classes)


def _judge_rows(source: Source, held: Source | None, classes: dict[int, KnownClasses], nan: str) -> None:
    """Check the rows that are in the driver's memory. Workers check rows from Spark.

    Raises:
        DataError: there are such rows, and ``nan`` is "error".
    """
    parts = {TRAINING: source} if held is None else {TRAINING: source, VALIDATION: held}
    found = [fault for part, each in parts.items() for fault in each.faults(classes, part)]
    rows = {part: each.count() or 0 for part, each in parts.items()}
    judge(sentences_of(found, rows, source.schema, classes), nan)


def _with_class_weights(rows: Schema, schema: Schema) -> Schema:
    """Return the schema of rows that are weighted by the class of their label.

    Raises:
        ConfigError: the rows have sample weights, no labels or several labels each, or the model has several
            outputs.
    """
    if rows.weights:
        raise ConfigError("class_weight should be left out if rows have sample weights; got both.")
    if not rows.labelled:
        raise ConfigError("class_weight needs labels; got rows without labels. Leave class_weight out.")
    if not isinstance(schema.template[1], int):
        raise ConfigError(
            "class_weight needs a model with one output; got several outputs. Pass sample weights instead."
        )
    label = schema.columns[schema.template[1]]
    if len(label.shape) > 1:
        raise ConfigError(
            f"class_weight needs one label per row, a whole number or a one-hot vector; {label.name} has "
            f"shape {label.shape}. Pass sample weights instead."
        )
    for column in schema.weights:
        if column.shape:
            raise ConfigError(
                "class_weight gives each row one weight, so validation rows should have one sample weight "
                f"each; got weights of shape {column.shape}. Pass sample weights for training rows too."
            )
    if schema.weights:
        return schema
    column = Column("class_weight", (), keras_settings.float_type())
    return replace(schema, columns=(*schema.columns, column), form=(*schema.form, len(schema.columns)))

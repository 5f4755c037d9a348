"""The checkpoint policy of a run: when to save a checkpoint, and how to resume from one.

``driver.checkpoints`` handles the files. Without a checkpoint folder, the policy's methods do nothing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

from sparkdl.config import AUTO, Mode, Placement
from sparkdl.core import packing
from sparkdl.driver.checkpoints import Checkpoints, Saved
from sparkdl.driver.description import describe, outer_name
from sparkdl.driver.display.progress import Results
from sparkdl.driver.epochs import DriverModel
from sparkdl.driver.remote_server import AnyCoordinator
from sparkdl.driver.request import Request
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_variables, optimizers
from sparkdl.rules import Rule, choose
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.monitoring.live import no_event
from sparkdl.server.state import Snapshot
from sparkdl.settings import flattened
from sparkdl.spark import spark_internals

logger = logging.getLogger(__name__)


class CheckpointPolicy:
    """The policy of a run without checkpoints, and the interface of every policy.

    Args:
        request: the request of the fit.

    Attributes:
        resumed: the checkpoint that the run resumes from, if there is one.
        resumption: a sentence that names this checkpoint and its point in the run; empty if there is none.
        seed: the seed of every random order.
        first: the run's first epoch, and the number of batches that its optimizer had seen before.
        on_event: a function of the text and the level of an event, which records it.
    """

    resumed: Saved | None = None
    resumption = ""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seed = secrets.randbits(31) if request.fit.seed is None else request.fit.seed
        self.first = request.fit.initial_epoch, float(optimizers.batches_seen(request.model))
        self.on_event: Callable[[str, str], object] = no_event

    def restore(self, coordinator: AnyCoordinator) -> None:
        """Restore the coordinator from the checkpoint that the run resumes from, if there is one.

        Raises:
            ConfigError: the state of the rule cannot be saved in a checkpoint, or differs in structure from
                the saved state.
        """

    def restore_model(self) -> int | None:
        """Restore model and history from the checkpoint; return the epoch to continue with.

        None: there is no checkpoint to resume from.
        """
        return None

    def require_owned(self) -> None:
        """Raise if another run is known to write to the folder.

        Raises:
            CheckpointError: another run has taken the folder over, or has written to it.
        """

    def keep(self, coordinator: AnyCoordinator, logs: Results | None = None) -> None:
        """Save a checkpoint if one is due; ``logs`` are the results of an epoch that has ended."""

    def keep_at_switch(self, coordinator: AnyCoordinator, logs: Results) -> None:
        """Save the end of a joint start, since the run that continues it has a schedule of its own."""

    def digests(self) -> list[bytes]:
        """Return digests of the model's weights, from which ``keep_last`` detects a change."""
        return []

    def keep_last(self, coordinator: AnyCoordinator, logs: Results, before: list[bytes]) -> None:
        """Save a final checkpoint if training was stopped or callbacks changed weights in ``on_train_end``.

        Then wait until all checkpoints are written.

        Args:
            coordinator: the run's coordinator.
            logs: the results of the last epoch.
            before: the digests of the model's weights before ``on_train_end``.

        Raises:
            CheckpointError: another run has taken the folder over, or has written to it.
        """

    def close(self) -> None:
        """Wait until all checkpoints are written."""


class FolderPolicy(CheckpointPolicy):
    """The policy of a run that keeps checkpoints in a folder.

    Args:
        request: the request of the fit.
        checkpoints: the checkpoints in the folder.
        driver: the driver's model.
        rule: the merge rule.
        training: counts and timings of the run, which each checkpoint holds.
        earlier: the policy of the run whose fit this run continues, if there is one. Then no checkpoint is
            restored.
    """

    def __init__(
        self,
        request: Request,
        checkpoints: Checkpoints,
        *,
        driver: DriverModel,
        rule: Rule,
        training: dict[str, Any],
        earlier: CheckpointPolicy | None = None,
    ) -> None:
        super().__init__(request)
        self.checkpoints, self.driver, self.rule, self.training = checkpoints, driver, rule, training
        checkpoints.failed = training.setdefault("checkpoints_failed", 0)
        self.settings = _settings_of(request, driver, rule, training["batch_size"])
        config, fit = request.config, request.fit
        others = {
            "merge": None if config.joint else rule,
            "class_weight": fit.class_weight,
            "validation_freq": fit.validation_freq,
            "compression": config.compression,
            **flattened(config.stragglers),
        }
        self.description = describe(request.model, request.schema, others)
        if isinstance(earlier, FolderPolicy):  # the learning rate is that of the program, not of callbacks
            self.description = replace(self.description, learning_rate=earlier.description.learning_rate)
            self.resumption = earlier.resumption
        else:
            self.resumed = checkpoints.newest(self.settings, self.description)
            self.resumption = checkpoints.resumption
        if self.resumed:
            self.seed, self.first = self.resumed.settings["seed"], self.resumed.first
        self.settings["seed"] = self.seed

    def restore(self, coordinator: AnyCoordinator) -> None:
        """Restore the coordinator from the checkpoint that the run resumes from, if there is one.

        Raises:
            ConfigError: the state of the rule cannot be saved in a checkpoint, or differs in structure from
                the saved state.
        """
        assert isinstance(coordinator, Coordinator)  # noqa: S101 - checkpoint_policy refuses placement="worker"
        state = coordinator.aggregation.state
        require_packable(self.rule, state)
        if self.resumed:
            try:
                snapshot = _with_state_like(state, self.resumed.snapshot)
            except TypeError as error:
                raise ConfigError(
                    f"The state of the rule {self.rule.name!r} should have the same structure in the "
                    f"checkpoint as in this run: {error} Use the rule's code of the first run, or start a "
                    "new run with another folder and without resume."
                ) from None
            coordinator.counters.update(self.resumed.counters)
            coordinator.resume(snapshot, self.resumed.held)
        self.checkpoints.start_from(coordinator.snapshot)

    def restore_model(self) -> int | None:
        """Restore model and history from the checkpoint; return the epoch to continue with.

        None: there is no checkpoint to resume from.
        """
        saved, request = self.resumed, self.request
        if saved is None:
            return None
        # the state at the start of the epoch
        self.driver.load(saved.snapshot.before or saved.snapshot, saved.rows)
        rates = saved.description.learning_rate, self.description.learning_rate
        if rates[0] == rates[1] or isnan(rates[1]):
            optimizers.set_learning_rate(request.model, saved.learning_rate)
        else:  # the user set a new rate, which replaces the rate that callbacks derived from the old one
            optimizers.set_learning_rate(request.model, rates[1])
            logger.info(
                "The run resumes with the learning rate %g of the compiled model; the original run began "
                "with %g.",
                rates[1],
                rates[0],
            )
        request.history.history, request.history.epoch = saved.history, saved.epochs
        self.training.update(saved.training, resumed=saved.training.get("resumed", 0) + 1)
        return request.fit.epochs if saved.stopped else saved.snapshot.epoch

    def require_owned(self) -> None:
        """Raise if another run is known to write to the folder.

        Raises:
            CheckpointError: another run has taken the folder over, or has written to it.
        """
        self.checkpoints.require_owned()

    def keep(self, coordinator: AnyCoordinator, logs: Results | None = None) -> None:
        """Save a checkpoint if one is due; ``logs`` are the results of an epoch that has ended."""
        if not coordinator.plans or coordinator.broken:
            return
        if self.checkpoints.asks():
            coordinator.request_snapshot()
        elif logs is not None and self.request.config.mode is not Mode.SYNCHRONOUS:
            coordinator.request_snapshot(ends=True)
        snapshot = coordinator.newest_snapshot
        if self.checkpoints.is_due(snapshot, ends=logs is not None):
            self._save(coordinator, snapshot, logs)

    def keep_at_switch(self, coordinator: AnyCoordinator, logs: Results) -> None:
        """Save the end of a joint start, since the run that continues it has a schedule of its own."""
        if coordinator.snapshot is not self.checkpoints.saved:
            self._save(coordinator, coordinator.snapshot, logs)

    def digests(self) -> list[bytes]:
        """Return digests of the model's weights, from which ``keep_last`` detects a change."""
        return keras_variables.digests(self.request.model.weights)

    def keep_last(self, coordinator: AnyCoordinator, logs: Results, before: list[bytes]) -> None:
        """Save a final checkpoint if training was stopped or callbacks changed weights in ``on_train_end``.

        Then wait until all checkpoints are written.

        Args:
            coordinator: the run's coordinator.
            logs: the results of the last epoch.
            before: the digests of the model's weights before ``on_train_end``.

        Raises:
            CheckpointError: another run has taken the folder over, or has written to it.
        """
        model = self.request.model
        try:
            if model.stop_training or before != keras_variables.digests(model.weights):
                snapshot = replace(
                    coordinator.snapshot,
                    parameters=self.driver.parameters(),
                    statistics=self.driver.statistics(),
                )
                self._save(coordinator, snapshot, logs)
        finally:
            self.checkpoints.close()
        self.checkpoints.require_owned()
        self.training["checkpoints_failed"] = self.checkpoints.failed

    def close(self) -> None:
        """Wait until all checkpoints are written, and forget the snapshots that were read and written."""
        self.checkpoints.close()
        self.training["checkpoints_failed"] = self.checkpoints.failed
        self.resumed = self.checkpoints.saved = None

    def _save(self, coordinator: AnyCoordinator, snapshot: Snapshot, logs: Results | None) -> None:
        model, history = self.request.model, self.request.history
        saved = Saved(
            settings=self.settings,
            first=self.first,
            snapshot=snapshot,
            held=coordinator.held,
            learning_rate=optimizers.learning_rate(model),
            history=history.history,
            epochs=history.epoch,
            training=self.training,
            counters=coordinator.counters,
            stopped=bool(model.stop_training),  # a callback may set any true value
            description=self.description,
        )
        value = None if logs is None else logs.get(self.checkpoints.config.monitor)
        if self.checkpoints.save(saved, value, wait=logs is not None):
            self.on_event(f"Checkpoint at {snapshot}.", "info")


def checkpoint_policy(
    request: Request,
    driver: DriverModel,
    rule: Rule,
    training: dict[str, Any],
    *,
    earlier: CheckpointPolicy | None = None,
) -> CheckpointPolicy:
    """Return the policy that a request asks for, with the checkpoint to resume from.

    Args:
        request: the request of the fit.
        driver: the driver's model.
        rule: the merge rule.
        training: counts and timings of the run.
        earlier: the policy of the run whose fit this run continues, if there is one.

    Raises:
        ConfigError: checkpoints are requested with placement="worker", the folder cannot be used, it has
            checkpoints and the run is new, or none of its checkpoints can be used.
    """
    fit = request.fit
    if fit.checkpoint is None:
        return CheckpointPolicy(request)
    if request.config.placement is Placement.WORKER:
        raise ConfigError(
            'checkpoint needs placement="driver" or "executors", since the driver writes checkpoints; got '
            'placement="worker". Leave one of them out.'
        )
    checkpoints = Checkpoints(
        fit.checkpoint,
        spark_internals.active_context(),
        fresh=not fit.resume and earlier is None,
        lease=request.lease,
    )
    return FolderPolicy(request, checkpoints, driver=driver, rule=rule, training=training, earlier=earlier)


def newest_checkpoint(request: Request) -> Saved | None:
    """Return the newest checkpoint that a request may resume from, whatever its settings, if there is one."""
    fit = request.fit
    if fit.checkpoint is None or not fit.resume or request.config.placement is Placement.WORKER:
        return None
    return Checkpoints(fit.checkpoint, spark_internals.active_context(), fresh=False).newest_readable()


def require_packable(rule: Rule, state: Any) -> None:
    """Require a state of a merge rule that a checkpoint can hold.

    Raises:
        ConfigError: it cannot.
    """
    try:
        packing.parts(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The state of the rule {rule.name!r} cannot be saved in a checkpoint ({error}). Use only dicts, "
            "lists, tuples, numbers, strings and arrays in it."
        ) from None


def _with_state_like(state: Any, snapshot: Snapshot) -> Snapshot:
    """Return a saved snapshot with the rule's state in the structure of ``state``.

    Raises:
        TypeError: the saved state has a different structure.
    """
    before = snapshot.before and _with_state_like(state, snapshot.before)
    return replace(snapshot, rule=packing.like(state, snapshot.rule), before=before)


def _settings_of(request: Request, driver: DriverModel, rule: Rule, batch_size: int) -> dict[str, object]:
    """Return the settings that a run must have in common with the checkpoint it resumes from."""
    config, fit = request.config, request.fit
    automatic = request.switch is not None or request.continues
    if request.switch is not None:
        later = request.switch.config
        rule = choose(later.merge, mode=later.mode.value, window=later.window).rule
    merges = automatic or not config.joint
    return {
        "optimizer": type(optimizers.inner(request.model)).__name__,
        "model_variables": driver.layouts.trainable.digest.hex(),
        "optimizer_variables": driver.layouts.optimizer.digest.hex(),
        "mode": config.mode.value,
        "frequency": AUTO if automatic else config.frequency,
        "merge": rule.name if merges else None,
        "center_optimizer": outer_name(rule) if merges else None,
        **({"joint_start": config.joint} if automatic else {}),  # whether it is the part before the switch
        **({} if request.local_batch_size is None else {"window_batch_size": request.local_batch_size}),
        "num_workers": request.num_workers,
        "batch_size": batch_size,
        "shuffle": fit.shuffle,
        "steps_per_epoch": fit.steps_per_epoch,
        "validation_split": fit.validation_split,
        "validation_data": "given" if request.validation is not None else None,
        "sample_weight": "given" if request.schema.weights else None,
        "preserve_partitions": fit.preserve_partitions,
        "seed": fit.seed,
    }

"""Settings of a run, validated before anything is started.

``TrainConfig`` holds the settings of a ``SparkModel``, ``FitConfig`` those of one ``fit``. Both are frozen.
A setting that is invalid raises ConfigError, which names the argument.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

from sparkdl.core.codecs import CODECS, Codec
from sparkdl.core.validation import (
    as_int,
    as_number,
    check_fields,
    checked,
    choose,
    one_of,
    require_flag,
    whole_number,
)
from sparkdl.errors import ConfigError
from sparkdl.settings import GROUPS, FaultTolerance, Network, Stragglers, flattened, parse_quorum

logger = logging.getLogger(__name__)

MOST_TRACED = 1000  # maximum number of batches of each worker in a trace
ModeName = Literal["synchronous", "asynchronous", "hogwild"]
CompressionName = Literal["bf16", "fp16", "int8"]
PlacementName = Literal["driver", "worker", "executors"]
AUTO = "auto"
AUTO_WINDOW, AUTO_MERGE = 16, "diloco"  # of a fit with frequency="auto" after its joint start
Frequency = Literal["batch", "epoch", "auto"] | int
Verbose = Literal["auto", 0, 1, 2]


class Mode(StrEnum):
    """Ways to merge the workers' updates."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    HOGWILD = "hogwild"


class Placement(StrEnum):
    """Processes that merge updates: the driver, worker 0, or all workers."""

    DRIVER = "driver"
    WORKER = "worker"
    EXECUTORS = "executors"


class Scaling(StrEnum):
    """Ways to scale a learning rate with the number of workers: by the number, or by its square root."""

    LINEAR = "linear"
    SQRT = "sqrt"


def parse_window(frequency: object) -> int | None:
    """Return the number of batches per exchange for a ``frequency``; None is one exchange per epoch.

    For "auto" it is the number at the start.

    Raises:
        ConfigError: ``frequency`` is neither "batch", "epoch", "auto" nor a whole number of at least 1.
    """
    if frequency == "epoch":
        return None
    if frequency in ("batch", AUTO):
        return 1
    number = as_int(frequency)
    if number is None or number < 1:
        raise ConfigError(
            'frequency should be "batch", "epoch", "auto" or a whole number of batches (at least 1); got '
            f"{frequency!r}."
        )
    return number


# Settings that depend on the place where a program runs. They are neither saved to a file nor read from one:
# the author of a file could redirect the token and the weights to another host.
OF_PLACE = (*(each.name for each in fields(Network)), "placement")


def without_place(values: dict[str, Any], names: Sequence[str], file: str) -> dict[str, Any]:
    """Return the settings of a file without the settings in ``names``; warn if the file sets any of them.

    Args:
        values: the settings, by name.
        names: the names of the settings to leave out.
        file: the path of the file, for the warning.
    """

    def is_set(value: Any) -> bool:
        return value is False or value not in (None, 0, Placement.DRIVER.value)

    left = [name for name in names if is_set(values.get(name))]
    if left:
        logger.warning(
            "%s sets %s. These settings depend on the machine where fit runs and are not read from a file. "
            "Pass them in this program if you need them.",
            file,
            ", ".join(left),
        )
    return {name: value for name, value in values.items() if name not in names}


def _frequency(name: str, value: Any) -> Any:
    number = parse_window(value)
    return value if isinstance(value, str) else number


def _codec(name: str, value: Any) -> str:
    return one_of(name, value, CODECS)


def _group(kind: type[Any]) -> Any:
    """Return a dataclass field for a group of settings; its default is the group with its own defaults."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise ConfigError(f"{name} should be a sparkdl.{kind.__name__}; got {value!r}.")
        return value

    return checked(kind(), check)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a SparkModel.

    Attributes:
        mode: how the workers' updates are merged: "synchronous", "asynchronous" or "hogwild".
        frequency: the batches between exchanges of a worker: "batch" (1), a number, or "epoch" (all); "auto"
            begins with "batch" and continues with 16.
        num_workers: number of workers; None is one per task slot, or fewer if a batch has fewer rows.
        merge: the rule by which updates change the center, or its name; None is the default for the
            mode and frequency.
        batch_size_per_worker: rows per step of each worker, instead of ``batch_size``.
        compression: the codec of updates on the network: "bf16", "fp16" or "int8"; None is float32.
        share_gpus: whether two workers may use the same GPU.
        dashboard: whether each fit has a live page, except with verbose=0 or placement="worker".
        placement: the process that merges updates: "driver"; "worker" (worker 0), if executors cannot
            connect to the process that calls ``fit``; or "executors" (all workers, each for a part of the
            updates).
        network: the endpoint's address, port and encryption.
        fault_tolerance: the reaction to the loss of a worker.
        stragglers: how long workers wait for slower ones.
    """

    mode: Mode = checked(Mode.SYNCHRONOUS, partial(choose, choices=Mode))
    frequency: str | int = checked("batch", _frequency)
    num_workers: int | None = checked(None, whole_number)
    merge: Any = None
    batch_size_per_worker: int | None = checked(None, whole_number)
    compression: str | None = checked(None, _codec)
    share_gpus: bool = checked(False, require_flag)
    dashboard: bool = checked(True, require_flag)
    placement: Placement = checked(Placement.DRIVER, partial(choose, choices=Placement))
    network: Network = _group(Network)
    fault_tolerance: FaultTolerance = _group(FaultTolerance)
    stragglers: Stragglers = _group(Stragglers)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stragglers.staleness is not None and self.mode is Mode.SYNCHRONOUS:
            raise ConfigError(
                "staleness needs a mode without rounds, since workers in a round wait for each other; "
                f'got staleness={self.stragglers.staleness!r} with mode="synchronous". Set '
                'mode="asynchronous" or mode="hogwild", or leave staleness out.'
            )
        if self.frequency == AUTO and self.mode is not Mode.SYNCHRONOUS:
            raise ConfigError(
                'frequency="auto" needs mode="synchronous", since it begins with the mean of all gradients; '
                f'got mode="{self.mode.value}". Set mode="synchronous", or frequency to "batch", '
                '"epoch" or a number of batches.'
            )
        if self.frequency == AUTO and self.batch_size_per_worker is not None:
            raise ConfigError(
                'frequency="auto" needs batch_size, since its steps would change their number of rows; got '
                f"batch_size_per_worker={self.batch_size_per_worker}. Pass batch_size to fit instead."
            )
        self._check_hybrid()
        self._check_shards()
        self._check_loss()
        self._check_recovery()

    def _check_shards(self) -> None:
        if self.placement is not Placement.EXECUTORS:
            return
        if self.mode is not Mode.SYNCHRONOUS:
            raise ConfigError(
                'placement="executors" needs mode="synchronous", since workers reduce updates together; got '
                f'mode="{self.mode.value}". Set placement="driver".'
            )
        if self.hybrid or self.goes_on:
            raise ConfigError(
                'placement="executors" needs all workers in each round, since each reduces a part of the '
                'updates; got quorum, straggler_timeout or on_worker_loss="continue". Leave them out, or '
                'set placement="driver".'
            )

    def _check_loss(self) -> None:
        if self.goes_on and self.placement is Placement.WORKER:
            raise ConfigError(
                'on_worker_loss="continue" needs placement="driver", since an endpoint in worker 0 is lost '
                'with that worker; got placement="worker". Leave one of them out.'
            )
        if self.goes_on and self.num_workers == 1:
            raise ConfigError(
                'on_worker_loss="continue" needs at least two workers, since training continues with the '
                "others; got num_workers=1. Use more workers, or leave on_worker_loss out; the run then "
                "restarts after its worker is lost."
            )

    def _check_recovery(self) -> None:
        if self.fault_tolerance.recovery_every is None:
            return
        if self.mode is not Mode.SYNCHRONOUS or self.window is None or self.placement is Placement.WORKER:
            raise ConfigError(
                'recovery_every needs mode="synchronous", a frequency other than "epoch" and '
                'placement="driver" or "executors", since it makes snapshots between rounds of an epoch; got '
                f'mode="{self.mode.value}", frequency={self.frequency!r} and '
                f'placement="{self.placement.value}". Leave recovery_every out.'
            )

    def _check_hybrid(self) -> None:
        if self.stragglers.quorum is not None:
            parse_quorum(self.stragglers.quorum, self.num_workers)
        if not self.hybrid:
            if self.stragglers.late_updates == "merge":
                raise ConfigError(
                    'late_updates="merge" needs quorum or straggler_timeout, since no update is late '
                    "without them. Set one of these, or leave late_updates out."
                )
            return
        if self.mode is not Mode.SYNCHRONOUS:
            raise ConfigError(
                'quorum and straggler_timeout need mode="synchronous", the only mode with rounds; got '
                f'mode="{self.mode.value}". Set mode="synchronous", or leave them out.'
            )
        if self.window is None:
            raise ConfigError(
                "quorum and straggler_timeout need rounds within an epoch, since all workers end an epoch "
                'together; got frequency="epoch". Set frequency to "batch" or a number of batches, or leave '
                "them out."
            )

    @property
    def goes_on(self) -> bool:
        """True if a run continues without a lost worker."""
        return self.fault_tolerance.on_worker_loss == "continue"

    @property
    def hybrid(self) -> bool:
        """True if a round may close without some of its workers."""
        return self.stragglers.quorum is not None or self.stragglers.straggler_timeout is not None

    @property
    def window(self) -> int | None:
        """Local batches per exchange; None is one exchange per epoch."""
        return parse_window(self.frequency)

    @property
    def joint(self) -> bool:
        """True if all workers take each step together, with the mean gradient."""
        return self.mode is Mode.SYNCHRONOUS and self.window == 1

    @property
    def last(self) -> TrainConfig:
        """The settings with which a fit ends; with ``frequency="auto"`` those after its joint start."""
        if self.frequency != AUTO:
            return self
        return replace(self, frequency=AUTO_WINDOW, merge=AUTO_MERGE if self.merge is None else self.merge)

    @property
    def codec(self) -> Codec | None:
        """The codec of updates on the network; None: they are float32."""
        return None if self.compression is None else CODECS[self.compression]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings to save in a file: flat, as values that JSON can hold.

        The exception is a ``merge`` that is a Rule, which is returned as it is.
        """
        values = {name: value for name, value in vars(self).items() if name not in GROUPS}
        values["mode"] = self.mode.value
        for group in GROUPS:
            values |= flattened(getattr(self, group))
        return {name: value for name, value in values.items() if name not in OF_PLACE}


@dataclass(frozen=True)
class CheckpointConfig:
    """The location, schedule and retention of checkpoints.

    Attributes:
        uri: a folder for checkpoints only: a local path, or a URI of a file system that Spark can reach.
        every: "epoch" for a checkpoint at the end of each epoch; or the number of updates (rounds in
            synchronous mode; with ``frequency="auto"`` batches) or the datetime.timedelta between two
            checkpoints, also within an epoch.
        keep: number of newest checkpoints to keep.
        keep_best: number of checkpoints to keep as well: those at the ends of epochs with the best
            ``monitor``.
        monitor: the name of a result in ``History``.
        best: "min" if a lower ``monitor`` is better, "max" if a higher one is.

    Raises:
        ConfigError: a setting is invalid.
    """

    uri: str
    every: str | int | timedelta = "epoch"
    keep: int = 2
    keep_best: int = 0
    monitor: str = "val_loss"
    best: str = "min"

    def __post_init__(self) -> None:
        if isinstance(self.uri, os.PathLike):
            object.__setattr__(self, "uri", os.fspath(self.uri))
        if not isinstance(self.uri, str) or not self.uri:
            raise ConfigError(f"uri should be a path or a URI; got {self.uri!r}.")
        timed = isinstance(self.every, timedelta) and self.every > timedelta(0)
        updates = as_int(self.every)
        if self.every != "epoch" and not timed and (updates is None or updates < 1):
            raise ConfigError(
                'every should be "epoch", a whole number of updates (at least 1) or a positive '
                f"datetime.timedelta; got {self.every!r}."
            )
        whole_number("keep", self.keep)
        whole_number("keep_best", self.keep_best, least=0)
        if self.best not in ("min", "max"):
            raise ConfigError(f'best should be "min" or "max"; got {self.best!r}.')

    @classmethod
    def of(cls, given: Any) -> CheckpointConfig:
        """Return ``given`` if it is a CheckpointConfig, else the default settings for ``given``, a folder."""
        return given if isinstance(given, CheckpointConfig) else cls(given)

    @property
    def seconds(self) -> float | None:
        """The seconds between checkpoints; None unless ``every`` is a time."""
        return self.every.total_seconds() if isinstance(self.every, timedelta) else None

    @property
    def updates(self) -> int | None:
        """The updates between checkpoints; None unless ``every`` is a number."""
        return as_int(self.every)


def _verbose(name: str, value: object) -> object:
    if value not in ("auto", 0, 1, 2):
        raise ConfigError(f'{name} should be "auto", 0, 1 or 2; got {value!r}.')
    return value


def _split(name: str, value: object) -> float:
    number = as_number(value)
    if number is None or not 0 <= number < 1:
        raise ConfigError(f"{name} should be a number of at least 0 and below 1; got {value!r}.")
    return number


def _class_weight(name: str, weights: object) -> object:
    pairs = weights.items() if isinstance(weights, dict) else [(None, None)]
    for label, weight in pairs:
        if not isinstance(label, Integral) or not isinstance(weight, Real):
            raise ConfigError(f"{name} should be a dict from class index to weight; got {weights!r}.")
    return weights


def _evaluated(name: str, value: object) -> object:
    return value if isinstance(value, list | tuple | set | frozenset) else whole_number(name, value)


def _checkpoint(name: str, value: object) -> CheckpointConfig:
    if not isinstance(value, str | os.PathLike | CheckpointConfig):
        raise ConfigError(f"{name} should be a folder or a CheckpointConfig; got {value!r}.")
    return CheckpointConfig.of(value)


def _action(name: str, value: object) -> object:
    if value not in ("error", "warn"):
        raise ConfigError(f'{name} should be "error" or "warn"; got {value!r}.')
    return value


def _traced(name: str, value: object) -> object:
    pair = [as_int(each) or 0 for each in value] if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not 1 <= pair[0] <= pair[1] < pair[0] + MOST_TRACED:
        raise ConfigError(
            f"{name} should be the first and the last batch to trace, counted from 1, with at most "
            f"{MOST_TRACED} batches; got {value!r}. For example, {name}=(10, 20)."
        )
    return value


_natural = partial(whole_number, least=0)


@dataclass(frozen=True)
class FitConfig:
    """The settings of one ``fit``; the docstring of ``SparkModel.fit`` says more about each.

    Attributes:
        batch_size: rows per update of the optimizer
        epochs: number of epochs
        verbose: 0 silent, 1 a bar, 2 a line per epoch, or "auto"
        shuffle: whether rows are dealt in a random order
        seed: the seed of every random order
        validation_split: the fraction of the rows held out for validation
        class_weight: the weight of a row by the class of its label
        initial_epoch: the index of the epoch at which training begins
        steps_per_epoch: steps per epoch; by default a pass over all rows
        validation_steps: batches of validation rows to evaluate; by default all
        validation_batch_size: rows per forward pass over validation rows
        validation_freq: epochs between evaluations, or a list of epochs to evaluate after
        preserve_partitions: whether each worker gets whole partitions, so that rows are not shuffled between
            workers
        checkpoint: a folder for the checkpoints of one fit, or a sparkdl.CheckpointConfig
        resume: whether to resume from the newest checkpoint, if there is one
        nan: the action for rows with NaN, Inf, or a label that is not a class: "error" or "warn"
        profile: the first and the last batch of each worker to trace, counted from 1; None traces nothing
    """

    batch_size: int = checked(32, whole_number)
    epochs: int = checked(1, _natural)
    verbose: str | int = checked("auto", _verbose)
    shuffle: bool = checked(True, require_flag)
    seed: int | None = checked(None, _natural)
    validation_split: float = checked(0.0, _split)
    class_weight: dict[int, float] | None = checked(None, _class_weight)
    initial_epoch: int = checked(0, _natural)
    steps_per_epoch: int | None = checked(None, whole_number)
    validation_steps: int | None = checked(None, whole_number)
    validation_batch_size: int | None = checked(None, whole_number)
    validation_freq: int | Collection[int] = checked(1, _evaluated)
    preserve_partitions: bool = checked(False, require_flag)
    checkpoint: CheckpointConfig | None = checked(None, _checkpoint)
    resume: bool = checked(False, require_flag)
    nan: str = checked("error", _action)
    profile: tuple[int, int] | None = checked(None, _traced)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.resume and self.checkpoint is None:
            raise ConfigError(
                "resume=True needs a folder of checkpoints; got checkpoint=None. Set checkpoint to the "
                "folder."
            )

    @property
    def traced(self) -> range:
        """The batches of each worker to trace, counted from 1."""
        return range(0) if self.profile is None else range(self.profile[0], self.profile[1] + 1)

    def with_steps_of(self, rows: int | None, held: int | None) -> FitConfig:
        """Return the settings with batch sizes computed from ``steps_per_epoch`` and ``validation_steps``.

        Keras does so for arrays, if numbers of steps are given without a batch size.

        Args:
            rows: number of training rows; None if it is not known before a job.
            held: number of validation rows; None if it is not known before a job.
        """
        size, held_size = self.batch_size, self.validation_batch_size
        if rows and self.steps_per_epoch:
            size = math.ceil(rows / self.steps_per_epoch)
        if held and self.validation_steps and held_size is None:
            held_size = math.ceil(held / self.validation_steps)
        return replace(self, batch_size=size, validation_batch_size=held_size)

    def validation_rows(self, batch_size: int) -> int | None:
        """Return the number of validation rows to evaluate, counted from the first; None is all.

        Args:
            batch_size: rows per forward pass.
        """
        return None if self.validation_steps is None else self.validation_steps * batch_size

    @property
    def evaluated(self) -> frozenset[int]:
        """The epochs, from 0, that end with an evaluation if there are validation rows."""
        freq = self.validation_freq
        chosen = range(freq, self.epochs + 1, freq) if isinstance(freq, int) else freq
        return frozenset(number - 1 for number in chosen)

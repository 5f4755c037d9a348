"""Data of a run: its settings, its members, the reports of an epoch, and the snapshots made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.codecs import Codec
from sparkdl.core.vectors import LARGE, Vector, as_bytes
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.transport.exchange import Notes
from sparkdl.transport.messages import NO_ID, Running, Update

OLDER = {"cut": "snapshot", "books": "reports"}  # names in checkpoints from before version 0.1.0
IN_MEMORY = 1 << 20  # size in bytes above which a worker's state or rows are kept in a file


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Settings of a worker group.

    Attributes:
        run: sixteen random bytes that identify the run.
        num_workers: number of workers in the group.
        layout: digest of the trainable variables' layout.
        metrics: size of one worker's metric states, in bytes.
        silence: seconds without a message after which a newer attempt may replace an older one.
        stall: seconds without a message after which a worker is lost.
    """

    run: bytes
    num_workers: int
    layout: bytes = NO_ID
    metrics: int = 0
    silence: float = 0.0
    stall: float = inf


@dataclass(frozen=True, kw_only=True)
class RunSpec(GroupSpec):
    """Settings of a training run, in addition to those of its worker group.

    Attributes:
        plan: a plan whose row counts are not known yet.
        epochs: index of the epoch before which training ends.
        evaluated: epochs that end with an evaluation of the validation rows.
        evaluation_waits: True if an evaluation waits for the driver, whose callbacks decide which weights are
            evaluated.
        optimizer: size of the optimizer's variables, in bytes.
        generators: size of the random generators' states, in bytes.
        own: size of a worker's own weights under an elastic rule, in bytes.
        first_step: number of batches that the optimizer had seen before the run.
        scaled: True if gradients of a scaled loss are exchanged.
        factor: multiplier of the learning rate, as a function of the number of completed epochs; None: 1.
        goes_on: True if the run continues without a lost worker, as long as others have rows.
        codec: codec of updates on the network; None: they are float32.
        snapshot_intervals: intervals of snapshots within an epoch, in rounds of the epoch or, without rounds,
            in versions of the center. Empty: only at the ends of epochs, and on request.
    """

    plan: BatchPlan
    epochs: int
    evaluated: frozenset[int] = frozenset()
    evaluation_waits: bool = False
    optimizer: int = 0
    generators: int = 0
    own: int = 0
    first_step: float = 0.0
    scaled: bool = False
    factor: Callable[[float], float] | None = None
    goes_on: bool = False
    codec: Codec | None = None
    snapshot_intervals: tuple[int, ...] = ()

    @property
    def whole_state(self) -> int:
        """Size of a worker's complete state, in bytes."""
        return self.optimizer + self.generators + self.own


class RowsHeld(NamedTuple):
    """A worker's number of training rows, and the fingerprint of its training and validation rows."""

    rows: int
    fingerprint: Fingerprint = NOTHING


@dataclass
class Member:
    """An attempt of one worker.

    ``heard`` is the time of its last message. ``lost`` is True once the attempt was lost and is refused.
    ``running`` holds the newest metric states of the epoch under way and of the one before. ``seconds`` holds
    the seconds of each of ``messages.ACTIVITIES``.
    """

    attempt: int
    host: str
    pid: int
    heard: float
    held: RowsHeld | None = None
    validation_rows: int = 0
    notes: Notes = field(default_factory=Notes)
    epoch: int = 0
    seen_rows: int = 0
    retries: int = 0
    lost: bool = False
    running: list[Running] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class CarriedState(NamedTuple):
    """The state that a run leaves to the next one: that of each worker and that of the rule."""

    states: dict[int, bytes | mmap]
    rule: Any


@dataclass
class Snapshot:
    """A point from which a run is restored: the center, every worker's state, and the rule's state.

    Attributes:
        epoch: epoch that is under way or begins.
        place: number of completed rounds of the epoch.
        metrics: each worker's metric states over its rows of this epoch.
        losses: within an epoch, mean loss of each round or update since the result of the previous epoch.
        ledger: without rounds, the number of the last counted update of each worker.
        reports: without rounds, the reports of the workers, by epoch.
        before: in rounds and within an epoch, the snapshot that the epoch began with.
    """

    epoch: int
    parameters: Vector
    statistics: Vector
    version: int
    progress: float
    states: dict[int, bytes | mmap] = field(default_factory=dict)
    rule: Any = None
    place: int = 0
    metrics: dict[int, bytes] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    ledger: dict[int, int] = field(default_factory=dict)
    reports: dict[int, EpochReports] = field(default_factory=dict)
    before: Snapshot | None = None

    def __str__(self) -> str:
        """Return the place where the snapshot was made, in words."""
        return (
            f"round {self.place} of epoch {self.epoch + 1}"
            if self.place
            else f"the end of epoch {self.epoch}"
            if self.epoch
            else "the beginning of epoch 1"
        )

    def values(self, *, rule: bool = False) -> dict[str, Any]:
        """Return the fields as ``core.packing`` takes them, with dicts by worker as pairs.

        Args:
            rule: True to include the state of the rule.
        """
        pairs = {name: list(getattr(self, name).items()) for name in ("states", "metrics", "ledger")}
        reports = [(epoch, report.values()) for epoch, report in self.reports.items()]
        before = self.before and self.before.values(rule=rule)
        own = {"reports": reports, "rule": self.rule if rule else None, "before": before}
        return vars(self) | pairs | own

    @classmethod
    def of(cls, values: dict[str, Any]) -> Snapshot:
        """Return the snapshot with these values."""
        values = {OLDER.get(name, name): value for name, value in values.items()}
        pairs = {name: dict(values[name]) for name in ("states", "metrics", "ledger")}
        reports = {epoch: EpochReports.of(each) for epoch, each in values["reports"]}
        before = values["before"] and cls.of(values["before"])
        return cls(**values | pairs | {"reports": reports, "before": before})

    @property
    def speaker(self) -> int:
        """The first worker whose state includes the optimizer, which makes it the longest state.

        In synchronous/"batch" only one worker reports the optimizer, which all replicas share.
        """
        return max(sorted(self.states), key=lambda worker: len(self.states[worker]), default=0)

    def state(self, worker: int) -> bytes:
        """Return a worker's state: optimizer variables, if any were sent, generators, its own weights."""
        return bytes(self.states.get(worker, b""))


@dataclass
class EpochResult:
    """Result of one epoch.

    Attributes:
        snapshot: center and states at its end.
        metrics: each worker's metric states over its training rows.
        validation: each worker's metric states over its validation rows.
        rows: number of training rows used.
        losses: mean loss of each update or round counted since the previous result, and nan for
            each update that was not merged because it had NaN, Inf or huge values.
    """

    snapshot: Snapshot
    metrics: list[bytes]
    validation: list[bytes]
    rows: int
    losses: list[float]


@dataclass
class EpochReports:
    """Reports of workers on one epoch, at its end or within it, by worker.

    ``weights`` and ``rule``, the state of the merge rule as a record, are those that all replicas share.
    """

    metrics: dict[int, bytes] = field(default_factory=dict)
    validation: dict[int, bytes] = field(default_factory=dict)
    states: dict[int, bytes | mmap] = field(default_factory=dict)
    weights: tuple[Vector, Vector] | None = None
    rows: int = 0
    first_losses: dict[int, float] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    rule: bytes = b""

    def values(self) -> dict[str, Any]:
        """Return the reports of workers in the form that ``core.packing`` takes."""
        names = "metrics", "states", "first_losses"
        return {name: list(getattr(self, name).items()) for name in names} | {"rows": self.rows}

    @classmethod
    def of(cls, values: dict[str, Any]) -> EpochReports:
        """Return the reports with these values."""
        fields = {name: value if name == "rows" else dict(value) for name, value in values.items()}
        return cls(**fields)  # type: ignore[arg-type]

    def without_results(self) -> EpochReports:
        """Return a copy of the workers' reports without the results derived from them."""
        states, losses = dict(self.states), dict(self.first_losses)
        return EpochReports(dict(self.metrics), states=states, rows=self.rows, first_losses=losses)

    def take(self, update: Update, whole_state: int) -> None:
        """Record a worker's report, completely or not at all. A repetition may add a state or weights.

        Args:
            update: the report.
            whole_state: the size of a worker's complete state, which the state of the rule may follow.
        """
        state = in_file(update.state[:whole_state]) if update.state else None
        weights = kept(update.parameters) if len(update.parameters) else None
        if update.worker not in self.metrics:
            self.rows += update.rows
            self.metrics[update.worker] = update.metrics
            self.first_losses[update.worker] = update.loss
        if state is not None:
            self.states[update.worker] = state
        if weights is not None:
            self.weights, self.rule = (weights, update.statistics), update.state[whole_state:]

    def result(self, validation: dict[int, bytes], losses: list[float]) -> EpochResult:
        """Return the result of an epoch that has ended; its metric states are in worker order.

        Args:
            validation: each worker's metric states over its validation rows, by worker.
            losses: see ``EpochResult``.

        Raises:
            ValueError: the epoch has not ended.
        """
        if self.snapshot is None:
            raise ValueError("The epoch has not ended.")
        return EpochResult(
            snapshot=self.snapshot,
            metrics=[self.metrics[k] for k in sorted(self.metrics)],
            validation=[validation[k] for k in sorted(validation)],
            rows=self.rows,
            losses=losses,
        )


def in_file(state: bytes) -> bytes | mmap:
    """Return a worker's state or rows, in a file if they are large."""
    return bytes(state) if len(state) <= IN_MEMORY else _mapped(state)


def kept(vector: Vector) -> Vector:
    """Return a copy of a vector, in a file if it is large: a snapshot is seldom read."""
    large = vector.nbytes > LARGE
    return np.frombuffer(_mapped(as_bytes(vector)), np.float32) if large else vector.copy()


def _mapped(data: bytes | memoryview) -> mmap:
    """Return a memory map of data in an unnamed file, which is deleted with the map."""
    with TemporaryFile() as file:
        file.write(data)
        file.flush()
        return mmap(file.fileno(), 0, access=ACCESS_READ)

"""Data of a run: its settings, its members, the reports of an epoch, and the snapshots made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from sparkdl.core.vectors import LARGE, Vector, as_bytes
from sparkdl.data.batch_plan import Plan
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.transport.messages import NO_ID, Running, Update

IN_MEMORY = 1 << 20  # bytes of a worker's state that are kept in memory; more goes to a file


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The settings of a worker group.

    Attributes:
        run: sixteen random bytes that name the run.
        num_workers: how many workers the group has.
        layout: the digest of the trainable variables' layout.
        metrics: bytes of one worker's metric states.
        silence: seconds without a word after which an attempt gives way to a newer one.
        stall: seconds without a word after which a worker is lost.
    """

    run: bytes
    num_workers: int
    layout: bytes = NO_ID
    metrics: int = 0
    silence: float = 0.0
    stall: float = inf


@dataclass(frozen=True, kw_only=True)
class RunSpec(GroupSpec):
    """The settings of a training run, beside those of its worker group.

    Attributes:
        plan: a plan whose row counts are not known yet.
        epochs: the epoch at which training ends.
        evaluated: the epochs that end with an evaluation of the validation rows.
        attended: whether an evaluation waits for the driver, whose callbacks decide which weights it is of.
        optimizer: bytes of the optimizer's variables.
        generators: bytes of the random generators' states.
        own: bytes of the weights that are a worker's own, by an elastic rule.
        first_step: the optimizer's iterations before the run.
        scaled: whether gradients of a scaled loss are exchanged.
        factor: by what the learning rate is multiplied when so many epochs are done; None: never.
        goes_on: whether the run goes on without a worker that is lost, as long as others have rows.
        cuts: there is a cut after so many rounds of an epoch, or updates where there are no rounds, and
            again after as many; none of these: at its end only.
    """

    plan: Plan
    epochs: int
    evaluated: frozenset[int] = frozenset()
    attended: bool = False
    optimizer: int = 0
    generators: int = 0
    own: int = 0
    first_step: float = 0.0
    scaled: bool = False
    factor: Callable[[float], float] | None = None
    goes_on: bool = False
    cuts: tuple[int, ...] = ()


class RowsHeld(NamedTuple):
    """A worker's number of training rows, and the fingerprint of them and of its validation rows."""

    rows: int
    fingerprint: Fingerprint = NOTHING


@dataclass
class Member:
    """An attempt of one worker.

    ``heard`` is the time of its last message; ``lost``: that is too long ago, and this attempt is refused.
    ``running`` holds the newest metric states of the epoch under way and of the one before.
    """

    attempt: int
    host: str
    pid: int
    heard: float
    held: RowsHeld | None = None
    validation_rows: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    seen_rows: int = 0
    retries: int = 0
    lost: bool = False
    running: list[Running] = field(default_factory=list)


class CarriedState(NamedTuple):
    """State that a run leaves to the next one: each worker's, and the rule's."""

    states: dict[int, bytes | mmap]
    rule: Any


@dataclass
class Snapshot:
    """A point from which a run is restored: the center, every worker's state, and the rule's.

    Attributes:
        epoch: the epoch that is under way, or begins.
        place: the rounds of it that are done.
        metrics: each worker's metric states over its rows of this epoch.
        losses: the mean loss of each round, or update, since the epoch began.
        ledger: where updates are merged one at a time, the last one counted of each worker.
        books: and what workers have reported of this epoch and the next.
        before: in the middle of an epoch, the cut that it began with.
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
    books: dict[int, EpochReports] = field(default_factory=dict)
    before: Snapshot | None = None

    def __str__(self) -> str:
        """Say where it was made."""
        return (
            f"round {self.place} of epoch {self.epoch + 1}"
            if self.place
            else f"the end of epoch {self.epoch}"
        )

    def values(self, *, rule: bool = False) -> dict[str, Any]:
        """Return the fields as ``core.packing`` takes them, with dicts by worker as pairs.

        Args:
            rule: whether to include the state of the rule.
        """
        pairs = {name: list(getattr(self, name).items()) for name in ("states", "metrics", "ledger")}
        books = [(epoch, book.values()) for epoch, book in self.books.items()]
        before = self.before and self.before.values(rule=rule)
        own = {"books": books, "rule": self.rule if rule else None, "before": before}
        return vars(self) | pairs | own

    @classmethod
    def of(cls, values: dict[str, Any]) -> Snapshot:
        """Return the cut of which these are the values."""
        pairs = {name: dict(values[name]) for name in ("states", "metrics", "ledger")}
        books = {epoch: EpochReports.of(each) for epoch, each in values["books"]}
        before = values["before"] and cls.of(values["before"])
        return cls(**values | pairs | {"books": books, "before": before})

    @property
    def speaker(self) -> int:
        """The first worker whose state has an optimizer in it; replicas have one, and some one says it."""
        return max(sorted(self.states), key=lambda worker: len(self.states[worker]), default=0)

    def state(self, worker: int) -> bytes:
        """Return a worker's state: optimizer variables, if any were sent, generators, weights of its own."""
        return bytes(self.states.get(worker, b""))


@dataclass
class EpochResult:
    """The result of one epoch.

    Attributes:
        cut: the center and the states at its end.
        metrics: each worker's metric states over its training rows.
        validation: each worker's metric states over its validation rows.
        rows: training rows that were used.
        losses: the mean loss of each update, or of each round, counted since the epoch before; nan besides
            for each update that was not merged because it had NaN or Inf in it.
    """

    cut: Snapshot
    metrics: list[bytes]
    validation: list[bytes]
    rows: int
    losses: list[float]


@dataclass
class EpochReports:
    """Reports of workers on one epoch, at its end or in the middle, by worker."""

    metrics: dict[int, bytes] = field(default_factory=dict)
    validation: dict[int, bytes] = field(default_factory=dict)
    states: dict[int, bytes | mmap] = field(default_factory=dict)
    weights: tuple[Vector, Vector] | None = None
    rows: int = 0
    first_losses: dict[int, float] = field(default_factory=dict)
    cut: Snapshot | None = None

    def values(self) -> dict[str, Any]:
        """Return the reports of workers in the form that ``core.packing`` takes."""
        names = "metrics", "states", "first_losses"
        return {name: list(getattr(self, name).items()) for name in names} | {"rows": self.rows}

    @classmethod
    def of(cls, values: dict[str, Any]) -> EpochReports:
        """Return the book of which these are the values."""
        fields = {name: value if name == "rows" else dict(value) for name, value in values.items()}
        return cls(**fields)  # type: ignore[arg-type]

    def noted(self) -> EpochReports:
        """Return what workers have reported by now, without what comes of it."""
        states, losses = dict(self.states), dict(self.first_losses)
        return EpochReports(dict(self.metrics), states=states, rows=self.rows, first_losses=losses)

    def take(self, update: Update) -> None:
        """Take in what a worker said, or nothing of it; it may say it again, with more in it."""
        state = spooled(update.state) if update.state else None
        weights = kept(update.parameters) if len(update.parameters) else None
        if update.worker not in self.metrics:
            self.rows += update.rows
            self.metrics[update.worker] = update.metrics
            self.first_losses[update.worker] = update.loss
        if state is not None:
            self.states[update.worker] = state
        if weights is not None:
            self.weights = weights, update.statistics


def spooled(state: bytes) -> bytes | mmap:
    """Keep a worker's state out of memory when it is large."""
    return bytes(state) if len(state) <= IN_MEMORY else _mapped(state)


def kept(vector: Vector) -> Vector:
    """Return a copy of a vector, out of memory when it is large: a cut is seldom read."""
    large = vector.nbytes > LARGE
    return np.frombuffer(_mapped(as_bytes(vector)), np.float32) if large else vector.copy()


def _mapped(data: bytes | memoryview) -> mmap:
    """Return data in a file, which has no name and goes with the map."""
    with TemporaryFile() as file:
        file.write(data)
        file.flush()
        return mmap(file.fileno(), 0, access=ACCESS_READ)

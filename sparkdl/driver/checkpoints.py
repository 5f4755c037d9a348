"""Checkpoint files: their content, schedule and retention, and the restoration of a run from one.

A checkpoint is a file: eight bytes that name the format, the BLAKE2b digest (32 bytes) of all that follows
it, and a record (``core.packing``). During training, a thread writes it under a temporary name and renames it
when it is complete. A truncated file, or a checkpoint that does not fit the run, is skipped with a warning,
and the next older checkpoint is used. Only the run that has the folder's lease writes or removes checkpoints,
and it never replaces one (on an object store, a run that was suspended while it renamed a file may).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

import numpy as np

from sparkdl.config import CheckpointConfig
from sparkdl.core import packing
from sparkdl.core.vectors import Array
from sparkdl.data.fingerprint import Fingerprint
from sparkdl.driver.lease import Lease
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.process import interrupts
from sparkdl.server.state import OLDER, RowsHeld, Snapshot
from sparkdl.spark import files, spark_internals
from sparkdl.spark.hadoop import Context

logger = logging.getLogger(__name__)
MAGIC = b"SDLCKPT1"
DIGEST_BYTES = 32
PIECE = 1 << 22  # bytes that are written at once
RESERVE_SECONDS = 0.5  # the time kept for the rest of an interrupted call's cleanup
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # errors of damaged files
DIGESTS = {"model_variables": "the model's variables", "optimizer_variables": "the optimizer's variables"}
NAME = re.compile(r"checkpoint-(\d{8})(?:_(-?\d+(?:\.\d+)?(?:e[-+]\d+)?))?\.sparkdl")
UNFINISHED = re.compile(r"\.checkpoint-.*|checkpoint-.*\.begun")


Words = dict[str, dict[str, str]]  # settings in words, by the part of the program and by name


@dataclass(frozen=True)
class Description:
    """A description of the program of a run, which gives the arrays of a checkpoint their meaning.

    Attributes:
        words: the settings of optimizer, losses, metrics, layers and fit.
        learning_rate: the rate that the program started with; nan if there is a schedule or a function.
        outputs: the model's outputs for a fixed input at fixed weights, float32; empty if not known.
        constants: a digest of vocabularies and of the weights that do not change, such as those of frozen
            layers.
    """

    words: Words
    learning_rate: float
    outputs: list[Array] = field(compare=False)
    constants: str

    def refusal(self, now: Description, *, mid_epoch: bool) -> str | None:
        """Return the reason why another program cannot use the state of a run; None if it can.

        Args:
            now: the description of the program that resumes.
            mid_epoch: whether the state includes metrics of a partial epoch.
        """
        if mid_epoch and self.words["metrics"] != now.words["metrics"]:
            return "it was written within an epoch, and the metrics of the model have changed since"
        if self.constants != now.constants:
            return (
                "vocabularies or weights that are not trained, such as those of frozen layers, have changed"
            )
        if not _close(self.outputs, now.outputs):
            changed = [text for text in self.changes(now) if "layer " in text]
            return f"the model computes different outputs with the same weights ({_listed(changed)})"
        return None

    def changes(self, now: Description) -> list[str]:
        """Return each setting that differs, in words."""
        changes = []
        for part in sorted(self.words.keys() | now.words.keys()):
            before, after = self.words.get(part, {}), now.words.get(part, {})
            changes += [
                f"{name} of {part} is {after.get(name, 'not set')} instead of {before.get(name, 'not set')}"
                for name in sorted(before.keys() | after.keys())
                if before.get(name) != after.get(name)
            ]
        return changes


def _close(saved: list[Array], now: list[Array]) -> bool:
    """Return True if outputs are equal up to the rounding of different machines, or are not known."""
    if not saved or not now:
        return True
    return len(saved) == len(now) and all(
        mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=1e-3, atol=1e-5 * np.abs(mine).max())
        for mine, theirs in zip(saved, now, strict=True)
    )


def _listed(changes: list[str], most: int = 8) -> str:
    more = [f"and {len(changes) - most} more"] if len(changes) > most else []
    return "; ".join([*changes[:most], *more]) or "its code has changed"


KINDS: dict[str, type] = {  # the types of values that a resumed run continues with
    "settings": dict,
    "history": dict,
    "epochs": list,
    "training": dict,
    "counters": dict,
    "stopped": bool,
    "learning_rate": float,
}


@dataclass(kw_only=True)
class Saved:
    """The content of a checkpoint.

    Attributes:
        settings: the settings that must be the same in a run that resumes, by name.
        first: the run's first epoch, and the number of batches that its optimizer had seen before.
        snapshot: the snapshot of the run.
        held: the row count and the fingerprint of the rows of each worker.
        learning_rate: the model's learning rate.
        history: the results of the completed epochs, by name.
        epochs: the numbers of these epochs.
        training: counts and timings so far.
        counters: the coordinator's counters.
        stopped: whether training was stopped, by a callback or from the live page.
        description: the description of the program.
    """

    settings: dict[str, Any]
    first: tuple[int, float]
    snapshot: Snapshot
    held: tuple[RowsHeld, ...]
    learning_rate: float
    history: dict[str, list[float | Array]]
    epochs: list[int]
    training: dict[str, Any]
    counters: dict[str, int]
    stopped: bool
    description: Description

    def values(self) -> dict[str, object]:
        """Return the content as values for ``core.packing``."""
        return vars(self) | {
            "snapshot": self.snapshot.values(rule=True),
            "description": vars(self.description),
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Saved:
        """Return the checkpoint with these values.

        Raises:
            TypeError: a value does not have the type that ``values`` writes.
        """
        values = {OLDER.get(name, name): value for name, value in values.items()}
        for name, kind in KINDS.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name!r} has type {type(values[name]).__name__}")
        held = tuple(RowsHeld(rows, Fingerprint.of(found)) for rows, found in values["held"])
        description = Description(**values["description"])
        return cls(
            **values | {"snapshot": Snapshot.of(values["snapshot"]), "held": held, "description": description}
        )

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of training rows of each worker."""
        return tuple(each.rows for each in self.held)

    def why_not(self, settings: dict[str, object], description: Description) -> str | None:
        """Return the reason why a run cannot resume from this checkpoint; None if it can.

        Args:
            settings: the settings of that run.
            description: the program of that run.
        """
        for name, mine in settings.items():
            theirs = self.settings.get(name, mine)  # an older version lacks some
            if name in DIGESTS and theirs != mine:
                return f"{DIGESTS[name]} differ in number, shape or dtype"
            if theirs != mine and not (name == "seed" and mine is None):
                return f"it belongs to a run with {name}={theirs!r} instead of {mine!r}"
        return self.description.refusal(description, mid_epoch=self.snapshot.before is not None)


class Checkpoints:
    """The checkpoints of a run, in a folder of their own.

    Args:
        config: the folder, schedule and retention of the checkpoints.
        context: the SparkContext, which URIs need.
        fresh: whether the run is new, so that the folder must not have checkpoints.
        lease: the lease of the folder, if there is one; nothing is written after it is lost.

    Attributes:
        resumption: a sentence that names the checkpoint to resume from and its point in the run; empty if
            there is none.

    Raises:
        ConfigError: the folder cannot be used, or has checkpoints of an earlier run.
    """

    def __init__(
        self, config: CheckpointConfig, context: Context, *, fresh: bool, lease: Lease | None = None
    ) -> None:
        self.config, self.context, self.lease = config, context, lease
        self._problem: CheckpointError | None = None  # the reason why no more checkpoints are written
        self.failed = 0
        self.resumption = ""
        self.saved: Snapshot | None = None  # the newest snapshot that was handed to the writer
        self._version, self._time = 0, time.monotonic()  # version and time of that snapshot
        self._noted = False
        self._names: dict[int, str] = {}
        self._values: dict[int, float] = {}
        self._queue: queue.SimpleQueue[tuple[list[packing.Part], float | None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)  # for one checkpoint in the queue
        self._thread: threading.Thread | None = None
        try:
            self._look()
        except OSError as error:
            raise ConfigError(f"Checkpoints cannot be kept in {config.uri}: {error}.") from error
        # The number of the last checkpoint that was begun. It is not used again: a write that fails may leave
        # a file of that name.
        self._number = max(self._names, default=0)
        if fresh and self._names:
            raise ConfigError(
                f"{config.uri} has checkpoints of an earlier run. Pass resume=True to continue that run, or "
                "use another folder."
            )

    def _look(self) -> None:
        if files.is_uri(self.config.uri):
            files.make_folder(self.config.uri, context=self.context)
        else:
            Path(self.config.uri).mkdir(parents=True, exist_ok=True)
        for name in files.names(self.config.uri, context=self.context):
            if found := NAME.fullmatch(name):
                self._names[int(found[1])] = name
                if found[2]:
                    self._values[int(found[1])] = float(found[2])
        self._remove_unfinished()  # left by a driver that died

    def _remove_unfinished(self) -> None:
        for name in files.names(self.config.uri, context=self.context):
            if UNFINISHED.fullmatch(name):
                files.discard(self._path(name), context=self.context)

    def _path(self, name: str) -> str:
        return f"{self.config.uri.rstrip('/')}/{name}"

    def newest(self, settings: dict[str, object], description: Description) -> Saved | None:
        """Return the newest checkpoint that can be used; None if the folder has no checkpoints.

        Args:
            settings: the settings of the run that resumes.
            description: the program of that run. Differences that do not prevent resuming are logged.

        Raises:
            ConfigError: there are checkpoints, but none can be used.
        """
        reasons = []
        for number in sorted(self._names, reverse=True):
            name = self._names[number]
            try:
                saved = _read(self._path(name), self.context)
                problem = saved.why_not(settings, description)
                changes = saved.description.changes(description)
            except UNREADABLE as error:
                problem = f"it is damaged or not a checkpoint ({error})"
            if problem is None:
                self.resumption = f"Resuming at {saved.snapshot}, from {name}."
                logger.info("%s", self.resumption)
                if changes:
                    logger.warning("The resumed run differs from the original run: %s.", _listed(changes))
                return saved
            reasons.append(f"{name}: {problem}")
            logger.warning("%s is not used: %s.", self._path(name), problem)
        if reasons:
            raise ConfigError(
                f"None of the checkpoints in {self.config.uri} can be used. {'; '.join(reasons)}. Restore "
                "the settings of the first run, or start a new run with another folder and without resume."
            )
        return None

    def newest_readable(self) -> Saved | None:
        """Return the newest checkpoint that can be read, whatever its settings; None if there is none."""
        for number in sorted(self._names, reverse=True):
            with suppress(*UNREADABLE):
                return _read(self._path(self._names[number]), self.context)
        return None

    def asks(self) -> bool:
        """Return True once when it is time to request a snapshot."""
        seconds = self.config.seconds
        if seconds is None or self._noted or time.monotonic() < self._time + seconds:
            return False
        self._noted = True
        return True

    def is_due(self, snapshot: Snapshot, *, ends: bool) -> bool:
        """Return True if a snapshot is to be saved; ``ends`` is True after an epoch and its callbacks."""
        if snapshot is self.saved:
            return False
        if self.config.updates is not None:
            return snapshot.version >= self._version + self.config.updates
        if self.config.seconds is not None:
            return self._noted or time.monotonic() >= self._time + self.config.seconds
        return ends

    def save(self, saved: Saved, value: object = None, *, wait: bool) -> bool:
        """Hand a checkpoint to the thread that writes it; return False if it is skipped or cannot be packed.

        It is skipped once another run is known to use the folder.

        Args:
            saved: the content of the checkpoint.
            value: the monitored result, by which the best checkpoints are chosen.
            wait: whether to wait while an earlier checkpoint is queued. If False, this one is then skipped.
        """
        if self._problem is not None or not self._room.acquire(blocking=wait):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="sparkdl-checkpoints", daemon=True)
            self._thread.start()
        rank = float(value) if isinstance(value, int | float) and isfinite(value) else None
        try:
            self._queue.put((packing.parts(saved.values()), rank))
            queued = True
        except (TypeError, ValueError, RecursionError) as error:  # a callback's logs cannot be packed
            self._fail(error)
            self._room.release()
            queued = False
        self.start_from(saved.snapshot)
        return queued

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        logger.warning(
            "A checkpoint could not be written to %s; training continues: %s", self.config.uri, error
        )

    def start_from(self, snapshot: Snapshot) -> None:
        """Count updates and seconds from a snapshot: the last one saved, or the first one of the run."""
        self.saved, self._version, self._time, self._noted = (
            snapshot,
            snapshot.version,
            time.monotonic(),
            False,
        )

    def require_owned(self) -> None:
        """Raise if no more checkpoints are to be written.

        Raises:
            CheckpointError: another run is known to use the folder, or an interrupt ended a checkpoint.
        """
        if self._problem is not None:
            raise self._problem
        if self.lease is not None:
            self.lease.require()

    def close(self) -> None:
        """Wait until all checkpoints are written. An interrupt limits the wait, and then ends the writing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        with interrupts.held():
            if interrupts.join(thread, reserve=RESERVE_SECONDS):
                return
            self._problem = CheckpointError("The call was interrupted while a checkpoint was being written.")
            if not interrupts.join(thread, interrupts.MOMENT):  # a write does not end
                left = f"An unfinished checkpoint may be left in {self.config.uri}"
                interrupts.finish(self._remove_unfinished, left)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            self._room.release()
            try:
                self.require_owned()
                self._write(*item)
            except CheckpointError as error:
                self._problem = error
            except Exception as error:  # noqa: BLE001 - a local or Hadoop file system may raise anything
                if self._problem is None:
                    self._fail(error)

    def _write(self, parts: list[packing.Part], value: float | None) -> None:
        self._number += 1
        ranked = f"_{value!r}" if value is not None and self.config.keep_best else ""
        name = f"checkpoint-{self._number:08d}{ranked}.sparkdl"
        uri = self.config.uri
        folder = spark_internals.temporary_folder(self.context) if files.is_uri(uri) else uri
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint-", delete=False) as file:
            local = Path(file.name)
            try:
                write_to(file, parts, self.require_owned)
                file.close()
                self._publish(local, name)
            finally:
                files.remove_temporary(local)
        self._names[self._number] = name
        if ranked:
            self._values[self._number] = float(ranked[1:])
        for old in self._retired():
            self._remove(old)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint; log a failure, and try again after the next checkpoint is written.

        Raises:
            CheckpointError: another run owns the folder.
        """
        path = self._path(self._names[number])
        try:
            if self.lease is not None:
                self.lease.check()
            files.discard(path, context=self.context)
        except OSError as error:
            logger.warning("An old checkpoint could not be removed: %s: %s", path, error)
            return
        del self._names[number]
        self._values.pop(number, None)

    def _publish(self, local: Path, name: str) -> None:
        """Give a complete file its name in the folder.

        Raises:
            CheckpointError: another run owns the folder, or has written a checkpoint of that name.
        """

        def check() -> None:
            if self.lease is not None:
                self.lease.check()
            self.require_owned()

        try:
            files.publish(local, self._path(name), context=self.context, check=check)
        except FileExistsError as error:
            raise CheckpointError(
                f"{self.config.uri} has a checkpoint {name} that this run did not write, so another run "
                "uses the folder. Use a separate folder for each run."
            ) from error

    def _retired(self) -> list[int]:
        """Return the numbers of the checkpoints that are neither among the newest nor among the best."""
        sign = -1.0 if self.config.best == "max" else 1.0
        best = sorted(self._values, key=lambda number: (sign * self._values[number], -number))
        kept = {*sorted(self._names)[-self.config.keep :], *best[: self.config.keep_best]}
        return [number for number in self._names if number not in kept]


def write_to(file: IO[bytes], parts: list[packing.Part], check: Callable[[], object] = lambda: None) -> None:
    """Write packed parts as a checkpoint to an open file; ``check`` may raise before each piece to end it."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    file.write(MAGIC + bytes(DIGEST_BYTES))
    for part in parts:
        for start in range(0, len(part), PIECE):
            check()
            piece = memoryview(part)[start : start + PIECE]
            digest.update(piece)
            file.write(piece)
    file.seek(len(MAGIC))
    file.write(digest.digest())


def _read(path: str, context: Context) -> Saved:
    """Return a checkpoint, whose arrays are views of the file.

    Raises:
        ValueError: the file is incomplete or not a checkpoint.
    """
    with tempfile.NamedTemporaryFile() as copy:
        if files.is_uri(path):
            files.get(path, Path(copy.name), context=context)
        with open(copy.name if files.is_uri(path) else path, "rb") as file:
            data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    begin = len(MAGIC) + DIGEST_BYTES
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError("it does not begin with the bytes of a checkpoint")
    if hashlib.blake2b(data[begin:], digest_size=DIGEST_BYTES).digest() != data[len(MAGIC) : begin]:
        raise ValueError("its digest does not match its content")
    return Saved.of(packing.unpack(data[begin:]))

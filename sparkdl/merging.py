"""How the updates of many workers become one center: by rounds, one at a time, or at once.

The three classes are interchangeable. ``push`` takes an update whose sections are still unread and a
function that reads them, so that a body that has to wait its turn waits outside of memory, and counts
each (worker, sequence) once. None of them knows HTTP, and what they know of workers is a number.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparkdl.errors import RefusedError
from sparkdl.rules import Merge, Rule
from sparkdl.weights import EMPTY, Vector, window_share
from sparkdl.wire import Answer, Flag, Reply, Update

PATIENCE = 20.0  # seconds that a request may wait before its worker is told to ask again
EARLY_BYTES = 64 << 20  # what a round keeps of bodies that came before their turn
STRIPE = 1 << 16  # elements that one lock of a hogwild center guards

Read = Callable[[], Update]
Control = Callable[[bool], Reply]  # the control words of this moment; True: the update, or round, counts


class Merging(ABC):
    """What a center and its way of merging are to the store.

    Attributes:
        parameters: the center variable; of ``GradientRounds`` what it was at the last cut.
        statistics: the moving statistics.
        version: how many updates, or rounds, the center has taken.
        losses: the mean loss of each update or round counted since they were last taken away.
        lock: guards all of it; the store that owns the center waits on it too.
    """

    def __init__(self, parameters: Vector, statistics: Vector, num_workers: int) -> None:
        self.parameters, self.statistics = parameters, statistics
        self.num_workers = num_workers
        self.version = 0
        self.generation = 0
        self.losses: list[float] = []
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)

    @abstractmethod
    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Count an update once and answer what its worker goes on with."""

    @abstractmethod
    def next_sequence(self, worker: int) -> int:
        """Return the first sequence number of this worker that is not counted yet."""

    @abstractmethod
    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update was counted, and not taken back since."""

    def wake(self) -> None:
        """Let every waiting request look again at why it waits."""
        with self.changed:
            self.changed.notify_all()

    def snapshot(self) -> tuple[Vector, Vector, int]:
        """Return copies of the center and the statistics, and their version."""
        with self.changed:
            return self.parameters.copy(), self.statistics.copy(), self.version

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take another center, as a new version."""
        with self.changed:
            self.parameters, self.statistics = parameters.copy(), statistics.copy()
            self.version += 1


class Rounds(Merging):
    """Synchronous: a round closes when all workers are in; sums run in worker order.

    The order makes a run repeat bit for bit. An update that comes before its turn is kept while it fits
    in a small budget; beyond it, its body stays unread in the socket.
    """

    def __init__(self, parameters: Vector, statistics: Vector, num_workers: int) -> None:
        super().__init__(parameters, statistics, num_workers)
        self.mean = True  # whether a round's parameters are a row-weighted mean, or else a sum
        self.begin(0)

    def begin(self, sequence: int) -> None:
        """Forget the open round and wait for the one with this number."""
        with self.changed:
            self.round = sequence
            self.last: Reply | None = None
            self._open()
            self.changed.notify_all()

    def _open(self) -> None:
        self.turn, self.rows, self.weight, self.loss = 0, 0, 0.0, 0.0
        self.early: dict[int, Update] = {}
        self.reading: set[int] = set()
        self.contributors, self.units = 0, (0.0, 0)
        self.sums: tuple[Vector, Vector] = (EMPTY, EMPTY)

    def next_sequence(self, worker: int) -> int:
        """Return the number of the open round, which is the same for every worker."""
        return self.round

    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update is in the open round, or that round has closed."""
        with self.changed:
            return sequence < self.round or (sequence == self.round and self._has(worker))

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Add an update to its round and answer when the round has closed."""
        if self._admit(update):
            try:
                self._accept(read(), control)
            finally:
                with self.changed:
                    self.reading.discard(update.worker)
            duplicate = Flag.NONE
        else:
            read()
            duplicate = Flag.DUPLICATE
        with self.changed:
            closed = self.changed.wait_for(
                lambda: self.round > update.sequence or self.generation != update.generation, PATIENCE
            )
            _check_generation(self, update)
            if not closed:
                return Reply(flags=Flag.AGAIN)
            if self.round != update.sequence + 1 or self.last is None:
                raise RefusedError(409, f"Round {update.sequence} closed long ago.")
            return replace(self.last, flags=self.last.flags | duplicate) if duplicate else self.last

    def _admit(self, update: Update) -> bool:
        """Wait until the update's body may be read; False if it is counted already."""
        size = 4 * (len(self.parameters) + len(self.statistics))
        with self.changed:
            if update.sequence > self.round:
                raise RefusedError(409, f"Round {update.sequence} is not open; {self.round} is.")
            while update.sequence == self.round and not self._has(update.worker):
                kept = size * (len(self.early) + len(self.reading))
                if update.worker == self.turn or kept + size <= EARLY_BYTES:
                    self.reading.add(update.worker)
                    return True
                self.changed.wait(PATIENCE)
                _check_generation(self, update)
            return False

    def _has(self, worker: int) -> bool:
        return worker < self.turn or worker in self.early

    def _accept(self, update: Update, control: Control) -> None:
        with self.changed:
            _check_generation(self, update)
            if update.sequence != self.round or self._has(update.worker):
                return
            self.early[update.worker] = update
            while self.turn in self.early:
                self._add(self.early.pop(self.turn))
                self.turn += 1
            if self.turn == self.num_workers:
                self._close(control)
            self.changed.notify_all()

    def _add(self, update: Update) -> None:
        """Add an update to the sums, which are kept in units of the first one's weights."""
        if not update.rows:
            return
        parts = update.parameters, update.statistics
        weight = update.normalizer or update.rows
        if not self.rows:
            self.sums, self.units = parts, (weight, update.rows)
        else:
            ratio = weight / self.units[0] if self.mean else 1.0
            fresh = self.contributors == 1
            self.sums = (
                _plus(self.sums[0], parts[0], ratio, fresh=fresh),
                _plus(self.sums[1], parts[1], update.rows / self.units[1], fresh=fresh),
            )
        self.contributors += 1
        self.rows += update.rows
        self.weight += weight
        self.loss += update.rows * update.loss

    def _close(self, control: Control) -> None:
        parameters, statistics = self.sums
        if self.contributors > 1:  # a lone update is its own mean, without a rounding
            statistics *= np.float32(self.units[1] / self.rows)
            if self.mean:
                parameters *= np.float32(self.units[0] / self.weight)
        self.version += 1
        self.losses.append(self.loss / max(1, self.rows))
        self.last = self._conclude(parameters, statistics, control(True))
        self.round += 1
        self._open()

    @abstractmethod
    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        """Use the means of a round, empty when no worker had rows, and fill in its reply."""


class GradientRounds(Rounds):
    """Every worker gets the mean gradient of a round and applies it with its own optimizer."""

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(statistics):
            self.statistics = statistics
        return replace(
            reply, kind=Answer.MEAN, version=self.version, parameters=parameters,
            statistics=self.statistics if len(parameters) else EMPTY,
        )  # fmt: skip


class DeltaRounds(Rounds):
    """The center moves by the rule's answer to the reduced delta; every worker goes on from the center."""

    def __init__(self, parameters: Vector, statistics: Vector, num_workers: int, rule: Rule) -> None:
        super().__init__(parameters, statistics, num_workers)
        self.rule, self.state = rule, rule.init(parameters)
        self.mean = rule.reduces == "mean"

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(parameters):
            step, self.state = self.rule.update(parameters, self.state, Merge(0, 1))
            self.parameters = self.parameters + step
        if len(statistics):
            self.statistics = statistics
        return replace(
            reply, kind=Answer.CENTER, version=self.version, parameters=self.parameters,
            statistics=self.statistics,
        )  # fmt: skip


class Locked(Merging):
    """Asynchronous: each update is merged under one lock, its staleness known."""

    def __init__(
        self, parameters: Vector, statistics: Vector, num_workers: int, rule: Rule,
        decays: Vector | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters.copy(), statistics.copy(), num_workers)
        self.rule, self.state = rule, rule.init(parameters)
        self.decays = np.full_like(statistics, np.nan) if decays is None else decays
        self.last: dict[int, int] = {}

    def next_sequence(self, worker: int) -> int:
        """Return the number after the last one counted of this worker."""
        return self.last.get(worker, -1) + 1

    def counted(self, worker: int, sequence: int) -> bool:
        """Return whether an update was merged; nothing that was merged is taken back."""
        with self.changed:
            return sequence < self.next_sequence(worker)

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update and answer the center, which the next one replaces and does not touch."""
        update = read()
        with self.changed:
            _check_generation(self, update)
            flags = Flag.NONE
            if self.counted(update.worker, update.sequence):
                flags = Flag.DUPLICATE
            else:
                self._merge(update)
            reply = control(not flags)
            return replace(
                reply, kind=Answer.CENTER, flags=reply.flags | flags, version=self.version,
                parameters=self.parameters, statistics=self.statistics.copy(),
            )  # fmt: skip

    def _merge(self, update: Update) -> None:
        merge = self._count(update)
        step, self.state = self.rule.update(update.parameters, self.state, merge)
        self.parameters = self.parameters + step

    def _count(self, update: Update) -> Merge:
        merge = Merge(self.version - update.base_version, self.num_workers)
        self.last[update.worker] = update.sequence
        self.losses.append(update.loss)
        if len(self.statistics):
            share = window_share(self.decays, update.steps, self.num_workers)
            self.statistics += share * (update.statistics - self.statistics)
        self.version += 1
        return merge


class Striped(Locked):
    """Hogwild (Recht et al., 2011): updates are merged at once, element by element.

    There is no lock over the whole center. An addition takes a short lock per stripe, because NumPy's
    ``+=`` from two threads loses additions; a reader may see one update's first half and another's second.
    """

    def __init__(
        self, parameters: Vector, statistics: Vector, num_workers: int, rule: Rule,
        decays: Vector | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, statistics, num_workers, rule, decays)
        self.stripes = [threading.Lock() for _ in range(0, max(1, len(parameters)), STRIPE)]

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update stripe by stripe and answer what the center then looks like."""
        update = read()
        flags = Flag.NONE
        with self.changed:
            _check_generation(self, update)
            if self.counted(update.worker, update.sequence):
                flags = Flag.DUPLICATE
            else:
                merge = self._count(update)
        if not flags:
            self._add(update, merge)
        reply = control(not flags)
        return replace(
            reply, kind=Answer.CENTER, flags=reply.flags | flags, version=self.version,
            parameters=self.parameters.copy(), statistics=self.statistics.copy(),
        )  # fmt: skip

    def _add(self, update: Update, merge: Merge) -> None:
        for index, lock in enumerate(self.stripes):
            part = slice(index * STRIPE, (index + 1) * STRIPE)
            step, _ = self.rule.update(update.parameters[part], None, merge)
            with lock:
                self.parameters[part] += step

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Take another center in place, so that additions under way are not lost."""
        with self.changed:
            for index, lock in enumerate(self.stripes):
                part = slice(index * STRIPE, (index + 1) * STRIPE)
                with lock:
                    self.parameters[part] = parameters[part]
            self.statistics[...] = statistics
            self.version += 1


def _plus(total: Vector, part: Vector, ratio: float, *, fresh: bool) -> Vector:
    """Return total + ratio * part; in place unless ``fresh``, when the total is somebody else's."""
    scaled = part if ratio == 1 else part * np.float32(ratio)
    return np.add(total, scaled, out=None if fresh else total)


def _check_generation(merging: Merging, update: Update) -> None:
    if merging.generation != update.generation:
        raise RefusedError(
            409, f"Generation {update.generation} is over; the run is at {merging.generation}."
        )


def make_merging(
    joint: bool, mode: str, parameters: Vector, statistics: Vector, num_workers: int, rule: Rule,
    decays: Vector | None = None,
) -> Merging:  # fmt: skip
    """Return the way of merging of a mode.

    Args:
        joint: whether gradients are merged, and not deltas.
        mode: "synchronous", "asynchronous" or "hogwild".
        parameters: the center variable.
        statistics: the moving statistics.
        num_workers: how many workers send updates.
        rule: what becomes of a delta.
        decays: how much of each statistic a training step keeps; nan, or None for all: not known.
    """
    if joint:
        return GradientRounds(parameters, statistics, num_workers)
    if mode == "synchronous":
        return DeltaRounds(parameters, statistics, num_workers, rule)
    kind = {"asynchronous": Locked, "hogwild": Striped}[mode]
    return kind(parameters, statistics, num_workers, rule, decays)

"""The plan of a run's batches: the rows of each update.

Workers may hold different numbers of rows, yet an epoch in synchronous/``"batch"`` has to make the same
updates as one process with the same ``batch_size``. Therefore all rows of a run form one order, the *even
interleaving*: row j of a worker with n of the N rows stands at position (j + 1/2) N / n, and ties go to the
lower worker. A row's rank is its place in this order. With batch size B, the global batch t consists of the
rows with ranks from t B to (t + 1) B - 1. This holds for any number of workers, however uneven their numbers
of rows are. Every worker can compute its share of each batch from the row counts alone. If the driver deals
rows to workers by rank and nothing is shuffled, the batches are exactly those of one process.

With a shuffle, a worker takes its rows in a new random order in each pass. If it has too many rows to shuffle
at once, they are stored in *buckets*. A pass goes through the buckets in random order, up to MIXED at a time,
and shuffles their rows together. So it reads dense columns from few places on the disk at a time, and never
holds the order of all rows in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MIXED = 16  # maximum number of buckets whose rows are shuffled together


def even_split(num_rows: int, num_workers: int) -> tuple[int, ...]:
    """Return the number of rows of each worker if rows are dealt evenly."""
    return tuple(num_rows // num_workers + (k < num_rows % num_workers) for k in range(num_workers))


def ranks(rows: tuple[int, ...], worker: int) -> Integers:
    """Return the rank, among all rows of the run, of each row of one worker.

    Args:
        rows: the number of rows of each worker.
        worker: the worker whose rows to rank.

    Returns:
        Ascending whole numbers below sum(rows), shape (rows[worker],).
    """
    return _rank(rows, worker, np.arange(rows[worker], dtype=np.int64))


def _rank(rows: tuple[int, ...], worker: int, index: Integers) -> Integers:
    """Return the ranks of the rows at these indices of one worker."""
    mine = rows[worker]
    ours = 2 * index + 1
    total = index.copy()
    for other, count in enumerate(rows):
        if other != worker and count and mine:
            # Count the rows j of `other` with (2j + 1) / count < ours / mine. A tie goes to the lower worker.
            reach = ours * count + (mine if other < worker else mine - 1)
            total += np.minimum(reach // (2 * mine), count)
    return total


def _num_before(rows: tuple[int, ...], worker: int, edges: Integers) -> Integers:
    """Return the number of a worker's rows with a rank below each edge.

    Bisection avoids computing the rank of every row.
    """
    low, high = np.zeros_like(edges), np.full_like(edges, rows[worker])
    for _ in range(rows[worker].bit_length()):
        middle = (low + high) // 2
        before = (middle < high) & (_rank(rows, worker, middle) < edges)
        low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
    return low


def num_before(rows: tuple[int, ...], worker: int, edge: int) -> int:
    """Return the number of a worker's rows whose rank among all rows of the run is below an edge."""
    return int(_num_before(rows, worker, np.array([edge], np.int64))[0])


def num_batches(num_rows: int, batch_size: int) -> int:
    """Return the number of batches in a pass over the rows, including a smaller last batch."""
    return -(-num_rows // batch_size)


class Span(NamedTuple):
    """A worker's share of a batch.

    Attributes:
        turn: the number of the pass over this worker's rows, as in ``Plan.order``.
        start: the position of the share's first row in the order of that pass.
        stop: the position after the share's last row.
        rows: number of rows in the whole batch.
    """

    turn: int
    start: int
    stop: int
    rows: int


class Order:
    """The order of one worker's rows in a pass: ``order[start:stop]`` returns the rows at these positions.

    Args:
        buckets: the number of rows of each bucket.
        seed: the seed of the order; None keeps the stored order.
    """

    def __init__(self, buckets: Sequence[int], seed: tuple[int, ...] | None) -> None:
        count = len(buckets)
        self._edges = np.append(0, np.cumsum(buckets, dtype=np.int64))
        self._seed, self._many = seed, count > MIXED
        taken = np.arange(count)
        if self._many and seed is not None:
            taken = np.random.default_rng(seed).permutation(count)
        self._mixes = np.array_split(taken, -(-count // MIXED))
        sizes = np.diff(self._edges)
        self._starts = np.append(0, np.cumsum([sizes[mix].sum() for mix in self._mixes]))
        self._newest = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._edges[-1])

    def __getitem__(self, places: slice) -> Integers:
        """Return the rows at a range of positions."""
        start, stop, _ = places.indices(len(self))
        if self._seed is None:
            return np.arange(start, stop, dtype=np.int64)
        parts = [np.zeros(0, np.int64)]
        while start < stop:
            index = int(np.searchsorted(self._starts, start, side="right")) - 1
            first, end = self._starts[index : index + 2].tolist()
            parts.append(self._mix(index)[start - first : min(stop, end) - first])
            start = end
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    @property
    def upcoming(self) -> Integers:
        """The buckets to be shuffled next.

        Empty without a seed, before the first row is read, and during the last group of buckets.
        """
        index = self._newest[0] + 1
        return self._mixes[index] if 0 < index < len(self._mixes) else np.zeros(0, np.int64)

    def _mix(self, index: int) -> Integers:
        """Return the rows of one group of buckets, in random order."""
        if self._newest[0] != index:
            edges = [self._edges[bucket : bucket + 2].tolist() for bucket in self._mixes[index]]
            rows = np.concatenate([np.arange(first, end, dtype=np.int64) for first, end in edges])
            seed = (*(self._seed or ()), index + 1) if self._many else self._seed
            self._newest = index, rows[np.random.default_rng(seed).permutation(len(rows))]
        return self._newest[1]


@dataclass(frozen=True)
class BatchPlan:
    """The batches and windows of one worker's epochs. A window ends with an exchange.

    An epoch is a pass over all rows, unless ``steps_per_epoch`` is given. Then each epoch begins at the row
    where the previous epoch ended, as in Keras.

    Attributes:
        rows: the number of training rows of each worker.
        worker: this worker's index.
        batch_size: maximum rows of a step: of all workers together if ``joint``, else of this worker.
        window: local batches per exchange; None is one exchange per epoch.
        joint: whether all workers make each step together (a mean gradient per batch).
        shuffle: whether each pass takes the worker's rows in a new random order.
        seed: the seed of the orders, combined with the pass and the worker.
        first_epoch: the first epoch of the run. Its first exchange has number 0.
        steps_per_epoch: steps per epoch of one process with this ``batch_size``; None is one pass.
        local_batch_size: maximum rows of a step if workers train locally and their batches are smaller than
            ``batch_size``, which learning-rate schedules count; None is ``batch_size``.
    """

    rows: tuple[int, ...]
    worker: int
    batch_size: int
    window: int | None
    joint: bool
    shuffle: bool
    seed: int
    first_epoch: int = 0
    steps_per_epoch: int | None = None
    local_batch_size: int | None = None

    @cached_property
    def working(self) -> int:
        """The number of workers with rows, at least 1."""
        return max(1, sum(count > 0 for count in self.rows))

    @cached_property
    def turn_steps(self) -> int:
        """Number of updates that one process with this ``batch_size`` makes in a pass over all rows."""
        return num_batches(sum(self.rows), self.batch_size)

    @cached_property
    def steps(self) -> int:
        """Number of updates of one process with this ``batch_size`` in an epoch.

        Learning-rate schedules count these updates.
        """
        return self.turn_steps if self.steps_per_epoch is None else self.steps_per_epoch

    @cached_property
    def epoch_rows(self) -> int:
        """Approximate number of rows that this worker trains on in an epoch."""
        return round(self.rows[self.worker] * self.steps / self.turn_steps) if self.turn_steps else 0

    @cached_property
    def bounds(self) -> Integers:
        """The edges of this worker's batches, as positions in a pass.

        A single worker has Keras's batches. If several workers train locally, each divides its rows into
        batches of nearly equal size. A worker may have any number of rows, so its last batch could
        otherwise have very few, and the step of such a batch is mostly noise.
        """
        if not self.joint:
            mine = self.rows[self.worker]
            count = self._local_turn(mine)
            if len(self.rows) > 1:
                return np.append(0, np.cumsum(even_split(mine, count), dtype=np.int64))
            return np.append(np.arange(count, dtype=np.int64) * self._local_size, mine)
        edges = np.arange(self.turn_steps + 1, dtype=np.int64) * self.batch_size
        return _num_before(self.rows, self.worker, edges)

    @cached_property
    def num_batches(self) -> int:
        """Batches of this worker in an epoch; some may be empty if updates are made jointly."""
        return self.steps if self.joint else self._local_batches(self.rows[self.worker])

    @property
    def _local_size(self) -> int:
        return self.batch_size if self.local_batch_size is None else self.local_batch_size

    def _local_turn(self, rows: int) -> int:
        """Return the number of local batches in a pass over ``rows`` rows."""
        return num_batches(rows, self._local_size)

    def _local_batches(self, rows: int) -> int:
        """Return the number of batches per epoch of a worker with ``rows`` rows."""
        turn = self._local_turn(rows)
        if self.steps_per_epoch is None or not turn:
            return turn
        return max(1, round(self.steps_per_epoch * turn / self.turn_steps))

    @cached_property
    def windows(self) -> int:
        """Exchanges of each worker in an epoch: as many as the worker with the most batches needs."""
        if self.joint:
            return self.steps
        most = self._local_batches(max(self.rows))
        return 1 if self.window is None else max(1, -(-most // self.window))

    def window_batches(self, index: int) -> range:
        """Return the range of this worker's batches in a window; empty if it has no batches left."""
        length = 1 if self.joint else (self.window or max(1, self.num_batches))
        return range(min(index * length, self.num_batches), min((index + 1) * length, self.num_batches))

    def sequence(self, epoch: int) -> int:
        """Return the number of an epoch's first exchange."""
        return (epoch - self.first_epoch) * self.windows

    def order(self, turn: int, buckets: Sequence[int] = ()) -> Order:
        """Return the order of this worker's rows in a pass over them.

        Args:
            turn: the number of the pass.
            buckets: the number of rows of each bucket; empty if all rows can be shuffled at once.
        """
        seed = (self.seed, turn, self.worker) if self.shuffle else None
        return Order(buckets or (self.rows[self.worker],), seed)

    def spans(self, epoch: int, index: int) -> Iterator[Span]:
        """Yield this worker's share of each batch in a window of an epoch."""
        bounds, total = self._edges, self._total
        for batch in self.window_batches(index):
            turn, place = divmod(epoch * self.num_batches + batch, len(bounds) - 1)
            start, stop = bounds[place], bounds[place + 1]
            whole = min(self.batch_size, total - place * self.batch_size)
            yield Span(turn, start, stop, whole if self.joint else stop - start)

    def batch_rows(self, epoch: int) -> Integers:
        """Return the number of rows of each batch in an epoch with joint updates."""
        places = (epoch * self.steps + np.arange(self.steps, dtype=np.int64)) % self.turn_steps
        return np.minimum(self.batch_size, self._total - places * self.batch_size)

    @cached_property
    def _edges(self) -> list[int]:
        edges: list[int] = self.bounds.tolist()
        return edges

    @cached_property
    def _total(self) -> int:
        return sum(self.rows)

    @cached_property
    def progress_per_step(self) -> float:
        """The progress of one local step of this worker, in updates of a single process.

        It is 1 for a single worker. ``steps`` is the number of these updates in an epoch.
        """
        mine = self.rows[self.worker]
        return self.steps * mine / sum(self.rows) / self.num_batches if mine else 0.0

    @cached_property
    def speed(self) -> float:
        """The progress of all workers together while this worker takes one step.

        It is counted like ``progress_per_step``, and is 1 for a single worker.
        """
        return self.steps / self.num_batches if self.num_batches else 0.0

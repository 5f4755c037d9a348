"""Which rows make which update.

Workers hold different numbers of rows, yet an epoch of synchronous training has to take the same
updates as one process with the same ``batch_size``. So all rows of a run are put into one order, the
*even interleaving*: row j of a worker that has n of N rows stands at position (j + 1/2) N / n, ties go to
the lower worker. The global batch t is made of the rows that rank from t B to (t + 1) B in it, whatever
the number of workers and however uneven their parts. Every worker can tell its share of each batch from
the row counts alone, and a driver that deals rows by rank gets the batches of one process exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def even_split(num_rows: int, num_workers: int) -> tuple[int, ...]:
    """Return how many rows each worker gets when they are dealt evenly."""
    return tuple(num_rows // num_workers + (k < num_rows % num_workers) for k in range(num_workers))


def ranks(rows: tuple[int, ...], worker: int) -> Integers:
    """Return the rank, among all rows of the run, of each row of one worker.

    Args:
        rows: the number of rows of each worker.
        worker: whose rows to rank.

    Returns:
        Ascending whole numbers below sum(rows), shape (rows[worker],).
    """
    mine = rows[worker]
    ours = 2 * np.arange(mine, dtype=np.int64) + 1
    total = np.arange(mine, dtype=np.int64)
    for other, count in enumerate(rows):
        if other != worker and count and mine:
            # Rows j of `other` with (2j + 1) / count below ours / mine; a tie goes to the lower worker.
            reach = ours * count + (mine if other < worker else mine - 1)
            total += np.minimum(reach // (2 * mine), count)
    return total


def num_batches(num_rows: int, batch_size: int) -> int:
    """Return how many batches an epoch has, a ragged last one included."""
    return -(-num_rows // batch_size)


@dataclass(frozen=True)
class Plan:
    """The batches and windows of one worker's epochs; a window ends where the worker exchanges.

    Attributes:
        rows: the number of training rows of each worker.
        worker: this worker's index.
        batch_size: rows per optimizer update: of all workers together when ``joint``, else of this one.
        window: local batches per exchange; None is one exchange per epoch.
        joint: whether all workers make each update together (a mean gradient per batch).
        shuffle: whether a worker's rows take a new order in every epoch.
        seed: what the orders are drawn from, with the epoch and the worker.
    """

    rows: tuple[int, ...]
    worker: int
    batch_size: int
    window: int | None
    joint: bool
    shuffle: bool
    seed: int

    @cached_property
    def steps(self) -> int:
        """Updates per epoch of one process with this ``batch_size``, which schedules count in."""
        return num_batches(sum(self.rows), self.batch_size)

    @cached_property
    def bounds(self) -> Integers:
        """Where each of this worker's batches begins and the last one ends, in rows of its epoch."""
        if not self.joint:
            mine = self.rows[self.worker]
            starts = np.arange(num_batches(mine, self.batch_size), dtype=np.int64) * self.batch_size
            return np.append(starts, mine)
        edges = np.arange(self.steps + 1, dtype=np.int64) * self.batch_size
        return np.searchsorted(ranks(self.rows, self.worker), edges).astype(np.int64)

    @cached_property
    def num_batches(self) -> int:
        """Batches of this worker in an epoch; some may be empty when updates are made jointly."""
        return len(self.bounds) - 1

    @cached_property
    def windows(self) -> int:
        """Exchanges of every worker in an epoch: those of the worker with most batches."""
        if self.joint:
            return self.steps
        most = num_batches(max(self.rows), self.batch_size)
        return 1 if self.window is None else max(1, -(-most // self.window))

    def window_batches(self, index: int) -> range:
        """Return which batches of this worker belong to a window; none where it ran out of rows."""
        length = 1 if self.joint else (self.window or max(1, self.num_batches))
        return range(min(index * length, self.num_batches), min((index + 1) * length, self.num_batches))

    def order(self, epoch: int) -> Integers:
        """Return the order of this worker's rows in an epoch."""
        mine = self.rows[self.worker]
        if not self.shuffle:
            return np.arange(mine, dtype=np.int64)
        return np.random.default_rng([self.seed, epoch, self.worker]).permutation(mine)

    def spans(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the first row and the end of each batch in a window, as places in the epoch's order."""
        for batch in self.window_batches(index):
            yield int(self.bounds[batch]), int(self.bounds[batch + 1])

    @cached_property
    def progress_per_step(self) -> float:
        """What one local step adds to the run's progress, counted in ``steps``; 1 for one worker."""
        mine = self.rows[self.worker]
        return self.steps * mine / sum(self.rows) / self.num_batches if mine else 0.0

    @cached_property
    def speed(self) -> float:
        """How much the whole run's progress grows while this worker takes one step; 1 for one worker."""
        return self.steps / self.num_batches if self.num_batches else 0.0

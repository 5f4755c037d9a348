"""Ranks and ``all_reduce`` for a user's function that runs on all workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from sparkdl.core import tree
from sparkdl.core.reduction import NUMBERS
from sparkdl.core.validation import choose
from sparkdl.core.vectors import Array
from sparkdl.data.arrays import array_of
from sparkdl.transport.exchange import Exchange
from sparkdl.transport.messages import NO_ID, Kind, Update
from sparkdl.worker import devices
from sparkdl.worker.session import Attempt, membership

R = TypeVar("R")


class Operation(StrEnum):
    """The reduction of the arrays of all workers."""

    MEAN = "mean"
    SUM = "sum"


class WorkerContext:
    """The argument that ``sparkdl.run`` passes to its function on each worker.

    Attributes:
        rank: the worker's number, from 0.
        size: number of workers.
        device: the device name, as ``keras.device`` and ``tf.device`` accept it. It is "gpu:0" if the task
            was given a GPU, which is then the first GPU visible to this process; else "cpu:0".
    """

    def __init__(self, rank: int, size: int, device: str, exchange: Exchange) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._exchange, self._sequence = exchange, 0

    def all_reduce(self, arrays: Any, op: str = "mean") -> Any:
        """Return the mean or the sum of the arrays of all workers. Every worker has to call it.

        Arrays are reduced in rank order. So the results are bitwise identical on all workers, and in a
        repeated run.

        Args:
            arrays: an array or a tensor of any library, also on a GPU, a number, or dicts, lists and tuples
                of these. The structure, shapes and dtypes have to be the same on all workers.
            op: "mean" or "sum". A sum keeps the dtypes; the mean of integers is float64. Values of
                dtype bfloat16 become float32.

        Returns:
            The same structure, with a NumPy array for each array, and a NumPy scalar for each number or array
            without dimensions.

        Raises:
            ConfigError: ``op`` is unknown.
            TypeError: a value has no numeric dtype.
            RefusedError: the arrays or ``op`` do not match those of another worker.
        """
        mean = choose("op", op, Operation) is Operation.MEAN
        named = [
            (path, _numbers(path, leaf))
            for path, leaf in zip(tree.paths(arrays, "arrays"), tree.leaves(arrays), strict=True)
        ]
        layout = repr((str(op), [(path, array.shape, array.dtype.str) for path, array in named]))
        sums = {
            dtype: self._sum([each for _, each in named if each.dtype.str == dtype], layout)
            for dtype in sorted({array.dtype.str for _, array in named})
        }
        totals = (next(sums[array.dtype.str]) for _, array in named)
        parts = (total / self.size if mean else total for total in totals)
        return tree.replaced(arrays, lambda _: next(parts))

    def barrier(self) -> None:
        """Wait until every worker has called this."""
        self.all_reduce(np.zeros(0, np.int8))

    def _sum(self, arrays: list[Array], layout: str) -> Iterator[Array]:
        """Yield the sums of arrays of one dtype over all workers, in one exchange."""
        flat = np.concatenate([array.ravel() for array in arrays])
        digest = hashlib.blake2b(layout.encode(), digest_size=16).digest()
        update = Update(Kind.ARRAYS, sequence=self._sequence, rows=1, layout=digest)
        update.metrics, update.state = flat.dtype.str.encode(), flat.tobytes()
        reply = self._exchange(update)
        self._sequence += 1
        total = np.frombuffer(bytearray(reply.state), flat.dtype)
        ends = np.cumsum([array.size for array in arrays])
        return (
            total[end - array.size : end].reshape(array.shape)[()]
            for array, end in zip(arrays, ends, strict=True)
        )


def _numbers(path: str, value: object) -> Array:
    array = array_of(value)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in NUMBERS:
        raise TypeError(
            f"Expected {path} to have a numeric NumPy dtype; got {array.dtype}. Convert it first, for "
            'example with .astype("float32").'
        )
    return array


def run_task(function: Callable[[WorkerContext], R], attempt: Attempt, size: int) -> R:
    """Run the function on this worker after the whole worker group has joined; return its result."""
    with membership(attempt, NO_ID) as (exchange, _):
        exchange.ready(1, 0, {})
        device = "gpu:0" if devices.held() else "cpu:0"
        value = function(WorkerContext(attempt.worker, size, device, exchange))
        exchange(Update(kind=Kind.REPORT))
        return value

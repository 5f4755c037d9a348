"""The layout of a model's variables, and the flat vector that holds them.

All variables that are exchanged or merged together form one contiguous array, so that neither merging nor
sending needs a loop over variables. No function here changes its arguments. This module does not depend on
Keras, Spark or HTTP.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Vector = NDArray[np.float32]
EMPTY: Vector = np.zeros(0, np.float32)
LARGE = 64 << 20  # bytes freed at once, above which ``trim`` returns memory to the system
PART = 1 << 16  # elements processed at a time, few enough for the processor's cache
ALIGNMENT = 64  # bytes; backends expect the address of a tensor to be a multiple of it


def aligned(size: int) -> NDArray[np.uint8]:
    """Return uninitialized memory of ``size`` bytes that a backend can use as a tensor without a copy."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + size]


def address(array: Array) -> int:
    """Return the memory address of an array, which must be contiguous, writeable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # __array_interface__ would build a dict


def trim(freed: float) -> None:
    """Return memory to the system after ``freed`` bytes were freed, where the C library would keep it.

    Small amounts stay with the C library, which reuses them faster; a trim takes some milliseconds.
    """
    if freed > LARGE:
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_finite(vector: Vector, below: float = np.inf) -> bool:
    """Return True if no number is NaN and all magnitudes are less than ``below``; makes no copy."""
    edge = np.float32(below)  # otherwise NumPy 1 compares in float64
    for start in range(0, len(vector), PART):
        part = vector[start : start + PART]
        if not (-edge < part.min() and part.max() < edge):
            return False
    return True


def norm(vector: Vector) -> float:
    """Return the Euclidean norm, summed in float64, since squares of float32 may overflow."""
    return float(np.sqrt(np.einsum("i,i", vector, vector, dtype=np.float64)))


def window_share(decays: Vector, steps: int, workers: int) -> Vector:
    """Return the fraction by which a window moves the center's moving statistics towards its own statistics.

    A window's own statistics are those of its batches alone; see ``window_statistics``.

    A moving average keeps ``decay`` of itself in each step, and so ``decay ** steps`` in a window. The share
    is the rest, ``1 - decay ** steps``. With it, workers that are merged one after the other give the moving
    average over all their batches, however stale they were. A statistic that is moved by this share lies
    between its old value and the window's value, so a variance stays valid.

    Args:
        decays: fraction of each statistic that a step keeps; nan if unknown, which gives 1 / workers.
        steps: local steps of the window, at least 1.
        workers: number of workers with rows, if updates are merged one by one; 1 in rounds.
    """
    return np.where(np.isnan(decays), np.float32(1 / workers), 1 - decays**steps)


def window_statistics(before: Vector, after: Vector, decays: Vector, steps: int) -> Vector:
    """Return the statistics of a window's batches alone; where the decay is unknown, return ``after``."""
    return np.where(np.isnan(decays), after, before + (after - before) / window_share(decays, steps, 1))


@dataclass(frozen=True)
class Layout:
    """The shapes and dtypes of an ordered list of variables.

    Attributes:
        shapes: one shape per variable; a scalar has an empty tuple.
        dtypes: one NumPy dtype name per variable.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Layout:
        """Return the layout of these arrays."""
        return cls(tuple(a.shape for a in arrays), tuple(a.dtype.name for a in arrays))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each variable."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """The number of elements of all variables together."""
        return sum(self.sizes)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all variables in their own dtypes."""
        return sum(n * np.dtype(t).itemsize for n, t in zip(self.sizes, self.dtypes, strict=True))

    @cached_property
    def digest(self) -> bytes:
        """A 16-byte digest that differs for different layouts."""
        return hashlib.blake2b(repr((self.shapes, self.dtypes)).encode(), digest_size=16).digest()

    def pack(self, arrays: Iterable[Array]) -> Vector:
        """Return the variables one after the other as one float32 vector of shape (size,)."""
        flat = np.empty(self.size, np.float32)
        for view, array in zip(self.unpack(flat), arrays, strict=True):
            view[...] = array
        return flat

    def unpack(self, flat: Array) -> list[Array]:
        """Return one view into ``flat`` per variable, in its shape."""
        views, start = [], 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            views.append(flat[start : start + size].reshape(shape))
            start += size
        return views

    def to_bytes(self, arrays: Sequence[Array]) -> bytes:
        """Return the variables as raw little-endian bytes, each in its own dtype."""
        return b"".join(
            np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()
            for array, dtype in zip(arrays, self.dtypes, strict=True)
        )

    def from_bytes(self, data: bytes | memoryview) -> list[Array]:
        """Return the variables that ``to_bytes`` wrote, as new arrays.

        Raises:
            ValueError: the number of bytes does not match this layout.
        """
        if len(data) != self.nbytes:
            raise ValueError(f"Expected {self.nbytes} bytes of variables; got {len(data)}.")
        arrays, start = [], 0
        for shape, size, dtype in zip(self.shapes, self.sizes, self.dtypes, strict=True):
            array = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), size, start)
            arrays.append(array.astype(dtype).reshape(shape))
            start += array.nbytes
        return arrays


def as_bytes(part: Any) -> memoryview:
    """Return the bytes of a contiguous array or of bytes, without copying them."""
    return memoryview(part).cast("B")

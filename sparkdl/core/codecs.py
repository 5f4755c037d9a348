"""Codecs: vectors as fewer bytes, for the network (``compression=``).

A codec turns a float32 vector into a shorter vector of 32-bit words, whose first word is the number of
elements. It has no state: random bits depend only on the place of the update in the run, so a run that is
restarted sends the same bits again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sparkdl.core.vectors import Vector
from sparkdl.errors import WireError

BLOCK = 1024  # elements that share a scale
PART = 64 * BLOCK  # elements that are encoded at once, so that temporary arrays stay in the cache
Bytes = npt.NDArray[np.uint8]


class Codec(ABC):
    """Base class of codecs.

    Attributes:
        name: the name, as in ``compression=``.
        below: numbers of smaller magnitude stay finite.
    """

    name: ClassVar[str]
    below: ClassVar[float] = inf

    def num_words(self, size: int) -> int:
        """Return the number of words of an encoded vector with this number of elements."""
        return 1 + -(-self._num_bytes(size) // 4)

    def encode(self, vector: Vector, place: tuple[int, int]) -> Vector:
        """Return a vector as words.

        Args:
            vector: the vector, float32.
            place: two numbers from 0 to 2^64 - 1 that no other vector of the run has, such as the worker and
                the number of the exchange.
        """
        words = np.zeros(self.num_words(len(vector)), np.float32)
        words[:1].view(np.uint32)[0] = len(vector)
        self._write(vector, words[1:].view(np.uint8), place)
        return words

    @staticmethod
    def size_of(words: Vector) -> int:
        """Return the number of elements of an encoded vector."""
        return int(words[:1].view(np.uint32)[0]) if len(words) else 0

    def decode(self, words: Vector, size: int) -> Vector:
        """Return the vector of some words.

        Args:
            words: the words.
            size: the number of elements that the vector should have.

        Raises:
            WireError: the words are not those of a vector of this size.
        """
        if len(words) != self.num_words(size) or self.size_of(words) != size:
            raise WireError(f"Expected a vector of {size} elements, encoded as {self.name}; got another one.")
        return self._read(words[1:].view(np.uint8), size)

    @abstractmethod
    def _num_bytes(self, size: int) -> int:
        """Return the number of bytes of a vector."""

    @abstractmethod
    def _write(self, vector: Vector, data: Bytes, place: tuple[int, int]) -> None:
        """Encode a vector into bytes."""

    @abstractmethod
    def _read(self, data: Bytes, size: int) -> Vector:
        """Return the vector of some bytes."""


class Half(Codec):
    """Numbers of 16 bits, rounded to nearest."""

    @abstractmethod
    def _dtype(self) -> Any:
        """Return the dtype of a number."""

    def _num_bytes(self, size: int) -> int:
        return 2 * size

    def _write(self, vector: Vector, data: Bytes, place: tuple[int, int]) -> None:
        with np.errstate(over="ignore"):
            data[: 2 * len(vector)].view(self._dtype())[:] = vector

    def _read(self, data: Bytes, size: int) -> Vector:
        vector: Vector = data[: 2 * size].view(self._dtype()).astype(np.float32)
        return vector


class BF16(Half):
    """bfloat16: the range of float32, with 8 bits of precision."""

    name = "bf16"
    below = (2 - 2.0**-8) * 2.0**127  # rounds to 2^128, which is infinite

    def _dtype(self) -> Any:
        import ml_dtypes  # which Keras requires; ``sparkdl.run`` also works on executors without it

        return ml_dtypes.bfloat16


class FP16(Half):
    """float16, with 11 bits of precision between about 6.1e-5 and 65,504, and fewer below.

    Larger numbers become infinite, and numbers below about 3e-8 become 0.
    """

    name = "fp16"
    below = 65_520.0  # rounds to 65,536, which float16 cannot hold

    def _dtype(self) -> Any:
        return np.float16


class Int8(Codec):
    """Integers from -127 to 127, times a scale for each block of 1,024 elements.

    Each number is rounded up or down at random (stochastic rounding; QSGD, Alistarh et al., 2017), so that
    the mean error is 0, to within 1/256 of the scale. A block with NaN or Inf becomes NaN.
    """

    name = "int8"

    def _num_bytes(self, size: int) -> int:
        return 4 * -(-size // BLOCK) + size

    def _write(self, vector: Vector, data: Bytes, place: tuple[int, int]) -> None:
        scales, numbers = self._sections(data, len(vector))
        random = np.random.Generator(np.random.Philox(key=np.array(place, np.uint64)))
        for start in range(0, len(vector), PART):
            part = vector[start : start + PART]
            blocks = np.zeros((-(-len(part) // BLOCK), BLOCK), np.float32)
            blocks.reshape(-1)[: len(part)] = part
            largest = np.abs(blocks).max(axis=1)
            scale = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))
            scales[start // BLOCK : start // BLOCK + len(scale)] = scale
            noise = np.frombuffer(random.bytes(blocks.size), np.uint8).reshape(blocks.shape)
            with np.errstate(invalid="ignore", divide="ignore"):
                rounded = np.floor(blocks / scale[:, None] + (noise + np.float32(0.5)) * np.float32(1 / 256))
            rounded = np.nan_to_num(rounded, copy=False).clip(-127, 127)
            numbers[start : start + len(part)] = rounded.reshape(-1)[: len(part)]

    def _read(self, data: Bytes, size: int) -> Vector:
        scales, numbers = self._sections(data, size)
        vector = numbers.astype(np.float32)
        whole = size // BLOCK * BLOCK
        vector[:whole].reshape(-1, BLOCK)[:] *= scales[: whole // BLOCK, None]
        vector[whole:] *= scales[whole // BLOCK :]
        return vector

    def _sections(self, data: Bytes, size: int) -> tuple[Vector, npt.NDArray[np.int8]]:
        """Return the scales and the integers as views of the bytes."""
        blocks = -(-size // BLOCK)
        return data[: 4 * blocks].view(np.float32), data[4 * blocks : 4 * blocks + size].view(np.int8)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (BF16(), FP16(), Int8())}


def salt_of(layout: bytes) -> int:
    """Return 32 bits of a layout's digest, so that the parts for each shard get random bits of their own."""
    return int.from_bytes(layout[:4], "little")

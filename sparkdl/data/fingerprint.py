"""Fingerprints of a worker's rows, which change if Spark recomputes the rows differently.

A row's key, which determines its order, depends on the place it came from and not on its content. If
``df.repartition(8)`` is recomputed, different rows may get the same keys, on this worker or on others. So
each row has a *digest* of its bytes; NaN and -0.0 are not normalized. A worker computes two sums modulo
2 ** 64: of the digests mixed with their keys (``ordered``), and of the digests alone (``free``). The sums do
not depend on the division into blocks, nor on the order in which a shuffle delivers rows. The sum of ``free``
over a worker group does not depend on which worker has which rows.

A row is a sequence of words. A dense column gives its bytes as 64-bit words, or as smaller words if
its bytes per row are not a multiple of 8. A column of strings or of sparse rows gives one word per
row, a hash of its content. A 64-bit word of a dense column is first XORed with itself shifted right
by 29 bits. Otherwise two changed signs, which are the highest bits of numbers, could cancel out.
Then each word is multiplied by an odd number that depends on its place in the row. The sum of these
products is mixed by splitmix64. The fingerprint detects mistakes, not attacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.core.vectors import Array
from sparkdl.data.sparse import SparseRows, TextRows

Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
TOGETHER = 1 << 18  # bytes of rows processed at a time; they fit into the processor's cache


class Fingerprint(NamedTuple):
    """Two sums that identify a set of rows.

    Attributes:
        ordered: depends on the rows and their keys.
        free: depends on the rows only.
    """

    ordered: int
    free: int

    @classmethod
    def of(cls, values: object) -> Fingerprint:
        """Return the fingerprint with these values.

        Raises:
            ValueError: they are not two numbers of 64 bits.
        """
        if isinstance(values, list | tuple) and len(values) == 2:
            ordered, free = values
            if all(type(value) is int and 0 <= value <= MASK for value in (ordered, free)):
                return cls(ordered, free)
        raise ValueError("Expected fingerprint to be two 64-bit integers.")


NOTHING = Fingerprint(0, 0)


def total(fingerprints: Iterable[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of all rows from fingerprints of disjoint parts."""
    sums = (sum(values) & MASK for values in zip(NOTHING, *fingerprints, strict=True))
    return Fingerprint(*sums)


def mixed(words: Words) -> Words:
    """Return words in which each bit depends on all input bits: the last steps of splitmix64, a bijection."""
    z = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def unmixed(words: Words) -> Words:
    """Return the original words: the inverse of ``mixed``."""
    z = words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))
    z = z * np.uint64(0x319642B2D24D8EC3)
    z = (z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))) * np.uint64(0x96DE1B173F119089)
    first: Words = z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))
    return first


def fingerprint(keys: Words, part: int, columns: Sequence[Array | SparseRows]) -> Fingerprint:
    """Return the fingerprint of some rows.

    Args:
        keys: the key of each row.
        part: the part that the rows belong to; a key may occur once in each part.
        columns: an array per column.
    """
    row = sum(column.nbytes for column in columns) // max(1, len(keys))
    size = max(1, TOGETHER // max(1, row))
    return total(
        _fingerprint(keys[start : start + size], part, [column[start : start + size] for column in columns])
        for start in range(0, len(keys), size)
    )


def _fingerprint(keys: Words, part: int, columns: Sequence[Array | SparseRows]) -> Fingerprint:
    digests, first = np.full(len(keys), GOLDEN, np.uint64), 0
    for column in columns:
        words = _words_of(column)
        digests += words @ _odds(first, words.shape[1])
        first += words.shape[1]
    digests = mixed(digests)
    ordered = mixed(digests ^ mixed(keys + np.uint64((part + 1) * GOLDEN & MASK)))
    return Fingerprint(int(ordered.sum()), int(digests.sum()))


def _words_of(column: Array | SparseRows) -> Words:
    if isinstance(column, TextRows):
        digests = (blake2b(row, digest_size=8).digest() for row in column.rows())
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[:, None]
    return _entries(column) if isinstance(column, SparseRows) else _words(column)


def _words(column: Array) -> Words:
    """Return the bytes of each row as words."""
    rows = np.ascontiguousarray(column).reshape(len(column), prod(column.shape[1:]))
    unit = gcd(rows.shape[1] * rows.itemsize, 8)
    words = rows.view(f"u{unit}")
    return words ^ (words >> np.uint64(29)) if unit == 8 else words.astype(np.uint64)


def _entries(rows: SparseRows) -> Words:
    """Return a word for each row: the sum of hashes of its numbers and their indices."""
    own = rows.compact()
    values = _words(own.entries["value"][:, None])[:, 0]
    places = own.entries["index"].astype(np.uint64) * np.uint64(GOLDEN)
    sums = np.append(np.uint64(0), np.cumsum(mixed(values + mixed(places + np.uint64(1)))))
    starts, counts = own.spans.T
    found: Words = sums[starts + counts] - sums[starts]
    return found[:, None]


@lru_cache
def _odds(first: int, count: int) -> Words:
    """Return unrelated odd numbers for ``count`` places."""
    return mixed(np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)

"""Equal shares of the training rows: workers pass on the few rows by which their shares differ.

A shuffle deals rows before their number is known. Afterwards shares differ by a few rows per partition. If
rows are dealt by a hash (a DataFrame on a Spark without ``repartitionById``), they differ by about the square
root of a share. Workers report their counts to the endpoint, compute the same moves from them, and send the
moved rows through the endpoint.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparkdl.data.arrays import AnyRows
from sparkdl.data.blocks import TRAINING, Block
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows, rows_of
from sparkdl.data.spill import SpillFile
from sparkdl.transport.exchange import Exchange
from sparkdl.transport.messages import Kind, Update

MOST_BYTES = 64 << 20  # limit on all moved rows; with more to move, no row moves


class Move(NamedTuple):
    """Some rows that one worker passes on to another."""

    giver: int
    taker: int
    rows: int


def moves(counts: Sequence[int]) -> list[Move]:
    """Return the moves of the fewest rows after which the counts differ by at most one.

    Args:
        counts: the number of rows of each worker.
    """
    share, more = divmod(sum(counts), len(counts))
    largest = sorted(range(len(counts)), key=lambda worker: -counts[worker])
    target = {worker: share + (place < more) for place, worker in enumerate(largest)}
    surplus = [[worker, counts[worker] - target[worker]] for worker in largest]
    givers, takers = ([each for each in surplus if each[1] * sign > 0] for sign in (1, -1))
    made = []
    for giver in givers:
        while giver[1]:
            rows = min(giver[1], -takers[0][1])
            made.append(Move(giver[0], takers[0][0], rows))
            giver[1] -= rows
            takers[0][1] += rows
            if not takers[0][1]:
                del takers[0]
    return made


def rebalance(spill_file: SpillFile, worker: int, exchange: Exchange) -> None:
    """Pass on training rows, so that the shares of all workers differ by at most one row.

    The rows with the largest keys are passed on, so a worker that restarts passes on the same rows. If the
    rows to move exceed ``MOST_BYTES`` in total, no rows are passed on, and the shares stay unequal.

    Args:
        spill_file: all rows of the worker.
        worker: its index.
        exchange: its connection to the endpoint.
    """
    reply = exchange(Update(kind=Kind.SHARE, rows=spill_file.count(TRAINING)))
    planned = moves(np.frombuffer(reply.state, "<u8").tolist())
    row = sum(column.nbytes for column in spill_file.schema.columns)
    if sum(move.rows for move in planned) * row > MOST_BYTES:
        return
    given = [move for move in planned if move.giver == worker]
    if given:
        rows = spill_file.remove(TRAINING, sum(move.rows for move in given))
        first = 0
        for move in given:
            some = slice(first, first + move.rows)
            data = packed(rows.keys[some], [column[some] for column in rows.columns])
            exchange(Update(kind=Kind.GIVE, sequence=move.taker, state=data))
            first += move.rows
    for move in planned:
        if move.taker == worker:
            reply = exchange(Update(kind=Kind.TAKE, sequence=move.giver))
            spill_file.extend([unpacked(reply.state, spill_file.schema)], counted=False)


def packed(keys: np.ndarray, columns: Sequence[AnyRows]) -> bytes:
    """Return rows as bytes, in NumPy's format."""
    file = io.BytesIO()
    for array in (keys, *_arrays(columns)):
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def _arrays(columns: Sequence[AnyRows]) -> Iterator[np.ndarray]:
    for column in columns:
        if isinstance(column, SparseRows):
            own = column.compact()
            yield own.spans
            yield own.entries
        else:
            yield column


def unpacked(data: bytes, schema: Schema) -> Block:
    """Return the training rows in the bytes that ``packed`` returned."""
    file = io.BytesIO(data)

    def read() -> np.ndarray:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array

    keys = read()
    columns: list[AnyRows] = []
    for column in schema.columns:
        first = read()
        columns.append(rows_of(column.dtype)(first, read(), column.shape) if column.sparse else first)
    return Block(keys, TRAINING, tuple(columns))

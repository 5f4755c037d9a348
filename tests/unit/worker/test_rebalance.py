"""Equal shares of the training rows: selection of the rows to move, and their transfer."""

from unittest import mock

import numpy as np
import pytest
from coordinators import coordinator_of, impatient, status_of, together, update_of
from coordinators import give as hand
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data.blocks import TRAINING, Block
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows, TextRows
from sparkdl.data.spill import SpillFile
from sparkdl.errors import DataError
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.transport.messages import Flag, Kind
from sparkdl.worker import rebalance as module
from sparkdl.worker.rebalance import moves, packed, rebalance, unpacked

SCHEMA = Schema(
    (
        Column("x", (2,), "float32"),
        Column("sparse", (4,), "float32", 2),
        Column("text", (), "string", 8),
        Column("y", (), "int64"),
    ),
    ((0, 1, 2), 3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("spill"))


def block_of(keys):
    """Return rows of every kind of column; the values follow from the keys."""
    keys = np.asarray(keys, np.uint64)
    sparse = [(np.arange(key % 4), np.full(key % 4, key)) for key in keys.tolist()]
    columns = (
        np.repeat(keys[:, None], 2, axis=1).astype(np.float32),
        SparseRows.of(sparse, (4,), "float32"),
        TextRows.of_texts([b"t" * int(key) for key in keys], ()),
        keys.astype(np.int64),
    )
    return Block(keys, TRAINING, columns)


def spill_file_of(keys, folder, size=3):
    file = SpillFile(SCHEMA, folder, 0)
    file.extend(block_of(keys[start : start + size]) for start in range(0, len(keys), size))
    return file


def labels_of(file):
    """Return the labels of a spill's rows, after checking the other values against them."""
    rows = file.rows(TRAINING)
    if not rows.count:
        return []
    (x, sparse, texts), labels, _ = rows.batch(np.arange(rows.count))
    dense = np.zeros((rows.count, 4))
    for row, label in enumerate(labels.tolist()):
        dense[row, : label % 4] = label
    assert (x == labels[:, None]).all()
    assert (sparse == dense).all()
    assert [len(text) for text in texts.tolist()] == labels.tolist()
    return labels.tolist()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_moves_make_counts_differ_by_one_at_most(counts):
    """Moves make counts differ by one at most; no row moves twice or needlessly."""
    after, planned = list(counts), moves(counts)
    for move in planned:
        after[move.giver] -= move.rows
        after[move.taker] += move.rows
    share = sum(counts) // len(counts)

    assert max(after) - min(after) <= 1
    assert sum(after) == sum(counts)
    assert all(move.rows > 0 for move in planned)
    assert not {move.giver for move in planned} & {move.taker for move in planned}
    assert sum(move.rows for move in planned) <= sum(max(0, count - share) for count in counts)


@given(st.lists(st.integers(0, 60), max_size=9, unique=True))
def test_rows_of_every_kind_travel_as_they_are(keys):
    """Arrays, sparse numbers and strings arrive unchanged with their keys."""
    block = block_of(keys)
    arrived = unpacked(packed(block.keys, block.columns), SCHEMA)

    assert block.keys.tolist() == arrived.keys.tolist()
    for sent, got in zip(block.columns, arrived.columns, strict=True):
        whole = (each.toarray() if isinstance(each, SparseRows) else each for each in (sent, got))
        np.testing.assert_array_equal(*whole)


def rebalanced(coordinator, shares, folder, attempts):
    """Return each worker's labels after the exchange of rows, and the spills."""

    def work(worker):
        file = spill_file_of(shares[worker], folder)
        rebalance(file, worker, LocalExchange(coordinator, worker, attempts[worker]))
        return labels_of(file), file.fingerprint

    return together(*(lambda worker=worker: work(worker) for worker in attempts))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.randoms(use_true_random=False),
    st.integers(0, 2),
)
def test_shares_differ_by_one_row_at_most(folder, owners, random, lost):
    """Shares differ by one row at most; a restarted worker gets the same rows in any order of arrival."""
    shares = [[key for key, owner in enumerate(owners) if owner == worker] for worker in range(3)]
    coordinator = coordinator_of("asynchronous", workers=3)
    found = rebalanced(coordinator, shares, folder, dict.fromkeys(range(3), 1))
    random.shuffle(shares[lost])
    again = rebalanced(coordinator, shares, folder, {lost: 2})
    counts = [len(labels) for labels, _ in found]

    assert sorted(sum((labels for labels, _ in found), [])) == list(range(len(owners)))
    assert max(counts) - min(counts) <= 1
    assert sorted(again[0][0]) == sorted(found[lost][0])
    assert again[0][1] == found[lost][1]


def test_rows_of_many_bytes_stay_where_they_are(folder):
    """Rows stay where they are if moving them would exceed the endpoint's memory limit."""
    coordinator = coordinator_of("asynchronous", workers=2)
    with mock.patch.object(module, "MOST_BYTES", 10):
        found = rebalanced(coordinator, [[1, 2, 3], []], folder, {0: 1, 1: 1})

    assert [[1, 2, 3], []] == [sorted(labels) for labels, _ in found]


def joined(workers=2, **fields):
    coordinator = coordinator_of("asynchronous", workers=workers, **fields)
    for worker in range(workers):
        coordinator.join(worker, coordinator.generation, 1, "host", 1)
    return coordinator


def told(coordinator, worker, kind, **fields):
    with impatient():
        return hand(coordinator, update_of(coordinator, worker, kind=kind, **{"rows": 0, **fields}))


def test_a_worker_asks_again_until_all_have_reported():
    """A worker asks again until all have reported, and gets every worker's number of rows."""
    coordinator = joined()

    most = 2**64 - 1  # of the header's field
    assert told(coordinator, 0, Kind.SHARE, rows=5).flags & Flag.AGAIN
    assert not told(coordinator, 1, Kind.SHARE, rows=most).flags & Flag.AGAIN
    reply = told(coordinator, 0, Kind.SHARE, flags=Flag.AWAIT)
    assert [5, most] == np.frombuffer(reply.state, "<u8").tolist()


def test_rows_are_taken_once_they_were_given():
    """Rows are kept after they were taken, for a worker that restarts."""
    coordinator = joined()

    assert told(coordinator, 1, Kind.TAKE, sequence=0).flags & Flag.AGAIN
    told(coordinator, 0, Kind.GIVE, sequence=1, state=b"rows")
    assert [told(coordinator, 1, Kind.TAKE, sequence=0).state for _ in range(2)] == [b"rows", b"rows"]


def test_another_number_of_rows_is_refused_once_others_count_on_it():
    """Another number of rows is refused once others rely on it: rows would be lost or repeated."""
    coordinator = joined()
    told(coordinator, 0, Kind.SHARE, rows=5)
    told(coordinator, 0, Kind.SHARE, rows=6)
    told(coordinator, 1, Kind.SHARE, rows=7)

    assert status_of(lambda: told(coordinator, 0, Kind.SHARE, rows=5)) == 422
    assert isinstance(coordinator.failure, DataError)
    assert "restarted with 5 rows instead of 6" in str(coordinator.failure)


def test_workers_that_start_together_again_report_anew():
    """Workers of a new generation report anew: Spark may have dealt other rows to them."""
    coordinator = joined()
    for worker in range(2):
        told(coordinator, worker, Kind.SHARE, rows=5)
        told(coordinator, worker, Kind.GIVE, sequence=1 - worker, state=b"rows")
    coordinator.restart()
    coordinator.join(0, coordinator.generation, 1, "host", 1)

    assert told(coordinator, 0, Kind.SHARE, rows=9).flags & Flag.AGAIN
    assert told(coordinator, 0, Kind.TAKE, sequence=1).flags & Flag.AGAIN


@pytest.mark.parametrize(
    ("kind", "fields", "status"),
    [
        (Kind.GIVE, {"sequence": 2, "state": b"rows"}, 400),
        (Kind.TAKE, {"sequence": 0, "state": b"rows"}, 413),
        (Kind.SHARE, {"state": b"rows"}, 413),
    ],
)
def test_rows_for_an_unknown_worker_and_sections_out_of_place_are_refused(kind, fields, status):
    """Rows for an unknown worker and misplaced sections are refused and not stored."""
    coordinator = joined()

    assert status_of(lambda: told(coordinator, 0, kind, **fields)) == status
    assert not coordinator.rebalance.given

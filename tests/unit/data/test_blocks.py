"""Blocks on their way to a worker: missing weights are filled in and rows are dealt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.blocks import TRAINING, VALIDATION, Block, deal, parts_of, row_keys, weigh
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.spill import SpillFile
from sparkdl.errors import DataError

SCHEMA = Schema(
    (Column("x", (), "float32"), Column("y", (2,), "int64"), Column("w", (), "float32")), (0, 1, 2)
)


@pytest.mark.parametrize(
    ("part", "classes", "expected"),
    [(0, None, [1, 1, 1]), (0, {0: 3.0, 1: 0.5}, [3, 0.5, 0.5]), (1, {0: 3.0}, [1, 1, 1])],
)
def test_rows_without_weights_get_those_of_their_classes(part, classes, expected):
    """Rows without weights get those of their classes, also for one-hot labels; others weigh 1."""
    labels = np.array([[1, 0], [0, 1], [0, 1]])
    block = Block(np.arange(3, dtype=np.uint64), part, (np.zeros(3, np.float32), labels))
    (weighed,) = weigh([block], SCHEMA, classes)

    assert expected == weighed.columns[2].tolist()


@pytest.mark.parametrize(("part", "classes"), [(TRAINING, None), (VALIDATION, None), (VALIDATION, {0: 3.0})])
def test_rows_with_weights_keep_them(part, classes):
    """Rows keep the weights they came with; class weights do not apply to validation rows."""
    columns = np.zeros(1, np.float32), np.zeros((1, 2), np.int64), np.array([7], np.float32)
    block = Block(np.zeros(1, np.uint64), part, columns)

    assert [block] == list(weigh([block], SCHEMA, classes))


def test_class_weights_replace_the_ones_that_a_union_fills_in():
    """Training rows get class weights even if they come with the weights that a DataFrame source fills in."""
    columns = np.zeros(2, np.float32), np.array([[1, 0], [0, 1]]), np.ones(2, np.float32)
    (weighed,) = weigh([Block(np.zeros(2, np.uint64), TRAINING, columns)], SCHEMA, {0: 3.0})

    assert [3, 1] == weighed.columns[2].tolist()


ROWS = np.zeros((5, 2))


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (ROWS, "ndarray of ndarray"),
        ([ROWS, ROWS[:, 0]], "list of ndarray"),
        ((ROWS,), "tuple of length 1"),
        (iter([ROWS]), "list_iterator of ndarray"),
        (None, "NoneType"),
        (5, "int"),
    ],
)
def test_what_a_function_of_rows_returns_without_labels_is_refused(made, given):
    """The error for a function's rows without labels names their type; a list [x, y] is two batches."""
    with pytest.raises(DataError, match=rf"return a tuple of arrays \(x, y\) .*; got {given}\."):
        list(parts_of(made))


def test_batches_are_tuples_or_lists():
    """Batches may be tuples, or lists as torch's loaders yield them."""
    assert [(1, 2), (3, 4)] == list(parts_of([[1, 2], (3, 4)]))


DEALT = Schema((Column("x", (), "int64"),), (0,))


def partition_of(index, sizes, part=TRAINING):
    """Return the blocks of a partition with these numbers of rows; a row's value is its key."""
    first = np.cumsum([0, *sizes])
    for start, size in zip(first, sizes, strict=False):
        keys = row_keys(index, np.arange(start, start + size, dtype=np.uint64))
        yield Block(keys, part, (keys.astype(np.int64),))


def shares_of(partitions, num_workers, seed, folder):
    """Return each worker's values after dealing the rows of (index, sizes of blocks)."""
    files = [SpillFile(DEALT, str(folder), seed) for _ in range(num_workers)]
    for index, sizes in partitions:
        for worker, block in deal(partition_of(index, sizes), num_workers, seed):
            files[worker].extend([block])
    shares = [file.rows(TRAINING) for file in files]
    values = [share.batch(np.arange(share.count)).x.tolist() if share.count else [] for share in shares]
    return values, [file.fingerprint for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spill")


SIZES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 5), st.integers(0, 3))
def test_rows_are_dealt_once_and_again_to_the_same_worker(folder, sizes, num_workers, seed):
    """Dealing is repeatable; shares differ by fewer rows than there are workers, per partition."""
    partitions = list(enumerate(sizes))
    (shares, marks), (again, marked) = (
        shares_of(some, num_workers, seed, folder) for some in (partitions, partitions[::-1])
    )
    counts = [len(share) for share in shares]
    blocks = [block for index, size in partitions for block in partition_of(index, size)]

    assert sorted(sum(shares, [])) == [value for block in blocks for value in block.columns[0].tolist()]
    assert max(counts) - min(counts) <= len(sizes) * max(0, num_workers - 1)
    assert [sorted(share) for share in shares] == [sorted(share) for share in again]
    assert marks == marked


def test_another_seed_deals_other_rows(folder):
    """Another seed deals other rows to a worker."""
    (shares, _), (others, _) = (shares_of([(0, [50])], 2, seed, folder) for seed in (0, 1))

    assert sorted(shares[0]) != sorted(others[0])


def test_rows_for_validation_are_dealt_by_chance_and_never_twice():
    """Validation rows are dealt at random, each once; only training shares must be equal."""
    dealt = list(deal(partition_of(0, [7], VALIDATION), 3, 0))

    assert {block.part for _, block in dealt} == {VALIDATION}
    assert len({key for _, block in dealt for key in block.keys.tolist()}) == 7
    assert sum(len(block.keys) for _, block in dealt) == 7

"""The laws of fingerprints: which changes of a worker's rows they detect, and which not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.blocks import TRAINING, VALIDATION, Block, select
from sparkdl.data.column import Column
from sparkdl.data.fingerprint import MASK, NOTHING, Fingerprint, fingerprint, total
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows
from sparkdl.data.spill import SpillFile

DTYPES = "float32", "float64", "float16", "int64", "uint8", "bool", "int32"
seeds_ = st.integers(0, 1 << 32)
counts_ = st.integers(1, 40)
shapes_ = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4)


def rows_of(seed, count, shapes):
    """Return a block of rows with columns of different types, the last one sparse."""
    random = np.random.default_rng(seed)
    columns = [
        random.integers(0, 1 << 15, (count, *shape)).astype(dtype)
        for shape, dtype in zip(shapes, DTYPES, strict=False)
    ]
    numbers = [random.permutation(9)[: random.integers(0, 5)] for _ in range(count)]
    columns.append(SparseRows.of([(np.sort(each), each + 1.5) for each in numbers], (9,), "float32"))
    return Block(random.permutation(count).astype(np.uint64), TRAINING, tuple(columns))


def changed(block, place, index):
    """Return a block with one byte changed in one column of one row."""
    column = block.columns[place].copy()
    data = column[index : index + 1].reshape(1, -1).view(np.uint8)
    data[0, index % data.shape[1]] ^= 1
    return block._replace(columns=(*block.columns[:place], column, *block.columns[place + 1 :]))


@given(seeds_, counts_, shapes_, st.lists(st.integers(0, 40), max_size=5))
def test_in_what_blocks_rows_come_is_not_seen(seed, count, shapes, edges):
    """The fingerprint is the sum of those of any parts, in any order."""
    block = rows_of(seed, count, shapes)
    edges = [0, *sorted(edge % (count + 1) for edge in edges), count]
    parts = [select(block, slice(*pair)) for pair in zip(edges[:-1], edges[1:], strict=True)]

    assert fingerprint(*block) == total(fingerprint(*part) for part in reversed(parts))


@given(seeds_, counts_, shapes_)
def test_in_what_order_rows_come_is_not_seen_as_long_as_they_keep_their_keys(seed, count, shapes):
    """The fingerprint does not depend on the order of arrival; keys define the order of rows."""
    block = rows_of(seed, count, shapes)
    order = np.random.default_rng(seed + 1).permutation(count)

    assert fingerprint(*block) == fingerprint(*select(block, order))


@given(seeds_, st.integers(2, 40), shapes_)
def test_rows_under_each_others_keys_are_in_another_order(seed, count, shapes):
    """Swapped keys change ``ordered``, but not ``free``."""
    block = rows_of(seed, count, [(4,), *shapes])
    before, after = fingerprint(*block), fingerprint(*block._replace(keys=np.roll(block.keys, 1)))

    assert before.ordered != after.ordered
    assert before.free == after.free


@given(seeds_, counts_, shapes_, st.integers(0, 39), st.integers(0, 9))
def test_any_other_value_is_seen(seed, count, shapes, index, place):
    """A changed value in any row and column changes both numbers."""
    block = rows_of(seed, count, shapes)
    before = fingerprint(*block)
    after = fingerprint(*changed(block, place % (len(block.columns) - 1), index % count))

    assert before.ordered != after.ordered
    assert before.free != after.free


@given(seeds_, st.integers(2, 40), st.integers(0, 39))
def test_values_that_rows_exchange_are_seen(seed, count, index):
    """Labels exchanged between rows change the fingerprint, unlike sums of columns."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(count, 3)), np.arange(count)
    keys = np.arange(count, dtype=np.uint64)

    assert (
        fingerprint(keys, 0, [x, y]).free
        != fingerprint(keys, 0, [x, np.roll(y, 1 + index % (count - 1))]).free
    )


@given(seeds_, st.integers(2, 60), st.data())
def test_signs_are_seen(seed, count, data):
    """Any set of changed signs changes the fingerprint: upper bits of words do not cancel out."""
    x = np.random.default_rng(seed).normal(size=(1, count)).astype(data.draw(st.sampled_from(DTYPES[:3])))
    places = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    other = x.copy()
    other[:, sorted(places)] *= -1
    key = np.zeros(1, np.uint64)

    assert fingerprint(key, 0, [x]).free != fingerprint(key, 0, [other]).free


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_row_of_other_signs_is_seen(dtype):
    """A row with all signs changed has another fingerprint."""
    key = np.zeros(1, np.uint64)
    for count in range(1, 65):
        x = np.random.default_rng(count).normal(size=(1, count)).astype(dtype)

        assert fingerprint(key, 0, [x]).free != fingerprint(key, 0, [-x]).free


def test_a_number_without_zeros_is_seen():
    """The fingerprint of a sparse row depends on each number's value, place and presence."""
    key, rows = (
        np.zeros(1, np.uint64),
        ([[0, 3], [1.0, 2.0]], [[0, 4], [1.0, 2.0]], [[0, 3], [1.0, 2.5]], [[0], [1.0]]),
    )
    found = [
        fingerprint(key, 0, [SparseRows.of([(np.array(i, int), np.array(v))], (9,), kind)])
        for i, v in rows
        for kind in ("float32", "float64")
    ]

    assert 8 == len({each.ordered for each in found}) == len({each.free for each in found})


def test_what_rows_are_for_is_seen_by_the_order_alone():
    """Moving rows from training to validation changes ``ordered`` only: keys decide which are held out."""
    block = rows_of(1, 5, [(2,)])
    training, validation = fingerprint(*block), fingerprint(*block._replace(part=VALIDATION))

    assert training.ordered != validation.ordered
    assert training.free == validation.free


def test_numbers_are_their_bytes():
    """Numbers count by their bytes: NaN equals NaN, and -0.0 differs from 0.0."""
    key = np.zeros(1, np.uint64)
    one, again, zero, minus = (
        fingerprint(key, 0, [np.array([value], np.float32)]) for value in (np.nan, np.nan, 0.0, -0.0)
    )

    assert one == again
    assert 3 == len({one, zero, minus})
    assert fingerprint(key, 0, [np.zeros((1, 0), np.float32)]) != NOTHING  # an empty row still counts
    assert fingerprint(key[:0], 0, [np.zeros((0, 2), np.float32)]) == NOTHING


def test_a_fingerprint_is_the_same_everywhere():
    """A fingerprint is the same on every machine and in every version, as checkpoints store it."""
    columns = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3), np.array([True, False, True])
    found = fingerprint(np.arange(3, dtype=np.uint64), TRAINING, columns)

    assert Fingerprint(10028230205019188308, 3728943832270958901) == found


@pytest.mark.parametrize(
    "values", [None, 7, "ab", [], [1], [1, 2, 3], [1, -1], [1, MASK + 1], [1, True], [1.0, 2]]
)
def test_what_is_no_fingerprint(values):
    """Anything but two 64-bit integers is rejected as a fingerprint."""
    with pytest.raises(ValueError, match="Expected fingerprint to be two 64-bit integers."):
        Fingerprint.of(values)


def test_a_spill_file_knows_the_fingerprint_of_all_its_rows(tmp_path):
    """A spill has the fingerprint of its training and validation rows; an empty block adds nothing."""
    schema = Schema((Column("x", (2,), "float32"), Column("y", (), "int64")), (0, 1))
    keys, x, y = np.arange(4, dtype=np.uint64), np.ones((4, 2), np.float32), np.arange(4)
    blocks = [Block(keys, part, (x + part, y)) for part in (TRAINING, VALIDATION)]
    file = SpillFile(schema, str(tmp_path))
    file.extend([*blocks, Block(keys[:0], 2, ())])
    for part in (TRAINING, VALIDATION):
        file.rows(part)

    assert total(fingerprint(*block) for block in blocks) == file.fingerprint != NOTHING

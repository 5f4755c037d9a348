"""Rows on a worker's disk: each pass has every row once, in an order of seed and keys."""

import subprocess
import sys
import threading
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data.batch_plan import MIXED, BatchPlan
from sparkdl.data.blocks import EMPTY, TRAINING, VALIDATION, Block, scramble
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.spill import INDEX_BYTES, MEMORY, SpillFile

SCHEMA = Schema((Column("x", (3,), "float32"), Column("y", (), "int64")), (0, 1))
SPARSE = Schema((replace(SCHEMA.columns[0], sparse=3), SCHEMA.columns[1]), (0, 1))
WHOLE = MEMORY


def blocks(keys, size=100, part=TRAINING, schema=SCHEMA):
    """Yield blocks of rows whose label is their key."""
    for start in range(0, len(keys), size):
        some = keys[start : start + size]
        x = schema.columns[0].of(np.repeat(some[:, None], 3, axis=1), "a block")
        yield Block(some, part, (x, some.astype(np.int64)))


def rows_of(keys, directory, seed, *, memory, size=100, schema=SCHEMA):
    file = SpillFile(schema, str(directory), seed, memory=memory)
    file.extend(blocks(np.asarray(keys, np.uint64), size, schema=schema))
    return file.rows(TRAINING)


def passed(rows, turn, *, shuffle=True, batch_size=32):
    """Return the labels of a pass, batch by batch."""
    plan = BatchPlan((rows.count,), 0, batch_size, 1, False, shuffle, 7)
    order = plan.order(turn, rows.buckets)
    found = [
        rows.batch(order[span.start : span.stop]) for i in range(plan.windows) for span in plan.spans(0, i)
    ]
    assert all((batch.x == batch.y[:, None]).all() for batch in found)
    return [batch.y.tolist() for batch in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spill")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 60),
    st.sampled_from([None, 3]),
    st.sampled_from([SCHEMA, SPARSE]),
    st.randoms(),
)
def test_a_pass_has_every_row_once_in_the_same_order_however_the_rows_came(
    folder, count, fit, seed, schema, random
):
    """``fit`` rows are mixed at a time; without a shuffle rows are in the order of their keys."""
    keys = [*range(count)]
    random.shuffle(keys)
    first = rows_of(keys, folder, seed, memory=fit * INDEX_BYTES, schema=schema)
    random.shuffle(keys)
    again = rows_of(keys, folder, seed, memory=fit * INDEX_BYTES, size=7, schema=schema)

    assert first.buckets == again.buckets
    assert [*range(count)] == sorted(sum(passed(first, 0), []))
    assert passed(first, 0) == passed(again, 0)
    if seed is None:
        assert [*range(count)] == sum(passed(again, 0, shuffle=False), [])


def test_rows_that_fit_are_mixed_whole(folder):
    """Small data has one permutation of the rows by their keys."""
    keys = np.random.default_rng(0).permutation(1000)
    expected = [np.random.default_rng([7, turn, 0]).permutation(1000).tolist() for turn in (0, 1)]

    rows = rows_of(keys, folder, 3, memory=WHOLE)

    assert (1000,) == rows.buckets
    assert expected == [sum(passed(rows, turn), []) for turn in (0, 1)]


def test_more_rows_are_mixed_within_and_across_buckets(folder):
    """A pass mixes a limited number of rows at a time; the next pass draws other rows and orders."""
    count, fit = 20_000, 2_000
    rows = rows_of(np.arange(count), folder, 3, memory=fit * INDEX_BYTES)
    lying = rows.columns[1].tolist()
    bucket_of = dict(zip(lying, np.repeat(np.arange(len(rows.buckets)), rows.buckets).tolist(), strict=True))
    stretches = []
    for turn in (0, 1):
        labels = sum(passed(rows, turn), [])
        stretches.append(
            [{bucket_of[label] for label in labels[at : at + 100]} for at in range(0, count, 100)]
        )

    assert len(rows.buckets) == count * MIXED // fit
    for stretch in stretches:
        assert max(map(len, stretch)) <= 2 * MIXED
        assert min(map(len, stretch)) > 1
    assert stretches[0][0] != stretches[1][0]


def test_the_buckets_that_come_next_are_brought_into_memory_ahead(folder):
    """The buckets to be read next are announced, none at the end, and reading them changes nothing."""
    rows = rows_of(np.arange(4_000), folder, 3, memory=500 * INDEX_BYTES)
    order = BatchPlan((rows.count,), 0, 40, 1, False, True, 7).order(0, rows.buckets)
    bucket_of = np.repeat(np.arange(len(rows.buckets)), rows.buckets)
    read, others = [], set(threading.enumerate())
    for place in range(rows.count):
        row = order[place : place + 1]
        rows.expect(order.upcoming)
        read.append((sorted(order.upcoming.tolist()), int(bucket_of[row[0]])))
    for thread in set(threading.enumerate()) - others:
        thread.join()
    mixes = [(ahead, {bucket for _, bucket in group}) for ahead, group in groupby(read, itemgetter(0))]

    assert len(mixes) == -(-len(rows.buckets) // MIXED)
    assert [ahead for ahead, _ in mixes] == [*(sorted(found) for _, found in mixes[1:]), []]
    assert [*range(4_000)] == sorted(sum(passed(rows, 1), []))


def test_rows_in_the_order_of_their_labels_are_mixed_well(folder):
    """Each batch of 100 has about as many rows of each half of the labels as random choice gives."""
    count = 20_000
    rows = rows_of(np.arange(count), folder, 3, memory=1_000 * INDEX_BYTES)
    halves = [np.mean(np.array(labels) < count // 2) for labels in passed(rows, 0, batch_size=100)]

    assert 0.05 == pytest.approx(np.std(halves), abs=0.01)


def test_without_a_shuffle_a_few_rows_are_as_they_were_and_many_lie_in_their_order(folder):
    """Without a shuffle rows keep the order of their keys; batches of adjacent rows are views of the file."""
    for keys in (np.arange(5_000), np.random.default_rng(0).permutation(5_000)):
        rows = rows_of(keys, folder, None, memory=100 * INDEX_BYTES)

        assert [*range(5_000)] == sum(passed(rows, 0, shuffle=False), [])
    rows = rows_of(np.arange(5_000), folder, None, memory=100 * INDEX_BYTES)
    batch = rows.batch(np.arange(64, 128))

    assert np.shares_memory(batch.x, rows.columns[0])
    assert not batch.x.flags.writeable


def test_parts_lie_apart_and_partitions_without_rows_are_counted(folder):
    """Validation rows are stored apart from training rows, and blocks of empty partitions are counted."""
    file = SpillFile(SCHEMA, str(folder), 3)
    none = Block(np.zeros(0, np.uint64), EMPTY, ())
    keys = scramble(np.arange(30, dtype=np.uint64), 1)
    file.extend([none, *blocks(keys[:20]), *blocks(keys[20:], part=VALIDATION), none])
    training, validation = file.rows(TRAINING), file.rows(VALIDATION)

    assert 2 == file.empty
    assert np.sort(keys[:20]).astype(np.int64).tolist() == training.batch(np.arange(20)).y.tolist()
    assert np.sort(keys[20:]).astype(np.int64).tolist() == validation.batch(np.arange(10)).y.tolist()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("named", [False, True])
def test_validation_rows_are_stored_in_a_dtype_of_their_own(folder, named):
    """Validation rows are stored and read in the dtypes that the schema has for them."""
    schema = replace(SCHEMA, held_dtypes=("float32", "float32"))
    settings = {"folder": str(folder)} if named else {}
    file, labels = SpillFile(schema, str(folder), **settings), np.array([0.5, 2.0], np.float32)
    for part, dtype in ((TRAINING, "int64"), (VALIDATION, "float32")):
        columns = np.zeros((2, 3), np.float32), labels.astype(dtype)
        file.extend([Block(np.arange(2, dtype=np.uint64), part, columns)])
    if named:
        file.save()
        file = SpillFile(schema, str(folder), **settings)
        assert file.load()

    assert [0, 2] == file.rows(TRAINING).batch(np.arange(2)).y.tolist()
    assert [0.5, 2.0] == file.rows(VALIDATION).batch(np.arange(2)).y.tolist()


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@pytest.mark.parametrize(
    ("labels", "one"),
    [
        ([0, 0, 0], True),
        ([0, 0, 1], False),
        ([[0, 1], [0, 1], [0, 1]], True),
        ([[0, 1], [0, 1], [1, 0]], False),
        ([0], False),
    ],
)
def test_one_class_is_told(folder, labels, one, dtype):
    """Data with a single class is detected from all labels: whole numbers of any dtype, or vectors."""
    columns = np.zeros((len(labels), 3), np.float32), np.array(labels, dtype)
    label = Column("y", columns[1].shape[1:], dtype)
    file = SpillFile(Schema((SCHEMA.columns[0], label), (0, 1)), str(folder))
    file.extend([Block(np.arange(len(labels), dtype=np.uint64), TRAINING, columns)])

    assert one == file.rows(TRAINING).one_class()


@pytest.mark.parametrize("label", [0.5, float("nan")])
def test_numbers_that_are_no_classes_are_not_one_class(folder, label):
    """Equal labels that are not whole numbers are not reported as one class."""
    file = SpillFile(Schema((SCHEMA.columns[0], Column("y", (), "float32")), (0, 1)), str(folder))
    columns = np.zeros((3, 3), np.float32), np.full(3, label, np.float32)
    file.extend([Block(np.arange(3, dtype=np.uint64), TRAINING, columns)])

    assert not file.rows(TRAINING).one_class()


LIMITED = """
import re, resource, sys
import numpy as np
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.blocks import TRAINING, Block
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.spill import SpillFile

width, size, count = int(sys.argv[1]), int(sys.argv[2]), 100
keys = iter(np.array_split(np.random.default_rng(0).permutation(size * count).astype(np.uint64), count))
plan = BatchPlan((size * count, size), 0, 1024, 1, True, True, 7)
held = 1024 * int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20),) * 2)

schema = Schema((Column("x", (width,), "float32"), Column("y", (), "int32")), (0, 1))
file = SpillFile(schema, sys.argv[3], 3, memory=16 << 20)
file.extend(
    Block(some, TRAINING, (np.ones((size, width), np.float32), some.astype(np.int32))) for some in keys
)
del keys
rows, seen = file.rows(TRAINING), 0
order = plan.order(0, rows.buckets)
for span in (span for index in range(plan.windows) for span in plan.spans(0, index)):
    seen += len(rows.batch(order[span.start : span.stop]).y)
print(seen == rows.count, rows.one_class())
"""


@pytest.mark.one_case
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")
@pytest.mark.parametrize(("width", "size"), [(1, 40_000), (1_000, 1_000)])
def test_memory_does_not_grow_with_the_rows(folder, width, size):
    """A pass over 400 MB of wide rows, or over millions of narrow ones, takes 64 MB beside mapped files."""
    arguments = [sys.executable, "-c", LIMITED, str(width), str(size), str(folder)]
    run = subprocess.run(arguments, capture_output=True, text=True)

    assert "True False" == run.stdout.strip(), run.stderr[-2000:]

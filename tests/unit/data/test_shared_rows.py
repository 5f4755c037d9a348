"""Rows that processes share are stored once, and each process reads the same rows."""

import contextlib
import multiprocessing
import os
import re

import numpy as np
import pytest
from failing import Failing, failures_at

from sparkdl.data import shared_rows, spill
from sparkdl.data.blocks import TRAINING, VALIDATION, Block
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.data.sparse import SparseRows

SCHEMA = Schema(
    (Column("x", (3,), "float32"), Column("s", (4,), "float32", sparse=1), Column("y", (), "int64")),
    (0, 1, 2),
)

UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "local_directory", lambda: str(tmp_path))
    return tmp_path


def blocks(count=50):
    """Return a block of training rows and one of validation rows."""
    for part in (TRAINING, VALIDATION):
        keys = np.arange(count, dtype=np.uint64)
        sparse = SparseRows.of([([row % 4], [float(row)]) for row in range(count)], (4,), "float32")
        x = np.arange(3 * count, dtype=np.float32).reshape(count, 3) + part
        yield Block(keys, part, (x, sparse, np.arange(count)))


def stored(log=None):
    def store(rows):
        if log is not None:
            with open(log, "a") as file:
                file.write("stored\n")
        rows.extend(blocks())

    return store


def test_the_second_reader_stores_nothing(directory):
    """The rows, their order and their fingerprint are those of a file that is not shared."""
    own = spill.SpillFile(SCHEMA, str(directory), 3)
    own.extend(blocks())
    log = directory / "log"
    first, second = (shared_rows.shared("a-0", SCHEMA, 3, stored(log)) for _ in range(2))

    assert ["stored"] == log.read_text().split()
    assert own.fingerprint == first.fingerprint == second.fingerprint
    for part in (TRAINING, VALIDATION):
        expected = own.rows(part)
        for found in (first.rows(part), second.rows(part)):
            assert 50 == found.count
            np.testing.assert_array_equal(expected.columns[0], found.columns[0])
            np.testing.assert_array_equal(expected.columns[1][7:9].toarray(), found.columns[1][7:9].toarray())
            np.testing.assert_array_equal(expected.columns[2], found.columns[2])


def test_rows_of_another_name_are_stored_apart(directory):
    """Rows of different names are stored separately; all rows of a search are deleted together."""
    shared_rows.shared("a-0", SCHEMA, 3, stored())
    shared_rows.shared("b-0", SCHEMA, 3, stored())
    shared_rows.forget_in_task("a", [1])

    assert ["sparkdl-rows-b-0"] == sorted(each.name for each in directory.iterdir())


def test_rows_whose_writer_failed_are_stored_again(directory):
    """If the first reader fails while it stores rows, the next reader stores all rows again."""

    def fail(rows):
        rows.extend([next(blocks(20))])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        shared_rows.shared("a-0", SCHEMA, 3, fail)

    assert 50 == shared_rows.shared("a-0", SCHEMA, 3, stored()).count(TRAINING)


# Where one of several files cannot be opened or mapped, Python closes the others.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)
def test_whatever_call_fails_the_rows_are_stored_whole_or_not_at_all(directory):
    """After any failed call, the next reader gets all rows."""

    def use(name):
        """Let two readers use the rows; return the rows that they get."""
        return [
            (rows.fingerprint, rows.rows(TRAINING).columns[0].tolist())
            for rows in (shared_rows.shared(name, SCHEMA, 3, stored()) for _ in range(2))
        ]

    expected = use("whole")
    with Failing() as watched:
        use("watched")
    cases = [
        (site, kind, number)
        for site, count in watched.sites.items()
        if re.match(r"sparkdl/data/(shared_rows|spill)", site)
        for kind in failures_at(site)
        if kind != "SIGINT"
        for number in {0, count - 1}
    ]
    for index, case in enumerate(cases):
        with Failing(*case) as failing, contextlib.suppress(OSError, MemoryError):
            use(f"rows-{index}")
        assert failing.failed, case
        assert expected == use(f"rows-{index}"), case
    assert len(cases) > 50


def read(directory, log, queue):
    spill.local_directory = lambda: directory
    queue.put(shared_rows.shared("a-0", SCHEMA, 3, stored(log)).fingerprint)


def test_processes_wait_for_the_one_that_stores(directory):
    """Of several processes that start together, one stores the rows, and all read the same rows."""
    context, log = multiprocessing.get_context("spawn"), str(directory / "log")
    queue = context.Queue()
    started = [context.Process(target=read, args=(str(directory), log, queue)) for _ in range(3)]
    for each in started:
        each.start()
    found = {queue.get(timeout=60) for _ in started}
    for each in started:
        each.join(30)

    assert 1 == len(found)
    assert ["stored"] == (directory / "log").read_text().split()
    assert os.path.exists(directory / "sparkdl-rows-a-0" / spill.COUNTS)

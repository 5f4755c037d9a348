"""Blocks of arrays that the driver holds: their division among tasks, their records, and the server."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import array_blocks
from sparkdl.data.array_blocks import ArrayBlocks
from sparkdl.data.blocks import TRAINING, VALIDATION
from sparkdl.data.sparse import SparseRows, TextRows
from sparkdl.errors import RefusedError
from sparkdl.server.http_app import add_rows, make_plain_app
from sparkdl.server.http_server import serve
from sparkdl.transport.client import Connection
from sparkdl.transport.exchange import Endpoint
from sparkdl.worker.task_rows import DealtRows, ServedRows

TOKEN = "secret"


def columns_of(count):
    """Return one column of each kind with this number of rows."""
    numbers = np.arange(6 * count, dtype=np.float32).reshape(count, 2, 3)
    return [
        numbers,
        (numbers[:, 0, 0] > 3),
        numbers.astype(np.uint8)[:, :, :1],
        numbers.reshape(count, 6)[:, ::2],
        np.empty((count, 0), np.float64),
        SparseRows.of_array(numbers % 3, (2, 3), "float32"),
        TextRows.of_texts([b"%d" % index for index in range(count)], ()),
        TextRows.of_texts([b"a" * (index % 4) for index in range(2 * count)], (2,)),
    ]


def dense(column):
    return column.toarray() if isinstance(column, SparseRows) else column


def require_equal(expected, block):
    assert len(expected) == len(block.columns)
    for one, other in zip(expected, block.columns, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(dense(one), dense(other))


@given(st.integers(0, 9), st.integers(0, 12), st.integers(1, 5))
def test_every_kind_of_column_comes_back_as_it_was(start, count, size):
    """Blocks have the chosen rows of each column, bit for bit, and their keys, in order."""
    columns, stop = columns_of(20), min(20, start + count)
    blocks = ArrayBlocks(2)
    blocks.add_range(1, columns, start, stop, size=size)
    assert (0, -(-(stop - start) // size)) == blocks.counts

    for index in range(blocks.counts[1]):
        block = array_blocks.decode(b"".join(array_blocks.encode(blocks.block(1, index))))
        first = start + index * size
        rows = slice(first, min(stop, first + size))
        assert TRAINING == block.part
        np.testing.assert_array_equal(np.arange(20, dtype=np.uint64)[rows], block.keys)
        require_equal([column[rows] for column in columns], block)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'["float32"', b'["float33"'),  # of an array
        (b'["float32", [2, 3], {"', b'["float33", [2, 3], {"'),  # of sparse rows
        (b'["float32", [2, 3], {"', b'["f4,(   ", [2, 3], {"'),
        (b'["string", []', b'["string", 77'),
    ],
)
def test_what_is_no_block_is_refused(old, new):
    """A record with an unknown dtype, or with another form, raises ValueError."""
    blocks = ArrayBlocks(1)
    blocks.add_range(0, columns_of(4), 0, 4, size=4)
    data = b"".join(array_blocks.encode(blocks.block(0, 0)))
    assert old in data

    with pytest.raises(ValueError, match="Expected .*; got other data"):
        array_blocks.decode(data.replace(old, new, 1))


@pytest.fixture
def endpoint():
    """An endpoint that serves rows 7, 2, 5, 0 to task 0, in blocks of three, and row 1 to task 1."""
    blocks = ArrayBlocks(2)
    blocks.add(0, columns_of(8), np.array([7, 2, 5, 0]), part=TRAINING, size=3)
    blocks.add(1, columns_of(8), np.array([1]), part=VALIDATION, size=3)
    with serve(make_plain_app(TOKEN, partial(add_rows, rows=blocks)), "127.0.0.1", 0, 2) as port:
        yield Endpoint("127.0.0.1", port, TOKEN, bytes(16))


def test_tasks_get_their_rows_from_the_endpoint(endpoint):
    """A task gets its own rows, in their order, and first the rows that Spark dealt to it."""
    rows = ServedRows((2, 1))
    mine, other = (list(rows.blocks(range(1), task, endpoint)) for task in (0, 1))

    assert [[0, 1, 2], [3]] == [block.keys.tolist() for block in mine]
    require_equal([column[np.array([7, 2, 5])] for column in columns_of(8)], mine[0])
    require_equal([column[np.array([0])] for column in columns_of(8)], mine[1])
    assert [(VALIDATION, [0])] == [(block.part, block.keys.tolist()) for block in other]

    dealt = ServedRows((2, 1), DealtRows()).blocks([(1, mine[0])], 1, endpoint)
    assert [3, 1] == [len(block.keys) for block in dealt]


def test_one_connection_carries_all_blocks(endpoint):
    """The endpoint leaves the connection open after a block, so that no request is sent twice."""
    connection = Connection(endpoint, 3)
    for _ in range(5):
        connection.get("/v1/rows/0/1")
    connection.close()

    assert 0 == connection.retried


@pytest.mark.parametrize(
    "path", ["/v1/rows/0/2", "/v1/rows/2/0", "/v1/rows/0/-1", "/v1/rows/0/x", "/v1/rows/0"]
)
def test_rows_that_there_are_not_are_refused(endpoint, path):
    """A task or a block that does not exist is answered with 404."""
    connection = Connection(endpoint, 0)
    with pytest.raises(RefusedError) as refused:
        connection.get(path)
    connection.close()

    assert 404 == refused.value.status

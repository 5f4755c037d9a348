"""What is wrong in a batch of Arrow columns is found, and the row named."""

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.errors import DataError
from sparkdl.frames import KEY, PART, blocks_of_batches
from sparkdl.schema import Column

SECOND = 1 << 33  # where the ids of a DataFrame's second partition begin


def blocks(values, shape, kind):
    count = len(values)
    columns = {
        "c0": pa.array(values, kind),
        KEY: pa.array(np.arange(SECOND, SECOND + count)),
        PART: pa.array(np.zeros(count, np.int32)),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    return list(blocks_of_batches([batch], (Column("picture", shape, "float32"),), None))


NUMBERS, LISTS = pa.float32(), pa.list_(pa.float32())
NESTED = pa.list_(LISTS)
GOOD = [
    ([1, 2, 3], (), NUMBERS),
    ([[1, 2], [3, 4], [5, 6]], (2,), LISTS),
    ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], (2, 2), NESTED),
    ([[1, 2, 3, 4], [5, 6, 7, 8]], (2, 2), LISTS),
    ([], (2,), LISTS),
]
BAD = [
    ([1, None, 3], (), NUMBERS, "row 1 of partition 1 is null or has one"),
    ([[1, 2], [3, 4], None], (2,), LISTS, "row 2 of partition 1 is null or has one"),
    ([[1, 2], [3, None], [5, 6]], (2,), LISTS, "row 1 of partition 1 is null or has one"),
    ([[1, 2], [], [5, 6]], (2,), LISTS, r"shape \(2,\), 2 values; row 1 of partition 1 has 0\."),
    ([[1, 2], [3, 4], [5, 6, 7]], (2,), LISTS, "row 2 of partition 1 has 3."),
    ([[[1, 2], [3, 4]], [[5, 6], [7]]], (2, 2), NESTED, "4 values; row 1 of partition 1 has 3."),
    ([[[1, 2], [3, 4]], [[5, 6], None]], (2, 2), NESTED, "row 1 of partition 1 is null or has one"),
    ([[[1, 2], [3, None]], [[5, 6], [7, 8]]], (2, 2), NESTED, "row 0 of partition 1 is null or has one"),
]


@pytest.mark.parametrize(("values", "shape", "kind"), GOOD)
def test_columns_become_arrays(values, shape, kind):
    """Numbers, lists and lists of lists have the values and the shape that the model takes."""
    array = np.concatenate(
        [np.empty((0, *shape)), *(block.columns[0] for block in blocks(values, shape, kind))]
    )

    np.testing.assert_array_equal(np.asarray(values, "float32").reshape(len(values), *shape), array)


@pytest.mark.parametrize(("values", "shape", "kind", "message"), BAD)
def test_a_row_that_does_not_fit_is_named(values, shape, kind, message):
    """A null at any depth, or too few or many values, is found in its row."""
    with pytest.raises(DataError, match=message):
        blocks(values, shape, kind)

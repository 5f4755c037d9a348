"""What the client of a run knows whose endpoint is in worker 0 travels as bytes, and is not unpickled."""

import numpy as np

from sparkdl.hosted import pack, unpack


def test_a_record_comes_out_as_it_went_in():
    """Arrays keep their type, bytes are bytes, and what is in a record twice travels once."""
    weights = np.arange(1000, dtype="float32")
    value = {
        "a": weights,
        "b": [weights, b"state", b""],
        "c": {"x": None, "y": 1.5},
        "d": np.zeros(0, "int64"),
    }

    data = pack(value)
    found = unpack(data)

    assert len(data) < 1.2 * weights.nbytes
    for array in (found["a"], found["b"][0]):
        np.testing.assert_array_equal(weights, array, strict=True)
    assert ([b"state", b""], value["c"]) == (found["b"][1:], found["c"])
    assert (0, np.int64) == (len(found["d"]), found["d"].dtype)

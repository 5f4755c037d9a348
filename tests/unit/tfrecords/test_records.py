"""TFRecord files are read as written, by sparkdl and TensorFlow; corrupt files are detected."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import DataError
from sparkdl.tfrecords.records import Record, parse, read, serialize, write

VALUES = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.floats(width=32, allow_nan=False)),
    st.lists(st.binary(max_size=20)),
)
FEATURES = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def file_of(*data):
    file = io.BytesIO()
    write(file, data)
    return file.getvalue()


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_records_are_read_as_they_were_written(data):
    """Records are read as they were written, also empty ones."""
    assert data == list(read(io.BytesIO(file_of(*data)), "file"))


@given(FEATURES)
def test_an_example_is_parsed_as_it_was_serialized(features):
    """Integers, 32-bit floats, bytes and empty features of an Example keep their values."""
    assert Record(features) == parse(serialize(Record(features)), "record", sequence=False)


@given(FEATURES, st.dictionaries(st.text(max_size=5), st.lists(VALUES, max_size=3), max_size=3))
def test_a_sequence_is_parsed_as_it_was_serialized(features, lists):
    """The context and the nested lists of a SequenceExample keep their values."""
    assert Record(features, lists) == parse(serialize(Record(features, lists)), "record", sequence=True)


@given(st.data())
def test_what_is_torn_or_altered_is_found(data):
    """A file truncated within a record, or with any bit flipped, is detected."""
    whole = file_of(b"first", b"second record")
    snapshot = data.draw(st.integers(1, len(whole) - 1).filter(lambda at: at != len(file_of(b"first"))))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    turned = bytearray(whole)
    turned[bit // 8] ^= 1 << bit % 8

    for broken in (whole[:snapshot], bytes(turned)):
        with pytest.raises(DataError, match=r"Record \d of file .*(incomplete|damaged)"):
            list(read(io.BytesIO(broken), "file"))


def test_a_feature_of_several_kinds_is_refused():
    """A feature with several kinds, and bytes that are not an Example, are refused."""
    with pytest.raises(DataError, match="The feature 'a' has values of several kinds"):
        serialize(Record({"a": [1, b"x"]}))
    with pytest.raises(DataError, match="Expected record 1 of f to be a serialized SequenceExample"):
        parse(b"\xff\xff\xff", "record 1 of f", sequence=True)

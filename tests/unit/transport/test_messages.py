"""The encoding of messages: decoding undoes it, and all other bytes are refused."""

from dataclasses import fields
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import WireError
from sparkdl.transport import messages
from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Update

vectors = st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda v: np.array(v, np.float32))
words, longs = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
flags = st.sampled_from(Flag)  # and their combinations
numbers = st.floats(allow_nan=False)
ids = st.binary(min_size=16, max_size=16)
sections = {
    "parameters": vectors,
    "statistics": vectors,
    "metrics": st.binary(max_size=9),
    "state": st.binary(max_size=9),
}
updates = st.builds(
    Update,
    kind=st.sampled_from(Kind),
    flags=flags,
    worker=words,
    sequence=longs,
    epoch=words,
    steps=words,
    base_version=longs,
    rows=longs,
    loss=numbers,
    offset=longs,
    generation=words,
    attempt=longs,
    run=ids,
    layout=ids,
    **sections,
)
replies = st.builds(
    Reply,
    kind=st.sampled_from(Answer),
    flags=flags,
    evaluate=st.integers(-(2**63), 2**63 - 1),
    version=longs,
    progress=numbers,
    learning_rate=numbers,
    waited=numbers,
    merged=numbers,
    offset=longs,
    **sections,
)


def fields_of(message):
    parts = ((field.name, getattr(message, field.name)) for field in fields(message))
    return {name: getattr(value, "tolist", lambda v=value: v)() for name, value in parts}


def through(message, encode, decode):
    header, body = encode(message), b"".join(messages.sections(message))
    return messages.fill(*decode(header), body)


@given(updates)
def test_an_update_comes_back_as_it_was_sent(update):
    """Decoding an update restores every field of its header and every section."""
    assert fields_of(update) == fields_of(through(update, messages.encode_update, messages.decode_update))


@given(replies)
def test_a_reply_comes_back_as_it_was_sent(reply):
    """Decoding a reply restores every field of its header and every section."""
    assert fields_of(reply) == fields_of(through(reply, messages.encode_reply, messages.decode_reply))


def test_who_keeps_statistics_does_not_keep_the_body():
    """Parameters are views of the body; the other sections are copies, which may be kept for long."""
    sent = Update(Kind.REPORT, parameters=np.ones(3, np.float32), statistics=np.ones(2, np.float32))
    body = b"".join(messages.sections(sent))
    came = messages.fill(*messages.decode_update(messages.encode_update(sent)), body)

    held = np.frombuffer(body, np.uint8)
    assert np.shares_memory(held, came.parameters)
    assert not np.shares_memory(held, came.statistics)


def test_what_is_not_a_number_travels_too():
    """NaN values, of a loss that exploded or an unchanged learning rate, arrive as NaN."""
    assert np.isnan(
        through(Update(Kind.DELTA, loss=nan), messages.encode_update, messages.decode_update).loss
    )
    assert np.isnan(through(Reply(), messages.encode_reply, messages.decode_reply).learning_rate)


@pytest.mark.parametrize("length", range(messages.UPDATE.size))
def test_a_truncated_update_is_refused(length):
    """A truncated update raises WireError, never struct.error."""
    with pytest.raises(WireError, match=f"of {messages.UPDATE.size} bytes; got {length}."):
        messages.decode_update(messages.encode_update(Update(Kind.DELTA))[:length])


@pytest.mark.parametrize("length", range(messages.REPLY.size))
def test_a_truncated_reply_is_refused(length):
    """A truncated reply raises WireError, never struct.error."""
    with pytest.raises(WireError, match=f"of {messages.REPLY.size} bytes; got {length}."):
        messages.decode_reply(messages.encode_reply(Reply())[:length])


@given(updates, st.integers(0, 200))
def test_sections_of_another_length_are_refused(update, length):
    """A body is read completely or refused."""
    header, body = messages.encode_update(update), b"".join(messages.sections(update))
    other = (body + bytes(200))[:length]
    if len(other) == len(body):
        other += b"x"
    with pytest.raises(WireError, match="Expected sections of"):
        messages.fill(*messages.decode_update(header), other)


@given(st.binary(min_size=messages.UPDATE.size, max_size=messages.UPDATE.size))
def test_noise_is_refused(noise):
    """Random bytes raise WireError and nothing else."""
    with pytest.raises(WireError):
        messages.decode_update(noise)
    with pytest.raises(WireError):
        messages.decode_reply(noise[: messages.REPLY.size])


@pytest.mark.parametrize(("place", "value"), [(4, 0), (4, 99), (7, 4), (7, 128)])
def test_an_unknown_kind_or_flag_is_refused(place, value):
    """A kind or flag of a later version is refused."""
    header = bytearray(messages.encode_update(Update(Kind.DELTA)))
    header[place] = value
    with pytest.raises(WireError, match="of a known kind"):
        messages.decode_update(bytes(header))


def test_the_bytes_of_an_update_are_these():
    """The bytes of an update are fixed, so that the format does not change unnoticed."""
    update = Update(
        Kind.REPORT,
        worker=2,
        sequence=3,
        epoch=4,
        steps=5,
        base_version=6,
        rows=7,
        loss=0.5,
        normalizer=0.25,
        flags=Flag.STOP,
        offset=8,
        parameters=np.array([1], np.float32),
        statistics=np.array([2, 3], np.float32),
        metrics=b"m",
        state=b"st",
        generation=9,
        attempt=10,
        run=b"r" * 16,
        layout=b"l" * 16,
    )
    expected = (
        "53444c55 0300 0200 09000000 02000000 04000000 05000000"
        "0a00000000000000 0300000000000000 0600000000000000 0700000000000000 000000000000e03f"
        "000000000000d03f"
        "0800000000000000 0100000000000000 0200000000000000 0100000000000000 0200000000000000"
    )

    assert bytes.fromhex(expected) + b"r" * 16 + b"l" * 16 == messages.encode_update(update)
    assert bytes.fromhex("0000803f 00000040 00004040") + b"mst" == b"".join(messages.sections(update))


def test_the_bytes_of_a_reply_are_these():
    """The bytes of a reply are fixed, so that the format does not change unnoticed."""
    reply = Reply(
        Answer.MEAN, Flag.STOP, version=3, round=7, progress=1.5, learning_rate=0.5, waited=0.25, merged=0.125
    )
    expected = (
        "53444c52 0100 0200 ffffffffffffffff 0300000000000000 0700000000000000 000000000000f83f"
        "000000000000e03f 000000000000d03f 000000000000c03f" + "00" * 40
    )

    assert bytes.fromhex(expected) == messages.encode_reply(reply)

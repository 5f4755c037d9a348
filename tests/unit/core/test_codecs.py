"""Codecs: sizes, errors and exactness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparkdl.core.codecs import BLOCK, CODECS
from sparkdl.errors import WireError

codecs = st.sampled_from(list(CODECS.values()))
numbers = st.floats(-1e4, 1e4, width=32)
vectors = arrays(np.float32, st.integers(0, 3000), elements=numbers)
places = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
PRECISION = {
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "int8": 1 / 127,
}  # of a number, or of the largest in its block


@given(codecs, vectors, places)
def test_the_error_is_within_the_precision(codec, vector, place):
    """Each decoded number is within the precision of the codec, and zeros stay zeros."""
    decoded = codec.decode(codec.encode(vector, place), len(vector))

    whole = np.pad(np.abs(vector), (0, -len(vector) % BLOCK)).reshape(-1, BLOCK)
    largest = np.repeat(whole.max(axis=1, initial=0), BLOCK)[: len(vector)]
    scale = largest if codec.name == "int8" else np.abs(vector)
    assert decoded.dtype == np.float32
    assert (np.abs(decoded - vector) <= PRECISION[codec.name] * scale * 1.001 + 2.0**-24).all()
    assert not decoded[vector == 0].any()


@given(codecs, vectors, places)
def test_the_same_place_gives_the_same_bits(codec, vector, place):
    """Encoding depends on the vector and its place alone, so a repeated round sends the same bits."""
    np.testing.assert_array_equal(
        codec.encode(vector, place).view(np.uint32), codec.encode(vector.copy(), place).view(np.uint32)
    )


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 1.9), ("fp16", 1.9), ("int8", 3.5)])
def test_an_encoded_vector_is_smaller(name, ratio):
    """The words of a large vector take at most this fraction of its bytes."""
    vector = np.ones(100_000, np.float32)
    words = CODECS[name].encode(vector, (0, 0))

    assert len(words) == CODECS[name].num_words(len(vector))
    assert len(vector) / len(words) >= ratio


def test_stochastic_rounding_has_no_bias():
    """The mean of many encodings of one vector approaches the vector, closer than one encoding can be."""
    vector = np.random.default_rng(0).normal(size=BLOCK).astype(np.float32)
    codec = CODECS["int8"]
    decoded = [codec.decode(codec.encode(vector, (0, number)), BLOCK) for number in range(2000)]
    step = np.abs(vector).max() / 127

    assert np.abs(np.mean(decoded, axis=0) - vector).max() < step / 20
    assert np.abs(decoded[0] - vector).max() > step / 2


@given(codecs, st.integers(1, 3000), st.data())
def test_numbers_that_are_not_finite_stay_so(codec, size, data):
    """A vector with NaN or Inf is decoded to one that is not finite, so that it is not merged."""
    vector = np.ones(size, np.float32)
    vector[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))

    assert not np.isfinite(codec.decode(codec.encode(vector, (1, 2)), size)).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_largest_number_that_stays_finite_is_known(name):
    """A number just below the limit of a codec stays finite, and the limit itself becomes infinite."""
    codec, limit = CODECS[name], np.float32(CODECS[name].below)
    vector = np.array([np.nextafter(limit, np.float32(0)), limit], np.float32)

    assert np.isfinite(codec.decode(codec.encode(vector, (0, 0)), 2)).tolist() == [True, False]


@given(codecs, vectors)
def test_words_of_another_vector_are_refused(codec, vector):
    """A vector of another size is refused, by its length or by its first word."""
    words = codec.encode(vector, (0, 0))
    with pytest.raises(WireError, match="Expected a vector of"):
        codec.decode(words, len(vector) + 1)
    with pytest.raises(WireError, match="Expected a vector of"):
        codec.decode(words[:-1], len(vector))

"""Gradients with slices: their encoding, their mean, and their aggregation at the endpoint."""

from dataclasses import replace

import numpy as np
import pytest
from coordinators import begun, coordinator_of, give, push, state_of, status_of, together, update_of, vector
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.codecs import CODECS
from sparkdl.core.reduction import Mean
from sparkdl.core.sparse_gradients import (
    SliceMean,
    Slices,
    Table,
    compressed,
    decode,
    decompressed,
    densified,
    encode,
    most_words,
    tables_of,
)
from sparkdl.core.vectors import Layout
from sparkdl.errors import WireError
from sparkdl.server.aggregation import GradientRounds, Hybrid, limits
from sparkdl.transport.messages import Flag, Reply

TABLES = (Table(3, 3), Table(1, 0), Table(12, 4), Table(20, 5))  # a bias, a scalar, two embeddings
SIZE = sum(table.size for table in TABLES)
numbers = st.integers(-8, 8).map(float)  # with exact sums


@st.composite
def gradients(draw, tables=TABLES):
    """Draw a gradient in which any variables except those of rank 0 have slices."""
    with_rows = [index for index, table in enumerate(tables) if table.rows]
    rest, lookups = [], {}
    sliced = draw(st.sets(st.sampled_from(with_rows)) if with_rows else st.just(set()))
    for index, table in enumerate(tables):
        if index in sliced:
            rows = draw(st.lists(st.integers(0, table.rows - 1), max_size=6))
            count = len(rows) * table.width
            values = draw(st.lists(numbers, min_size=count, max_size=count))
            values = np.array(values, np.float32).reshape(len(rows), table.width)
            lookups[index] = np.array(rows, np.int32), values
        else:
            rest += draw(st.lists(numbers, min_size=table.size, max_size=table.size))
    return Slices(np.array(rest, np.float32), lookups)


def plain(slices):
    """Return a gradient as lists, for comparison."""
    lookups = {index: (rows.tolist(), values.tolist()) for index, (rows, values) in slices.lookups.items()}
    return slices.rest.tolist(), lookups


def dense(slices):
    return densified(slices, TABLES).rest


def added_up(slices):
    """Return the dense gradient, by one addition per slice."""
    parts, start = [], 0
    for index, table in enumerate(TABLES):
        if index in slices.lookups:
            whole = np.zeros((table.rows, table.width), np.float32)
            for row, value in zip(*slices.lookups[index], strict=True):
                whole[row] += value
            parts.append(whole.reshape(-1))
        else:
            parts.append(slices.rest[start : start + table.size])
            start += table.size
    return np.concatenate(parts)


def mean_of(contributions):
    """Return the weighted mean of gradients, and True if it has slices."""
    mean = SliceMean(TABLES)
    for slices, weight in contributions:
        if slices.lookups:
            mean.add_encoded(encode(slices), weight)
        else:
            mean.add(slices.rest, weight)
    found = mean.result()
    return (decode(found, TABLES) if mean.sliced else Slices(found, {})), mean.sliced


@given(gradients().filter(lambda slices: slices.lookups))
def test_a_gradient_with_slices_comes_back_as_it_was_encoded(slices):
    """Decoding undoes encoding, with repeated rows in any order."""
    assert plain(decode(encode(slices), TABLES)) == plain(slices)


@given(gradients())
def test_slices_are_added_up_by_row(slices):
    """A dense gradient has at each row the sum of its slices, and 0 at rows without slices."""
    assert added_up(slices).tolist() == dense(slices).tolist()


@given(gradients(), st.sets(st.sampled_from([0, 2, 3])))
def test_some_variables_may_keep_their_slices(slices, keep):
    """A variable made dense does not depend on the other variables that keep their slices."""
    some = densified(slices, TABLES, keep)

    assert some.lookups.keys() == slices.lookups.keys() & keep
    assert dense(some).tolist() == dense(slices).tolist()


WEIGHTS = st.sampled_from([1.0, 2.0, 4.0])


@given(st.lists(st.tuples(gradients(), WEIGHTS), min_size=1, max_size=4))
def test_the_mean_of_slices_is_the_mean_of_dense_gradients(contributions):
    """The mean of slices, added up by row, is the mean of the dense gradients, whichever have slices."""
    expected = Mean()
    for slices, weight in contributions:
        expected.add(dense(slices), weight)
    found, _ = mean_of(contributions)

    np.testing.assert_allclose(dense(found), expected.result(), rtol=1e-5, atol=1e-5)


@given(st.lists(st.tuples(gradients(), WEIGHTS), min_size=1, max_size=4))
def test_a_variable_keeps_slices_that_all_gradients_have(contributions):
    """The mean keeps slices that all gradients have, in the order of workers, without adding them up."""
    found, sliced = mean_of(contributions)
    common = set.intersection(*(set(slices.lookups) for slices, _ in contributions))

    assert found.lookups.keys() == common
    assert sliced == bool(common)
    for index in common:
        rows = [row for slices, _ in contributions for row in slices.lookups[index][0].tolist()]
        assert found.lookups[index][0].tolist() == rows


@given(gradients())
def test_a_lone_gradient_is_its_own_mean(slices):
    """The mean of one worker's slices is identical to them, bit for bit."""
    found, _ = mean_of([(slices, 3.0)])

    assert plain(found) == plain(slices)


@given(st.lists(gradients(tables=(Table(3, 0),)), min_size=1, max_size=3))
def test_dense_gradients_have_the_mean_that_they_always_had(contributions):
    """Without slices, the mean has the bits of the plain mean."""
    expected, found = Mean(), SliceMean((Table(3, 0),))
    for slices in contributions:
        expected.add(slices.rest, 3.0)
        found.add(slices.rest, 3.0)

    assert expected.result().tobytes() == found.result().tobytes()
    assert not found.sliced


def test_tables_are_the_variables_of_a_layout():
    """A table's rows run along the first axis of its variable; a variable of rank 0 is not a table."""
    layout = Layout(((5, 2, 3), (4,), (), (0, 3)), ("float32",) * 4)

    assert [(table.size, table.rows, table.width) for table in tables_of(layout)] == [
        (30, 5, 6),
        (4, 4, 1),
        (1, 0, 0),
        (0, 0, 0),
    ]


GOOD = Slices(
    vector(1, 2, 3, 4, *range(20)), {2: (np.array([3, 0, 3], np.int32), np.ones((3, 3), np.float32))}
)
WORDS = encode(GOOD)  # 24 dense ones, 9 values, 3 rows, (2, 3), 1


def test_the_words_of_a_gradient_are_these():
    """The encoding of a gradient is fixed, so that the format does not change unnoticed."""
    assert WORDS[:33].tolist() == [1, 2, 3, 4, *range(20), *[1] * 9]
    assert WORDS[33:].view(np.int32).tolist() == [3, 0, 3, 2, 3, 1]


def changed(place, value):
    words = WORDS.copy()
    words.view(np.int32)[place] = value
    return words


MALFORMED = {
    "no words": WORDS[:0],
    "one word": WORDS[:1],
    "a word too few": WORDS[1:],
    "a word more": np.append(WORDS[:1], WORDS),
    "no variable": changed(-1, 0),
    "more variables than words": changed(-1, 99),
    "fewer than none": changed(-1, -1),
    "two variables": changed(-1, 2),
    "a variable that is not there": changed(-3, 4),
    "one before the first": changed(-3, -1),
    "a variable without rows": changed(-3, 1),
    "another variable": changed(-3, 3),
    "fewer slices": changed(-2, 2),
    "a negative number of slices": changed(-2, -3),
    "as many as make an overflow": changed(-2, 2**31 - 1),
    "a row beyond the table": changed(33, 4),
    "a row before it": changed(34, -1),
    "a row far beyond it": changed(34, 2**31 - 1),
}


@pytest.mark.parametrize("words", MALFORMED.values(), ids=MALFORMED)
def test_malformed_slices_are_refused(words):
    """Malformed slices raise WireError, whatever is wrong."""
    with pytest.raises(WireError):
        decode(words, TABLES)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12), st.integers(0, len(WORDS)))
def test_noise_is_refused_or_a_gradient(noise, start):
    """Random words at the end raise WireError, or are slices of existing rows."""
    words = np.concatenate([WORDS[:start], np.array(noise, np.int32).view(np.float32)])
    try:
        slices = decode(words, TABLES)
    except WireError:
        return
    assert len(encode(slices)) == len(words)
    assert dense(slices).shape == (SIZE,)


@given(gradients().filter(lambda slices: slices.lookups), st.sampled_from(list(CODECS.values())))
def test_a_codec_rounds_the_numbers_of_slices_and_keeps_their_rows(slices, codec):
    """A compressed gradient has the same rows, and its numbers are those that the codec gives."""
    words, place = encode(slices), (1, 2)
    found = decode(decompressed(compressed(words, codec, place), codec, len(words)), TABLES)
    size = sum(map(len, slices.parts))
    expected = codec.decode(codec.encode(words[:size], place), size)

    assert [(index, rows.tolist()) for index, (rows, _) in found.lookups.items()] == [
        (index, rows.tolist()) for index, (rows, _) in slices.lookups.items()
    ]
    np.testing.assert_array_equal(np.concatenate(found.parts), expected)


def test_compressed_slices_take_fewer_words():
    """A codec shortens the dense numbers and those of the slices; row numbers keep their length."""
    wide = (Table(1 << 12, 1 << 6), Table(1 << 12, 0))
    rows = np.zeros(1 << 5, np.int32)
    words = encode(Slices(np.ones(1 << 12, np.float32), {0: (rows, np.ones((1 << 5, 1 << 6), np.float32))}))
    sizes = {name: len(compressed(words, codec, (0, 0))) for name, codec in CODECS.items()}

    assert decode(words, wide).num_slices == 1 << 5
    assert sizes["bf16"] == sizes["fp16"] == 1 + (6144 + 1) // 2 + (1 << 5) + 3
    assert sizes["int8"] == 1 + 6144 // 1024 + 6144 // 4 + (1 << 5) + 3


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("words", MALFORMED.values(), ids=MALFORMED)
def test_malformed_compressed_slices_are_refused(words, codec):
    """Words that are not compressed slices raise WireError, before memory is allocated for them."""
    with pytest.raises(WireError):
        decode(decompressed(words, codec, len(WORDS)), TABLES)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_compressed_slices_have_a_limit(codec):
    """A gradient that would exceed the limit raises WireError."""
    words = compressed(WORDS, codec, (0, 0))

    assert len(decompressed(words, codec, len(WORDS))) == len(WORDS)
    with pytest.raises(WireError, match=f"at most {len(WORDS) - 1} words"):
        decompressed(words, codec, len(WORDS) - 1)


@given(
    st.sampled_from(list(CODECS.values())),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12),
    st.integers(0, 30),
)
def test_noise_is_refused_or_compressed_slices(codec, noise, start):
    """Random words at the end raise WireError, or are compressed slices within the limit."""
    words = np.concatenate(
        [compressed(WORDS, codec, (0, 0))[:start], np.array(noise, np.int32).view(np.float32)]
    )
    try:
        found = decompressed(words, codec, len(WORDS))
        decode(found, TABLES)
    except WireError:
        return
    assert len(found) <= len(WORDS)


# -- at the endpoint ------------------------------------------------------------------------------


def sliced_coordinator(**options):
    return begun(coordinator_of(size=SIZE, tables=TABLES, **{"workers": 2} | options))


def sliced_of(coordinator, worker, words=WORDS, **fields):
    return update_of(coordinator, worker, words, flags=Flag.SLICES, **fields)


def test_a_round_answers_with_slices():
    """All workers get the same reply, in the order of workers, and each row is counted."""
    coordinator = sliced_coordinator()
    other = replace_rows(GOOD, [1, 2, 1])
    replies = together(
        lambda: give(coordinator, sliced_of(coordinator, 1, encode(other))),
        lambda: give(coordinator, sliced_of(coordinator, 0)),
    )

    assert all(reply.flags & Flag.SLICES for reply in replies)
    first, second = (decode(reply.parameters, TABLES) for reply in replies)
    assert plain(first) == plain(second)
    assert first.lookups[2][0].tolist() == [3, 0, 3, 1, 2, 1]
    assert np.unique(first.lookups[2][1]).tolist() == [0.5]
    assert first.rest.tolist() == GOOD.rest.tolist()
    assert coordinator.summary()["slices"] == 6


def replace_rows(slices, rows):
    return slices._replace(lookups={2: (np.array(rows, np.int32), slices.lookups[2][1])})


def test_a_worker_without_rows_gets_the_slices_of_the_others():
    """A worker with weight 0 gets the slices of the others without dividing by its weight."""
    coordinator = sliced_coordinator()
    replies = together(lambda: push(coordinator, 0), lambda: give(coordinator, sliced_of(coordinator, 1)))

    assert [reply.parameters.tobytes() for reply in replies] == [WORDS.tobytes()] * 2


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_round_of_compressed_slices_answers_with_compressed_slices(codec):
    """The mean of compressed slices is compressed again, with random bits of its round."""
    coordinator = sliced_coordinator(codec=codec)
    flags = Flag.SLICES | Flag.ENCODED
    words = compressed(WORDS, codec, (0, 1))
    sent = [update_of(coordinator, worker, words, flags=flags) for worker in (0, 1)]
    replies = together(*(lambda update=update: give(coordinator, update) for update in sent))
    mean = SliceMean(TABLES)
    for _ in sent:
        mean.add_encoded(decompressed(words, codec, len(WORDS)), 4)

    assert [reply.flags for reply in replies] == [flags] * 2
    expected = compressed(mean.result(), codec, (0, 0)).tobytes()
    assert [reply.parameters.tobytes() for reply in replies] == [expected] * 2
    assert coordinator.summary()["slices"] == 6


@pytest.mark.parametrize("words", [words for words in MALFORMED.values() if len(words)], ids=len)
def test_malformed_compressed_slices_change_nothing(words):
    """Malformed compressed slices change nothing at the endpoint."""
    coordinator = sliced_coordinator(workers=1, codec=CODECS["bf16"])
    before = state_of(coordinator)
    with pytest.raises(WireError):
        give(coordinator, update_of(coordinator, 0, words, flags=Flag.SLICES | Flag.ENCODED))

    assert before == state_of(coordinator)


def test_slices_and_a_dense_gradient_make_a_dense_mean():
    """Slices and a dense gradient have a dense mean: a worker may send the shorter form."""
    coordinator = sliced_coordinator()
    replies = together(
        lambda: give(coordinator, sliced_of(coordinator, 0)),
        lambda: push(coordinator, 1, np.ones(SIZE, np.float32)),
    )

    assert not any(reply.flags & Flag.SLICES for reply in replies)
    assert replies[0].parameters.tolist() == ((dense(GOOD) + 1) / 2).tolist()


def test_slices_that_come_twice_count_once():
    """A repeated update with slices gets the reply and adds nothing."""
    coordinator = sliced_coordinator()
    together(
        lambda: give(coordinator, sliced_of(coordinator, 0)),
        lambda: give(coordinator, sliced_of(coordinator, 1)),
    )
    again = give(coordinator, sliced_of(coordinator, 0))

    assert again.flags == Flag.SLICES | Flag.DUPLICATE
    assert coordinator.summary()["slices"] == 6
    assert coordinator.aggregation.version == 1


@pytest.mark.parametrize("words", [words for words in MALFORMED.values() if len(words)], ids=len)
def test_malformed_slices_change_nothing(words):
    """Malformed slices change nothing, and the worker can then send valid ones."""
    coordinator = sliced_coordinator(workers=1)
    before = state_of(coordinator)
    with pytest.raises(WireError):
        give(coordinator, sliced_of(coordinator, 0, words))

    assert before == state_of(coordinator)
    assert give(coordinator, sliced_of(coordinator, 0)).parameters.tobytes() == WORDS.tobytes()


def test_slices_are_refused_by_the_header_where_there_are_none():
    """The header of slices is refused without tables, with deltas, or beyond the limit of a round."""
    plain_run = begun(coordinator_of(size=SIZE, workers=1))
    deltas = begun(coordinator_of("asynchronous", size=SIZE, workers=1))
    long = np.zeros(most_words(SIZE, 1 << 20) + 1, np.float32)
    many = sliced_coordinator(workers=1)
    many.aggregation.most = most_words(SIZE, 1 << 20)
    refused = [(plain_run, WORDS), (deltas, WORDS), (many, long), (many, WORDS[:0])]

    assert [status_of(lambda s=s, w=w: give(s, sliced_of(s, 0, w, rows=4))) for s, w in refused] == [413] * 4


@pytest.mark.parametrize("place", [0, 24])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_slices_that_are_no_numbers_are_not_merged(place, number):
    """NaN and Inf in dense variables or slices are found; the update counts as one without rows."""
    words = WORDS.copy()
    words[place] = number
    coordinator = sliced_coordinator()
    replies = together(
        lambda: give(coordinator, sliced_of(coordinator, 0, words)),
        lambda: give(coordinator, sliced_of(coordinator, 1)),
    )

    assert [bool(reply.flags & Flag.NOT_FINITE) for reply in replies] == [True, False]
    assert replies[0].parameters.tobytes() == WORDS.tobytes()


def test_the_gradient_of_a_scaled_loss_may_be_infinite():
    """Infinite gradients of a scaled loss are merged, so that all replicas see them in the mean."""
    words = WORDS.copy()
    words[24] = np.inf
    coordinator = sliced_coordinator(workers=1, scaled=True)

    assert give(coordinator, sliced_of(coordinator, 0, words)).parameters.tobytes() == words.tobytes()


def test_a_late_worker_gets_the_slices_that_it_missed(monkeypatch):
    """Means with slices are kept for late workers like others: as many as fit, and at least four."""
    monkeypatch.setattr(limits, "KEPT_BYTES", 4 * len(WORDS) * 5)
    rounds = GradientRounds(np.zeros(2, np.float32), vector(), 2, Hybrid(1), TABLES)
    rounds.generation = 1
    before = rounds.depth
    update = sliced_of(begun(coordinator_of(workers=2)), 0)
    for sequence in range(3):
        sent = replace(update, sequence=sequence)
        rounds.push(sent, lambda sent=sent: sent, lambda counts: Reply())
    late = replace(update, worker=1, sequence=1, rows=0, parameters=vector(), flags=Flag.NONE)
    reply = rounds.push(late, lambda: late, lambda counts: Reply())

    assert before > 5 == rounds.depth
    assert reply.flags & Flag.SLICES
    assert reply.round == 3
    assert reply.parameters.tobytes() == WORDS.tobytes()

"""The ground floor: batches, bytes, sums and the book of a run, as laws."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl import wire
from sparkdl.batches import Plan, even_split, ranks
from sparkdl.errors import ConfigError, RefusedError, WireError
from sparkdl.merging import Locked, Striped, make_merging
from sparkdl.rules import Average, DynSGD, Merge, Sum, choose_rule
from sparkdl.store import ParameterStore, RunShape
from sparkdl.wire import Answer, Flag, Kind, Reply, Sections, Update

row_counts = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)
EMPTY = np.zeros(0, np.float32)


@given(row_counts)
def test_ranks_put_every_row_in_one_place(rows):
    """The rows of all workers together rank from 0 to the last, each once."""
    together = sorted(int(rank) for worker in range(len(rows)) for rank in ranks(rows, worker))

    assert list(range(sum(rows))) == together


@given(row_counts, st.integers(1, 40))
def test_shares_of_a_batch_add_up_to_it(rows, batch_size):
    """Every joint batch but the last has batch_size rows, however uneven the workers are."""
    plans = [Plan(rows, worker, batch_size, 1, True, False, 0) for worker in range(len(rows))]
    shares = sum(np.diff(plan.bounds) for plan in plans)

    assert all(shares[:-1] == batch_size)
    assert sum(rows) == shares.sum()


@given(row_counts, st.integers(1, 40), st.none() | st.integers(1, 5))
def test_windows_hold_each_local_batch_once(rows, batch_size, window):
    """A worker's windows cover its batches; one that has fewer joins the rest without rows."""
    for worker, count in enumerate(rows):
        plan = Plan(rows, worker, batch_size, window, False, False, 0)
        spans = [span for index in range(plan.windows) for span in plan.spans(index)]

        assert count == sum(stop - start for start, stop in spans)


@given(row_counts, st.integers(1, 40))
def test_progress_of_an_epoch_is_that_of_one_process(rows, batch_size):
    """Local steps of all workers add up to the updates of one process."""
    plans = [Plan(rows, worker, batch_size, None, False, False, 0) for worker in range(len(rows))]
    total = sum(plan.num_batches * plan.progress_per_step for plan in plans)

    assert plans[0].steps == pytest.approx(total)


floats = st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda v: np.array(v, np.float32))


@given(st.sampled_from(Kind), floats, floats, st.binary(max_size=9), st.integers(0, 2**64 - 1))
def test_an_update_comes_back_as_it_was_sent(kind, parameters, statistics, state, sequence):
    """Decoding undoes encoding, header and sections."""
    sent = Update(kind, sequence=sequence, parameters=parameters, statistics=statistics, state=state)
    update, lengths = wire.decode_update(wire.encode_update(sent))
    body = b"".join(wire.sections(sent))
    got = wire.fill(update, lengths, body)

    assert (kind, sequence, state) == (got.kind, got.sequence, got.state)
    np.testing.assert_array_equal(parameters, got.parameters)
    np.testing.assert_array_equal(statistics, got.statistics)


@pytest.mark.parametrize("length", [0, 1, wire.UPDATE.size - 1, wire.UPDATE.size + 1])
def test_a_header_of_another_length_is_refused(length):
    """A truncated header is an error with a name, not one of struct's."""
    with pytest.raises(WireError):
        wire.decode_update(bytes(length))


def test_the_bytes_of_a_reply_are_these():
    """The format does not change unnoticed."""
    header = wire.encode_reply(Reply(Answer.MEAN, Flag.STOP, version=3, progress=1.5, learning_rate=0.5))

    assert (
        header.hex()
        == "53444c5201000200ffffffffffffffff0300000000000000000000000000f83f000000000000e03f" + "00" * 40
    )


def test_the_rules_are_the_literatures():
    """Average c += delta / K, sum c += delta, DynSGD c += delta / (staleness + 1)."""
    delta = np.array([4.0, -8.0], np.float32)

    np.testing.assert_array_equal([2, -4], Average().update(delta, None, Merge(0, 2))[0])
    np.testing.assert_array_equal([4, -8], Sum().update(delta, None, Merge(3, 2))[0])
    np.testing.assert_array_equal([1, -2], DynSGD().update(delta, None, Merge(3, 2))[0])
    np.testing.assert_array_equal([4, -8], DynSGD().update(delta, None, Merge(0, 2))[0])


def test_a_rule_that_means_nothing_in_a_mode_is_refused():
    """DynSGD needs a staleness, which rounds have not."""
    with pytest.raises(ConfigError, match="dynsgd"):
        choose_rule("dynsgd", synchronous=True)


def make_store(mode="synchronous", workers=3, size=5, joint=True, rows=10):
    plan = Plan((), 0, 4, 1, joint, False, 0)
    shape = RunShape(run=b"r" * 16, layout=b"l" * 16, num_workers=workers, plan=plan, epochs=2)
    rule = choose_rule(None, synchronous=mode == "synchronous")
    merging = make_merging(joint, mode, np.zeros(size, np.float32), EMPTY, workers, rule)
    store = ParameterStore(shape, merging)
    store.release(0, float("nan"))
    for worker in range(workers):
        store.join(worker, 1, 1, "host", 1)
    together([lambda k=k: store.ready(k, 1, 1, rows, 0, {}) for k in range(workers)])
    return store


def together(calls):
    """Return what calls return that wait for each other, each in a thread."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except RefusedError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def push(store, worker, vector, sequence=0, rows=4, kind=Kind.GRADIENT, **fields):
    update = Update(
        kind, worker=worker, sequence=sequence, rows=rows, loss=1.0, parameters=vector, generation=1,
        attempt=1, run=b"r" * 16, layout=b"l" * 16,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(update, name, value)
    store.admit(update, Sections(len(update.parameters), 0, 0, 0))
    return store.exchange(update, lambda: update)


@settings(max_examples=20, deadline=None)
@given(st.permutations([0, 1, 2]), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_a_round_is_the_row_weighted_mean_whatever_the_order_of_arrival(order, rows):
    """Sums run in worker order, so that a run repeats bit for bit."""
    vectors = [np.random.default_rng(k).normal(size=5).astype(np.float32) for k in range(3)]

    def round_of(workers):
        store = make_store()
        return together([lambda k=k: push(store, k, vectors[k], rows=rows[k]) for k in workers])[0]

    reply, sorted_reply = round_of(order), round_of(range(3))
    expected = np.average(np.stack(vectors), axis=0, weights=rows)

    np.testing.assert_allclose(reply.parameters, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(reply.parameters, sorted_reply.parameters)


def test_a_worker_without_rows_weighs_nothing():
    """It joins the round, and the others' mean is theirs alone."""
    store, one = make_store(), np.ones(5, np.float32)
    replies = together(
        [lambda: push(store, 0, one), lambda: push(store, 1, EMPTY, rows=0), lambda: push(store, 2, 3 * one)]
    )

    np.testing.assert_array_equal(2 * one, replies[1].parameters)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_an_update_that_comes_twice_counts_once(mode):
    """A retry after a lost answer is told that it is a duplicate, and gets the center of now."""
    store, one = make_store(mode, joint=False), np.ones(5, np.float32)
    push(store, 0, one, kind=Kind.DELTA)
    again = push(store, 0, one, kind=Kind.DELTA)

    assert again.flags & Flag.DUPLICATE
    np.testing.assert_array_equal(one, again.parameters)
    assert store.counters["duplicates"] == 1


def test_hogwild_loses_no_addition():
    """Many threads add at once, and the sum is exact."""
    size = 200_000
    merging = Striped(np.zeros(size, np.float32), EMPTY, 8, Sum())
    merging.generation = 1
    one = np.ones(size, np.float32)

    def pushes(worker):
        for sequence in range(25):
            update = Update(Kind.DELTA, worker=worker, sequence=sequence, parameters=one, generation=1)
            merging.push(update, lambda update=update: update, Reply)

    together([lambda k=k: pushes(k) for k in range(8)])

    np.testing.assert_array_equal(200 * one, merging.parameters)


def test_dynsgd_divides_by_how_stale_an_update_is():
    """The staleness is the number of updates merged since the worker last pulled."""
    merging = Locked(np.zeros(2, np.float32), EMPTY, 2, DynSGD())
    merging.generation = 1
    one = np.ones(2, np.float32)
    for worker in (0, 1):
        update = Update(Kind.DELTA, worker=worker, parameters=one, generation=1, base_version=0)
        merging.push(update, lambda update=update: update, Reply)

    np.testing.assert_array_equal(1.5 * one, merging.parameters)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"run": b"x" * 16}, 409), ({"generation": 2}, 409), ({"attempt": 0}, 409),
        ({"layout": b"x" * 16}, 422), ({"parameters": np.ones(4, np.float32)}, 413),
        ({"sequence": 7}, 409),
    ],
)  # fmt: skip
def test_an_update_that_is_not_this_runs_is_refused_and_changes_nothing(fields, status):
    """Run, generation, attempt, layout, length and sequence are fences."""
    store = make_store(joint=False)
    before = store.merging.version
    with pytest.raises(RefusedError) as error:
        push(store, 0, np.ones(5, np.float32), kind=Kind.DELTA, **fields)

    assert status == error.value.status
    assert before == store.merging.version


def test_a_restart_rolls_rounds_back_to_the_cut():
    """The next generation begins with the center, the round and the ledger of the last cut."""
    store, one = make_store(joint=False, workers=1), np.ones(5, np.float32)
    push(store, 0, one, kind=Kind.DELTA)
    generation = store.restart()

    assert generation == 2
    assert store.merging.next_sequence(0) == 0
    np.testing.assert_array_equal(0 * one, store.merging.parameters)
    with pytest.raises(RefusedError):
        push(store, 0, one, kind=Kind.DELTA)


def test_even_split_deals_what_there_is():
    """No worker has more than one row more than another."""
    assert even_split(10, 3) == (4, 3, 3)

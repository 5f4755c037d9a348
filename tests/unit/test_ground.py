"""Sums and the book of a run, as laws."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.batches import Plan
from sparkdl.errors import RefusedError
from sparkdl.merging import Locked, Striped, make_merging
from sparkdl.rules import DynSGD, Sum, choose_rule
from sparkdl.store import ParameterStore, RunShape
from sparkdl.wire import Flag, Kind, Reply, Sections, Update

EMPTY = np.zeros(0, np.float32)


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

"""Tests of aggregation: many workers' updates become one center, in any order and with repetitions."""

import contextlib
import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from functools import partial

import numpy as np
import pytest
from coordinators import EMPTY, begun, coordinator_of, impatient, push, together, update_of, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from standalone import eventually

from sparkdl.core.vectors import window_statistics
from sparkdl.errors import DivergedError, RefusedError, RuleError
from sparkdl.rules import BMUF, Average, DynSGD, Sum
from sparkdl.server.aggregation import (
    AggregationSpec,
    Asynchronous,
    DeltaRounds,
    GradientRounds,
    Hogwild,
    Hybrid,
    limits,
    make_aggregation,
)
from sparkdl.transport.arrivals import ArrivalError
from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Update


def noise(seed, size=5):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def words(counts):
    """Return the control words of a coordinator without orders."""
    return Reply()


def arrive(coordinator, updates):
    """Push the updates of one round in this order of arrival; return the replies by worker."""
    rounds, replies = coordinator.aggregation, {}

    def run(update):
        replies[update.worker] = coordinator.exchange(update, lambda: update)

    threads = [threading.Thread(target=run, args=(update,)) for update in updates]
    for thread, update in zip(threads, updates, strict=True):
        thread.start()
        assert eventually(partial(rounds.counted, update.worker, update.sequence), 10)
    for thread in threads:
        thread.join(10)
    return replies


def one_by_one(kind, rule, *updates, workers=2, size=1):
    """Return a center after these updates, pushed one after the other."""
    center = kind(np.zeros(size, np.float32), EMPTY, workers, rule, EMPTY)
    for update in updates:
        center.push(update, lambda update=update: update, words)
    return center


def delta(worker, *values, sequence=0, base_version=0, statistics=EMPTY):
    return Update(
        Kind.DELTA,
        worker=worker,
        sequence=sequence,
        rows=4,
        loss=1.0,
        base_version=base_version,
        parameters=vector(*values),
        statistics=statistics,
    )


# -- rounds ---------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.booleans())
def test_a_round_has_the_same_bits_in_whatever_order_its_updates_come(rows, joint):
    """A round gives the same bits in every order of arrival, because sums run in worker order."""
    outcomes = set()
    for order in itertools.permutations(range(3)):
        coordinator = begun(coordinator_of(joint=joint, statistics=2))
        updates = [
            update_of(
                coordinator,
                k,
                noise(k) if rows[k] else EMPTY,
                rows=rows[k],
                loss=k,
                statistics=noise(9 + k, 2) if rows[k] else EMPTY,
            )
            for k in order
        ]
        replies = arrive(coordinator, updates)
        outcomes |= {(r.parameters.tobytes(), r.statistics.tobytes(), r.version) for r in replies.values()}

    assert 1 == len(outcomes)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any))
def test_a_round_is_the_row_weighted_mean(rows):
    """A round weights gradients, statistics and losses by rows; a worker without rows counts nothing."""
    coordinator = begun(coordinator_of(workers=len(rows), statistics=2))
    vectors, moved = [noise(k) for k in range(len(rows))], [noise(9 + k, 2) for k in range(len(rows))]
    updates = [
        update_of(
            coordinator,
            k,
            vectors[k] if n else EMPTY,
            rows=n,
            loss=k + 1.0,
            statistics=moved[k] if n else EMPTY,
        )
        for k, n in enumerate(rows)
    ]
    reply = arrive(coordinator, updates)[0]

    assert Answer.MEAN is reply.kind
    np.testing.assert_allclose(reply.parameters, np.average(vectors, axis=0, weights=rows), 1e-4, 1e-6)
    np.testing.assert_allclose(reply.statistics, np.average(moved, axis=0, weights=rows), 1e-4, 1e-6)
    assert [np.average(np.arange(len(rows)) + 1, weights=rows)] == pytest.approx(
        coordinator.aggregation.losses
    )


def test_a_lone_contributor_is_its_own_mean_without_a_rounding():
    """A single contributor to a round gets back its own gradient, to the bit."""
    coordinator = begun(coordinator_of())
    updates = [update_of(coordinator, k, noise(7) if k == 1 else EMPTY, rows=3 * (k == 1)) for k in range(3)]

    np.testing.assert_array_equal(noise(7), arrive(coordinator, updates)[0].parameters)


def test_a_round_without_rows_moves_nothing():
    """A round without rows is counted, leaves the statistics as they were and has nothing to apply."""
    coordinator = begun(coordinator_of(statistics=2))
    reply = arrive(coordinator, [update_of(coordinator, k) for k in range(3)])[0]

    assert 1 == reply.version
    assert 0 == len(reply.parameters)
    assert [0.0, 0.0] == reply.statistics.tolist()


def test_the_workers_arrays_are_left_as_they_came():
    """A sum is made in memory of its own, so that a worker may send the same arrays again."""
    coordinator = begun(coordinator_of(workers=2))
    sent = [noise(0), noise(1)]
    kept = [array.copy() for array in sent]
    arrive(coordinator, [update_of(coordinator, k, sent[k]) for k in range(2)])

    np.testing.assert_array_equal(kept, sent)


@pytest.mark.parametrize(("rule", "expected"), [(Average(), 2.5), (Sum(), 4.0)])
def test_local_steps_move_the_center_by_the_rules_answer(rule, expected):
    """The center moves by the row-weighted mean of the deltas under Average, by their sum under Sum."""
    coordinator = begun(coordinator_of(joint=False, workers=2, size=1, merge=rule.name))
    replies = arrive(
        coordinator, [update_of(coordinator, 0, [1.0], rows=1), update_of(coordinator, 1, [3.0], rows=3)]
    )

    assert {Answer.CENTER} == {reply.kind for reply in replies.values()}
    assert [expected] == replies[0].parameters.tolist() == coordinator.aggregation.parameters.tolist()


def test_an_update_counts_once_in_its_round():
    """An update that is repeated before or after its round has closed changes nothing."""
    coordinator = begun(coordinator_of(workers=2, size=1))
    with impatient():
        first = push(coordinator, 0, [2.0])
        again = push(coordinator, 0, [9.0])
        closing = push(coordinator, 1, [4.0])
        late = push(coordinator, 0, [9.0])

    assert [Flag.AGAIN, Flag.AGAIN] == [first.flags, again.flags]
    assert [3.0] == closing.parameters.tolist() == late.parameters.tolist()
    assert late.flags & Flag.DUPLICATE
    assert 1 == coordinator.aggregation.version
    assert 1 == coordinator.counters["duplicates"]


def test_a_request_does_not_wait_for_ever():
    """A waiting worker has to repeat its request without the body, and then gets the reply of its round."""
    coordinator = begun(coordinator_of(workers=2, size=1))
    with impatient():
        reply = push(coordinator, 0, [2.0])
        asked = push(coordinator, 0, rows=0, flags=Flag.AWAIT)
        push(coordinator, 1, [4.0])
        answered = push(coordinator, 0, rows=0, flags=Flag.AWAIT)

    assert [Flag.AGAIN, Flag.AGAIN] == [reply.flags, asked.flags]
    assert [3.0] == answered.parameters.tolist()


def test_a_round_that_is_not_open_is_refused():
    """A round that is not open yet and one that closed long ago are refused."""
    coordinator = begun(coordinator_of(workers=1, size=1))
    push(coordinator, 0, [1.0])
    push(coordinator, 0, [1.0], sequence=1)
    for sequence, message in [
        (3, "Round 3 is not open; the open round is 2."),
        (0, "Round 0 closed too long ago; its reply was dropped."),
    ]:
        with pytest.raises(RefusedError, match=message) as error:
            push(coordinator, 0, [1.0], sequence=sequence)

        assert 409 == error.value.status
    assert 2 == coordinator.aggregation.version


def test_an_update_wakes_nobody_before_its_round_closes(monkeypatch):
    """Requests that wait for a round to close are woken once, whatever the number of workers."""
    coordinator = begun(coordinator_of(workers=8))
    rounds, woken = coordinator.aggregation, []
    notify_all = rounds.changed.notify_all
    monkeypatch.setattr(rounds.changed, "notify_all", lambda: woken.append(rounds.round) or notify_all())
    arrive(coordinator, [update_of(coordinator, worker, noise(worker)) for worker in range(8)])

    assert [1] == woken


def test_bodies_beyond_the_budget_wait_unread(monkeypatch):
    """A body ahead of its turn stays in the socket once the budget is spent; the sum does not change."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 20)  # one update of five elements
    coordinator = begun(coordinator_of(workers=4))
    rounds, read, threads = coordinator.aggregation, [], []

    def reading(update):
        read.append(update.worker)
        return update

    def start(worker):
        update = update_of(coordinator, worker, noise(worker))
        run = threading.Thread(target=rounds.push, args=(update, lambda: reading(update), words))
        run.start()
        threads.append(run)

    start(1)
    assert eventually(lambda: 1 in rounds.early, 10)
    start(3)
    start(2)
    before = list(read)
    start(0)
    for thread in threads:
        thread.join(10)

    assert [1] == before
    assert [1, 0] == read[:2]
    assert {2, 3} == set(read[2:])
    np.testing.assert_allclose(
        rounds.replies[0].parameters, np.mean([noise(k) for k in range(4)], axis=0), 1e-5
    )


def test_an_update_whose_body_never_comes_leaves_its_place_free():
    """A connection that breaks while a body is read changes nothing, and the worker sends again."""
    coordinator = begun(coordinator_of(workers=1, size=1))

    def broken():
        raise ArrivalError("gone")

    with pytest.raises(ArrivalError):
        coordinator.exchange(update_of(coordinator, 0, [1.0]), broken)

    assert 0 == coordinator.aggregation.version
    assert [5.0] == push(coordinator, 0, [5.0]).parameters.tolist()


def test_a_generation_that_ends_lets_its_requests_go():
    """A worker that waits for a round of an ended generation is refused at once."""
    coordinator = begun(coordinator_of(workers=2, size=1))
    old = update_of(coordinator, 0, [1.0])

    def restart():
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.aggregation.counted(0, 0), 10)
        coordinator.restart()

    refused, _ = together(lambda: coordinator.exchange(old, lambda: old), restart)

    assert isinstance(refused, RefusedError)
    assert 409 == refused.status
    assert 0 == coordinator.aggregation.version


# -- asynchronous and hogwild ---------------------------------------------------------------------

KINDS = [Asynchronous, Hogwild]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_comes_twice_counts_once(kind):
    """A retried update is flagged as a duplicate, counts once and gets the current center."""
    center = one_by_one(kind, Sum(), delta(0, 1.0), delta(1, 10.0))
    again = center.push(delta(0, 1.0), lambda: delta(0, 1.0), words)

    assert again.flags & Flag.DUPLICATE
    assert [11.0] == again.parameters.tolist()
    assert 2 == again.version == center.version
    assert [1, 1] == [center.next_sequence(worker) for worker in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_dynsgd_knows_how_stale_an_update_is(kind):
    """The staleness of an update is the number of updates merged since its worker last pulled."""
    center = one_by_one(
        kind, DynSGD(), delta(0, 1.0), delta(1, 1.0), delta(0, 1.0, sequence=1, base_version=1)
    )

    assert [1.0 + 0.5 + 0.5] == center.parameters.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_move_by_a_kth_part(kind):
    """Moving statistics of unknown decay are averaged over the workers, never summed."""
    center = kind(vector(0.0), vector(0.0), 2, Sum(), vector(float("nan")))
    for worker, value in enumerate([4.0, 8.0]):
        update = delta(worker, 0.0, statistics=vector(value))
        center.push(update, lambda update=update: update, words)

    assert [5.0] == center.statistics.tolist()


WINDOWS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.floats(0, 9, width=32), min_size=1, max_size=9)),
    max_size=9,
)


@pytest.mark.parametrize("kind", KINDS)
@given(windows=WINDOWS, decay=st.floats(0, 0.984375, width=32))
def test_statistics_are_the_moving_average_of_all_batches(kind, windows, decay):
    """Statistics average all batches as one process would, whatever the staleness; no variance is below 0."""
    center = kind(vector(0.0), vector(1.0), 3, Sum(), vector(decay))
    pulled, expected = [1.0] * 3, 1.0
    for number, (worker, pulls, batches) in enumerate(windows):
        after = pulled[worker]
        for batch in batches:
            after = decay * after + (1 - decay) * batch
            expected = decay * expected + (1 - decay) * batch
        ends = vector(pulled[worker]), vector(after)
        update = delta(
            worker, 0.0, sequence=number, statistics=window_statistics(*ends, vector(decay), len(batches))
        )
        update.steps = len(batches)
        reply = center.push(update, lambda update=update: update, words)
        if pulls:
            pulled[worker] = float(reply.statistics[0])

    assert center.statistics[0] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert center.statistics[0] > -1e-5


@given(
    rounds=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=4),
    seen=st.lists(st.floats(0, 9, width=32), min_size=2, max_size=2),
    decay=st.floats(0, 0.984375, width=32),
)
def test_statistics_of_a_round_move_by_all_its_batches(rounds, seen, decay):
    """The statistics of a round move by all its batches, as its weights do."""
    coordinator = begun(coordinator_of(workers=2, statistics=1, joint=False, decays=vector(decay)))
    expected = held = 0.0
    for number, windows in enumerate(rounds):
        updates = []
        for worker, steps in enumerate(windows):
            after = held * decay**steps + (1 - decay**steps) * seen[worker]
            sent = window_statistics(vector(held), vector(after), vector(decay), steps)
            words = {"sequence": number, "rows": steps, "steps": steps, "statistics": sent}
            updates.append(update_of(coordinator, worker, noise(worker), **words))
        expected += (1 - decay ** sum(windows)) * (np.average(seen, weights=windows) - expected)
        held = float(arrive(coordinator, updates)[0].statistics[0])

    assert held == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_a_copy(kind):
    """A center that was sent to a worker is not changed by later updates."""
    center = one_by_one(kind, Sum(), delta(0, 1.0))
    reply = center.push(delta(1, 1.0), lambda: delta(1, 1.0), words)
    center.push(delta(0, 5.0, sequence=1), lambda: delta(0, 5.0, sequence=1), words)

    assert [2.0] == reply.parameters.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3 * limits.STRIPE + 17])
def test_many_threads_lose_no_addition(kind, size):
    """The center is the sum of all updates, however their threads interleave."""
    center = kind(np.zeros(size, np.float32), EMPTY, 8, Sum(), EMPTY)
    one = np.ones(size, np.float32)

    def pushes(worker):
        for sequence in range(20):
            update = Update(Kind.DELTA, worker=worker, sequence=sequence, parameters=one)
            center.push(update, lambda update=update: update, words)

    assert [None] * 8 == together(*(lambda k=k: pushes(k) for k in range(8)))
    np.testing.assert_array_equal(160 * one, center.parameters)
    assert 160 == center.version == len(center.losses)


def test_a_new_center_is_not_overrun_by_an_addition_under_way():
    """A callback's weights wait for the stripe of a hogwild addition under way."""
    center = Hogwild(vector(0.0), EMPTY, 2, Sum(), EMPTY)
    setting = threading.Thread(target=center.replace, args=(vector(7.0), EMPTY))
    with center.stripes[0]:
        read = center.parameters[0]
        setting.start()
        setting.join(0.05)
        center.parameters[0] = read + 1
    setting.join(10)

    assert [7.0] == center.parameters.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_an_old_generation_is_refused(kind):
    """An update of an old generation is refused and not merged, whatever its sequence."""
    center = one_by_one(kind, Sum(), delta(0, 1.0))
    center.generation = 1
    with pytest.raises(RefusedError, match="Generation 0 is over; the current one is 1."):
        center.push(delta(0, 1.0, sequence=1), lambda: delta(0, 1.0, sequence=1), words)

    assert [1.0] == center.parameters.tolist()


@pytest.mark.parametrize(
    ("joint", "mode", "kind"),
    [
        (True, "synchronous", GradientRounds),
        (False, "synchronous", DeltaRounds),
        (False, "asynchronous", Asynchronous),
        (False, "hogwild", Hogwild),
    ],
)
def test_a_mode_has_its_way_of_merging(joint, mode, kind):
    """The mode and the kind of update alone choose the class of the aggregation."""
    assert type(make_aggregation(AggregationSpec(mode, joint, 1, Average()), vector(0.0), EMPTY)) is kind


@pytest.mark.parametrize("mode", ["joint", "synchronous", "asynchronous", "hogwild"])
def test_a_new_center_is_a_new_version(mode):
    """A replaced center has a new version, and later updates leave the array passed in unchanged."""
    center = make_aggregation(AggregationSpec(mode, mode == "joint", 1, Average()), vector(1.0), EMPTY)
    given = vector(7.0)
    given.flags.writeable = False
    center.replace(given, EMPTY)
    before, _, version = center.snapshot()
    center.push(delta(0, 1.0), lambda: delta(0, 1.0), words)
    after, _, _ = center.snapshot()

    assert ([7.0], 1) == (before.tolist(), version)
    assert [7.0 if mode == "joint" else 8.0] == after.tolist()


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_who_asks_at_once_gets_one_copy(mode):
    """Concurrent requests for the center share one copy, which saves the driver's memory."""
    center = make_aggregation(AggregationSpec(mode, False, 2, Sum()), vector(1.0), EMPTY)
    before = center.snapshot()[0]

    assert before is center.snapshot()[0]

    center.push(delta(0, 1.0), lambda: delta(0, 1.0), words)
    moved = center.snapshot()[0]
    center.replace(vector(7.0), EMPTY)
    assert [1.0, 2.0, 7.0] == [*before, *moved, *center.snapshot()[0]]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_merge_takes_memory_for_its_reply_alone(mode):
    """A merge changes the center in place and takes memory for its reply only."""
    size = 1 << 20
    center = make_aggregation(AggregationSpec(mode, False, 1, Sum()), np.zeros(size, np.float32), EMPTY)
    update = delta(0, *[1.0] * size)
    tracemalloc.start()
    try:
        reply = center.push(update, lambda: update, words)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (reply.parameters == 1).all()
    assert peak < 1.5 * reply.parameters.nbytes


# -- normalizers ----------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 100)), min_size=2, max_size=4))
def test_a_gradient_weighs_by_its_normalizer_and_statistics_by_rows(weights):
    """Gradients are weighted by their loss normalizers, moving statistics by rows."""
    workers = len(weights)
    coordinator = begun(coordinator_of(workers=workers, statistics=2))
    updates = [
        update_of(coordinator, k, noise(k), rows=rows, normalizer=normalizer, statistics=noise(9 + k, 2))
        for k, (rows, normalizer) in enumerate(weights)
    ]
    reply = arrive(coordinator, updates)[0]
    rows, normalizers = zip(*weights, strict=True)
    gradient = np.average([noise(k) for k in range(workers)], axis=0, weights=normalizers)
    statistics = np.average([noise(9 + k, 2) for k in range(workers)], axis=0, weights=rows)

    np.testing.assert_allclose(reply.parameters, gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(reply.statistics, statistics, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalizer", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(normalizer):
    """An update with a negative or non-finite weight is refused before it can spoil its round."""
    coordinator = begun(coordinator_of(workers=1))

    with pytest.raises(RefusedError, match="An update cannot have the weight") as caught:
        push(coordinator, 0, noise(0), normalizer=normalizer)
    assert caught.value.status == 400


# -- bounded staleness ----------------------------------------------------------------------------


def bounded(kind, bound, workers):
    """Return a center whose workers are all training."""
    center = kind(np.zeros(1, np.float32), EMPTY, workers, Sum(), None, bound)
    for worker in range(workers):
        center.enter(worker)
    return center


@pytest.mark.parametrize("kind", KINDS)
@given(bound=st.integers(0, 3), turns=st.lists(st.integers(0, 2), max_size=40))
def test_nobody_gets_further_ahead_than_the_bound(kind, bound, turns):
    """A worker too far ahead is merged, and repeats its request until the slowest worker has moved."""
    center, clocks, waiting = bounded(kind, bound, 3), [0, 0, 0], set()
    with impatient():
        for worker in turns:
            update = delta(worker, 1.0, sequence=clocks[worker] - (worker in waiting))
            reply = center.push(update, lambda update=update: update, words)
            clocks[worker] += worker not in waiting
            waits = clocks[worker] - min(clocks) > bound

            assert waits == bool(reply.flags & Flag.AGAIN)
            waiting = waiting | {worker} if waits else waiting - {worker}
            assert max(clocks) - min(clocks) <= bound + 1
    assert [sum(clocks)] == center.parameters.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_left_is_not_waited_for(kind):
    """A worker that left delays no one, and one that returns begins level with the slowest."""
    center = bounded(kind, 0, 2)
    update = delta(0, 1.0)
    first, _ = together(lambda: center.push(update, lambda: update, words), lambda: center.leave(1))
    center.enter(1)

    assert not first.flags & Flag.AGAIN
    assert {0: 1, 1: 1} == center.clocks


# -- updates with NaN or Inf ----------------------------------------------------------------------

UNSOUND = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", UNSOUND)
@pytest.mark.parametrize("mode", ["joint", "synchronous", "asynchronous", "hogwild"])
def test_an_update_that_is_not_finite_is_counted_and_not_merged(mode, value):
    """An update with NaN or Inf counts as one without rows, and its worker and the driver learn of it."""
    joint = mode == "joint"
    rule = "average" if mode == "synchronous" else None
    mode = "synchronous" if joint else mode
    coordinator = begun(coordinator_of(mode, joint=joint, workers=2, size=2, statistics=1, merge=rule))
    bad = update_of(coordinator, 0, [1.0, value], statistics=vector(1.0))
    good = update_of(coordinator, 1, [2.0, 4.0], statistics=vector(1.0))
    spoilt, sound = together(*(lambda u=u: coordinator.exchange(u, lambda: u) for u in (bad, good)))

    assert spoilt.flags & Flag.NOT_FINITE
    assert not sound.flags & Flag.NOT_FINITE
    assert coordinator.aggregation.counted(0, 0)
    assert 1 == coordinator.counters["not_finite"]
    center = sound.parameters if joint else coordinator.aggregation.snapshot()[0]
    assert [2.0, 4.0] == center.tolist()
    (warning,) = coordinator.take_log(last=True)
    next_step = "applies the mean gradient of the others" if joint else "continues from the center"
    assert warning["message"].endswith(f"The update was not merged; the worker {next_step}.")


@pytest.mark.parametrize("mode", ["joint", "synchronous", "asynchronous", "hogwild"])
def test_deltas_that_could_add_up_to_infinity_are_not_merged(mode):
    """Deltas of 1e15 or more are not merged; gradients may have any finite size."""
    joint = mode == "joint"
    mode = "synchronous" if joint else mode
    coordinator = begun(coordinator_of(mode, joint=joint, workers=1, size=1))
    replies = [push(coordinator, 0, [value], sequence=k) for k, value in enumerate([3e38, -3e38, 1e15, 9e14])]

    assert [not joint] * 3 + [False] == [bool(reply.flags & Flag.NOT_FINITE) for reply in replies]
    assert np.isfinite(coordinator.aggregation.snapshot()[0]).all()


def test_statistics_that_are_not_finite_are_not_merged_either():
    """An update whose statistics are not finite is not merged: the NaN would stay in the model."""
    coordinator = begun(coordinator_of("asynchronous", workers=1, size=1, statistics=1))
    reply = push(coordinator, 0, [1.0], statistics=vector(float("nan")))

    assert reply.flags & Flag.NOT_FINITE
    assert [0.0] == coordinator.aggregation.parameters.tolist() == coordinator.aggregation.statistics.tolist()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_that_goes_on_sending_them_ends_the_run(mode):
    """Ten consecutive updates of a worker with NaN or Inf end the run; a sound one resets the count."""
    coordinator = begun(coordinator_of(mode, workers=1, size=1))
    for sequence in range(12):
        push(coordinator, 0, [1.0 if sequence == 1 else float("nan")], sequence=sequence)

        assert (sequence == 11) == isinstance(coordinator.failure, DivergedError)
    assert "the last 10 updates of worker 0 (the latest in epoch 1) contained NaN" in str(coordinator.failure)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_each_such_update_is_one_however_often_it_is_sent(mode):
    """A repeated update with NaN or Inf counts once, and asking again does not reset the count."""
    coordinator = begun(coordinator_of(mode, workers=1, size=1))
    for sequence in range(9):
        for _ in range(2):
            push(coordinator, 0, [float("nan")], sequence=sequence)
        push(coordinator, 0, rows=0, sequence=sequence, flags=Flag.AWAIT)
    before = coordinator.failure
    push(coordinator, 0, [float("nan")], sequence=9)

    assert before is None
    assert isinstance(coordinator.failure, DivergedError)
    assert 10 == coordinator.counters["not_finite"]


def test_a_worker_group_that_starts_again_is_not_held_to_what_went_before():
    """After a restart, a sound update is merged although one with its sequence was refused before."""
    coordinator = begun(coordinator_of(workers=1, size=1))
    push(coordinator, 0, [float("nan")])
    coordinator.restart()
    begun(coordinator)

    assert not push(coordinator, 0, [1.0]).flags & Flag.NOT_FINITE


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_a_rule_that_fails_ends_the_run(mode):
    """A rule that raises ends the run with an error that names the rule, and the update is not merged."""
    coordinator = begun(coordinator_of(mode, joint=False, workers=1, size=1))
    coordinator.aggregation.rule = type("Odd", (Sum,), {"name": "odd", "update": lambda *_: 1 / 0})()
    with pytest.raises(RuleError):
        push(coordinator, 0, [1.0])

    assert "The rule 'odd' failed" in str(coordinator.failure)
    assert [0.0] == coordinator.aggregation.parameters.tolist()


def test_gradients_of_a_scaled_loss_may_be_infinite():
    """Infinite gradients of a scaled loss are merged: all replicas see them, skip the step and scale less."""
    coordinator = begun(coordinator_of(workers=1, size=1, scaled=True))

    assert [float("inf")] == push(coordinator, 0, [float("inf")]).parameters.tolist()
    assert 0 == coordinator.counters["not_finite"]


# -- rounds that close without all workers: see also test_simulator -------------------------------


def test_a_worker_that_is_told_late_to_begin_begins_with_the_first_round():
    """A worker that starts late begins with round 0, or its replica would lack a mean."""
    coordinator = begun(coordinator_of(workers=3, size=1, hybrid=Hybrid(2)))
    together(lambda: push(coordinator, 0, [1.0]), lambda: push(coordinator, 1, [3.0]))
    begin = coordinator.ready(2, coordinator.generation, 1, 10, 0, {})

    assert 0 == begin["sequence"]
    late = push(coordinator, 2, [5.0])
    assert ([2.0], 1) == (late.parameters.tolist(), late.round)
    assert {2: 1} == coordinator.aggregation.dropped


def test_a_round_is_not_closed_while_nobody_is_in():
    """A hybrid round does not close by its deadline while it is empty."""
    coordinator = begun(coordinator_of(workers=2, size=1, hybrid=Hybrid(2, 1e-9)))
    looked = []

    def slowly():
        time.sleep(0.001)
        looked.append(coordinator.aggregation._may_close())
        return update_of(coordinator, 0, [4.0])

    reply = coordinator.exchange(update_of(coordinator, 0, [4.0]), slowly)

    assert [False] == looked
    assert ([4.0], 1) == (reply.parameters.tolist(), coordinator.aggregation.version)


def test_a_slow_upload_holds_up_neither_quorum_nor_time(monkeypatch):
    """The body of a straggler is read beside the others, so that a slow upload delays no quorum."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    coordinator = begun(coordinator_of(workers=3, size=1, hybrid=Hybrid(2)))
    arriving, arrived = threading.Event(), threading.Event()

    def slowly():
        arriving.set()
        arrived.wait(30)
        return update_of(coordinator, 2, [9.0])

    slow = threading.Thread(target=coordinator.exchange, args=(update_of(coordinator, 2, [9.0]), slowly))
    slow.start()
    arriving.wait(30)
    first, second = together(lambda: push(coordinator, 0, [1.0]), lambda: push(coordinator, 1, [3.0]))
    arrived.set()
    slow.join(30)

    assert [2.0] == first.parameters.tolist() == second.parameters.tolist()
    assert {2: 1} == coordinator.aggregation.dropped


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_few_bodies_of_a_large_model_are_read_at_a_time(monkeypatch, mode):
    """Only a few bodies of a large model are read at a time; the others wait in their sockets."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    coordinator, reading, most = begun(coordinator_of(mode, workers=8, size=1, merge="sum")), [], []
    first = threading.Barrier(limits.LEAST_EARLY)

    def send(worker):
        def read():
            reading.append(worker)
            most.append(len(reading))
            with contextlib.suppress(threading.BrokenBarrierError):
                first.wait(5)  # this many are let in together
            reading.remove(worker)
            return update_of(coordinator, worker, [1.0])

        update = update_of(coordinator, worker, [1.0])
        coordinator.exchange(update, read)
        coordinator.sent(update)

    together(*(lambda k=k: send(k) for k in range(8)))

    assert limits.LEAST_EARLY == max(most)
    assert [8.0] == coordinator.aggregation.parameters.tolist()


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_no_body_is_read_while_the_centers_before_are_on_their_way(monkeypatch, mode):
    """A center on its way takes room until it is sent or fails, and no further body is read."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    coordinator, read = begun(coordinator_of(mode, workers=5, size=1)), []

    def send(worker, kind=Kind.DELTA):
        update = update_of(coordinator, worker, [1.0] if kind is Kind.DELTA else [], kind=kind)
        coordinator.exchange(update, lambda: read.append(worker) or update)
        return update

    with pytest.raises(ZeroDivisionError):
        coordinator.exchange(update_of(coordinator, 4, [1.0]), lambda: 1 / 0)
    under_way = [send(0), send(1, Kind.CENTER)]
    last = threading.Thread(target=lambda: coordinator.sent(send(2)))
    last.start()
    last.join(0.2)
    before = list(read)
    for update in under_way:
        coordinator.sent(update)
    last.join(30)

    assert [0] == before
    assert [0, 2] == read
    assert 0 == coordinator.aggregation.flights


def test_who_waits_for_room_learns_at_once_that_the_run_starts_again(monkeypatch):
    """A request that waits for room is refused as soon as the worker group restarts."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    coordinator, refused = begun(coordinator_of("asynchronous", workers=3, size=1)), []
    updates = [update_of(coordinator, worker, [1.0]) for worker in range(3)]
    for update in updates[:2]:
        coordinator.exchange(update, lambda update=update: update)

    def wait():
        with pytest.raises(RefusedError, match="Generation 1 is over"):
            coordinator.exchange(updates[2], lambda: updates[2])
        refused.append(2)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    coordinator.restart()
    waiting.join(limits.PATIENCE / 2)

    assert [2] == refused


@pytest.mark.parametrize(
    ("mode", "terms", "kept"),
    # The sum of a round starts with one of its arrays.
    [("synchronous", {}, 1), ("asynchronous", {"staleness": 0}, 0), ("hogwild", {"staleness": 0}, 0)],
)
def test_no_body_is_kept_while_its_worker_waits(mode, terms, kept):
    """The endpoint keeps no body of a worker that waits for a round or a staleness bound."""
    coordinator, bodies, alive = begun(coordinator_of(mode, workers=3, size=1, **terms)), [], []

    def send(worker):
        def read():
            body = np.ones(1, np.float32)
            bodies.append(weakref.ref(body))
            return update_of(coordinator, worker, body)

        with contextlib.suppress(RefusedError):  # the run is over
            coordinator.exchange(update_of(coordinator, worker, rows=4), read)

    def look():
        with coordinator.changed:
            for worker in (0, 1):
                assert coordinator.changed.wait_for(partial(coordinator.aggregation.counted, worker, 0), 10)
        gc.collect()
        alive.append(sum(body() is not None for body in bodies))
        coordinator.close()

    together(lambda: send(0), lambda: send(1), look)

    assert 2 == len(bodies)
    assert alive[0] <= kept


@pytest.mark.parametrize(("power", "momentum"), [(0.5, 1 - 8**-0.5), (0.0, 1 - 80**-0.5)])
def test_the_default_rule_counts_no_more_workers_than_the_study(power, momentum):
    """With more workers than studied, the block momentum and the scaled rate use the same number."""
    terms = AggregationSpec("synchronous", False, 80, BMUF(power=0.5), power=power)
    rounds = make_aggregation(terms, vector(0.0), EMPTY)
    rounds.bind(80)

    assert rounds.rule.block_momentum == momentum


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_statistics_that_a_callback_sets_are_not_mixed_with_older_ones(mode):
    """After the driver sets statistics, updates that began before do not bring the old values back."""
    coordinator = begun(coordinator_of(mode, workers=2, size=1, statistics=1))
    old, new = np.zeros(1, np.float32), np.ones(1, np.float32)
    coordinator.replace(np.zeros(1, np.float32), new)
    version = coordinator.aggregation.version
    for worker in (0, 1):
        push(coordinator, worker, [1.0], statistics=old, base_version=version - 1)
    assert [1.0] == coordinator.aggregation.statistics.tolist()
    push(coordinator, 0, [1.0], sequence=1, statistics=new + 1, base_version=coordinator.aggregation.version)

    assert coordinator.aggregation.statistics[0] > 1.0

"""Assignment of rows to updates: laws of ranks, shares, windows and progress."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.batch_plan import BatchPlan, even_split, num_batches, num_before, ranks

row_counts = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)
batch_sizes = st.integers(1, 40)


def plans(rows, batch_size, *, window=1, joint=False, shuffle=False, seed=0):
    return [BatchPlan(rows, worker, batch_size, window, joint, shuffle, seed) for worker in range(len(rows))]


@given(row_counts)
def test_ranks_put_every_row_in_one_place(rows):
    """The ranks of all workers' rows are a permutation, in order within each worker."""
    each = [ranks(rows, worker).tolist() for worker in range(len(rows))]

    assert list(range(sum(rows))) == sorted(sum(each, []))
    assert all(sorted(mine) == mine for mine in each)


@given(row_counts)
def test_ranks_are_the_even_interleaving(rows):
    """Row j of n has rank (j + 1/2) N / n; a tie goes to the lower worker."""
    places = sorted(
        ((2 * j + 1) * np.lcm.reduce([n for n in rows if n]) // n, k, j)
        for k, n in enumerate(rows)
        for j in range(n)
    )
    expected = {(k, j): rank for rank, (_, k, j) in enumerate(places)}

    for worker in range(len(rows)):
        assert [expected[worker, j] for j in range(rows[worker])] == ranks(rows, worker).tolist()


@given(row_counts, st.integers(0, 200))
def test_the_first_rows_of_all_workers_are_the_first_ones_of_each(rows, edge):
    """The rows below a rank are the first rows of each worker, and their number is that rank."""
    counts = [num_before(rows, worker, edge) for worker in range(len(rows))]

    assert min(edge, sum(rows)) == sum(counts)
    assert counts == [int((ranks(rows, worker) < edge).sum()) for worker in range(len(rows))]


@given(row_counts, batch_sizes)
def test_shares_of_a_batch_add_up_to_it(rows, batch_size):
    """Every joint batch but the last has batch_size rows, however uneven the workers are."""
    shares = sum(np.diff(plan.bounds) for plan in plans(rows, batch_size, joint=True))

    assert [batch_size] * (len(shares) - 1) == shares[:-1].tolist()
    assert sum(rows) == shares.sum()
    assert num_batches(sum(rows), batch_size) == len(shares)


@given(row_counts, batch_sizes)
def test_a_joint_batch_is_made_of_the_rows_of_one_process(rows, batch_size):
    """Batch t of all workers together consists of ranks t B to (t + 1) B."""
    group = plans(rows, batch_size, joint=True)
    for batch in range(group[0].steps):
        together = []
        for plan in group:
            for span in plan.spans(0, batch):
                together += ranks(rows, plan.worker)[plan.order(0)[span.start : span.stop]].tolist()

        assert list(range(sum(rows)))[batch * batch_size : (batch + 1) * batch_size] == sorted(together)


@given(row_counts, batch_sizes, st.none() | st.integers(1, 5))
def test_windows_hold_each_local_batch_once(rows, batch_size, window):
    """A worker's windows cover its rows in order; a worker with fewer rows joins the rest without rows."""
    group = plans(rows, batch_size, window=window)
    for plan, count in zip(group, rows, strict=True):
        spans = [span for index in range(plan.windows) for span in plan.spans(0, index)]

        assert [place for span in spans for place in range(span.start, span.stop)] == list(range(count))
        assert all(span.stop - span.start <= batch_size for span in spans)
        assert all(window is None or len(plan.window_batches(i)) <= window for i in range(plan.windows))


@given(row_counts.filter(lambda rows: len(rows) > 1), batch_sizes)
def test_batches_of_workers_that_step_alone_are_as_equal_as_they_can_be(rows, batch_size):
    """There are as many local batches as Keras would make, of nearly equal sizes."""
    for plan, count in zip(plans(rows, batch_size), rows, strict=True):
        sizes = np.diff(plan.bounds).tolist()

        assert len(sizes) == num_batches(count, batch_size)
        assert max(sizes, default=0) <= batch_size
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.integers(1, 60), batch_sizes)
def test_one_worker_has_the_batches_of_keras(count, batch_size):
    """One worker has the batches of Keras: batch_size rows each, and the rest in the last one."""
    (plan,) = plans((count,), batch_size)

    assert plan.bounds.tolist() == [*range(0, count, batch_size), count]


@given(row_counts, batch_sizes, st.none() | st.integers(1, 5))
def test_every_worker_comes_to_as_many_exchanges(rows, batch_size, window):
    """All workers have the same number of exchanges, also those without rows."""
    for joint in (True, False):
        counts = {plan.windows for plan in plans(rows, batch_size, window=window, joint=joint)}

        assert 1 == len(counts)
        assert min(counts) >= 1


@given(row_counts, batch_sizes)
def test_progress_of_an_epoch_is_that_of_one_process(rows, batch_size):
    """Local steps of all workers add up to the updates of one process."""
    group = plans(rows, batch_size, window=None)
    total = sum(plan.num_batches * plan.progress_per_step for plan in group)

    assert group[0].steps == pytest.approx(total)


@given(row_counts, batch_sizes, batch_sizes, st.integers(1, 5))
def test_smaller_local_batches_count_as_parts_of_an_update(rows, batch_size, local, window):
    """Workers with batches of their own size take each row once, and progress counts whole batches."""
    wanted = plans(rows, batch_size)[0].steps
    group = [replace(plan, local_batch_size=local) for plan in plans(rows, batch_size, window=window)]
    for plan, count in zip(group, rows, strict=True):
        places = [place for span in all_spans(plan, 0) for place in range(span.start, span.stop)]

        assert places == list(range(count))
        assert max(np.diff(plan.bounds), default=0) <= local
        assert plan.steps == wanted
    assert wanted == pytest.approx(sum(plan.num_batches * plan.progress_per_step for plan in group))


@given(row_counts, st.integers(0, 5), st.integers(0, 2**31 - 1))
def test_an_order_is_drawn_from_seed_epoch_and_worker(rows, epoch, seed):
    """Seed, epoch and worker determine the permutation; without shuffle rows keep their order."""
    for plan, again in zip(
        plans(rows, 4, shuffle=True, seed=seed), plans(rows, 4, shuffle=True, seed=seed), strict=True
    ):
        order = plan.order(epoch)

        assert order[:].tolist() == again.order(epoch)[:].tolist()
        assert list(range(rows[plan.worker])) == sorted(order[:].tolist())
    for plan in plans(rows, 4):
        assert list(range(rows[plan.worker])) == plan.order(epoch)[:].tolist()


def test_another_epoch_worker_or_seed_gives_another_order():
    """Another epoch, worker or seed gives another order."""
    one, other = plans((50, 50), 4, shuffle=True, seed=1)
    orders = [
        one.order(0),
        one.order(1),
        other.order(0),
        plans((50, 50), 4, shuffle=True, seed=2)[0].order(0),
    ]

    assert 4 == len({tuple(order[:].tolist()) for order in orders})


@given(st.integers(0, 1000), st.integers(1, 20))
def test_even_split_deals_what_there_is(num_rows, num_workers):
    """An even split deals all rows, and shares differ by one row at most."""
    split = even_split(num_rows, num_workers)

    assert num_rows == sum(split)
    assert max(split) - min(split) <= 1


@given(row_counts, batch_sizes, st.integers(1, 12), st.booleans())
def test_epochs_of_so_many_steps_go_on_where_the_last_one_ended(rows, batch_size, steps, joint):
    """Epochs with steps_per_epoch continue the batches of pass after pass, however long an epoch is."""
    for plan in plans(rows, batch_size, joint=joint):
        epochs, turns = replace(plan, steps_per_epoch=steps), plan
        spans = [span for epoch in range(5) for span in all_spans(epochs, epoch)]
        expected = [span for turn in range(60) for span in all_spans(turns, turn)]

        assert len(spans) == 5 * epochs.num_batches
        assert spans == expected[: len(spans)]
        assert not joint or epochs.num_batches == steps


def all_spans(plan, epoch):
    return [span for window in range(plan.windows) for span in plan.spans(epoch, window)]

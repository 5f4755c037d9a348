"""Tests of all-reduce: sums in worker order, identical on all workers, and errors after a return."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
from coordinators import RUN, give, impatient, status_of, together

from sparkdl.core.reduction import Total
from sparkdl.errors import ConfigError, RefusedError, WorkerError
from sparkdl.server.aggregation import limits
from sparkdl.server.allreduce import AllReduceCoordinator
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.transport.messages import Flag, Kind, Update, lengths_of
from sparkdl.worker.collective import WorkerContext


@pytest.fixture
def group():
    """A coordinator, and the contexts of three workers that are ready."""
    coordinator = AllReduceCoordinator(RUN, 3)
    exchanges = [LocalExchange(coordinator, worker) for worker in range(3)]
    together(*(partial(exchange.ready, 1, 0, {}) for exchange in exchanges))
    return coordinator, [WorkerContext(worker, 3, "cpu:0", exchanges[worker]) for worker in range(3)]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i8", "u2", "c8", ">f4"])
def test_the_sum_is_that_of_numpy_in_worker_order(group, dtype):
    """The sum is bit for bit that of NumPy in worker order, for any dtype, shape and order of arrival."""
    _, workers = group
    random = np.random.default_rng(3)
    given = [(random.normal(size=(5, 7)) * 9).astype(dtype) for _ in workers]
    expected = given[0] + given[1] + given[2]

    calls = [partial(worker.all_reduce, array, "sum") for worker, array in zip(workers, given, strict=True)]
    for order in ((0, 1, 2), (2, 1, 0)):
        for total in together(*(calls[k] for k in order)):
            np.testing.assert_array_equal(total, expected.astype(total.dtype))
            assert total.dtype == np.dtype(dtype).newbyteorder("=")
            total += 1  # it belongs to the worker


def test_the_mean_of_a_structure_has_its_structure(group):
    """A mean keeps a structure of dicts, lists and tuples with several dtypes, in any order of keys."""
    _, workers = group
    given = [
        {"weights": [np.full((2, 2), k, "float32"), np.full(3, k, "float64")], "rows": k, "loss": (0.5 * k,)}
        for k in range(3)
    ]
    given[1] = dict(reversed(given[1].items()))

    results = together(*(partial(worker.all_reduce, one) for worker, one in zip(workers, given, strict=True)))

    for result in results:
        assert [np.float32, np.float64] == [array.dtype for array in result["weights"]]
        assert all((array == 1).all() for array in result["weights"])
        assert (1.0, (0.5,)) == (result["rows"], result["loss"])
    assert list(given[1]) == list(results[1])


def test_a_sum_that_fails_ends_the_run_by_name(group, monkeypatch):
    """A sum that fails ends the run: workers would wait forever for an update that is not added."""
    coordinator, workers = group
    monkeypatch.setattr(Total, "add", mock.Mock(side_effect=MemoryError("too much")))

    outcomes = together(*(partial(worker.all_reduce, np.ones(3)) for worker in workers))

    assert not any(isinstance(outcome, np.ndarray) for outcome in outcomes)
    assert str(coordinator.failure).startswith("The parameter endpoint failed: Memory ran out")


def test_calls_follow_each_other(group):
    """Each call of all_reduce or barrier is a round of its own."""
    _, workers = group

    def count(worker):
        found = []
        for step in range(20):
            found.append(int(worker.all_reduce(step * worker.rank, "sum")))
            worker.barrier()
        return found

    assert [[3 * step for step in range(20)]] * 3 == together(*(partial(count, worker) for worker in workers))


def test_a_reply_that_was_lost_is_given_again(group):
    """Arrays sent twice are added once, even after their round has closed and another is open."""
    coordinator, workers = group
    first = [partial(worker.all_reduce, np.ones(2, "float32"), "sum") for worker in workers]
    together(*first)
    again = Update(
        kind=Kind.ARRAYS,
        worker=1,
        rows=1,
        metrics=b"<f4",
        state=np.ones(2, "<f4").tobytes(),
        run=RUN,
        generation=1,
        layout=coordinator.rounds.alike[0][0],
    )

    reply = give(coordinator, again)

    assert [3.0, 3.0] == np.frombuffer(reply.state, "<f4").tolist()
    assert Flag.DUPLICATE == reply.flags
    assert 1 == coordinator.rounds.round


def test_a_worker_that_waits_asks_again(group):
    """A worker repeats a request that waits longer than the endpoint's patience."""
    coordinator, workers = group
    update = Update(
        kind=Kind.ARRAYS, rows=1, metrics=b"<f4", state=bytes(8), run=RUN, generation=1, layout=b"l" * 16
    )
    with impatient():
        reply = give(coordinator, update)

    assert Flag.AGAIN == reply.flags


def test_arrays_that_are_not_alike_are_refused(group):
    """Arrays of another shape, dtype, name or operation are refused, and the round is unchanged."""
    coordinator, workers = group
    alike = np.ones(2, "float32")
    for other in (np.zeros(3, "float32"), np.zeros(2, "float64"), {"a": alike}, alike):
        one = workers[0]._exchange.begin(sent(workers[0], np.ones(2, "float32")))
        coordinator.admit(one, lengths_of(one))
        with pytest.raises(RefusedError, match="arrays that worker 1 passed to all_reduce do not match"):
            workers[1].all_reduce(other)
    results = together(*(partial(worker.all_reduce, np.ones(2, "float32"), "sum") for worker in workers))

    assert [[3.0, 3.0]] * 3 == [result.tolist() for result in results]


def sent(worker, array):
    """Return the update that a worker sends for an array."""
    kept = []

    class Keeping:
        def __call__(self, update):
            kept.append(update)
            raise LookupError

    with pytest.raises(LookupError):
        WorkerContext(worker.rank, worker.size, worker.device, Keeping()).all_reduce(array, "sum")
    return kept[0]


def test_a_worker_that_returned_is_not_waited_for(group):
    """The run fails with the name of a worker that returned while another waits for it."""
    coordinator, workers = group
    exchanges = [worker._exchange for worker in workers]
    exchanges[2](Update(kind=Kind.REPORT))

    one = exchanges[0].begin(sent(workers[0], np.ones(2)))
    coordinator.admit(one, lengths_of(one))

    assert isinstance(coordinator.failure, WorkerError)
    assert "Worker 2 returned, and worker 0 waits for it" in str(coordinator.failure)


@pytest.mark.parametrize("comes", ["attempt", "generation"])
@pytest.mark.parametrize("kind", [Kind.ARRAYS, Kind.REPORT])
def test_what_was_on_its_way_when_its_attempt_was_over_changes_nothing(group, kind, comes):
    """A message admitted before a newer attempt or a restart is refused afterwards, and changes nothing."""
    coordinator, workers = group
    update = sent(workers[0], np.ones(2)) if kind is Kind.ARRAYS else Update(kind=kind)
    workers[0]._exchange.begin(update)
    coordinator.admit(update, lengths_of(update))
    if comes == "attempt":
        coordinator.membership.add(0, 1, "host", 2)
        coordinator.rounds.attempts[0] = 1
    else:
        coordinator.restart()

    assert 409 == status_of(lambda: coordinator.exchange(update, lambda: update))

    assert [-1, -1, -1] == list(coordinator.rounds.taken.values())
    assert not coordinator.returned


def test_what_is_no_number_is_named(group):
    """A value that is not a number is named with its place; an unknown op is named with the valid ones."""
    _, workers = group
    with pytest.raises(
        TypeError, match=r"Expected arrays\['names'\]\[0\] to have a numeric NumPy dtype; got <U4"
    ):
        workers[0].all_reduce({"names": ["text"]})
    with pytest.raises(TypeError, match="got bool"):
        workers[0].all_reduce(np.zeros(2, bool))
    with pytest.raises(ConfigError, match="op should be one of 'mean', 'sum'; got 'max'"):
        workers[0].all_reduce(1.0, op="max")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"run": b"x" * 16}, 409),
        ({"generation": 9}, 409),
        ({"sequence": 1}, 409),
        ({"flags": Flag.AWAIT, "state": b"", "metrics": b""}, 409),
        ({"kind": Kind.GRADIENT}, 400),
        ({"kind": Kind.REPORT}, 400),
        ({"parameters": np.ones(2, "float32")}, 400),
        ({"metrics": b"O"}, 400),
        ({"metrics": b"<f8"}, 400),
        ({"metrics": b"float32"}, 422),
    ],
)
def test_what_is_no_message_of_such_a_run_changes_nothing(group, fields, status):
    """A message that does not fit the run is refused, and the round stays open."""
    coordinator, _ = group
    values = {
        "kind": Kind.ARRAYS,
        "rows": 1,
        "metrics": b"<f4",
        "state": bytes(12),
        "run": RUN,
        "generation": 1,
        "layout": b"l" * 16,
    }
    update = Update(**values | fields)

    with pytest.raises(RefusedError) as caught:
        give(coordinator, update)

    assert status == caught.value.status
    assert [-1, -1, -1] == list(coordinator.rounds.taken.values())
    assert not coordinator.returned


def test_early_arrays_beyond_a_budget_stay_unread(group, monkeypatch):
    """Arrays ahead of their turn stay unread in the socket beyond a small budget."""
    coordinator, workers = group
    monkeypatch.setattr(limits, "EARLY_BYTES", 7)
    read = []
    updates = [workers[k]._exchange.begin(sent(workers[k], np.full(2, k, "float32"))) for k in range(3)]

    def push(update):
        coordinator.admit(update, lengths_of(update))
        return coordinator.exchange(update, lambda: read.append(update.worker) or update)

    replies = together(*(partial(push, updates[k]) for k in (2, 1, 0)))

    assert [3.0, 3.0] == np.frombuffer(replies[0].state, "<f4").tolist()
    assert [0, 1, 2] == read

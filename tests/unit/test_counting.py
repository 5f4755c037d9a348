"""Exactly once, proved by counting: every update adds a known amount, and the sum is exact.

Between workers and the endpoint is a relay that loses requests and answers, in the middle of them too, and
sends requests again, at once or later.
"""

from contextlib import ExitStack

import numpy as np
import pytest
from relay import Relay
from stores import KINDS, LAYOUT, NEVER, RUN, store_of, together, vector

from sparkdl import client
from sparkdl.client import HttpExchange
from sparkdl.exchange import Endpoint
from sparkdl.merging import Locked
from sparkdl.server import Traffic, make_app, serve
from sparkdl.wire import Update

WORKERS, UPDATES, SIZE = 4, 25, 3
SETTINGS = {
    "gradients": {"joint": True},
    "deltas": {"joint": False, "merge": "sum"},
    "asynchronous": {"mode": "asynchronous", "merge": "sum"},
    "stale": {"mode": "asynchronous", "merge": "sum", "staleness": 2},
    "hogwild": {"mode": "hogwild", "merge": "sum"},
}


def amount(worker, sequence):
    """Return what an update adds, another number for each."""
    return float(1 + worker * UPDATES + sequence)


TOTAL = sum(amount(worker, sequence) for worker in range(WORKERS) for sequence in range(UPDATES))


def work(endpoint, worker, kind):
    """Send a worker's updates; return what its replies held."""
    exchange = HttpExchange(endpoint, worker, 1, 1, LAYOUT)
    exchange.join("host", 1)
    exchange.ready(4 * UPDATES, 0, {})
    replies, version = [], 0
    for sequence in range(UPDATES):
        parameters = vector(*[amount(worker, sequence)] * SIZE)
        update = Update(
            kind, sequence=sequence, rows=4, loss=1.0, steps=1, base_version=version, parameters=parameters
        )
        reply = exchange(update)
        version = reply.version
        replies.append(reply.parameters.tolist())
    exchange.close()
    return replies


@pytest.fixture
def count(monkeypatch):
    """A function that runs a gang through a relay; it returns the store, all replies, and what was lost."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: low / 10)  # pauses before a request

    def run(setting, seed, merging=None):
        store = store_of(**{"workers": WORKERS, "size": SIZE, "epochs": 1, **SETTINGS[setting]})
        if merging is not None:
            store.merging.__class__ = merging
        store.release(0, NEVER)
        with ExitStack() as stack:
            app = make_app(store, "secret", Traffic())
            port = stack.enter_context(serve(app, "127.0.0.1", 0, WORKERS))
            stack.callback(store.close)
            relay = stack.enter_context(Relay(port, seed))
            endpoint = Endpoint("127.0.0.1", relay.port, "secret", RUN)
            kind = KINDS[store.shape.plan.joint]
            replies = together(*(lambda k=k: work(endpoint, k, kind) for k in range(WORKERS)))
        return store, replies, relay.done

    return run


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(1, 20))])
def test_every_update_counts_once_where_requests_and_answers_get_lost(count, setting, seed):
    """The center, or the sum of what rounds answered, is that of all updates, whatever got lost."""
    store, replies, lost = count(setting, seed)

    assert all(isinstance(each, list) for each in replies), replies
    assert all(lost[each] > 0 for each in ("requests", "answers", "repeated"))
    assert store.counters["duplicates"] > 0
    assert {store.merging.next_sequence(worker) for worker in range(WORKERS)} == {UPDATES}
    for values in replies if store.shape.plan.joint else []:
        assert [TOTAL / WORKERS] * SIZE == np.sum(values, axis=0).tolist()
    if not store.shape.plan.joint:
        assert [TOTAL] * SIZE == store.merging.snapshot()[0].tolist()


class Forgetful(Locked):
    """Merges without a ledger."""

    def counted(self, worker, sequence):
        return False


def test_a_store_that_counts_twice_is_found(count):
    """The sum is too large then."""
    store, _, _ = count("asynchronous", 0, Forgetful)

    assert store.merging.snapshot()[0][0] > TOTAL

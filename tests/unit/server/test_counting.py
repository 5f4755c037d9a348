"""Tests of counting exactly once: each update adds a known amount, and the sum is exact.

Between workers and the endpoint is a relay that loses requests and answers, also in the middle, and repeats
requests at once or later. In another test, workers are processes, one of which is stopped for a while.
"""

import json
import signal
from contextlib import ExitStack

import numpy as np
import pytest
from coordinators import KINDS, NEVER, coordinator_of, together
from counted import SIZE, Job, started, total, work
from relay import Relay
from standalone import eventually

from sparkdl.server.aggregation import Asynchronous, SynchronousRounds
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import client

WORKERS, UPDATES = 4, 25
SETTINGS = {
    "gradients": {"joint": True},
    "deltas": {"joint": False, "merge": "sum"},
    "asynchronous": {"mode": "asynchronous", "merge": "sum"},
    "stale": {"mode": "asynchronous", "merge": "sum", "staleness": 2},
    "hogwild": {"mode": "hogwild", "merge": "sum"},
}


TOTAL = total(WORKERS, UPDATES)


@pytest.fixture
def count(monkeypatch):
    """A function that runs workers through a relay and returns the coordinator, replies and losses."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: low / 10)  # pause before a request
    monkeypatch.setattr(client, "RETRIES", 30)  # bad luck is not under test

    def run(setting, seed, aggregation=None):
        coordinator = coordinator_of(**{"workers": WORKERS, "size": SIZE, "epochs": 1, **SETTINGS[setting]})
        if aggregation is not None:
            coordinator.aggregation.__class__ = aggregation
        coordinator.release(1, NEVER)
        with ExitStack() as stack:
            app = make_app(coordinator, "secret", Traffic())
            port = stack.enter_context(serve(app, "127.0.0.1", 0, WORKERS))
            stack.callback(coordinator.close)
            relay = stack.enter_context(Relay(port, seed))
            kind = KINDS[coordinator.shape.plan.joint]
            jobs = [Job("127.0.0.1", relay.port, k, kind, UPDATES) for k in range(WORKERS)]
            replies = together(*(lambda job=job: work(job) for job in jobs))
        return coordinator, replies, relay.done

    return run


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(1, 20))])
def test_every_update_counts_once_where_requests_and_answers_get_lost(count, setting, seed):
    """Every update counts once, although the relay loses and repeats requests and answers."""
    coordinator, replies, lost = count(setting, seed)

    assert all(isinstance(each, list) for each in replies), replies
    assert all(lost[each] > 0 for each in ("requests", "answers", "repeated"))
    assert coordinator.counters["duplicates"] > 0
    assert {coordinator.aggregation.next_sequence(worker) for worker in range(WORKERS)} == {UPDATES}
    for values in replies if coordinator.shape.plan.joint else []:
        assert [TOTAL / WORKERS] * SIZE == np.sum(values, axis=0).tolist()
    if not coordinator.shape.plan.joint:
        assert [TOTAL] * SIZE == coordinator.aggregation.snapshot()[0].tolist()


class Forgetful(Asynchronous):
    """An aggregation that merges without a ledger."""

    def counted(self, worker, sequence):
        return False


def test_a_coordinator_that_counts_twice_is_found(count):
    """The sum is too large if the coordinator counts updates twice."""
    coordinator, _, _ = count("asynchronous", 0, Forgetful)

    assert coordinator.aggregation.snapshot()[0][0] > TOTAL


@pytest.fixture
def processes():
    """A function that serves a coordinator and returns a function that starts its worker processes."""
    with ExitStack() as stack:

        def serving(coordinator):
            port = stack.enter_context(
                serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, WORKERS)
            )
            stack.callback(coordinator.close)
            kind = KINDS[coordinator.shape.plan.joint]

            def start(worker, **fields):
                job = Job("127.0.0.1", port, worker, kind, UPDATES, 0.05, **fields)
                return stack.enter_context(started(job))

            return start

        yield serving


def outcome_of(process):
    """Return the exit code, the output and the errors of a process."""
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_attempt_that_wakes_up_after_another_took_its_place_is_refused(processes, setting):
    """A worker stopped by SIGSTOP until another attempt took over is refused; the latter's updates count."""
    coordinator = coordinator_of(workers=2, size=SIZE, epochs=1, silence=1.0, **SETTINGS[setting])
    coordinator.release(1, NEVER)
    start, aggregation = processes(coordinator), coordinator.aggregation
    group = [start(0), start(1)]
    assert eventually(lambda: aggregation.next_sequence(0) > UPDATES // 4)
    group[0].send_signal(signal.SIGSTOP)
    second = start(0, attempt=2)
    if isinstance(aggregation, SynchronousRounds):  # in rounds, the whole worker group fails
        assert eventually(lambda: coordinator.failure)
        assert "cannot rejoin" in outcome_of(second)[2]
        coordinator.restart()
        ends = [start(worker, attempt=3, generation=2) for worker in range(2)]
    else:
        ends = [second, group.pop()]
        assert eventually(lambda: coordinator.members[0].attempt == 2)
    begun = aggregation.next_sequence(0)
    assert eventually(lambda: aggregation.next_sequence(0) > begun)
    group[0].send_signal(signal.SIGCONT)
    refused, ended = [outcome_of(process) for process in group], [outcome_of(process) for process in ends]

    assert [1] * len(group) == [code for code, *_ in refused]
    assert all("errors.RefusedError: " in errors for *_, errors in refused), refused
    assert [0, 0] == [code for code, *_ in ended], ended
    assert [UPDATES] * 2 == [aggregation.next_sequence(worker) for worker in range(2)]
    sums = [aggregation.snapshot()[0]]
    if coordinator.shape.plan.joint:
        sums = [2 * np.sum(json.loads(out), axis=0) for _, out, _ in ended]
    assert {total(2, UPDATES)} == set(np.concatenate(sums).tolist())

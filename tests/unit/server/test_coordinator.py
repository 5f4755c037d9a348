"""Tests of the coordinator: membership, update accounting and epoch progress of a run."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from coordinators import (
    EMPTY,
    NEVER,
    begun,
    coordinator_of,
    give,
    impatient,
    moved,
    outcomes_of,
    push,
    report_of,
    state_of,
    status_of,
    together,
    update_of,
    vector,
)

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.driver.remote_server import RemoteCoordinator
from sparkdl.errors import (
    ClusterError,
    DataError,
    DivergedError,
    RefusedError,
    RuleError,
    SparkDLError,
    WorkerLostError,
)
from sparkdl.process import interrupts
from sparkdl.rules import Sum
from sparkdl.server import snapshots, state
from sparkdl.server.aggregation import Hybrid, limits
from sparkdl.server.hosted_run import HostedRun
from sparkdl.server.state import RowsHeld
from sparkdl.transport.exchange import awaiting
from sparkdl.transport.messages import Answer, Flag, Kind, lengths_of


def finish_epoch(coordinator, epoch=0, **fields):
    """Let every worker report an epoch and the driver commit it; return its result."""
    with impatient():
        for worker in range(coordinator.shape.num_workers):
            give(coordinator, report_of(coordinator, worker, epoch, **fields))
    result = coordinator.wait_epoch(epoch, 0)
    coordinator.commit(result.snapshot)
    coordinator.release(epoch + 1, NEVER)
    return result


def round_of(coordinator, sequence):
    """Let every worker send 1 in a round; return the replies."""
    workers = range(coordinator.shape.num_workers)
    return together(*(lambda k=k: push(coordinator, k, [1.0], sequence=sequence) for k in workers))


# -- membership -----------------------------------------------------------------------------------


def test_a_worker_group_begins_when_all_are_ready():
    """A ready worker group begins, and each worker learns the rows of all, which set its share of a batch."""
    coordinator = coordinator_of(workers=2)
    for worker in (0, 1):
        coordinator.join(worker, 1, 7, "host", 1)
    coordinator.release(0, 0.25)
    begins = together(
        lambda: coordinator.ready(0, 1, 7, 3, 0, {}), lambda: coordinator.ready(1, 1, 7, 5, 0, {})
    )

    expected = {
        "rows": (3, 5),
        "epoch": 0,
        "sequence": 0,
        "restore": False,
        "learning_rate": 0.25,
        "progress": 0.0,
        "stop": False,
        "validation_rows": [0, 0],
    }
    assert [expected, expected] == begins


def test_a_worker_group_without_rows_ends_by_name():
    """A run without training rows ends with a DataError, for example when all rows are held out."""
    coordinator = coordinator_of(workers=2)

    with impatient():
        assert RefusedError in map(type, outcomes_of(coordinator, [RowsHeld(0)] * 2))

    assert isinstance(coordinator.failure, DataError)
    assert "no rows to train on; the workers have 0 validation rows" in str(coordinator.failure)


def test_who_is_early_is_told_to_ask_again():
    """A worker that is ready before the others or the driver has to repeat its request."""
    coordinator = coordinator_of(workers=2)
    with impatient():
        coordinator.join(0, 1, 1, "host", 1)
        alone = coordinator.ready(0, 1, 1, 4, 0, {})
        coordinator.join(1, 1, 1, "host", 1)
        unreleased = coordinator.ready(1, 1, 1, 4, 0, {})
        coordinator.release(0, NEVER)

        assert (None, None) == (alone, unreleased)
        assert coordinator.ready(0, 1, 1, 4, 0, {})["learning_rate"] is None


def test_the_driver_knows_who_is_missing():
    """The driver can list the workers that have not joined."""
    coordinator = coordinator_of()
    coordinator.join(1, 1, 1, "host", 1)

    assert [0, 2] == coordinator.missing()


def test_a_worker_that_is_none_of_the_worker_group_is_refused():
    """A worker whose index is out of range is refused."""
    assert 400 == status_of(lambda: coordinator_of().join(3, 1, 1, "host", 1))
    assert 400 == status_of(lambda: coordinator_of().join(-1, 1, 1, "host", 1))


def test_a_newer_attempt_takes_the_older_ones_place():
    """A newer attempt replaces the older one, which is refused from then on."""
    coordinator = begun(coordinator_of("asynchronous"))
    coordinator.join(0, 1, 2, "host", 1)
    before = state_of(coordinator)

    assert 409 == status_of(lambda: push(coordinator, 0, np.ones(5)))
    assert 409 == status_of(lambda: coordinator.heartbeat(0, 1, 1, 0, 0, 0, []))
    assert 409 == status_of(lambda: coordinator.join(0, 1, 1, "host", 1))
    assert before == state_of(coordinator)
    assert 1 == coordinator.counters["superseded"]


def test_a_newer_attempt_waits_while_the_older_one_is_at_work():
    """A newer attempt waits while the older one is active, and replaces it once it is silent."""
    coordinator = begun(coordinator_of("asynchronous", silence=3.0))
    at = moved(coordinator)
    at(2.9)
    assert not coordinator.join(0, 1, 2, "host", 1)
    assert 1 == push(coordinator, 0, np.ones(5)).version  # an update counts as a message
    at(5.8)
    assert not coordinator.join(0, 1, 2, "host", 1)
    at(6.0)
    assert coordinator.join(0, 1, 2, "host", 1)
    assert 409 == status_of(lambda: push(coordinator, 0, np.ones(5)))
    assert 1 == coordinator.counters["superseded"]


def test_a_worker_that_says_nothing_for_too_long_is_lost():
    """A worker without a heartbeat for longer than stall_timeout is lost, and the error names it."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, stall=10.0))
    at = moved(coordinator)
    for second in range(1, 13):
        at(second)
        coordinator.heartbeat(0, 1, 1, 0, 0, 0, [])
        coordinator.wait_epoch(0, 0)
        assert (coordinator.failure is not None) == (second > 10)
    assert isinstance(coordinator.failure, WorkerLostError)
    assert "Worker 1 on host (process 1) has sent no heartbeat for 11 s" in str(coordinator.failure)

    coordinator.restart()
    coordinator.wait_epoch(0, 0)
    assert coordinator.failure is None


def test_a_worker_that_lives_and_gets_nowhere_is_named_once():
    """A worker that is alive but trains no row for long is logged once per position, and not lost."""
    coordinator = begun(coordinator_of("asynchronous", workers=3, stall=10.0))
    at = moved(coordinator)
    coordinator.membership.asking.add(2)
    for second in range(1, 400):
        at(second)
        for worker, rows in ((0, 12 if second < 200 else 16), (1, second), (2, 8)):
            coordinator.heartbeat(worker, 1, 1, 1, rows, 0, [])
        coordinator.wait_epoch(0, 0)

    says = [entry["message"] for entry in coordinator.log]
    begin = "Worker 0 on host (process 1) is alive but has trained no row for 101 s, in epoch 2 after"
    assert [f"{begin} {rows} rows" for rows in (12, 16)] == [each.split(". ")[0] for each in says]
    assert coordinator.failure is None


def test_who_waits_for_an_answer_gets_on():
    """A worker that waits for a reply is recorded as waiting, before and after its round."""
    coordinator = begun(coordinator_of(workers=2, stall=10.0))
    asked = []
    update = update_of(coordinator, 0, [1.0])
    with impatient():
        coordinator.exchange(update, lambda: asked.append(set(coordinator.membership.asking)) or update)

    assert ([{0}], set()) == (asked, coordinator.membership.asking)


def test_a_driver_that_was_away_calls_nobody_silent():
    """Time during which the driver was away does not count as silence of the workers."""
    coordinator = begun(coordinator_of("asynchronous", stall=10.0))
    at = moved(coordinator)
    for second in (0, 3600, 3604, 3608):
        at(second)
        coordinator.wait_epoch(0, 0)
        assert coordinator.failure is None
    at(3611)
    coordinator.wait_epoch(0, 0)
    assert coordinator.failure is not None


def test_a_worker_that_was_heard_while_the_driver_was_away_is_not_waited_for_longer():
    """A worker heard while the driver was away is lost after stall seconds of silence from then on."""
    coordinator = begun(coordinator_of("asynchronous", stall=10.0))
    at = moved(coordinator)
    coordinator.wait_epoch(0, 0)
    at(3600)
    coordinator.heartbeat(0, 1, 1, 0, 0, 0, [])
    for second in (3600, 3604, 3608, 3611):
        assert coordinator.failure is None
        at(second)
        coordinator.wait_epoch(0, 0)
        for worker in (1, 2):
            coordinator.heartbeat(worker, 1, 1, 0, 0, 0, [])

    assert "Worker 0" in str(coordinator.failure)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_who_has_not_joined_or_is_not_ready_is_refused(mode):
    """An update of a worker that has not joined or is not ready is refused."""
    coordinator = coordinator_of(mode)
    before = status_of(lambda: push(coordinator, 0, np.ones(5)))
    coordinator.join(0, 1, 1, "host", 1)

    assert [409, 409] == [before, status_of(lambda: push(coordinator, 0, np.ones(5)))]
    assert 0 == coordinator.aggregation.version


def test_a_worker_that_returns_to_rounds_starts_the_worker_group_again():
    """A worker that returns to rounds is refused and fails the generation: its replica is gone."""
    coordinator = begun(coordinator_of())

    assert 409 == status_of(lambda: coordinator.join(0, 1, 2, "host", 1))
    assert isinstance(coordinator.failure, WorkerLostError)


def test_a_worker_that_returns_elsewhere_goes_on_after_what_was_counted():
    """Without rounds, a returning worker continues after its last counted update without a rollback."""
    coordinator = begun(coordinator_of("asynchronous", size=1))
    push(coordinator, 0, [1.0], sequence=0)
    push(coordinator, 0, [1.0], sequence=1, base_version=1)
    coordinator.join(0, 1, 2, "host", 1)
    begin = coordinator.ready(0, 1, 2, 10, 0, {})
    restored = give(coordinator, update_of(coordinator, kind=Kind.RESTORE, attempt=2))

    assert (2, True) == (begin["sequence"], begin["restore"])
    assert ([2.0], 2) == (restored.parameters.tolist(), restored.version)


def test_a_worker_that_returns_with_other_rows_is_refused():
    """A worker that returns with another number of rows is refused and fails the run."""
    coordinator = begun(coordinator_of("asynchronous"))
    coordinator.join(0, 1, 2, "host", 1)
    with pytest.raises(RefusedError, match="restarted with 9 rows instead of 10") as error:
        coordinator.ready(0, 1, 2, 9, 0, {})

    assert (422, None) == (error.value.status, coordinator.members[0].held)
    assert isinstance(coordinator.failure, DataError)


# -- refusals -------------------------------------------------------------------------------------


def test_a_report_of_an_epoch_that_there_is_not_is_refused():
    """A report of an epoch beyond the last one is refused, because it would be kept forever."""
    coordinator = begun(coordinator_of("asynchronous"))
    with pytest.raises(RefusedError, match=r"Unknown epoch 3: the run has 2\.") as error:
        push(coordinator, 0, kind=Kind.REPORT, epoch=2)

    assert (400, []) == (error.value.status, sorted(coordinator.epochs.reports))


OTHERS = [
    ({"run": b"x" * 16}, 409),
    ({"generation": 0}, 409),
    ({"generation": 2}, 409),
    ({"attempt": 0}, 409),
    ({"worker": 3}, 409),
    ({"layout": b"x" * 16}, 422),
    ({"offset": 1}, 422),
    ({"parameters": vector(1, 2, 3, 4)}, 413),
    ({"parameters": EMPTY}, 413),
    ({"statistics": vector(1)}, 413),
    ({"metrics": b"m"}, 413),
    ({"state": b"s"}, 413),
    ({"rows": 0}, (400, 413)),  # with the sections of an update that has rows
    ({"base_version": 1}, 400),
    ({"kind": "other"}, 400),
    ({"flags": Flag.AWAIT, "rows": 0, "parameters": EMPTY}, 409),
    ({"flags": Flag.AWAIT}, 413),
]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
@pytest.mark.parametrize(("fields", "status"), OTHERS)
def test_an_update_that_is_not_this_runs_is_refused_and_changes_nothing(mode, fields, status):
    """An update of another run, generation, attempt or layout is refused before its body is read."""
    coordinator = begun(coordinator_of(mode))
    update = update_of(coordinator, 0, np.ones(5))
    if fields.get("kind") == "other":
        fields = {"kind": Kind.DELTA if update.kind is Kind.GRADIENT else Kind.GRADIENT}
    before = state_of(coordinator)

    assert status_of(lambda: give(coordinator, replace(update, **fields))) in np.atleast_1d(status)
    assert before == state_of(coordinator)
    assert 1 == coordinator.counters["refused"]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_an_update_without_rows_is_for_rounds_alone(mode):
    """An update without rows is refused if there are no rounds."""
    coordinator = begun(coordinator_of(mode))
    before = state_of(coordinator)

    assert 400 == status_of(lambda: push(coordinator, 0))
    assert before == state_of(coordinator)


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.RESTORE, Kind.VALIDATION])
def test_a_request_that_carries_no_weights_may_bring_none(kind):
    """A request of a kind without weights is refused if it carries some."""
    coordinator = begun(coordinator_of())

    assert 413 == status_of(lambda: push(coordinator, 0, np.ones(5), kind=kind))


@pytest.mark.parametrize(
    "call",
    [
        lambda coordinator: coordinator.join(0, 1, 1, "host", 1),
        lambda coordinator: coordinator.ready(0, 1, 1, 10, 0, {}),
        lambda coordinator: coordinator.heartbeat(0, 1, 1, 0, 0, 0, []),
        lambda coordinator: push(coordinator, 0, np.ones(5)),
        lambda coordinator: give(coordinator, report_of(coordinator, 0)),
    ],
)
def test_a_run_that_is_over_takes_nothing(call):
    """Every request to a run that is over is answered with 410."""
    coordinator = begun(coordinator_of("asynchronous"))
    coordinator.close()

    assert 410 == status_of(lambda: call(coordinator))


def test_closing_lets_go_who_waits():
    """A worker that waits at an epoch's end is refused with 410 when the run closes."""
    coordinator = begun(coordinator_of(workers=1))

    def close():
        coordinator.wait_epoch(0, 10)
        coordinator.close()

    refused, _ = together(lambda: give(coordinator, report_of(coordinator, 0)), close)

    assert 410 == refused.status


# -- epochs ---------------------------------------------------------------------------------------


def test_an_epoch_is_complete_when_all_have_reported():
    """A complete epoch has metrics in worker order, the number of rows, the losses and the snapshot."""
    coordinator = begun(coordinator_of("asynchronous", size=1, metrics=2, optimizer=3))
    push(coordinator, 0, [6.0])
    with impatient():
        for worker, rows in ((2, 30), (0, 10), (1, 20)):
            assert coordinator.wait_epoch(0, 0) is None
            give(
                coordinator,
                report_of(coordinator, worker, rows=rows, metrics=b"m%d" % worker, state=b"st%d" % worker),
            )
    result = coordinator.wait_epoch(0, 0)

    assert ([b"m0", b"m1", b"m2"], 60, [1.0]) == (result.metrics, result.rows, result.losses)
    assert (1, [6.0], 1) == (
        result.snapshot.epoch,
        result.snapshot.parameters.tolist(),
        result.snapshot.version,
    )
    assert [b"st0", b"st1", b"st2"] == [result.snapshot.state(worker) for worker in range(3)]
    assert [] == coordinator.aggregation.losses


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_run_that_has_grown_out_of_proportion_ends_with_the_epoch_before(mode):
    """A run whose loss and center grow together in the last epoch ends with the snapshot before it."""
    rule = "average" if mode == "synchronous" else "sum"
    coordinator = begun(coordinator_of(mode, joint=False, workers=2, size=1, center=[1.0], merge=rule))

    def exchange(epoch, delta, **fields):
        updates = [update_of(coordinator, k, delta, sequence=epoch, epoch=epoch, **fields) for k in (0, 1)]
        together(*(lambda u=u: give(coordinator, u) for u in updates))

    exchange(0, [0.5])
    before = finish_epoch(coordinator).snapshot.parameters
    exchange(1, [30.0], loss=60.0)
    with impatient():
        for worker in (0, 1):
            give(coordinator, report_of(coordinator, worker, epoch=1))

    assert coordinator.wait_epoch(1, 0) is None
    assert isinstance(coordinator.failure, DivergedError)
    assert "the mean loss of epoch 2 is 60, compared to 1 at the start" in str(coordinator.failure)
    assert before.tolist() == coordinator.stopped_snapshot().parameters.tolist()


@pytest.mark.parametrize(
    ("mode", "window", "losses"),
    [
        ("asynchronous", 1, 32),
        ("asynchronous", 16, 3),
        ("hogwild", None, 3),
        ("synchronous", 1, 10),
        ("synchronous", 16, 1),
        ("synchronous", None, 1),
    ],
)
def test_what_a_run_is_compared_with_is_nothing_that_merging_did(mode, window, losses):
    """The initial loss is that of 32 batches, or of the first windows or round if they have more."""
    plan = BatchPlan((), 0, 4, window, False, False, 0)

    assert losses == coordinator_of(mode, joint=False, plan=plan).screening.detector.first


def test_an_update_that_was_not_merged_is_among_the_losses():
    """An update that was not merged is NaN among the losses, which TerminateOnNaN checks."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, size=1))
    push(coordinator, 0, [float("nan")])
    push(coordinator, 1, [1.0])
    losses = finish_epoch(coordinator).losses

    assert [True, False] == np.isnan(losses).tolist()


def test_an_epoch_without_one_sound_update_ends_the_run():
    """An epoch without a sound update ends the run, however few updates it has."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, size=1))
    with impatient():
        for worker in (0, 1):
            push(coordinator, worker, [float("nan")])
            assert coordinator.failure is None
            give(coordinator, report_of(coordinator, worker))

    assert isinstance(coordinator.failure, DivergedError)
    assert "every update of epoch 1 contained NaN, Inf or values" in str(coordinator.failure)


def test_a_report_that_comes_twice_counts_once():
    """A repeated report adds no rows, and one that arrives after the epoch is ignored."""
    coordinator = begun(coordinator_of("asynchronous", workers=2))
    with impatient():
        give(coordinator, report_of(coordinator, 0))
        give(coordinator, report_of(coordinator, 0))
        give(coordinator, report_of(coordinator, 1))
        result = coordinator.wait_epoch(0, 0)
        coordinator.commit(result.snapshot)
        coordinator.release(1, NEVER)
        give(coordinator, report_of(coordinator, 1))

    assert 20 == result.rows
    assert {} == coordinator.epochs.reports


def test_rounds_wait_for_the_driver_between_epochs():
    """In rounds, the next epoch begins with the weights and the rate that callbacks have set."""
    coordinator = begun(coordinator_of(workers=1, size=1))
    replies = []

    def driver():
        result = coordinator.wait_epoch(0, 10)
        coordinator.commit(result.snapshot)
        coordinator.replace(vector(8.0), EMPTY)
        coordinator.release(1, 0.125)

    together(
        lambda: replies.append(give(coordinator, report_of(coordinator, 0, parameters=vector(3.0)))), driver
    )

    assert (Answer.CENTER, [8.0], 0.125) == (
        replies[0].kind,
        replies[0].parameters.tolist(),
        replies[0].learning_rate,
    )
    assert [8.0] == coordinator.snapshot.parameters.tolist()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_who_is_to_end_is_sent_no_center(mode):
    """A worker that should end is sent no center, which saves the driver's memory."""
    coordinator = begun(coordinator_of(mode, workers=1, size=1, joint=False, epochs=1))
    push(coordinator, 0, [1.0])
    replies = []

    def driver():
        coordinator.commit(coordinator.wait_epoch(0, 10).snapshot)
        coordinator.stop()

    together(lambda: replies.append(give(coordinator, report_of(coordinator, 0))), driver)

    assert (Answer.NOTHING, Flag.STOP, 0) == (replies[0].kind, replies[0].flags, len(replies[0].parameters))


def test_an_asynchronous_worker_is_at_most_an_epoch_ahead():
    """An asynchronous worker goes on to a released epoch at once, and waits at the next one."""
    coordinator = begun(coordinator_of("asynchronous", epochs=5))
    with impatient():
        first = give(coordinator, report_of(coordinator, 0, 0))
        second = give(coordinator, report_of(coordinator, 0, 1))

    assert (Flag.NONE, Flag.AGAIN) == (first.flags, second.flags)


def test_the_last_epoch_ends_with_the_run():
    """At the end of the last epoch, workers wait until the driver stops the run."""
    coordinator = begun(coordinator_of("asynchronous", workers=1, epochs=1))
    with impatient():
        waiting = give(coordinator, report_of(coordinator, 0))
        coordinator.stop()
        ended = give(coordinator, report_of(coordinator, 0, flags=Flag.AWAIT))

    assert (Flag.AGAIN, Flag.STOP) == (waiting.flags, ended.flags & Flag.STOP)


def test_a_validated_epoch_is_evaluated_by_everybody():
    """Every worker evaluates a validated epoch once, with the weights of the epoch's end."""
    coordinator = begun(
        coordinator_of("asynchronous", workers=2, size=1, evaluated=frozenset({0, 1}), metrics=1)
    )
    push(coordinator, 0, [3.0])
    with impatient():
        early = give(coordinator, report_of(coordinator, 0, metrics=b"t", base_version=1))
        asked = give(coordinator, report_of(coordinator, 1, metrics=b"t"))
        after = push(coordinator, 0, [4.0], sequence=1, base_version=1)
        pulled = give(coordinator, update_of(coordinator, 1, kind=Kind.PULL, epoch=0))
        for worker in (0, 1):
            assert coordinator.wait_epoch(0, 0) is None
            update = update_of(coordinator, worker, kind=Kind.VALIDATION, epoch=0, metrics=b"%d" % worker)
            answer = give(coordinator, update)

    assert (-1, 0, 0, -1) == (early.evaluate, asked.evaluate, after.evaluate, answer.evaluate)
    assert ([3.0], 1) == (pulled.parameters.tolist(), pulled.version)
    assert [b"0", b"1"] == coordinator.wait_epoch(0, 0).validation


def test_a_worker_that_has_the_snapshot_is_sent_nothing():
    """A worker that has the requested snapshot gets its version only."""
    coordinator = begun(coordinator_of("asynchronous", size=1))
    reply = give(coordinator, update_of(coordinator, kind=Kind.PULL, base_version=0))

    assert (Answer.NOTHING, 0) == (reply.kind, len(reply.parameters))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_progress_is_that_of_the_updates_that_count(mode):
    """A duplicate counts neither as a step of the schedule nor as an exchange."""
    coordinator = begun(coordinator_of(mode, joint=False, workers=1, size=1))
    for _ in range(2):
        push(coordinator, 0, [1.0])

    assert (1.0, 1, 1) == (
        coordinator.progress,
        coordinator.counters["exchanges"],
        coordinator.counters["duplicates"],
    )


def test_an_evaluation_waits_for_a_driver_that_attends_it():
    """With an attending driver, an evaluation waits until the driver has chosen the weights."""
    shape = {"evaluated": frozenset({0, 1}), "evaluation_waits": True, "metrics": 1}
    coordinator = begun(coordinator_of(workers=1, size=1, **shape))
    with impatient():
        waiting = give(coordinator, report_of(coordinator, 0, epoch=0))
        snapshot = coordinator.awaiting_evaluation(0).snapshot
        unknown = coordinator.wait_epoch(0, 0)
        coordinator.evaluate(0, (np.full(1, 7, np.float32), EMPTY))
        asked = give(coordinator, awaiting(report_of(coordinator, 0, epoch=0)))
        pulled = give(
            coordinator, update_of(coordinator, 0, kind=Kind.PULL, epoch=0, base_version=snapshot.version)
        )
        give(coordinator, update_of(coordinator, 0, kind=Kind.VALIDATION, epoch=0, metrics=b"v"))
    result = coordinator.wait_epoch(0, 0)
    coordinator.commit(result.snapshot)

    assert (-1, None, 0) == (waiting.evaluate, unknown, asked.evaluate)
    assert (Answer.CENTER, [7.0]) == (pulled.kind, pulled.parameters.tolist())
    assert [b"v"] == result.validation
    assert ({}, None) == (coordinator.epochs.evaluation_weights, coordinator.awaiting_evaluation(1))


def test_evaluations_are_asked_for_while_others_open_and_close_books(monkeypatch):
    """A push looks for an evaluation while it holds the lock that guards the reports."""
    coordinator = begun(coordinator_of("asynchronous", workers=1, size=1, evaluated=frozenset({0, 1})))
    looked = []
    look = coordinator.epochs.to_evaluate
    monkeypatch.setattr(
        coordinator.epochs,
        "to_evaluate",
        lambda worker: looked.append(coordinator.aggregation.lock._is_owned()) or look(worker),
    )
    push(coordinator, 0, [1.0])

    assert [True] == looked


FREED = """
import re, numpy as np
from pathlib import Path
from unittest import mock
from coordinators import begun, coordinator_of

def resident():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

coordinator = begun(coordinator_of("asynchronous"))
pairs = [(np.ones(10_000, np.float32), np.ones(1_000, np.float32)) for _ in range(2_000)]
begin, used = resident(), [small for _, small in pairs]
del pairs
coordinator.commit(coordinator.snapshot)  # in the first seconds of a run
kept, after = begin - resident(), coordinator.state.clock() + 11
coordinator.state.clock = lambda: after
coordinator.commit(coordinator.snapshot)
print(kept, begin - resident())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc returns memory to the system"
)
def test_what_requests_have_freed_is_given_back_now_and_then():
    """Freed memory of requests is returned to the system when a snapshot is committed."""
    paths = [str(Path(__file__).parents[level]) for level in (2, 3)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))  # in a process with its own heap
    out = subprocess.check_output([sys.executable, "-c", FREED], env=environment, text=True)
    before, after = map(int, out.split())

    assert before < 20e6 < 60e6 < after


# -- ends and restarts ----------------------------------------------------------------------------


def test_a_stop_reaches_a_worker_with_its_next_reply():
    """A stop reaches a worker with its next reply, to an exchange or to a heartbeat."""
    coordinator = begun(coordinator_of("asynchronous", size=1))
    coordinator.stop()
    line = {"name": "n", "level": logging.INFO, "message": "hello"}

    assert push(coordinator, 0, [1.0]).flags & Flag.STOP
    assert coordinator.heartbeat(0, 1, 1, 0, 5, 0, [line])["stop"]
    assert 5 == coordinator.members[0].seen_rows
    assert [line | {"message": "worker 0: hello"}] == coordinator.take_log()


def test_an_epoch_that_is_cut_short_ends_with_the_round_under_way():
    """An epoch that is cut short ends after the open round; all workers report and evaluate it."""
    coordinator = begun(coordinator_of(workers=2, size=1, evaluated=frozenset([0, 1]), metrics=1))
    first = together(lambda: push(coordinator, 0, [1.0]), lambda: push(coordinator, 1, [1.0]))
    coordinator.end_early(0)
    coordinator.end_early(0)
    last = together(
        lambda: push(coordinator, 0, [1.0], sequence=1), lambda: push(coordinator, 1, [1.0], sequence=1)
    )
    said = {"flags": Flag.STOP, "metrics": b"m"}
    gone = together(
        lambda: give(coordinator, report_of(coordinator, 0, parameters=vector(6.0), **said)),
        lambda: give(coordinator, report_of(coordinator, 1, **said)),
    )

    assert [Flag.NONE] * 2 == [reply.flags for reply in first]
    assert all(reply.flags & Flag.STOP for reply in (*last, *gone))
    assert [0, 0] == [reply.evaluate for reply in gone]
    assert coordinator.wait_epoch(0, 0) is None
    for worker in (0, 1):
        give(coordinator, update_of(coordinator, worker, kind=Kind.VALIDATION, metrics=b"v"))
    result = coordinator.wait_epoch(0, 0)
    assert ([b"m", b"m"], [b"v", b"v"], [6.0]) == (
        result.metrics,
        result.validation,
        result.snapshot.parameters.tolist(),
    )


def test_a_worker_that_is_ahead_evaluates_an_epoch_that_is_cut_short():
    """Without rounds, a worker already in the next epoch evaluates the one that is cut short."""
    coordinator = begun(
        coordinator_of("asynchronous", workers=2, size=1, evaluated=frozenset([0]), metrics=1)
    )
    coordinator.release(0, 0.1)
    give(coordinator, report_of(coordinator, 0, metrics=b"m"))
    coordinator.end_early(0)

    assert push(coordinator, 0, [1.0]).flags & Flag.STOP
    ahead, ended = together(
        lambda: give(coordinator, report_of(coordinator, 0, epoch=1, flags=Flag.STOP, metrics=b"x")),
        lambda: give(coordinator, report_of(coordinator, 1, flags=Flag.STOP, metrics=b"n")),
    )
    assert (0, 0) == (ahead.evaluate, ended.evaluate)
    assert {0: b"m", 1: b"n"} == coordinator.epochs.reports[0].metrics
    assert 1 not in coordinator.epochs.reports


def test_a_worker_that_has_not_begun_an_epoch_that_is_cut_short_still_reports_it():
    """Without rounds, a resumed worker is not stopped before it trains in the epoch that is cut short."""
    coordinator = begun(coordinator_of("asynchronous", size=1))
    coordinator.end_early(0)
    resumed = give(coordinator, update_of(coordinator, kind=Kind.RESTORE))

    assert not resumed.flags & Flag.STOP
    assert push(coordinator, 0, [1.0]).flags & Flag.STOP


def test_a_worker_that_is_replaced_in_the_last_evaluation_evaluates():
    """Without rounds, the next attempt of a worker evaluates the epoch cut short before it stops."""
    coordinator = begun(
        coordinator_of("asynchronous", workers=2, size=1, evaluated=frozenset([0]), metrics=1)
    )
    coordinator.release(0, 0.1)
    coordinator.end_early(0)
    with impatient():
        for worker in (0, 1):
            give(coordinator, report_of(coordinator, worker, flags=Flag.STOP, metrics=b"m"))
    coordinator.restart()
    begun(coordinator, attempt=2)
    resumed = give(coordinator, update_of(coordinator, kind=Kind.RESTORE, attempt=2))
    with impatient():
        waits = report_of(coordinator, 0, flags=Flag.AWAIT, attempt=2)
        settled = give(coordinator, waits)

    assert not resumed.flags & Flag.STOP
    assert 0 == settled.evaluate


def test_a_repeated_report_does_not_wait_for_the_next_epoch_that_is_cut_short():
    """Without rounds, a worker that repeats its report continues into the epoch that is cut short."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, size=1))
    finish_epoch(coordinator)
    coordinator.end_early(1)
    with impatient():
        repeated = give(coordinator, report_of(coordinator, 0))

    assert not repeated.flags & (Flag.STOP | Flag.AGAIN)
    assert push(coordinator, 0, [1.0], epoch=1).flags & Flag.STOP


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("joint", [True, False])
def test_a_worker_that_is_lost_in_an_evaluation_costs_the_evaluation(joint, restarts):
    """A restart during an evaluation keeps the trained epoch with its losses, and evaluates it again."""
    shape = {"evaluated": frozenset([0, 1]), "metrics": 1, "optimizer": 2}
    coordinator = begun(coordinator_of(workers=2, size=1, joint=joint, **shape))
    together(lambda: push(coordinator, 0, [1.0]), lambda: push(coordinator, 1, [1.0]))
    losses = list(coordinator.aggregation.losses)
    together(
        lambda: give(
            coordinator, report_of(coordinator, 0, parameters=vector(6.0), state=b"op", metrics=b"m")
        ),
        lambda: give(coordinator, report_of(coordinator, 1, metrics=b"n")),
    )
    with impatient():
        give(coordinator, update_of(coordinator, 1, kind=Kind.VALIDATION, metrics=b"v"))
    for _ in range(restarts):
        coordinator.restart()
        begins = outcomes_of(coordinator, [RowsHeld(10)] * 2)
        waiting = together(
            *(lambda k=k: give(coordinator, report_of(coordinator, k, flags=Flag.AWAIT)) for k in range(2))
        )

    assert [1, 1] == [begin["epoch"] for begin in begins]
    assert [0, 0] == [reply.evaluate for reply in waiting]
    assert coordinator.wait_epoch(0, 0) is None
    with impatient():
        for worker in range(2):
            give(coordinator, update_of(coordinator, worker, kind=Kind.VALIDATION, metrics=b"v"))
    result = coordinator.wait_epoch(0, 0)
    assert ([b"m", b"n"], [b"v", b"v"], 20) == (result.metrics, result.validation, result.rows)
    assert losses == result.losses
    assert b"op" == result.snapshot.state(0)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_stopped_run_has_its_last_merge(mode):
    """A stopped run returns the center of its last merge, and the progress that this merge counts for."""
    coordinator = begun(coordinator_of(mode, size=1))
    push(coordinator, 0, [4.0])
    coordinator.stop()
    snapshot = coordinator.stopped_snapshot()

    assert [4.0] == snapshot.parameters.tolist()
    assert 0 < coordinator.progress == snapshot.progress


def test_a_stopped_worker_group_of_replicas_tells_its_weights():
    """A stopped run of replicas returns the weights that worker 0 reports."""
    coordinator = begun(coordinator_of(workers=1, size=1, optimizer=2))
    before = coordinator.stopped_snapshot()
    coordinator.stop()
    give(coordinator, report_of(coordinator, 0, parameters=vector(6.0), state=b"op", flags=Flag.STOP))
    snapshot = coordinator.stopped_snapshot()

    assert [0.0] == before.parameters.tolist()
    assert ([6.0], b"op") == (snapshot.parameters.tolist(), snapshot.state(0))


def test_a_stopped_worker_group_of_replicas_tells_its_weights_on_a_full_disk(monkeypatch):
    """A stopped run of replicas returns its last weights, even if no temporary file can be written."""
    coordinator = begun(coordinator_of(workers=1, size=1, optimizer=2))
    monkeypatch.setattr(state, "IN_MEMORY", 1)
    monkeypatch.setattr(state, "TemporaryFile", mock.Mock(side_effect=OSError(28, "No space left on device")))
    coordinator.stop()
    give(coordinator, report_of(coordinator, 0, parameters=vector(6.0), state=b"op", flags=Flag.STOP))
    snapshot = coordinator.stopped_snapshot()

    assert ([6.0], b"op") == (snapshot.parameters.tolist(), snapshot.state(0))


def test_a_worker_group_that_stops_behind_an_epochs_end_has_that_epoch():
    """A run stopped after an epoch's end returns that epoch's snapshot, taken by the driver or not."""
    coordinator = begun(coordinator_of(workers=1, size=1, optimizer=2))
    coordinator.stop()
    give(coordinator, report_of(coordinator, 0, parameters=vector(6.0), state=b"op"))
    snapshot = coordinator.stopped_snapshot()

    assert (1, [6.0], b"op") == (snapshot.epoch, snapshot.parameters.tolist(), snapshot.state(0))


@pytest.mark.parametrize(
    ("attempt", "silent", "lost", "counts"),
    [
        (1, 0, False, False),
        (2, 0, False, True),
        (3, 0, False, False),  # the second is active
        (3, 5, False, True),  # the second is silent for long, so that its successor may report for the worker
        (1, 5, False, False),
        (2, 0, True, False),
        (-1, 0, False, True),
        (-1, 0, True, True),
    ],
)
def test_what_fails_a_run_is_the_attempt_that_is_at_work(attempt, silent, lost, counts):
    """Only a worker's active attempt, its successor, or a task that deals rows (-1) may fail the run."""
    coordinator = coordinator_of("asynchronous", workers=3, goes_on=True, stall=60.0, silence=3.0)
    set_clock = moved(coordinator)
    begun(coordinator, attempt=2)
    if lost:
        with coordinator.changed:
            coordinator.lose(1, "Worker 1 has said nothing.")
    set_clock(silent)

    if counts:
        coordinator.fail_of(1, 1, attempt, SparkDLError("broken"))
    else:
        with pytest.raises(RefusedError):
            coordinator.fail_of(1, 1, attempt, SparkDLError("broken"))

    assert (coordinator.failure is not None) is counts


def test_a_report_that_cannot_be_kept_is_not_booked(monkeypatch):
    """A report that cannot be stored is not recorded, and the run fails."""
    coordinator = begun(coordinator_of("asynchronous", workers=1, optimizer=2, epochs=3))
    monkeypatch.setattr(state, "in_file", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        give(coordinator, report_of(coordinator, 0, state=b"op"))

    assert 0 not in coordinator.epochs.reports or not coordinator.epochs.reports[0].metrics
    assert isinstance(coordinator.failure, ClusterError)


def test_a_snapshot_that_a_slow_disk_refuses_fails_the_run_by_name(monkeypatch):
    """A time-out of a file, unlike one of a worker's socket, fails the run."""
    coordinator = begun(coordinator_of("asynchronous", workers=1, epochs=3))
    monkeypatch.setattr(snapshots, "kept", mock.Mock(side_effect=TimeoutError(110, "Connection timed out")))
    with pytest.raises(TimeoutError):
        give(coordinator, report_of(coordinator, 0))

    assert "The parameter endpoint failed: TimeoutError: [Errno 110]" in str(coordinator.failure)


class Fails(Sum):
    """A rule that fails at its n-th update."""

    def __init__(self, number):
        self.number, self.seen = number, 0

    def update(self, delta, state, merge):
        self.seen += 1
        if self.seen == self.number:
            raise MemoryError("too much")
        return delta, state


class FailsInRounds(Fails):
    """The same for rounds only."""

    alone, rounds = "it is for rounds", None


def test_an_update_whose_rule_fails_is_not_counted():
    """An update whose rule fails is not counted, neither in the center and ledger nor in a snapshot."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, size=1, merge=Fails(2)))
    push(coordinator, 0, [1.0])
    before = state_of(coordinator)
    with pytest.raises(RuleError, match="too much"):
        push(coordinator, 0, [2.0], sequence=1)
    failure = coordinator.failure
    coordinator.state.failure = None
    coordinator.request_snapshot()

    assert isinstance(failure, RuleError)
    assert before == state_of(coordinator)
    assert {0: 0} == coordinator.newest_snapshot.ledger
    assert [1.0] == coordinator.stopped_snapshot().parameters.tolist()


def test_an_update_that_is_merged_in_part_is_in_nothing_that_is_kept(monkeypatch):
    """If a hogwild merge fails half-way, the run ends with its last snapshot and merges nothing further."""
    monkeypatch.setattr(limits, "STRIPE", 2)
    coordinator = begun(coordinator_of("hogwild", workers=2, size=4, merge=Fails(4), epochs=3))
    push(coordinator, 0, [1.0] * 4)
    finish_epoch(coordinator)
    with pytest.raises(RuleError):
        push(coordinator, 0, [2.0] * 4, sequence=1)

    assert coordinator.broken
    assert [1.0] * 4 == coordinator.stopped_snapshot().parameters.tolist()
    assert 409 == status_of(lambda: push(coordinator, 1, [1.0] * 4))
    assert coordinator.wait_epoch(1, 0) is None
    coordinator.restart()
    assert isinstance(coordinator.failure, RuleError)


def test_a_round_that_fails_as_it_closes_is_not_closed_again():
    """If a round fails as it closes, waiting workers are refused, and the run ends with the state before."""
    coordinator = begun(coordinator_of(joint=False, workers=2, size=1, merge=FailsInRounds(2)))
    round_of(coordinator, 0)
    outcomes = round_of(coordinator, 1)

    assert {RuleError, RefusedError} == {type(outcome) for outcome in outcomes}
    assert coordinator.broken
    assert (0, [0.0]) == (
        coordinator.stopped_snapshot().version,
        coordinator.stopped_snapshot().parameters.tolist(),
    )
    assert isinstance(coordinator.failure, RuleError)


def test_a_failure_that_stays_comes_before_a_lost_worker():
    """Another failure takes precedence over a lost worker, for which the worker group would be restarted."""
    coordinator = begun(coordinator_of())
    failure = SparkDLError("broken")
    coordinator.fail(1, WorkerLostError("lost"))
    coordinator.fail(1, failure)
    coordinator.fail(1, WorkerLostError("lost"))

    assert coordinator.failure is failure


STALE = {
    "delta": ("asynchronous", {"parameters": np.ones(5, np.float32)}),
    "delta of a part": ("hogwild", {"parameters": np.ones(5, np.float32)}),
    "delta in a round": ("synchronous", {"parameters": np.ones(5, np.float32)}),
    "delta with NaN": ("asynchronous", {"parameters": np.full(5, np.nan, np.float32)}),
    "report": ("asynchronous", {"kind": Kind.REPORT}),
    "share": ("asynchronous", {"kind": Kind.SHARE, "rows": 3}),
    "rows": ("asynchronous", {"kind": Kind.GIVE, "sequence": 1, "state": b"rows"}),
    "given rows": ("asynchronous", {"kind": Kind.TAKE, "sequence": 1}),
    "validation": ("asynchronous", {"kind": Kind.VALIDATION}),
    "state": ("synchronous", {"kind": Kind.STATE}),
    "pull": ("asynchronous", {"kind": Kind.PULL}),
    "restore": ("asynchronous", {"kind": Kind.RESTORE}),
    "center": ("asynchronous", {"kind": Kind.CENTER}),
    "rule": ("asynchronous", {"kind": Kind.RULE}),
    "gradient": ("synchronous", {"kind": Kind.GRADIENT, "parameters": np.ones(5, np.float32)}),
}


def test_every_message_of_a_worker_is_fenced():
    """The messages of the test below include each kind; those of all-reduce have a test of their own."""
    kinds = {fields.get("kind", Kind.DELTA) for _, fields in STALE.values()}

    assert set(Kind) - {Kind.ARRAYS} == kinds


@pytest.mark.parametrize("comes", ["attempt", "generation"])
@pytest.mark.parametrize("name", STALE)
def test_what_was_on_its_way_when_its_attempt_was_over_changes_nothing(name, comes):
    """A request admitted before a newer attempt or a restart is refused afterwards, and changes nothing."""
    mode, fields = STALE[name]
    joint = fields.get("kind") is Kind.GRADIENT
    coordinator = begun(coordinator_of(mode, joint=joint, workers=2, goes_on=True))
    update = update_of(coordinator, 0, **fields)
    coordinator.admit(update, lengths_of(update))
    if comes == "attempt":
        coordinator.join(0, 1, 2, "host", 2)
    else:
        coordinator.restart()
    before, shares = state_of(coordinator), dict(coordinator.rebalance.shares)

    with impatient():
        assert 409 == status_of(lambda: coordinator.exchange(update, lambda: update))

    assert before == state_of(coordinator)
    assert (shares, {}) == (coordinator.rebalance.shares, coordinator.rebalance.given)


def test_an_epoch_is_not_released_at_an_older_rate():
    """A late release of an older epoch does not change the released epoch or the learning rate."""
    coordinator = begun(coordinator_of("asynchronous", epochs=3))
    coordinator.release(1, 0.1)
    coordinator.release(0, 0.5)

    assert (2, 0.1) == (coordinator.released, coordinator.schedule.learning_rate)


def test_the_first_failure_of_a_generation_counts():
    """Only the first failure of the current generation counts."""
    coordinator = coordinator_of()
    first, second = SparkDLError("first"), SparkDLError("second")
    coordinator.fail(0, second)
    coordinator.fail(1, first)
    coordinator.fail(1, second)

    assert coordinator.failure is first
    assert coordinator.wait_epoch(0, 60) is None
    coordinator.restart()
    assert coordinator.failure is None


def test_a_restart_rolls_rounds_back_to_the_cut():
    """A restart in rounds restores center, version, progress, reports and losses of the last epoch's end."""
    coordinator = begun(coordinator_of(joint=False, workers=1, size=1, epochs=3, optimizer=2, generators=1))
    for sequence in range(3):
        push(coordinator, 0, [1.0], sequence=sequence, base_version=sequence)
    finish_epoch(coordinator, state=b"ost"[:3])
    push(coordinator, 0, [1.0], sequence=3, base_version=3)
    generation = coordinator.restart()

    assert (2, 3, 3, {}, [], 3.0) == (
        generation,
        coordinator.aggregation.next_sequence(0),
        coordinator.aggregation.version,
        coordinator.epochs.reports,
        coordinator.aggregation.losses,
        coordinator.progress,
    )
    assert [3.0] == coordinator.aggregation.parameters.tolist()
    begun(coordinator, attempt=2)
    restored = give(coordinator, update_of(coordinator, kind=Kind.RESTORE, attempt=2))
    assert (b"ost", [3.0], 3) == (restored.state, restored.parameters.tolist(), restored.version)


def cut_of(coordinator, worker, sequence, **fields):
    return update_of(coordinator, worker, kind=Kind.STATE, sequence=sequence, rows=4, **fields)


def test_a_cut_in_the_middle_of_an_epoch_is_what_all_workers_were():
    """A snapshot within an epoch holds the reported states of all workers, and a restart uses it."""
    coordinator = begun(
        coordinator_of(joint=False, merge="average", workers=2, size=1, metrics=1, snapshot_intervals=(2,))
    )
    replies = [round_of(coordinator, sequence) for sequence in range(2)]
    assert [[False, False], [True, True]] == [
        [bool(r.flags & Flag.SEND_STATE) for r in each] for each in replies
    ]
    give(coordinator, cut_of(coordinator, 0, 2, metrics=b"a"))
    assert (0, 0) == (coordinator.snapshot.epoch, coordinator.snapshot.place)
    give(coordinator, cut_of(coordinator, 0, 2, metrics=b"a"))
    give(coordinator, cut_of(coordinator, 1, 2, metrics=b"b"))
    give(coordinator, cut_of(coordinator, 1, 2, metrics=b"c"))  # again, too late
    assert (0, 2, {0: b"a", 1: b"b"}) == (
        coordinator.snapshot.epoch,
        coordinator.snapshot.place,
        coordinator.snapshot.metrics,
    )

    progress = coordinator.progress
    (last, *_) = round_of(coordinator, 2)  # the last round of this epoch, whose end is a snapshot anyway
    assert not last.flags & Flag.SEND_STATE
    coordinator.restart()
    assert ([2.0], 2, [1.0, 1.0], progress) == (
        coordinator.aggregation.parameters.tolist(),
        coordinator.aggregation.round,
        coordinator.aggregation.losses,
        coordinator.progress,
    )
    begun(coordinator, attempt=2)
    restored = give(coordinator, update_of(coordinator, 1, kind=Kind.RESTORE, attempt=2))
    assert (b"b", 2) == (restored.metrics, coordinator.aggregation.next_sequence(1))


def test_a_cut_of_replicas_is_what_the_first_of_them_was():
    """A snapshot of replicas within an epoch has the weights of worker 0."""
    coordinator = begun(coordinator_of(workers=1, size=1, snapshot_intervals=(1,)))
    push(coordinator, 0, [1.0])
    give(coordinator, cut_of(coordinator, 0, 1, parameters=vector(7.0)))

    assert 1 == coordinator.snapshot.place
    assert coordinator.snapshot.parameters is coordinator.aggregation.parameters


def test_a_cut_waits_for_workers_that_rounds_do_not_wait_for():
    """Hybrid rounds before and during a snapshot wait for all workers."""
    coordinator = begun(
        coordinator_of(joint=False, workers=2, size=1, snapshot_intervals=(2,), hybrid=Hybrid(1))
    )
    aggregation = coordinator.aggregation
    with impatient():
        push(coordinator, 0, [1.0])
        assert 1 == aggregation.round
        assert Flag.AGAIN == push(coordinator, 0, [1.0], sequence=1).flags
        push(coordinator, 1, [1.0], sequence=0)  # late
        assert Flag.SEND_STATE & push(coordinator, 1, [1.0], sequence=1).flags
        give(coordinator, cut_of(coordinator, 0, 2))
        assert Flag.AGAIN == push(coordinator, 0, [1.0], sequence=2).flags
        give(coordinator, cut_of(coordinator, 1, 2))
        assert not push(coordinator, 0, [1.0], sequence=2).flags & Flag.AGAIN

    assert (0, 2) == (coordinator.snapshot.epoch, coordinator.snapshot.place)


def test_a_cut_that_the_end_of_an_epoch_makes_is_waited_for_no_longer():
    """A snapshot requested in the last round of an epoch is not awaited after the epoch's end."""
    coordinator = begun(coordinator_of(joint=False, workers=2, size=1, hybrid=Hybrid(1)))
    with impatient():
        for sequence in range(3):
            if sequence == 2:
                coordinator.request_snapshot()
            for worker in (0, 1):
                push(coordinator, worker, [1.0], sequence=sequence)
        finish_epoch(coordinator)

        assert not push(coordinator, 0, [1.0], sequence=3).flags & Flag.AGAIN


def test_a_run_that_was_taken_up_wants_the_same_rows():
    """A resumed run fails if its rows differ, and the error shows both counts."""
    coordinator = coordinator_of(workers=2)
    coordinator.resume(coordinator.snapshot, (RowsHeld(10), RowsHeld(11)))

    with impatient():
        _, refused = outcomes_of(coordinator, [RowsHeld(10)] * 2)

    assert refused.status == 422
    assert isinstance(coordinator.failure, DataError)
    for rows in ("(10, 10)", "(10, 11)"):
        assert rows in str(coordinator.failure)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_run_without_rounds_is_taken_up_after_what_was_counted(mode):
    """Without rounds, a resumed run has the center, ledger, reports and newest states of the snapshot."""
    first = begun(coordinator_of(mode, workers=2, size=1, generators=1))
    first.snapshots.committed = replace(first.snapshot, states={0: b"o", 1: b"p"})
    push(first, 0, [2.0])
    with impatient():
        give(first, report_of(first, 0, state=b"n"))
    first.request_snapshot()
    snapshot = replace(first.newest_snapshot, parameters=vector(2.0))
    coordinator = coordinator_of(mode, workers=2, size=1, generators=1)
    coordinator.resume(snapshot, (RowsHeld(10),) * 2)
    begun(coordinator)

    assert ([2.0], 1, 1, 0) == (
        coordinator.aggregation.parameters.tolist(),
        coordinator.aggregation.version,
        coordinator.aggregation.next_sequence(0),
        coordinator.aggregation.next_sequence(1),
    )
    assert [b"n", b"p"] == [
        give(coordinator, update_of(coordinator, k, kind=Kind.RESTORE)).state for k in (0, 1)
    ]
    push(coordinator, 1, [3.0])
    assert [2.0] == snapshot.parameters.tolist()
    assert 2.0 < coordinator.aggregation.parameters[0]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_what_is_noted_has_of_each_worker_what_it_was_after_the_note_before(mode):
    """A snapshot without rounds has each worker's state as reported after the snapshot before."""
    shape = {"workers": 2, "size": 1, "generators": 1, "epochs": 4}
    coordinator = begun(coordinator_of(mode, snapshot_intervals=(2,), **shape))
    assert not push(coordinator, 0, [1.0]).flags
    assert Flag.SEND_STATE == push(coordinator, 1, [1.0]).flags  # the second update
    give(coordinator, cut_of(coordinator, 1, 1, state=b"b"))
    assert Flag.SEND_STATE == push(coordinator, 0, [1.0], sequence=1).flags
    give(coordinator, cut_of(coordinator, 0, 2, state=b"a"))
    assert Flag.SEND_STATE == push(coordinator, 1, [1.0], sequence=1).flags  # the fourth
    give(coordinator, cut_of(coordinator, 1, 2, state=b"c"))
    give(coordinator, cut_of(coordinator, 1, 1, state=b"b"))  # again, too late
    assert not push(coordinator, 0, [1.0], sequence=2).flags  # it will report the epoch

    assert {0: b"a", 1: b"b"} == coordinator.newest_snapshot.states
    other = coordinator_of(mode, **shape)
    other.resume(coordinator.newest_snapshot, (RowsHeld(10),) * 2)
    coordinator.restart()
    for each, states in ((other, [b"a", b"b"]), (coordinator, [b"a", b"c"])):
        begun(each, attempt=2)
        restored = [give(each, update_of(each, k, kind=Kind.RESTORE, attempt=2)) for k in (0, 1)]
        assert states == [reply.state for reply in restored]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_an_epoch_that_was_over_when_it_was_noted_ends_once_the_workers_are_there(mode):
    """An epoch that was over when a snapshot was made ends once the workers of the resumed run are ready."""
    first = begun(coordinator_of(mode, workers=2, size=1))
    with impatient():
        for worker in (0, 1):
            give(first, report_of(first, worker))
    first.request_snapshot()
    coordinator = coordinator_of(mode, workers=2, size=1)
    coordinator.resume(first.newest_snapshot, (RowsHeld(10),) * 2)
    coordinator.release(0, NEVER)

    assert coordinator.wait_epoch(0, 0) is None
    begun(coordinator)
    assert coordinator.wait_epoch(0, 0).rows == 20


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_what_is_noted_stays_as_it_was(mode):
    """A report that arrives after a snapshot was made does not change it."""
    coordinator = begun(coordinator_of(mode, workers=2, size=1))
    with impatient():
        give(coordinator, report_of(coordinator, 0))
        coordinator.request_snapshot()
        snapshot = coordinator.newest_snapshot
        push(coordinator, 1, [2.0])
        give(coordinator, report_of(coordinator, 1))
    assert ([0], 10) == (list(snapshot.reports[0].metrics), snapshot.reports[0].rows)

    other = coordinator_of(mode, workers=2, size=1)
    other.resume(snapshot, (RowsHeld(10),) * 2)
    with impatient():
        give(begun(other), report_of(other, 1))
    assert [0] == list(snapshot.reports[0].metrics)


@pytest.mark.parametrize("generators", [0, 1])
def test_every_replica_gets_the_common_optimizer_state_back(generators):
    """Every replica is restored with worker 0's optimizer state and its own random generators."""
    coordinator = begun(coordinator_of(workers=2, size=1, optimizer=2, generators=generators))
    with impatient():
        give(coordinator, report_of(coordinator, 0, parameters=vector(1.0), state=b"opA"[: 2 + generators]))
        give(coordinator, report_of(coordinator, 1, state=b"B"[:generators]))
    coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)
    coordinator.restart()
    begun(coordinator)
    states = [give(coordinator, update_of(coordinator, k, kind=Kind.RESTORE)).state for k in (0, 1)]

    assert [b"opA"[: 2 + generators], b"opB"[: 2 + generators]] == states


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_restart_takes_back_nothing_that_was_merged_one_by_one(mode):
    """Without rounds, a restart keeps the center, and workers continue after their last counted update."""
    coordinator = begun(coordinator_of(mode, size=1))
    push(coordinator, 0, [2.0])
    old = update_of(coordinator, 1, [5.0])
    coordinator.restart()

    assert 409 == status_of(lambda: give(coordinator, old))
    assert ([2.0], 1, 0) == (
        coordinator.aggregation.parameters.tolist(),
        coordinator.aggregation.next_sequence(0),
        coordinator.aggregation.next_sequence(1),
    )


def test_a_large_state_is_kept_in_a_file_without_a_name(tmp_path, monkeypatch):
    """A large worker state is kept in an unnamed file, not in the driver's memory."""
    monkeypatch.setattr("sparkdl.server.state.IN_MEMORY", 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    coordinator = begun(coordinator_of(workers=1, size=1, optimizer=5000))
    result = finish_epoch(coordinator, parameters=vector(1.0), state=b"s" * 5000)

    assert b"s" * 5000 == result.snapshot.state(0)
    assert not isinstance(result.snapshot.states[0], bytes)
    assert [] == list(tmp_path.iterdir())


def test_what_comes_again_late_moves_nobody():
    """Late repetitions of messages do not change the training clock of a worker."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, staleness=9, epochs=2))
    clocks, report = coordinator.aggregation.clocks, report_of(coordinator, 0, epoch=0, sequence=1)

    def come_again():
        coordinator.join(0, 1, 1, "host", 1)
        coordinator.ready(0, 1, 1, 10, 0, {})

    with impatient():
        push(coordinator, 0, np.ones(5))
        come_again()
        assert {0: 1, 1: 0} == clocks

        give(coordinator, report)
        push(coordinator, 0, np.ones(5), epoch=1, sequence=2)
        for late in (report, awaiting(report)):
            give(coordinator, late)
            assert {0: 1, 1: 0} == clocks

        give(coordinator, report_of(coordinator, 0, epoch=1, sequence=3))
        give(coordinator, report)
        come_again()
        assert {1: 0} == clocks


def store_of_client():
    """Return a coordinator as the client of a hosted run has it."""
    shape = coordinator_of().shape
    return RemoteCoordinator(HostedRun(shape, None, EMPTY, EMPTY, None, "secret", False, None), None)


@pytest.fixture
def python_handles_interrupts():
    """Restore Python's SIGINT handler, because a background shell may have made pytest ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "make",
    [lambda: begun(coordinator_of("asynchronous", workers=1)), store_of_client],
    ids=["own", "of a client"],
)
def test_an_interrupt_leaves_no_lock_behind(make, python_handles_interrupts):
    """Ctrl-C between taking and releasing the lock is deferred, and the driver raises it afterwards."""
    coordinator, pressed = make(), []

    def press(_frame, event, function):
        if event == "c_return" and getattr(function, "__name__", "") == "__enter__" and not pressed:
            pressed.append(function)
            signal.raise_signal(signal.SIGINT)

    def work():
        sys.setprofile(press)
        try:
            coordinator.wait_epoch(0, 0)
        finally:
            sys.setprofile(None)
        assert ["free"] == together(lambda: coordinator.stop() or "free")
        interrupts.check()
        pytest.fail("The interrupt was lost.")

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)
    assert pressed

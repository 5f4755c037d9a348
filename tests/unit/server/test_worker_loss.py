"""Tests of a run that continues without lost workers, and of the return of another attempt."""

import logging
from functools import partial

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
    push,
    report_of,
    state_of,
    status_of,
    together,
    update_of,
    vector,
)

from sparkdl.errors import RefusedError, WorkerLostError
from sparkdl.server.aggregation import Hybrid, limits
from sparkdl.transport.exchange import awaiting
from sparkdl.transport.messages import Answer, Flag, Kind

STALL = 10.0
MODES = ["synchronous", "asynchronous", "hogwild"]


def going_on(mode="synchronous", **options):
    """Return a coordinator with a test clock that has begun and continues without lost workers."""
    coordinator = begun(coordinator_of(mode, goes_on=True, stall=STALL, **{"size": 1, **options}))
    coordinator.at = moved(coordinator)
    return coordinator


def lose(coordinator, *workers):
    """Let all workers except these send a heartbeat after a long silence, and the driver look."""
    now = coordinator.state.clock() + STALL + 1
    coordinator.at(now)
    coordinator.membership.looked = now
    for worker, member in coordinator.members.items():
        if worker not in workers and not member.lost:
            coordinator.heartbeat(worker, coordinator.generation, member.attempt, 0, 0, 0, [])
    coordinator.wait_epoch(coordinator.shape.epochs, 0)


def come_back(coordinator, worker, attempt=2, rows=10):
    """Let another attempt of a worker report ready; return the reply, or None if it has to ask again."""
    with impatient():
        assert coordinator.join(worker, coordinator.generation, attempt, "host", 2)
        return coordinator.ready(worker, coordinator.generation, attempt, rows, 0, {})


def ready_again(coordinator, worker, attempt=2, rows=10):
    with impatient():
        return coordinator.ready(worker, coordinator.generation, attempt, rows, 0, {})


def counts(coordinator):
    return coordinator.summary()["lost"], coordinator.summary()["returned"]


# -- loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_silent_worker_is_named_and_the_run_goes_on(mode):
    """The loss of a silent worker is logged with its name, and the run continues."""
    coordinator = going_on(mode)
    lose(coordinator, 1)
    said = coordinator.take_log()[-1]

    assert ({1}, None, (1, 0)) == (coordinator.lost, coordinator.failure, counts(coordinator))
    assert logging.WARNING == said["level"]
    assert "Worker 1 on host (process 1) has sent no heartbeat for 11 s" in said["message"]
    assert said["message"].endswith("The run continues without this worker.")


def test_a_worker_is_lost_once():
    """A worker is lost once, however often the driver looks."""
    coordinator = going_on()
    lose(coordinator, 1)
    lose(coordinator, 1)

    assert ((1, 0), 1) == (counts(coordinator), len(coordinator.log))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_lost_attempt_still_sends_is_refused(mode):
    """Messages of a lost attempt are refused and change nothing."""
    coordinator = going_on(mode)
    lose(coordinator, 1)
    before = state_of(coordinator)

    assert 409 == status_of(lambda: push(coordinator, 1, [1.0]))
    assert 409 == status_of(lambda: give(coordinator, report_of(coordinator, 1)))
    assert 409 == status_of(lambda: coordinator.heartbeat(1, 1, 1, 0, 0, 0, []))
    assert 409 == status_of(lambda: coordinator.join(1, 1, 1, "host", 1))
    assert before == state_of(coordinator)


@pytest.mark.parametrize("mode", MODES)
def test_a_body_that_was_on_its_way_is_refused(mode):
    """An update admitted before its worker was lost is refused when its body has arrived."""
    coordinator = going_on(mode)

    def reading(update):
        lose(coordinator, 1)
        return update

    update = update_of(coordinator, 1, [1.0])

    assert 409 == status_of(lambda: coordinator.exchange(update, lambda: reading(update)))
    assert 0 == coordinator.aggregation.next_sequence(1)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_workers_are_all_lost_fails(mode):
    """A run that has lost all workers fails, and after a restart it waits for all of them."""
    coordinator = going_on(mode, workers=2)
    lose(coordinator, 1)
    assert coordinator.failure is None
    lose(coordinator, 0)

    assert isinstance(coordinator.failure, WorkerLostError)
    assert "Worker 0 on host" in str(coordinator.failure)
    coordinator.restart()
    assert set() == coordinator.lost


def test_workers_without_rows_are_nobody_to_go_on_with():
    """A run fails when only workers without rows are left."""
    coordinator = coordinator_of("asynchronous", workers=2, goes_on=True, stall=STALL)
    coordinator.release(0, NEVER)
    for worker in (0, 1):
        coordinator.join(worker, 1, 1, "host", 1)
    together(*(lambda k=k: coordinator.ready(k, 1, 1, 10 * k, 0, {}) for k in (0, 1)))
    coordinator.at = moved(coordinator)
    lose(coordinator, 1)

    assert isinstance(coordinator.failure, WorkerLostError)


def test_a_worker_group_that_never_was_complete_does_not_go_on():
    """A worker group that was never complete does not continue without a worker: its rows are unknown."""
    coordinator = coordinator_of(workers=2, goes_on=True, stall=STALL)
    for worker in (0, 1):
        coordinator.join(worker, 1, 1, "host", 1)
    coordinator.at = moved(coordinator)
    lose(coordinator, 1)

    assert isinstance(coordinator.failure, WorkerLostError)


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("joint", [True, False])
def test_a_round_closes_with_those_who_are_there(joint, lost):
    """A round closes without the lost worker, with the mean over the rows of the others."""
    coordinator = going_on(joint=joint, merge=None if joint else "average")
    there = [worker for worker in range(3) if worker != lost]
    with impatient():
        for worker in there:
            assert push(coordinator, worker, [worker + 1.0], rows=worker + 1).flags & Flag.AGAIN
        lose(coordinator, lost)
        replies = [push(coordinator, worker, rows=0, flags=Flag.AWAIT) for worker in there]
    expected = np.average([worker + 1.0 for worker in there], weights=[worker + 1 for worker in there])

    for reply in replies:
        assert [pytest.approx(expected)] == reply.parameters.tolist()
    assert (1, 2) == (coordinator.aggregation.version, coordinator.counters["exchanges"])


@pytest.mark.parametrize("joint", [True, False])
def test_a_round_that_waits_goes_on_when_a_worker_is_lost(joint):
    """Waiting workers get the reply of their round when the missing worker is lost."""
    coordinator = going_on(joint=joint, merge=None if joint else "average")

    def lose_when_they_wait():
        with coordinator.changed:
            coordinator.changed.wait_for(
                lambda: coordinator.aggregation.counted(0, 0) and coordinator.aggregation.counted(2, 0), 10
            )
        lose(coordinator, 1)

    replies = together(
        lambda: push(coordinator, 0, [1.0]), lambda: push(coordinator, 2, [3.0]), lose_when_they_wait
    )

    assert [[2.0], [2.0]] == [reply.parameters.tolist() for reply in replies[:2]]


def test_what_a_lost_worker_has_in_the_open_round_counts():
    """The update of a lost worker in the open round counts."""
    coordinator = going_on()
    with impatient():
        push(coordinator, 1, [5.0])
        lose(coordinator, 1)
        push(coordinator, 0, [1.0])
        reply = push(coordinator, 2, [3.0])

    assert [3.0] == reply.parameters.tolist()


def test_a_body_waits_for_no_lost_worker(monkeypatch):
    """A body beyond the budget does not wait for the turn of a lost worker."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    coordinator = going_on()
    waits = (
        partial(push, coordinator, 2, [3.0]),
        partial(push, coordinator, 1, [1.0]),
        partial(lose, coordinator, 0),
    )
    replies = together(*waits)

    assert [[2.0], [2.0]] == [reply.parameters.tolist() for reply in replies[:2]]


def test_a_quorum_that_is_not_there_any_more_is_all_who_are():
    """A quorum larger than the number of present workers closes with all of them."""
    coordinator = going_on(joint=False, merge="average", hybrid=Hybrid(3))
    with impatient():
        lose(coordinator, 2)
        assert push(coordinator, 0, [1.0]).flags & Flag.AGAIN
        reply = push(coordinator, 1, [3.0])

    assert [2.0] == reply.parameters.tolist()


def test_replicas_that_are_late_wait_for_no_lost_one(monkeypatch):
    """A round that waits for a late replica closes when that replica is lost."""
    monkeypatch.setattr(limits, "KEPT_BYTES", 0)
    monkeypatch.setattr(limits, "LEAST_KEPT", 1)
    coordinator = going_on(hybrid=Hybrid(1))
    with impatient():
        for worker in (0, 1):
            push(coordinator, worker, [1.0], sequence=0)
        assert push(coordinator, 0, [1.0], sequence=1).flags & Flag.AGAIN
        lose(coordinator, 2)
        assert not push(coordinator, 0, rows=0, flags=Flag.AWAIT, sequence=1).flags & Flag.AGAIN


# -- without rounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_bound_does_not_count_a_lost_worker(mode):
    """A staleness bound ignores a lost worker."""
    coordinator = going_on(mode, workers=2, staleness=1)
    with impatient():
        flags = [push(coordinator, 0, [1.0], sequence=n).flags for n in range(2)]
        lose(coordinator, 1)
        after = push(coordinator, 0, rows=0, flags=Flag.AWAIT, sequence=1).flags

    assert [Flag.NONE, Flag.AGAIN, Flag.DUPLICATE] == [*flags, after]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_lost_worker_at_an_epochs_end_is_no_ghost(mode):
    """A worker lost while it waits at an epoch's end does not count as training when the wait is over."""
    coordinator = going_on(mode, workers=2, staleness=1, epochs=3)
    with impatient():
        give(coordinator, report_of(coordinator, 1, 0))
        give(coordinator, report_of(coordinator, 1, 1))

    def lose_and_release():
        lose(coordinator, 1)
        coordinator.release(1, NEVER)

    refused, _ = together(
        lambda: coordinator.exchange(awaiting(report_of(coordinator, 1, 1)), lambda: None), lose_and_release
    )

    assert isinstance(refused, RefusedError)
    assert {0} == set(coordinator.aggregation.clocks)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_worker_comes_back_at_once_where_there_are_no_rounds(mode):
    """Without rounds, a worker returns at once, after its last counted update and level with the slowest."""
    coordinator = going_on(mode, workers=2, staleness=9)
    push(coordinator, 1, [1.0], sequence=0)
    push(coordinator, 1, [1.0], sequence=1, base_version=1)
    lose(coordinator, 1)
    begin = come_back(coordinator, 1)
    restored = give(coordinator, update_of(coordinator, 1, kind=Kind.RESTORE, attempt=2))
    push(coordinator, 1, [1.0], sequence=2, base_version=2, attempt=2)

    assert (2, 0, True) == (begin["sequence"], begin["epoch"], begin["restore"])
    assert (Answer.CENTER, 2) == (restored.kind, restored.version)
    assert (set(), {0: 0, 1: 1}, (1, 1)) == (
        coordinator.lost,
        coordinator.aggregation.clocks,
        counts(coordinator),
    )
    assert "Worker 1 on host is back." == coordinator.take_log()[-1]["message"]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_worker_that_comes_back_later_begins_with_the_epoch_that_is_under_way(mode):
    """A worker that returns later begins with the epoch under way, not with those that ended without it."""
    coordinator = going_on(mode, workers=2, epochs=9)
    lose(coordinator, 1)
    with impatient():
        give(coordinator, report_of(coordinator, 0, 0))
        coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)
        coordinator.release(1, NEVER)
        give(coordinator, report_of(coordinator, 0, 1))
    begin = come_back(coordinator, 1)

    assert 2 == begin["epoch"]


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_worker_that_missed_an_epoch_comes_back_with_its_own_state(mode):
    """A worker that missed an epoch returns with its own last state, which the epoch's snapshot has."""
    coordinator = going_on(mode, workers=2, epochs=9, optimizer=3)
    with impatient():
        give(coordinator, report_of(coordinator, 1, 0, state=b"one"))
        lose(coordinator, 1)
        for epoch, state in enumerate((b"sta", b"two")):
            give(coordinator, report_of(coordinator, 0, epoch, state=state))
            coordinator.commit(coordinator.wait_epoch(epoch, 0).snapshot)
            coordinator.release(epoch + 1, NEVER)
    come_back(coordinator, 1)

    assert {0: b"two", 1: b"one"} == coordinator.snapshot.states
    assert b"one" == give(coordinator, update_of(coordinator, 1, kind=Kind.RESTORE, attempt=2)).state


# -- epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_ends_with_those_who_are_there(mode):
    """An epoch ends without the lost workers, with the metrics and rows of all that reported it."""
    coordinator = going_on(mode, joint=False, metrics=1, optimizer=1)
    with impatient():
        for worker in (0, 2):
            give(
                coordinator,
                report_of(coordinator, worker, metrics=b"%d" % worker, state=b"s", rows=worker + 1),
            )
        assert coordinator.wait_epoch(0, 0) is None
        lose(coordinator, 2)
        assert coordinator.wait_epoch(0, 0) is None
        lose(coordinator, 1)
    result = coordinator.wait_epoch(0, 0)

    assert ([b"0", b"2"], 4) == (result.metrics, result.rows)
    assert [0, 2] == sorted(result.snapshot.states)


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_waits_for_no_lost_worker(mode):
    """An evaluation ends without the validation rows of a lost worker."""
    coordinator = going_on(mode, joint=False, workers=2, metrics=1, evaluated=frozenset({0}))
    with impatient():
        for worker in (0, 1):
            give(coordinator, report_of(coordinator, worker, metrics=b"m"))
        give(coordinator, update_of(coordinator, 0, kind=Kind.VALIDATION, epoch=0, metrics=b"v"))
        assert coordinator.wait_epoch(0, 0) is None
        lose(coordinator, 1)

    assert [b"v"] == coordinator.wait_epoch(0, 0).validation


def test_another_replica_speaks_for_the_first_when_that_is_lost():
    """If worker 0 is lost, the lowest present replica reports the shared weights."""
    coordinator = going_on(workers=3, optimizer=2, generators=1)
    lose(coordinator, 0)
    with impatient():
        push(coordinator, 1, [1.0])
        flags = (
            push(coordinator, 2, [1.0]).flags,
            push(coordinator, 1, rows=0, flags=Flag.AWAIT).flags & Flag.SPEAK,
        )
        give(coordinator, report_of(coordinator, 1, parameters=vector(7.0), state=b"opB"))
        give(coordinator, report_of(coordinator, 2, state=b"C"))
    snapshot = coordinator.wait_epoch(0, 0).snapshot

    assert (Flag.NONE, Flag.SPEAK) == flags
    assert ([7.0], 1, b"opB") == (
        snapshot.parameters.tolist(),
        snapshot.speaker,
        snapshot.state(snapshot.speaker),
    )
    coordinator.commit(snapshot)
    coordinator.restart()
    begun(coordinator)
    states = [give(coordinator, update_of(coordinator, k, kind=Kind.RESTORE)).state for k in range(3)]
    assert [b"op", b"opB", b"opC"] == states


def test_a_replica_that_has_reported_already_is_asked_to_speak():
    """A replica that has reported is asked for the shared weights if worker 0 is lost without a report."""
    coordinator = going_on(workers=3, optimizer=2, metrics=1)
    reports = [report_of(coordinator, worker, metrics=b"%d" % worker) for worker in (1, 2)]
    with impatient():
        for report in reports:
            assert Flag.AGAIN == give(coordinator, report).flags
        lose(coordinator, 0)
        assert coordinator.wait_epoch(0, 0) is None
        flags = [give(coordinator, awaiting(report)).flags for report in reports]
        give(coordinator, report_of(coordinator, 1, metrics=b"x", parameters=vector(7.0), state=b"op"))
    result = coordinator.wait_epoch(0, 0)

    assert [Flag.SPEAK, Flag.AGAIN] == flags
    assert ([7.0], [b"1", b"2"], 20) == (result.snapshot.parameters.tolist(), result.metrics, result.rows)


def test_a_first_replica_that_has_spoken_is_not_asked_again():
    """No replica is asked for the shared weights if worker 0 reported them before it was lost."""
    coordinator = going_on(workers=2, optimizer=2)
    with impatient():
        give(coordinator, report_of(coordinator, 0, parameters=vector(7.0), state=b"op"))
        lose(coordinator, 0)
        assert Flag.AGAIN == give(coordinator, report_of(coordinator, 1)).flags

    assert [7.0] == coordinator.wait_epoch(0, 0).snapshot.parameters.tolist()


def test_a_run_that_is_stopped_gets_its_weights_from_who_speaks():
    """A stopped run without worker 0 gets its weights from another replica."""
    coordinator = going_on(workers=2, optimizer=2)
    lose(coordinator, 0)
    coordinator.stop()
    assert not coordinator.reported
    give(coordinator, report_of(coordinator, 1, parameters=vector(6.0), state=b"op", flags=Flag.STOP))
    snapshot = coordinator.stopped_snapshot()

    assert coordinator.reported
    assert ([6.0], b"op") == (snapshot.parameters.tolist(), snapshot.state(snapshot.speaker))


# -- return to rounds -----------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [True, False])
def test_a_worker_comes_back_to_rounds_when_an_epoch_begins(joint):
    """A worker returns to rounds at the next epoch's beginning, with the state of the snapshot."""
    coordinator = going_on(joint=joint, merge=None if joint else "average", workers=2, optimizer=2)
    lose(coordinator, 1)
    with impatient():
        for sequence in range(coordinator.plans[0].windows - 1):
            push(coordinator, 0, [1.0], sequence=sequence, base_version=sequence)
        assert come_back(coordinator, 1) is None
        push(coordinator, 0, [1.0], sequence=sequence + 1, base_version=sequence + 1)
        give(coordinator, report_of(coordinator, 0, parameters=vector(7.0) if joint else EMPTY, state=b"op"))
        coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)
        assert ready_again(coordinator, 1) is None  # the driver runs its callbacks
        coordinator.release(1, NEVER)
        begin = ready_again(coordinator, 1)
        restored = give(coordinator, update_of(coordinator, 1, kind=Kind.RESTORE, attempt=2))
        sequence = coordinator.plans[0].windows
        waits = push(coordinator, 0, [1.0], sequence=sequence).flags
        closed = push(coordinator, 1, [1.0], sequence=sequence, attempt=2).flags

    assert (sequence, 1, True) == (begin["sequence"], begin["epoch"], begin["restore"])
    assert coordinator.snapshot.parameters.tolist() == restored.parameters.tolist()
    assert (b"op" if joint else b"") == restored.state
    assert (Flag.AGAIN, Flag.NONE) == (waits, closed)
    assert (set(), (1, 1)) == (coordinator.lost, counts(coordinator))


@pytest.mark.parametrize("joint", [True, False])
def test_a_cut_is_made_for_a_worker_that_comes_back_in_the_middle_of_an_epoch(joint):
    """A worker that returns within an epoch begins after a snapshot made for it, with the next round."""
    coordinator = going_on(joint=joint, merge=None if joint else "average", workers=2, metrics=1, optimizer=1)
    lose(coordinator, 1)
    with impatient():
        push(coordinator, 0, [1.0], sequence=0)
        assert come_back(coordinator, 1) is None
        assert push(coordinator, 0, [1.0], sequence=1, base_version=1).flags & Flag.SEND_STATE
        weights = vector(7.0) if joint else EMPTY
        give(
            coordinator,
            update_of(
                coordinator,
                0,
                kind=Kind.STATE,
                sequence=2,
                rows=4,
                metrics=b"m",
                state=b"o",
                parameters=weights,
            ),
        )
        begin = ready_again(coordinator, 1)
        assert push(coordinator, 0, [1.0], sequence=2).flags & Flag.AGAIN
    restored = give(coordinator, update_of(coordinator, 1, kind=Kind.RESTORE, attempt=2))

    assert (2, 0, True, b"") == (begin["sequence"], begin["epoch"], begin["restore"], restored.metrics)
    assert coordinator.snapshot.parameters.tolist() == restored.parameters.tolist()
    assert (set(), (1, 1)) == (coordinator.lost, counts(coordinator))


def test_a_worker_does_not_come_back_to_an_epoch_whose_last_round_has_closed():
    """An epoch that is cut short in rounds ends without a worker that would return at its last snapshot."""
    coordinator = going_on(joint=False, merge="average", workers=2, metrics=1, optimizer=1)
    lose(coordinator, 1)
    with impatient():
        assert come_back(coordinator, 1) is None
        coordinator.end_early(0)
        last = push(coordinator, 0, [1.0], sequence=0).flags
        state = {"kind": Kind.STATE, "sequence": 1, "rows": 4, "metrics": b"m", "state": b"o"}
        give(coordinator, update_of(coordinator, 0, **state))
        give(coordinator, report_of(coordinator, 0, flags=Flag.STOP, metrics=b"m", state=b"o"))

    assert Flag.SEND_STATE | Flag.STOP == last & (Flag.SEND_STATE | Flag.STOP)
    assert {1} == coordinator.lost
    assert coordinator.wait_epoch(0, 0) is not None


def test_a_cut_that_a_lost_worker_has_not_answered_is_that_of_the_others():
    """A snapshot under way is completed without the state of a worker that is lost."""
    coordinator = going_on(joint=False, merge="average", metrics=1, snapshot_intervals=(1,))
    together(*(lambda k=k: push(coordinator, k, [1.0]) for k in range(3)))
    for worker in (0, 1):
        give(coordinator, update_of(coordinator, worker, kind=Kind.STATE, sequence=1, rows=4, metrics=b"m"))
    assert 0 == coordinator.snapshot.place
    lose(coordinator, 2)

    assert (1, [0, 1]) == (coordinator.snapshot.place, sorted(coordinator.snapshot.metrics))


def test_a_cut_without_the_weights_of_replicas_is_none():
    """A snapshot without the shared weights, because worker 0 was lost, is discarded and requested again."""
    coordinator = going_on(workers=3, snapshot_intervals=(1,))
    together(*(lambda k=k: push(coordinator, k, [1.0]) for k in range(3)))
    for worker in (1, 2):
        give(coordinator, update_of(coordinator, worker, kind=Kind.STATE, sequence=1, rows=4))
    lose(coordinator, 0)
    assert (0, None, True) == (
        coordinator.snapshot.place,
        coordinator.snapshots.gathering,
        coordinator.snapshots.wanted,
    )
    replies = together(*(lambda k=k: push(coordinator, k, [1.0], sequence=1) for k in (1, 2)))

    assert [Flag.SEND_STATE | Flag.SPEAK, Flag.SEND_STATE] == [reply.flags for reply in replies]


def test_a_worker_whose_update_is_in_the_round_after_a_cut_waits_for_the_next_one():
    """A worker whose update is already in the round after a snapshot returns at the next snapshot."""
    coordinator = going_on(joint=False, merge="average", workers=3, snapshot_intervals=(1,))
    together(*(lambda k=k: push(coordinator, k, [1.0]) for k in range(3)))
    with impatient():
        give(coordinator, update_of(coordinator, 2, kind=Kind.STATE, sequence=1, rows=4))
        push(coordinator, 2, [1.0], sequence=1)
        lose(coordinator, 2)
        assert come_back(coordinator, 2) is None
        for worker in (0, 1):
            give(coordinator, update_of(coordinator, worker, kind=Kind.STATE, sequence=1, rows=4))
        assert ready_again(coordinator, 2) is None
        for worker in (0, 1):
            push(coordinator, worker, [1.0], sequence=1)
        for worker in (0, 1):
            give(coordinator, update_of(coordinator, worker, kind=Kind.STATE, sequence=2, rows=4))
        begin = ready_again(coordinator, 2)

    assert (2, 2) == (begin["sequence"], coordinator.snapshot.place)


def test_a_newer_attempt_takes_the_place_of_a_silent_one_in_rounds():
    """In rounds, an attempt that replaces a silent one takes part from the next snapshot on."""
    coordinator = going_on(silence=3.0)
    coordinator.at(2.0)
    assert not coordinator.join(1, 1, 2, "host", 1)
    coordinator.at(3.0)
    assert come_back(coordinator, 1) is None
    said = [entry["message"] for entry in coordinator.log]

    assert ({1}, (1, 0), None) == (coordinator.lost, counts(coordinator), coordinator.failure)
    assert ["Worker 1 on host (process 1) was restarted. The run continues without this worker."] == said
    assert 409 == status_of(lambda: push(coordinator, 1, [1.0]))


def test_a_worker_that_waits_to_come_back_and_is_silent_is_lost_again():
    """A returning worker that falls silent is lost again, and another attempt may return."""
    coordinator = going_on()
    lose(coordinator, 1)
    assert come_back(coordinator, 1) is None
    lose(coordinator, 1)

    assert ({1}, (2, 0)) == (coordinator.lost, counts(coordinator))
    assert come_back(coordinator, 1, attempt=3) is None


@pytest.mark.parametrize("joint", [True, False])
def test_a_run_that_stops_sends_home_who_waits_to_come_back(joint):
    """A returning worker gets the answer to end if the run stops, and no round waits for it."""
    coordinator = going_on(joint=joint, merge=None if joint else "average")
    lose(coordinator, 1)
    assert come_back(coordinator, 1) is None
    coordinator.stop()

    assert ready_again(coordinator, 1)["stop"]
    assert {1} == coordinator.lost


def test_nobody_comes_back_after_the_last_epoch():
    """No worker returns after the last epoch."""
    coordinator = going_on(joint=False, merge="average", workers=2, epochs=1)
    lose(coordinator, 1)
    assert come_back(coordinator, 1) is None
    with impatient():
        give(coordinator, report_of(coordinator, 0))
    coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)

    assert ({1}, (1, 0)) == (coordinator.lost, counts(coordinator))


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_comes_back_with_other_rows_is_refused(mode):
    """A worker that returns with another number of rows is refused."""
    coordinator = going_on(mode)
    lose(coordinator, 1)

    with pytest.raises(RefusedError, match="restarted with 9 rows instead of 10"):
        come_back(coordinator, 1, rows=9)
    assert {1} == coordinator.lost


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_are_there_again_after_a_restart(mode):
    """After a restart, all workers take part again, including lost ones."""
    coordinator = going_on(mode, workers=2, joint=False, optimizer=1)
    lose(coordinator, 1)
    with impatient():
        give(coordinator, report_of(coordinator, 0, state=b"o"))
        coordinator.commit(coordinator.wait_epoch(0, 0).snapshot)
    coordinator.restart()
    begun(coordinator, attempt=5)
    states = [
        give(coordinator, update_of(coordinator, k, kind=Kind.RESTORE, attempt=5)).state for k in (0, 1)
    ]

    assert ([b"o", b""], set()) == (states, coordinator.lost)

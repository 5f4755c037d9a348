"""Tests of a run whose rows are recomputed: unchanged, reordered, on other workers, or different."""

import pytest
from coordinators import (
    coordinator_of,
    give,
    impatient,
    outcomes_of,
    push,
    saved_of,
    together,
    update_of,
    vector,
)

from sparkdl.core import packing
from sparkdl.data.fingerprint import MASK, Fingerprint
from sparkdl.driver.checkpoints import Saved
from sparkdl.errors import DataError, RefusedError
from sparkdl.server.state import RowsHeld
from sparkdl.transport.messages import Flag, Kind

HELD = RowsHeld(10, Fingerprint(7, 1)), RowsHeld(10, Fingerprint(8, MASK))
OTHERWISE = RowsHeld(10, Fingerprint(70, 1)), HELD[1]
MOVED = RowsHeld(10, Fingerprint(71, MASK)), RowsHeld(10, Fingerprint(81, 1))
UNEVEN = RowsHeld(13, Fingerprint(72, 5)), RowsHeld(7, Fingerprint(82, MASK - 4))
OTHERS = RowsHeld(10, Fingerprint(73, 2)), HELD[1]
MORE = RowsHeld(11, Fingerprint(74, 2)), HELD[1]
AFTER = ["restart", "resume"]
options = {"workers": 2, "size": 1, "metrics": 1, "generators": 1, "snapshot_intervals": (2,), "epochs": 3}


def trained(*, joint=False):
    """Return a coordinator that has ended an epoch and has a snapshot within the next one."""
    coordinator = coordinator_of(joint=joint, merge=None if joint else "average", **options)
    outcomes_of(coordinator, HELD)
    steps = coordinator.plans[0].windows
    for epoch in (0, 1):
        for place in range(steps if epoch == 0 else 2):
            rounds_of(coordinator, epoch * steps + place, epoch)
        if epoch == 0:
            end_epoch(coordinator, epoch)
    assert (1, 2) == (coordinator.snapshot.epoch, coordinator.snapshot.place)
    return coordinator


def rounds_of(coordinator, sequence, epoch):
    """Let every worker send 1 in a round, and report its state if it is asked to."""
    replies = together(
        *(lambda k=k: push(coordinator, k, [1.0], sequence=sequence, epoch=epoch) for k in (0, 1))
    )
    for worker, reply in enumerate(replies):
        if reply.flags & Flag.SEND_STATE:
            give(coordinator, standing(coordinator, worker, Kind.STATE, sequence=sequence + 1, epoch=epoch))


def standing(coordinator, worker, kind, **fields):
    """Return a worker's report of its state; that of replica 0 has weights that count rounds."""
    counts = coordinator.shape.plan.joint and not worker
    own = {"parameters": vector(float(coordinator.aggregation.version))} if counts else {}
    return update_of(
        coordinator, worker, kind=kind, rows=10, metrics=b"m", state=b"%d" % worker, **own, **fields
    )


def end_epoch(coordinator, epoch):
    with impatient():
        for worker in (0, 1):
            give(coordinator, standing(coordinator, worker, Kind.REPORT, epoch=epoch))
    coordinator.commit(coordinator.wait_epoch(epoch, 0).snapshot)
    coordinator.release(epoch + 1, float("nan"))


def again(coordinator, after):
    """Return a coordinator for a new start: in the same driver, or resumed from a checkpoint."""
    if after == "restart":
        coordinator.restart()
        return coordinator
    saved = saved_of(coordinator)
    saved = Saved.of(packing.unpack(memoryview(packing.pack(saved.values()))))
    joint = coordinator.shape.plan.joint
    mode = "synchronous" if coordinator.aggregation.has_rounds else "asynchronous"
    other = coordinator_of(mode, joint=joint, merge=None if joint else "average", **options)
    other.resume(saved.snapshot, saved.held)
    return other


def warnings_of(coordinator):
    return [entry["message"] for entry in coordinator.log]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_the_same_rows_are_gone_on_with_in_the_middle_of_an_epoch(after, joint):
    """A run continues within an epoch, without a warning, if the workers hold the same rows."""
    coordinator = again(trained(joint=joint), after)
    begins = outcomes_of(coordinator, HELD)

    assert (1, 2) == (coordinator.snapshot.epoch, coordinator.snapshot.place)
    assert [coordinator.plans[0].sequence(1) + 2] * 2 == [begin["sequence"] for begin in begins]
    assert [] == warnings_of(coordinator)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("held", [OTHERWISE, MOVED, UNEVEN])
def test_rows_in_another_order_begin_the_epoch_again(held, after, joint):
    """If rows change order or worker, the epoch begins again with its center, states and progress."""
    before = trained(joint=joint)
    boundary, progress = before.snapshot.before, before.snapshot.before.progress
    coordinator = again(before, after)
    begins = outcomes_of(coordinator, held)

    assert (1, 0, None) == (
        coordinator.snapshot.epoch,
        coordinator.snapshot.place,
        coordinator.snapshot.before,
    )
    assert coordinator.newest_snapshot is coordinator.snapshot
    assert held == coordinator.held
    assert (boundary.version, boundary.parameters.tolist(), progress, []) == (
        coordinator.aggregation.version,
        coordinator.aggregation.parameters.tolist(),
        coordinator.progress,
        coordinator.aggregation.losses,
    )
    for worker, begin in enumerate(begins):
        assert (tuple(each.rows for each in held), 1, True) == (
            begin["rows"],
            begin["epoch"],
            begin["restore"],
        )
        assert coordinator.plans[0].sequence(1) == begin["sequence"]
        reply = give(coordinator, update_of(coordinator, worker, kind=Kind.RESTORE))
        assert (b"%d" % worker, b"") == (reply.state, reply.metrics)
    (warning,) = warnings_of(coordinator)
    assert "the run continues from the end of epoch 1. Spark recomputed the rows" in warning
    for place in range(coordinator.plans[0].windows):
        rounds_of(coordinator, coordinator.plans[0].sequence(1) + place, 1)
    end_epoch(coordinator, 1)
    assert 2 == coordinator.snapshot.epoch


def test_a_first_epoch_begins_again_with_the_model_of_the_driver():
    """A first epoch begins again with the driver's model, without a state to restore."""
    coordinator = coordinator_of(joint=False, merge="average", **options)
    outcomes_of(coordinator, HELD)
    for sequence in range(2):
        rounds_of(coordinator, sequence, 0)
    assert 2 == coordinator.snapshot.place
    coordinator.restart()
    begins = outcomes_of(coordinator, MOVED)

    assert [(0, 0, False)] * 2 == [(begin["epoch"], begin["sequence"], begin["restore"]) for begin in begins]
    assert (0, [0.0]) == (coordinator.aggregation.version, coordinator.aggregation.parameters.tolist())


@pytest.mark.parametrize("after", AFTER)
def test_at_an_epochs_end_there_is_nothing_to_undo(after):
    """Reordered rows at an epoch's end undo nothing; the run warns once and continues with them."""
    coordinator = coordinator_of(joint=False, merge="average", **options)
    outcomes_of(coordinator, HELD)
    for sequence in range(coordinator.plans[0].windows):
        rounds_of(coordinator, sequence, 0)
    end_epoch(coordinator, 0)
    snapshot = coordinator.snapshot
    coordinator = again(coordinator, after)
    outcomes_of(coordinator, MOVED)

    assert (snapshot.version, 0) == (coordinator.aggregation.version, coordinator.snapshot.place)
    assert 1 == len(warnings_of(coordinator))
    coordinator.restart()
    outcomes_of(coordinator, MOVED)
    assert 1 == len(warnings_of(coordinator))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    ("held", "words"),
    [
        (OTHERS, r"have \(10, 10\) training rows; those of .* had \(10, 10\), but the values in these rows"),
        (MORE, r"have \(11, 10\) training rows; those of .* had \(10, 10\)\. Spark recomputed the rows"),
    ],
)
def test_other_rows_end_the_run(held, words, after, mode):
    """Different rows end the run with an error that shows the counts and a remedy."""
    coordinator = trained() if mode == "synchronous" else pushed()
    version, coordinator = coordinator.newest_snapshot.version, again(coordinator, after)
    with impatient():
        told = [*outcomes_of(coordinator, held), *outcomes_of(coordinator, held)]

    assert {422} == {each.status for each in told if each is not None}
    with pytest.raises(DataError, match=words) as error:
        raise coordinator.failure
    assert (after == "resume") == ("start a new run with another folder" in str(error.value))
    assert ("checkpoint had" if after == "resume" else "previous worker group had") in str(error.value)
    assert version == coordinator.aggregation.version


def pushed():
    """Return a coordinator without rounds in the middle of an epoch."""
    coordinator = coordinator_of("asynchronous", merge="average", **options)
    outcomes_of(coordinator, HELD)
    push(coordinator, 0, [2.0])
    coordinator.request_snapshot()
    return coordinator


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("held", [HELD, OTHERWISE, MOVED])
def test_without_rounds_workers_go_on_after_what_was_counted(held, after):
    """Without rounds, a run continues after the counted updates in any order of rows, with one warning."""
    coordinator = again(pushed(), after)
    begins = outcomes_of(coordinator, held)

    assert [1, 0] == [begin["sequence"] for begin in begins]
    assert (1, [1.0]) == (coordinator.aggregation.version, coordinator.aggregation.parameters.tolist())
    assert (held != HELD) == len(warnings_of(coordinator))


def test_without_rounds_the_number_of_rows_of_each_worker_stays():
    """Without rounds, a changed number of rows of a worker ends the run: its windows would not match."""
    coordinator = again(pushed(), "restart")
    with impatient():
        outcomes_of(coordinator, UNEVEN)

    assert isinstance(coordinator.failure, DataError)


def test_a_worker_that_returns_alone_may_have_taken_rows_of_others():
    """A worker that returns alone with other rows causes one warning; another number is refused."""
    coordinator = pushed()

    def comes_back(attempt, held):
        coordinator.join(0, 1, attempt, "host", 1)
        return coordinator.ready(0, 1, attempt, held.rows, 0, {}, held.fingerprint)

    assert 1 == comes_back(2, HELD[0])["sequence"]
    assert [] == warnings_of(coordinator)
    for attempt in (3, 4):
        assert 1 == comes_back(attempt, OTHERS[0])["sequence"]
    (warning,) = warnings_of(coordinator)
    assert "Worker 0 restarted with different rows, or with the same rows in a different order" in warning
    with pytest.raises(RefusedError, match="restarted with 11 rows instead of 10"):
        comes_back(5, MORE[0])
    coordinator.restart()
    outcomes_of(coordinator, HELD)
    assert 1 == len(warnings_of(coordinator))


def test_a_worker_says_once_what_it_holds():
    """An attempt that later reports other rows is refused, and nothing changes."""
    coordinator = trained()
    for held in (OTHERWISE[0], MORE[0]):
        with pytest.raises(RefusedError, match="reported rows that differ from its first report"):
            coordinator.ready(0, 1, 1, held.rows, 0, {}, held.fingerprint)

    assert HELD == coordinator.held
    assert coordinator.ready(0, 1, 1, 10, 0, {}, HELD[0].fingerprint) is not None

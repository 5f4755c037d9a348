"""Tests with many workers of given speeds over the real coordinator and rules, in virtual time."""

from unittest import mock

import numpy as np
import pytest
from coordinators import begun, coordinator_of, push
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Condition, DeadlockError, World

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.errors import RefusedError
from sparkdl.server.aggregation import Hybrid, limits
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.transport.messages import Flag, Kind, Update

BATCHES = 20  # per worker, with one exchange per batch
paces_ = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)


class Trace:
    """Record of each worker's exchanges.

    Attributes:
        ends: end times of each worker's exchanges.
        staleness: versions merged since the center on which each update is based.
        applied: sum of all replies to each worker.
        ahead: largest lead of a worker over the slowest training one, in exchanges.
        given: number of updates handed to the coordinator.
    """

    def __init__(self, workers):
        self.ends, self.staleness = [[] for _ in range(workers)], []
        self.applied, self.ahead, self.training = [0.0] * workers, 0, set(range(workers))
        self.given = 0

    def ended(self, worker, now):
        self.ends[worker].append(now)
        slowest = min((len(self.ends[k]) for k in self.training), default=0)
        self.ahead = max(self.ahead, len(self.ends[worker]) - slowest)

    @property
    def sent(self):
        return [len(ends) for ends in self.ends]


class Simulation:
    """Simulation of workers that exchange an update per batch. A worker of pace p takes p seconds per batch.

    Args:
        coordinator: the coordinator.
        paces: seconds per batch of each worker.
        batches: batches per epoch of each worker.
        lives: for each worker that dies, the time of its death and of the next attempt; None: never.
    """

    def __init__(self, coordinator, paces, batches, lives):
        self.coordinator, self.paces, self.batches, self.lives = coordinator, paces, batches, lives
        self.world, self.trace = World(limit=3e3), Trace(len(paces))
        self.epochs, self.joint = coordinator.shape.epochs, coordinator.shape.plan.joint
        self.kind = Kind.GRADIENT if self.joint else Kind.DELTA
        self.world.live_in(coordinator)
        coordinator.state.clock = lambda: self.world.now

    def run(self):
        """Run the simulation."""
        for worker in range(len(self.paces)):
            self.world.spawn(self.live, worker)
        for worker in range(len(self.paces)) if self.lives else ():
            self.world.spawn(self.beat, worker)
        for worker, (_, back) in self.lives.items():
            if back is not None:
                self.world.spawn(self.live, worker, 1)
                self.world.spawn(self.beat, worker, 1)
        self.world.spawn(self.drive)
        self.world.run()

    def is_dead(self, worker, attempt):
        return attempt == 0 and worker in self.lives and self.world.now >= self.lives[worker][0]

    def live(self, worker, attempt=0):
        """Run an attempt of a worker until it ends or dies."""
        if attempt:
            self.world.sleep(self.lives[worker][1])
        try:
            self.work(worker, LocalExchange(self.coordinator, worker, attempt))
        except RefusedError:
            assert self.is_dead(worker, attempt)

    def beat(self, worker, attempt=0):
        """Send heartbeats of a worker's attempt while it lives."""
        if attempt:
            self.world.sleep(self.lives[worker][1])
        while not (self.coordinator.stopping or self.is_dead(worker, attempt)):
            self.coordinator.heartbeat(worker, 1, attempt, 0, 0, 0, [])
            self.world.sleep(1.0)

    def work(self, worker, exchange):
        begin = exchange.ready(4 * self.batches[worker], 0, {})
        if begin["stop"]:
            return
        sequence, version = begin["sequence"], exchange(Update(Kind.RESTORE)).version
        for epoch in range(begin["epoch"], self.epochs):
            self.trace.training.add(worker)
            sequence = max(sequence, epoch * max(self.batches))
            while sequence < epoch * max(self.batches) + self.batches[worker]:
                self.world.sleep(self.paces[worker])
                if self.is_dead(worker, exchange.attempt):
                    return
                reply, sequence = self.step(exchange, epoch, sequence, version)
                version = reply.version
                if reply.flags & Flag.SEND_STATE:
                    exchange(Update(Kind.STATE, sequence=sequence, rows=4, epoch=epoch))
            self.trace.training.discard(worker)
            rows = 4 * self.batches[worker]
            exchange(Update(Kind.REPORT, rows=rows, base_version=version, epoch=epoch))

    def step(self, exchange, epoch, sequence, version):
        """Exchange an update; return the last reply and the number of the next exchange."""
        trace, worker = self.trace, exchange.worker
        trace.given += 1
        trace.staleness.append(self.coordinator.aggregation.version - version)
        update = Update(
            self.kind,
            sequence=sequence,
            base_version=version,
            rows=4,
            steps=1,
            loss=1.0,
            epoch=epoch,
            parameters=np.full(1, 1 + self.joint * (7 * worker + sequence), np.float32),
        )
        reply = exchange(update)
        trace.ended(worker, self.world.now)
        trace.applied[worker] += float(reply.parameters[0])
        while self.joint and reply.round > sequence + 1:  # the means that the worker missed
            sequence += 1
            reply = exchange(Update(self.kind, sequence=sequence, epoch=epoch))
            trace.applied[worker] += float(reply.parameters[0])
        return reply, max(sequence + 1, reply.round)

    def drive(self):
        """Run the driver, which looks for silent workers if any may die."""
        for epoch in range(self.epochs):
            self.coordinator.release(epoch, float("nan"))
            while (result := self.coordinator.wait_epoch(epoch, 1.0 if self.lives else 1e9)) is None:
                assert self.lives
                assert self.coordinator.failure is None
            self.coordinator.commit(result.snapshot)
        self.coordinator.stop()


def simulate(mode, paces, *, joint=None, batches=BATCHES, epochs=1, lives=None, **terms):
    """Run workers that exchange an update per batch.

    Args:
        mode: the mode.
        paces: seconds per batch of each worker.
        joint: True if workers send gradients; None: the default of the mode.
        batches: batches per epoch, one number for all workers or one for each.
        epochs: number of epochs.
        lives: see ``Simulation``.
        **terms: further arguments of ``coordinator_of``.

    Returns:
        The coordinator and the trace.
    """
    batches = batches if isinstance(batches, list) else [batches] * len(paces)
    plan = BatchPlan((), 0, 4, 1, mode == "synchronous" if joint is None else joint, False, 0)
    coordinator = coordinator_of(
        mode, workers=len(paces), size=1, joint=joint, epochs=epochs, plan=plan, **terms
    )
    simulation = Simulation(coordinator, paces, batches, lives or {})
    simulation.run()
    return coordinator, simulation.trace


@pytest.mark.whole
def test_a_round_takes_as_long_as_the_slowest_worker():
    """A synchronous round takes as long as its slowest worker, with 256 workers too."""
    paces = np.linspace(1, 3, 256)
    coordinator, trace = simulate("synchronous", paces)

    assert BATCHES == coordinator.aggregation.version
    assert [pytest.approx(3.0 * (i + 1)) for i in range(BATCHES)] == trace.ends[0]
    assert {BATCHES} == {len(ends) for ends in trace.ends}


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_nobody_waits_without_rounds(mode):
    """Without rounds, every worker keeps its own pace, and every update is merged."""
    paces = np.linspace(1, 3, 256)
    coordinator, trace = simulate(mode, paces, merge="sum")

    assert 256 * BATCHES == coordinator.aggregation.version == coordinator.aggregation.parameters[0]
    for pace, ends in zip(paces, trace.ends, strict=True):
        assert [pytest.approx(pace * (i + 1)) for i in range(BATCHES)] == ends


@pytest.mark.parametrize("workers", [2, 16, 256])
def test_equal_workers_are_as_stale_as_there_are_others(workers):
    """With K workers of one pace, all but the first updates are K - 1 versions stale."""
    _, trace = simulate("asynchronous", [1.0] * workers)

    assert list(range(workers)) + [workers - 1] * (BATCHES - 1) * workers == trace.staleness


def test_slow_workers_are_the_stale_ones():
    """While three workers train, the updates of one that is 10.5 times slower are 30 versions stale."""
    coordinator, trace = simulate("asynchronous", [1.0, 1.0, 1.0, 10.5])

    assert [30, 30] == [stale for stale in trace.staleness if stale > 3]
    assert 4 * BATCHES == coordinator.aggregation.version


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=8),
    st.integers(0, 4),
    st.sampled_from(["asynchronous", "hogwild"]),
)
def test_nobody_is_further_ahead_than_the_bound(paces, bound, mode):
    """A staleness bound holds at any speeds, all updates are merged, and no worker waits forever."""
    coordinator, trace = simulate(mode, paces, staleness=bound)

    assert trace.ahead <= bound + 1
    assert len(paces) * BATCHES == coordinator.aggregation.version
    assert max(trace.staleness) <= (len(paces) - 1) * (2 * bound + 1)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 12)), min_size=2, max_size=5).filter(
        lambda workers: any(batches for _, batches in workers)
    ),
    st.integers(0, 4),
    st.integers(2, 5),
)
def test_a_bound_lets_nobody_wait_for_ever(workers, bound, epochs):
    """Workers with different numbers of batches wait for each other at epochs' ends without a deadlock."""
    paces, batches = map(list, zip(*workers, strict=True))
    coordinator, trace = simulate("asynchronous", paces, batches=batches, epochs=epochs, staleness=bound)

    assert [epochs * each for each in batches] == trace.sent
    assert epochs * sum(batches) == coordinator.aggregation.version


@pytest.mark.whole
def test_a_bound_holds_at_256_workers():
    """A staleness bound holds the fastest of 256 workers back to the pace of the slowest one."""
    paces = np.linspace(1, 4, 256)
    _, trace = simulate("asynchronous", paces, staleness=3)

    assert trace.ahead <= 4
    assert trace.ends[0][-1] > 4.0 * (BATCHES - 5)


def test_a_cut_without_a_lock_has_in_it_what_it_counts():
    """A hogwild snapshot requested during an addition contains every update that it counts."""
    coordinator, world = begun(coordinator_of("hogwild", workers=2, size=1, merge="sum")), World()
    world.live_in(coordinator)

    class Stripe:
        """A lock for which an addition waits one second."""

        def __enter__(self):
            world.sleep(1.0)

        def __exit__(self, *exception):
            return None

    def after(seconds, call):
        world.sleep(seconds)
        call()

    coordinator.aggregation.stripes = [Stripe()]
    world.spawn(after, 0.0, lambda: push(coordinator, 0, [3.0]))
    world.spawn(after, 0.5, coordinator.request_snapshot)
    world.spawn(after, 0.7, lambda: push(coordinator, 1, [4.0]))
    world.run()

    assert ([3.0], {0: 0}) == (
        coordinator.newest_snapshot.parameters.tolist(),
        coordinator.newest_snapshot.ledger,
    )
    assert [7.0] == coordinator.aggregation.parameters.tolist()


# -- rounds that close without all workers --------------------------------------------------------


@pytest.mark.parametrize("joint", [True, False])
def test_a_quorum_does_not_wait_for_the_slowest(joint):
    """With a quorum of three out of four workers, rounds go at the pace of the third."""
    coordinator, trace = simulate("synchronous", [1.0, 1.0, 1.5, 9.0], joint=joint, hybrid=Hybrid(3))

    assert BATCHES == coordinator.aggregation.version
    assert pytest.approx(1.5 * BATCHES, rel=0.01) == trace.ends[0][-1]
    assert {3: trace.sent[3]} == coordinator.aggregation.dropped


@pytest.mark.parametrize("joint", [True, False])
def test_a_round_goes_on_when_its_time_is_up(joint):
    """A round closes when its time is up, counted from its first update."""
    coordinator, trace = simulate("synchronous", [1.0, 1.0, 1.3, 9.0], joint=joint, hybrid=Hybrid(4, 0.5))

    assert pytest.approx(1.5 * BATCHES) == trace.ends[0][-1]
    assert {3: trace.sent[3]} == coordinator.aggregation.dropped


def test_a_time_out_that_nobody_reaches_changes_nothing():
    """A time-out that no round reaches changes nothing."""
    coordinator, trace = simulate("synchronous", [1.0, 1.2, 1.4], hybrid=Hybrid(3, 1.0))

    assert pytest.approx(1.4 * BATCHES) == trace.ends[0][-1]
    assert not coordinator.aggregation.dropped


@settings(max_examples=40)
@given(paces_, st.integers(1, 8), st.none() | st.floats(0, 5), st.booleans())
def test_every_update_is_merged_once_or_dropped_and_counted(paces, quorum, timeout, merge_late):
    """Every update is merged once, or dropped and counted, at any speeds, quorum and time-out."""
    hybrid = Hybrid(min(quorum, len(paces)), timeout, merge_late)
    coordinator, trace = simulate("synchronous", paces, joint=False, merge="sum", hybrid=hybrid)
    left = coordinator.aggregation.late  # late updates of a round that no worker is left for
    dropped = coordinator.aggregation.dropped.total()

    assert BATCHES == coordinator.aggregation.version
    assert sum(trace.sent) == coordinator.aggregation.parameters[0] + dropped + left
    assert not (dropped and merge_late)


@settings(max_examples=40)
@given(paces_, st.integers(1, 8), st.booleans(), st.integers(1, 5))
def test_replicas_stay_identical_though_some_are_late(paces, quorum, merge_late, kept):
    """A late worker applies every mean that it missed in order, so that replicas stay identical."""
    with mock.patch.multiple(limits, KEPT_BYTES=0, LEAST_KEPT=kept):
        hybrid = Hybrid(min(quorum, len(paces)), None, merge_late)
        coordinator, trace = simulate("synchronous", paces, hybrid=hybrid)

    assert 1 == len({round(applied, 3) for applied in trace.applied})
    assert BATCHES == coordinator.aggregation.version


def test_rounds_wait_for_a_worker_that_missed_as_many_as_are_kept():
    """Rounds wait for a worker that missed all kept means: three rounds per batch of that worker."""
    with mock.patch.multiple(limits, KEPT_BYTES=0, LEAST_KEPT=3):
        _, trace = simulate("synchronous", [1.0, 1.0, 100.0], hybrid=Hybrid(2))

    assert 7 == trace.sent[2]
    assert pytest.approx(600, abs=5) == trace.ends[0][-1]


@pytest.mark.whole
def test_256_workers_with_backups():
    """With 230 of 256 workers as quorum, a round takes as long as the slowest of them."""
    paces = np.linspace(1, 2, 256)
    _, trace = simulate("synchronous", paces, hybrid=Hybrid(230))

    assert pytest.approx(BATCHES * np.sort(paces)[229], rel=0.02) == trace.ends[0][-1]


# -- workers that die -----------------------------------------------------------------------------

LOSSES = {"goes_on": True, "stall": 5.0}


@pytest.mark.parametrize("joint", [True, False])
def test_rounds_wait_for_a_dead_worker_once(joint):
    """Rounds wait for a dead worker until it counts as lost, and then go at the pace of the others."""
    coordinator, trace = simulate(
        "synchronous", [1.0, 1.0, 1.0], joint=joint, lives={2: (7.5, None)}, **LOSSES
    )

    assert [BATCHES, BATCHES, 7] == trace.sent
    assert BATCHES == coordinator.aggregation.version
    assert 5 <= trace.ends[0][-1] - BATCHES <= 7
    assert (1, 0) == (coordinator.counters["lost"], coordinator.counters["returned"])


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_nobody_waits_for_a_dead_worker_without_rounds(mode):
    """Without rounds, a dead worker slows no other one, and all updates sent are merged."""
    coordinator, trace = simulate(mode, [1.0, 1.3, 1.0], merge="sum", lives={2: (7.5, None)}, **LOSSES)

    assert [BATCHES, BATCHES, 7] == trace.sent
    assert [pytest.approx(1.0 * BATCHES), pytest.approx(1.3 * BATCHES)] == [e[-1] for e in trace.ends[:2]]
    assert sum(trace.sent) == coordinator.aggregation.parameters[0]


def test_a_bound_waits_for_a_dead_worker_once():
    """A staleness bound waits for a dead worker until it counts as lost, and only once."""
    _, trace = simulate("asynchronous", [1.0, 1.0, 1.0], staleness=2, lives={2: (7.5, None)}, **LOSSES)

    assert [BATCHES, BATCHES, 7] == trace.sent
    assert trace.ends[0][-1] - BATCHES <= 7


@pytest.mark.parametrize("joint", [True, False])
def test_a_worker_that_returns_is_in_the_rounds_again(joint):
    """A returning worker takes part in rounds again from a snapshot made for it within the epoch."""
    lives = {2: (7.5, 14.2)}
    coordinator, trace = simulate("synchronous", [1.0, 1.0, 1.0], joint=joint, lives=lives, **LOSSES)

    assert [BATCHES, BATCHES] == trace.sent[:2]
    assert BATCHES - 4 <= trace.sent[2] <= BATCHES
    assert (1, 1) == (coordinator.counters["lost"], coordinator.counters["returned"])


MODES = [
    ("synchronous", False, None),
    ("synchronous", False, Hybrid(2)),
    ("asynchronous", None, None),
    ("hogwild", None, None),
]


@pytest.mark.whole
@settings(max_examples=60)
@given(
    st.lists(st.floats(0.1, 5), min_size=2, max_size=5),
    st.floats(0, 60),
    st.none() | st.floats(0, 60),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.none() | st.integers(0, 3),
)
def test_every_update_counts_once_where_a_worker_dies(paces, death, back, mode, epochs, bound):
    """Every update counts once whenever a worker dies and returns, and no worker waits forever."""
    mode, joint, hybrid = mode
    lives = {0: (death, None if back is None else death + 9.0 + back)}
    terms = {"staleness": bound} if mode != "synchronous" else {"hybrid": hybrid}
    coordinator, trace = simulate(
        mode, paces, joint=joint, merge="sum", epochs=epochs, lives=lives, **terms, **LOSSES
    )

    assert trace.given == coordinator.aggregation.parameters[0] + coordinator.aggregation.dropped.total()
    assert coordinator.counters["returned"] <= coordinator.counters["lost"] <= 1


def test_threads_that_wait_for_each_other_are_found():
    """The simulator reports threads that wait for each other, instead of hanging."""
    world = World()
    condition = Condition(world)
    world.spawn(condition.wait)

    with pytest.raises(DeadlockError, match="1 threads wait for each other."):
        world.run()

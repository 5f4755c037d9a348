"""Laws of a coordinator under any events: versions only grow, a sequence counts once, nothing is lost.

Workers make one step at a time, in one thread and by a test clock. No request waits: each is repeated later.
Every update holds a whole number, so that the center is the exact sum of the counted updates.
"""

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from unittest import mock

import numpy as np
import pytest
from coordinators import (
    EMPTY,
    NEVER,
    coordinator_of,
    give,
    impatient,
    report_of,
    saved_of,
    state_of,
    status_of,
    update_of,
)
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sparkdl.core import packing
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.fingerprint import Fingerprint
from sparkdl.driver.checkpoints import Saved
from sparkdl.errors import RefusedError, WorkerLostError
from sparkdl.server.aggregation import Asynchronous, Hybrid, limits
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.row_agreement import RowAgreement
from sparkdl.server.snapshots import RoundSnapshots, UpdateSnapshots
from sparkdl.server.worker_loss import WorkerLoss
from sparkdl.transport.exchange import awaiting
from sparkdl.transport.messages import Answer, Flag, Kind

WORKERS, ROWS, WINDOWS = 3, 10, 4  # rows and exchanges per epoch of each worker
SILENCE, STALL = 3.0, 1000.0
DEPTH = 2  # number of rounds that a replica may be late
EVERY = 3  # updates, or rounds of an epoch, between snapshots
workers_ = st.integers(0, WORKERS - 1)
settled = precondition(lambda self: self.heard_since > 5)  # restarts in quick succession make no progress
values_ = st.integers(-1000, 1000).map(lambda value: 60 * value)  # means of up to 6 of them are whole numbers


class Machine(RuleBasedStateMachine):
    """State machine of workers that push, repeat and fall silent, and a driver that snapshots and restarts.

    Attributes:
        kind: class of the coordinator.
        goes_on_without: True if the run continues without a lost worker.
        lost: workers without which the run continues.
        waiting_room: lost workers that wait to return.
        ledger: expected state of the coordinator.
        noted: expected state of its newest snapshot.
        kept: a checkpoint, and its expected state.
        sent: last update of each worker.
        heard_since: number of messages of workers since the worker group began.
        order: order of the rows of all workers.
    """

    mode, joint, terms, kind = "asynchronous", False, {}, Coordinator
    goes_on_without = False

    def __init__(self):
        super().__init__()
        self.patience = impatient()
        self.patience.__enter__()

    def teardown(self):
        self.patience.__exit__(None, None, None)

    @initialize()
    def begin(self):
        self.now, self.run, self.attempts, self.heard = 0.0, 1, [1] * WORKERS, [0.0] * WORKERS
        self.ledger, self.kept = self.law(), None
        self.noted = deepcopy(self.ledger)
        self.heard_since, self.order = 0, 0
        self.open_store()
        self.join_all()

    def open_store(self):
        """Begin a run."""
        batch = WORKERS * ROWS // WINDOWS + 1 if self.joint else ROWS // WINDOWS + 1
        self.coordinator = coordinator_of(
            self.mode,
            joint=self.joint,
            merge="sum",
            workers=WORKERS,
            size=2,
            kind=self.kind,
            plan=BatchPlan((), 0, batch, 1, self.joint, False, 0),
            epochs=10**6,
            snapshot_intervals=(EVERY,),
            silence=SILENCE,
            run=bytes([self.run % 256]) * 16,
            metrics=1,
            generators=12,
            stall=STALL,
            goes_on=self.goes_on_without,
            **self.terms,
        )
        self.coordinator.state.clock = self.coordinator.aggregation.clock = lambda: self.now
        self.generation, self.version = 1, 0

    def join_all(self):
        """Let the worker group form. Each worker but the last has to repeat its request."""
        self.sent = [None] * WORKERS
        self.lost, self.waiting_room = set(), set()
        self.coordinator.release(self.coordinator.snapshot.epoch, NEVER)
        for worker in range(WORKERS):
            self.join(worker)
        assert [None] * (WORKERS - 1) == [self.ready(worker) for worker in range(WORKERS)][:-1]
        for worker in range(WORKERS):
            self.goes_on(worker, self.ready(worker))
        self.heard_since = 0

    def join(self, worker):
        """Let a newer attempt of a worker join; return True if it may begin."""
        joined = self.coordinator.join(worker, self.generation, self.attempts[worker] + 1, "host", 1)
        self.attempts[worker] += joined
        return joined

    def ready(self, worker):
        self.heard[worker] = self.now
        return self.coordinator.ready(worker, self.generation, self.attempts[worker], ROWS, 0, {}, self.rows)

    @property
    def rows(self):
        """The fingerprint of the rows of a worker."""
        return Fingerprint(self.order, 7)

    def stamp(self, worker, **fields):
        names = {"attempt": self.attempts[worker], "generation": self.generation}
        return names | {"run": self.coordinator.shape.run} | fields

    def update(self, worker, value, sequence, **fields):
        """Return a worker's update with a value, or with nothing if the worker had no rows."""
        body = EMPTY if value is None else [value, -value]
        return update_of(self.coordinator, worker, body, sequence=sequence, **self.stamp(worker, **fields))

    def say(self, worker, kind, **fields):
        """Return a worker's message of another kind."""
        return update_of(self.coordinator, worker, kind=kind, **self.stamp(worker, **fields))

    def give(self, update):
        self.heard[update.worker] = self.now
        self.heard_since += 1
        reply = give(self.coordinator, update)
        self.coordinator.sent(update)
        return reply

    def restored(self, worker):
        """Assert the current center in the reply that a worker begins with; return the reply."""
        reply = self.give(self.say(worker, Kind.RESTORE))
        assert [self.center(), self.ledger.version] == [reply.parameters[0], reply.version]
        return reply

    # Requests of workers that do not belong to the run any more.

    @rule(worker=workers_, value=values_, what=st.sampled_from(["generation", "attempt"]))
    def push_of_the_past(self, worker, value, what):
        """An update of an old generation or of a superseded attempt changes nothing."""
        past = {what: self.stamp(worker)[what] - 1}
        self.refuse(self.update(worker, value, self.coordinator.aggregation.next_sequence(worker), **past))

    @rule(worker=workers_, value=values_)
    def push_of_another_run(self, worker, value):
        """An update of a worker of another run, whose driver has died, changes nothing."""
        other = bytes([(self.run - 1) % 256]) * 16
        self.refuse(self.update(worker, value, self.coordinator.aggregation.next_sequence(worker), run=other))

    def refuse(self, update):
        before = state_of(self.coordinator)
        assert 409 == status_of(lambda: give(self.coordinator, update))
        assert before == state_of(self.coordinator)

    # Events of workers and of the driver.

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def pass_time(self, seconds):
        """All workers are silent for a while, and the driver checks for it."""
        self.now += seconds
        self.coordinator.membership.looked = self.now

    @settled
    @rule(worker=workers_, seconds=st.sampled_from([0.0, SILENCE]))
    def supersede(self, worker, seconds):
        """A newer attempt replaces a silent one, but not an active one."""
        self.pass_time(seconds)
        if worker in self.lost:
            return
        if self.now - self.heard[worker] < SILENCE:
            assert not self.join(worker)
        else:
            self.replace_worker(worker)

    @settled
    @rule(early=st.integers(0, WORKERS))
    def restart(self, early):
        """The driver restarts the worker group, perhaps again after some workers have joined."""
        if early:
            self.generation = self.coordinator.restart()
            for worker in range(early):
                self.join(worker)
        self.generation = self.coordinator.restart()
        self.version = 0
        self.roll_back()
        self.join_all()

    @rule()
    def keep(self):
        """The driver writes the newest snapshot into a checkpoint."""
        coordinator = self.coordinator
        saved = saved_of(coordinator)
        self.kept = packing.pack(saved.values()), deepcopy(self.noted), self.order

    @settled
    @precondition(lambda self: self.kept is not None)
    @rule()
    def resume(self):
        """The driver dies, and another one resumes from the checkpoint."""
        data, ledger, self.order = self.kept
        saved = Saved.of(packing.unpack(memoryview(data)))
        self.run += 1
        self.open_store()
        state = packing.like(self.coordinator.aggregation.state, saved.snapshot.rule)
        self.coordinator.resume(replace(saved.snapshot, rule=state), saved.held)
        self.ledger, self.noted = deepcopy(ledger), deepcopy(ledger)
        self.join_all()

    @property
    def there(self):
        return set(range(WORKERS)) - self.lost

    def gone(self, worker):
        """Record a worker as lost by a run that continues."""
        self.lost.add(worker)
        self.waiting_room.discard(worker)
        self.sent[worker] = None

    def end_epoch(self, epoch):
        """The driver takes the reports of all present workers, once each."""
        result = self.coordinator.wait_epoch(epoch, 0)
        assert len(self.reporters(epoch)) * ROWS == result.rows
        self.ledger.handed += len(result.losses)
        self.coordinator.commit(result.snapshot)
        self.coordinator.release(epoch + 1, NEVER)

    # The laws.

    @invariant()
    def versions_only_grow(self):
        """Within a generation the version grows by one for each counted update or round."""
        assert self.version <= self.coordinator.aggregation.version == self.ledger.version
        self.version = self.coordinator.aggregation.version

    @invariant()
    def nothing_is_lost_and_nothing_counted_twice(self):
        """The center is the sum of the counted updates."""
        assert [self.center(), -self.center()] == self.coordinator.aggregation.parameters.tolist()

    @invariant()
    def the_driver_learns_each_loss_once(self):
        """Each loss is with the driver or waits for it."""
        assert self.ledger.version == self.ledger.handed + len(self.coordinator.aggregation.losses)


# -- without rounds -------------------------------------------------------------------------------


@dataclass
class OneByOneLaw:
    """Expected state without rounds: every update counts on arrival.

    Attributes:
        counted: value of each update, by worker and sequence.
        states: last reported state of each worker.
        reports: pairs of a worker and an epoch that it has reported.
        handed: number of losses that the driver has.
    """

    counted: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    reports: set = field(default_factory=set)
    handed: int = 0

    @property
    def version(self):
        return len(self.counted)

    def next_sequence(self, worker):
        return max((sequence + 1 for k, sequence in self.counted if k == worker), default=0)


class OneByOne(Machine):
    """Runs without rounds: updates are merged on arrival, and only a new driver rolls back.

    Attributes:
        over: epochs that all workers present at some moment had reported.
        unsaid: workers that have not reported their state since the last snapshot within an epoch.
        aware: workers of ``unsaid`` that know it.
        stood: last report of each worker's state within an epoch.
    """

    law = OneByOneLaw

    def open_store(self):
        self.over, self.unsaid = set(), set()
        super().open_store()

    def join_all(self):
        self.lost, self.aware, self.stood = set(), set(), [None] * WORKERS
        self.note_ends()
        super().join_all()

    def note_ends(self):
        epochs = {epoch for _, epoch in self.ledger.reports if epoch >= self.coordinator.snapshot.epoch}
        self.over |= {epoch for epoch in epochs if self.there <= self.reporters(epoch)}

    def reporters(self, epoch):
        return {worker for worker, reported in self.ledger.reports if reported == epoch}

    def epoch_of(self, worker):
        """Return the first epoch that a worker has not reported and that is not over."""
        epoch = self.coordinator.snapshot.epoch
        while epoch in self.over or (worker, epoch) in self.ledger.reports:
            epoch += 1
        return epoch

    def gone(self, worker):
        super().gone(worker)
        self.leave(worker)
        self.note_ends()

    def let_in(self, worker, begin):
        """Readmit a lost worker at once."""
        self.lost.discard(worker)
        self.goes_on(worker, begin)

    def center(self):
        return sum(self.ledger.counted.values())

    def roll_back(self):
        """Roll back nothing."""

    def goes_on(self, worker, begin):
        """A worker begins after its last counted update, in the epoch that it has not reported."""
        assert self.ledger.next_sequence(worker) == begin["sequence"]
        assert self.epoch_of(worker) == begin["epoch"]
        assert self.ledger.states.get(worker, b"") == self.restored(worker).state
        self.sent[worker] = self.stood[worker] = None
        self.aware.discard(worker)
        self.leave(worker)
        self.enter(worker)
        if begin["epoch"]:
            self.stand_at_the_gate(worker)

    def replace_worker(self, worker):
        assert self.join(worker)
        self.goes_on(worker, self.ready(worker))

    def enter(self, worker):
        """Record a worker that trains."""

    def leave(self, worker):
        """Record an idle worker."""

    def may_train(self, worker):
        """Return True if a worker may train its epoch: it is at most one ahead."""
        return worker in self.there and self.epoch_of(worker) <= self.coordinator.released

    def may_push(self, worker):
        return self.may_train(worker)

    def too_far(self, worker):
        """Return True if a worker has to wait for others."""
        return False

    def flag(self, worker):
        """Return the expected flag of the reply to a worker's last update."""
        if self.too_far(worker):
            return Flag.AGAIN
        within = (self.sent[worker].sequence + 1) % WINDOWS
        return Flag.SEND_STATE if within and worker in self.unsaid else Flag.NONE

    def is_now(self, worker, epoch):
        """Return the state of a worker, which is unique to this moment."""
        return np.array([self.run, self.ledger.next_sequence(worker), epoch], "<i4").tobytes()

    def stand(self, worker):
        """Let a worker that was asked to report its state do so before it continues."""
        if worker not in self.aware:
            return
        epoch, sequence = self.epoch_of(worker), self.ledger.next_sequence(worker)
        fields = {"state": self.is_now(worker, epoch), "metrics": b"m", "rows": ROWS}
        self.stood[worker] = self.say(worker, Kind.STATE, epoch=epoch, sequence=sequence, **fields)
        self.give(self.stood[worker])
        self.ledger.states[worker] = fields["state"]
        self.unsaid.discard(worker)
        self.aware.discard(worker)

    @rule(worker=workers_)
    def stand_again(self, worker):
        """A repeated report of a worker's state does not replace a newer one."""
        if (stood := self.stood[worker]) is not None and worker in self.there and worker not in self.aware:
            unsaid = worker in self.coordinator.snapshots.awaited
            self.give(stood)
            assert unsaid or worker not in self.coordinator.snapshots.awaited

    def noted_now(self):
        """Record a snapshot of this moment, after which every worker should report its state."""
        self.noted, self.unsaid = deepcopy(self.ledger), set(range(WORKERS))

    @rule(pushes=st.lists(st.tuples(workers_, values_, st.integers(0, 2)), min_size=1, max_size=6))
    def push_many(self, pushes):
        """Workers push updates. Those with fewer batches skip sequences at an epoch's end."""
        for push in pushes:
            self.push(*push)

    def push(self, worker, value, skip):
        if not self.may_push(worker):
            return
        self.stand(worker)
        sequence = self.ledger.next_sequence(worker) + skip
        update = self.update(worker, value, sequence, base_version=self.version, epoch=self.epoch_of(worker))
        reply = self.give(update)
        self.sent[worker], self.ledger.counted[worker, sequence] = update, value
        self.count(worker)
        if not self.ledger.version % EVERY:
            self.noted_now()
        self.answered(worker, reply, self.flag(worker))

    def count(self, worker):
        """Count an exchange of a worker."""

    def answered(self, worker, reply, flag):
        assert flag == reply.flags
        assert flag & Flag.AGAIN or self.center() == reply.parameters[0]
        if flag & Flag.SEND_STATE:
            self.aware.add(worker)

    @rule(worker=workers_, again=st.booleans())
    def repeat(self, worker, again):
        """After a lost answer, the worker repeats the update or asks for the answer."""
        if (sent := self.sent[worker]) is not None:
            flag = self.flag(worker)
            reply = self.give(awaiting(sent) if again else sent)
            self.answered(worker, reply, flag if flag & Flag.AGAIN else flag | Flag.DUPLICATE)

    @rule(worker=workers_, known=st.booleans())
    def pull(self, worker, known):
        """A worker requests the current center, which it may have."""
        if worker in self.lost:
            return
        version = self.coordinator.aggregation.version if known else 0
        reply = self.give(self.say(worker, Kind.CENTER, base_version=version))
        assert self.coordinator.aggregation.version == reply.version
        assert (version == reply.version) == (reply.kind is Answer.NOTHING)
        assert reply.kind is Answer.NOTHING or self.center() == reply.parameters[0]

    @rule(reports=st.lists(st.tuples(workers_, st.booleans()), min_size=1, max_size=4))
    def report_many(self, reports):
        """Workers reach the end of an epoch."""
        for report in reports:
            self.report(*report)

    def report(self, worker, twice):
        """A worker ends its epoch, or asks to go on to the next one."""
        if self.may_push(worker):
            self.stand(worker)
            epoch = self.epoch_of(worker)
            state = self.is_now(worker, epoch + 1)
            report = report_of(
                self.coordinator, worker, epoch, metrics=b"m", state=state, **self.stamp(worker)
            )
            for _ in range(1 + twice):
                self.give(report)
            self.ledger.states[worker] = state
            self.ledger.reports.add((worker, report.epoch))
            self.note_ends()
            self.sent[worker] = None
            self.leave(worker)
        if worker in self.there and self.epoch_of(worker):
            self.stand_at_the_gate(worker)

    def stand_at_the_gate(self, worker):
        if not self.may_train(worker):
            self.leave(worker)
        epoch = self.epoch_of(worker) - 1
        reply = self.give(self.say(worker, Kind.REPORT, flags=Flag.AWAIT, epoch=epoch))
        assert (Flag.NONE if self.may_train(worker) else Flag.AGAIN) == reply.flags
        if self.may_train(worker):
            self.enter(worker)

    @rule()
    def note(self):
        """The driver requests a snapshot, after it has taken the epoch's end if there is one."""
        unsaid, ends = self.unsaid, self.coordinator.snapshot.epoch in self.over
        if ends:
            self.end_epoch(self.coordinator.snapshot.epoch)
        self.coordinator.request_snapshot(ends=ends)
        self.noted_now()
        if ends:
            self.unsaid = unsaid

    @invariant()
    def nobody_takes_room(self):
        """All replies have been sent, so that no exchange takes room."""
        assert 0 == self.coordinator.aggregation.flights


class Hogwild(OneByOne):
    """Hogwild runs, under the same laws."""

    mode = "hogwild"


class Bounded(OneByOne):
    """Runs with a staleness bound. A worker that exceeds it does not continue."""

    terms = {"staleness": 1}

    def join_all(self):
        self.clocks = {worker: 0 for worker in range(WORKERS)}  # noqa: C420 - all begin side by side
        super().join_all()

    def enter(self, worker):
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))

    def leave(self, worker):
        self.clocks.pop(worker, None)

    def count(self, worker):
        self.clocks[worker] += 1

    def too_far(self, worker):
        return self.clocks.get(worker, 0) - min(self.clocks.values(), default=0) > 1

    def may_push(self, worker):
        return self.may_train(worker) and worker in self.clocks and not self.too_far(worker)

    @invariant()
    def nobody_is_too_far(self):
        """The coordinator's clocks are the expected ones."""
        assert self.clocks == self.coordinator.aggregation.clocks
        assert max(self.clocks.values(), default=0) - min(self.clocks.values(), default=0) <= 2


# -- rounds ---------------------------------------------------------------------------------------


@dataclass
class RoundsLaw:
    """Expected state with rounds.

    Attributes:
        closed: movement of the center by each closed round.
        handed: number of losses that the driver has.
    """

    closed: list = field(default_factory=list)
    handed: int = 0

    @property
    def version(self):
        return len(self.closed)


class InRounds(Machine):
    """Runs in rounds, of all workers or some. The loss of a worker rolls back to the last snapshot.

    Attributes:
        at: round of each worker's next update.
        missed: round up to which each worker applies the means of rounds that closed without it.
        open: values in the open round, by worker.
        late: values of the late updates.
        waiting: update of each worker that has no answer yet.
        standing: workers asked to report their state for a snapshot that have not done so.
        reported: workers that have ended the epoch.
        speaks: workers that report the shared weights.
        spoken: True if the shared weights were reported at this epoch's end.
        returning: readmitted workers that do not know it yet.
        seen: newest known snapshot.
        replicas: replica of each worker, if gradients are exchanged.
    """

    mode, law, hybrid = "synchronous", RoundsLaw, None

    def __init_subclass__(cls):
        cls.terms = {"hybrid": cls.hybrid}

    def join_all(self):
        self.at, self.missed, self.replicas = [0] * WORKERS, [0] * WORKERS, [0] * WORKERS
        self.waiting, self.standing, self.reported = [None] * WORKERS, set(), set()
        self.speaks, self.spoken, self.returning = {0}, False, set()
        self.seen = self.coordinator.newest_snapshot
        self.dropped = self.coordinator.aggregation.dropped.total()
        self.open_round()
        super().join_all()

    def open_round(self):
        self.open, self.late, self.deadline = {}, [], inf

    def goes_on(self, worker, begin):
        """A worker begins after the snapshot."""
        assert self.ledger.version == begin["sequence"]
        assert self.ledger.version // WINDOWS == begin["epoch"]
        self.at[worker], self.replicas[worker] = begin["sequence"], self.restored(worker).parameters[0]

    def roll_back(self):
        """Return to the last snapshot, or to an epoch that all have reported, which the driver takes."""
        if self.there <= self.reported and not self.mute:
            super().end_epoch(self.coordinator.snapshot.epoch - 1)
            self.noted = deepcopy(self.ledger)
        self.ledger = deepcopy(self.noted)

    @settled
    @rule()
    def restart_with_another_order(self):
        """Spark recomputes the rows in another order, and the epoch begins again."""
        self.order += 1
        del self.noted.closed[self.noted.version // WINDOWS * WINDOWS :]
        self.restart(0)

    def replace_worker(self, worker):
        """A replaced worker has lost its replica: all restart from the snapshot, or continue without it."""
        if self.goes_on_without and self.there - {worker}:
            assert self.join(worker)
            self.gone(worker)
            self.let_in(worker, self.ready(worker))
            return
        assert 409 == status_of(lambda: self.join(worker))
        assert isinstance(self.coordinator.failure, WorkerLostError)
        self.restart(0)

    def gone(self, worker):
        super().gone(worker)
        self.waiting[worker] = None
        for those in (self.standing, self.speaks, self.returning):
            those.discard(worker)
        self.note_cut()

    def let_in(self, worker, begin):
        """Let a lost worker wait for a snapshot."""
        assert begin is None
        self.waiting_room.add(worker)

    def note_cut(self):
        """Record a new snapshot, which readmits waiting workers without an update after it."""
        coordinator = self.coordinator
        if (
            coordinator.newest_snapshot.version != self.ledger.version
            or coordinator.newest_snapshot is self.seen
        ):
            return
        self.seen = coordinator.newest_snapshot
        self.noted = deepcopy(self.ledger)
        for worker in sorted(self.waiting_room - self.open.keys()):
            self.lost.discard(worker)
            self.waiting_room.discard(worker)
            self.returning.add(worker)
            self.at[worker] = self.missed[worker] = self.ledger.version
        assert self.lost == coordinator.lost

    def reporters(self, epoch):
        return self.reported

    @property
    def mute(self):
        """True if the shared weights were not reported before worker 0 was lost."""
        return self.joint and 0 in self.lost and not self.spoken

    def give(self, update):
        """Hand an update to the coordinator, and record a request for the shared weights."""
        reply = super().give(update)
        if reply.flags & Flag.SPEAK:
            assert self.joint
            assert 0 in self.lost
            assert min(self.there) == update.worker
            if not reply.flags & Flag.AGAIN:
                self.speaks.add(update.worker)
        return replace(reply, flags=reply.flags & ~Flag.SPEAK)

    def center(self):
        """Return the center. With replicas, it is the center of the snapshot."""
        return sum((self.noted if self.joint else self.ledger).closed)

    @property
    def end(self):
        return WINDOWS * (self.coordinator.snapshot.epoch + 1)

    @rule(steps=st.lists(st.tuples(workers_, st.none() | values_, st.booleans()), min_size=1, max_size=6))
    def step_some(self, steps):
        """Workers take steps, some more than others."""
        for step in steps:
            self.step(*step)

    def step(self, worker, value, twice):
        """Take a worker's next step, perhaps twice: report its state, ask again, end its epoch or push."""
        if worker in self.lost:
            assert worker not in self.waiting_room or self.ready(worker) is None
        elif worker in self.returning:
            self.goes_on_again(worker, self.ready(worker))
        elif worker in self.standing:
            self.stand(worker, twice)
        elif self.waiting[worker] is not None:
            self.hand_in(worker, self.waiting[worker] if twice else awaiting(self.waiting[worker]))
        elif self.at[worker] == self.end:
            self.report(worker, twice)
        else:
            catches_up = self.at[worker] < self.missed[worker]
            self.push(worker, self.update(worker, None if catches_up else value, self.at[worker]))

    @rule(order=st.permutations(range(WORKERS)), values=st.lists(values_, min_size=1, max_size=8))
    def step_together(self, order, values):
        """All workers take several steps in turn, and the driver follows."""
        for value in values:
            for worker in order:
                self.step(worker, value, False)
            self.end_epoch(self.coordinator.snapshot.epoch)

    def goes_on_again(self, worker, begin):
        """A readmitted worker begins at that snapshot, though rounds may have closed without it since."""
        assert self.at[worker] == begin["sequence"]
        self.returning.discard(worker)
        self.speaks |= {worker} & {0}
        self.replicas[worker] = self.restored(worker).parameters[0]

    def push(self, worker, update):
        value = float(update.parameters[0]) if update.rows else None
        self.waiting[worker] = self.sent[worker] = update
        if update.sequence == self.ledger.version:
            self.open[worker] = value
            if value is not None and self.hybrid:
                self.deadline = min(self.deadline, self.now + (self.hybrid.timeout or inf))
        elif value is not None and self.hybrid.merge_late:
            self.late.append(value)
        else:
            self.dropped += value is not None
        self.hand_in(worker, update)

    def hand_in(self, worker, update):
        """Give an update to the coordinator, which closes the round if it may."""
        closes = update.sequence == self.ledger.version and self.may_close()
        rounds = self.ledger.version + closes
        if closes:
            self.close()
        reply = self.give(update)
        if update.sequence == rounds:
            assert Flag.AGAIN == reply.flags
            return
        assert rounds == reply.round
        self.waiting[worker] = None
        self.missed[worker] = rounds if self.joint else 0
        self.at[worker] = update.sequence + 1 if self.joint else rounds
        self.take(worker, reply)
        if reply.flags & Flag.SEND_STATE:
            self.standing.add(worker)

    def take(self, worker, reply):
        """Apply a reply; it must hold the current center or move the replica to that round."""
        if not self.joint:
            assert self.center() == reply.parameters[0]
            return
        self.replicas[worker] += reply.parameters[0] if len(reply.parameters) else 0
        assert sum(self.ledger.closed[: self.at[worker]]) == self.replicas[worker]

    def may_close(self):
        """Return True if the open round may close: it has all workers, or enough and none too far behind."""
        if self.hybrid is None or self.coordinator.aggregation.whole or self.there <= self.open.keys():
            return self.there <= self.open.keys()
        with_rows = sum(value is not None for value in self.open.values())
        enough = with_rows >= self.hybrid.quorum or with_rows and self.now >= self.deadline
        latest = min(self.at[worker] for worker in self.there)
        return enough and (not self.joint or latest > self.ledger.version - DEPTH)

    def close(self):
        values = [value for value in self.open.values() if value is not None] + self.late
        self.ledger.closed.append(sum(values) / (len(values) or 1) if self.joint else sum(values))
        self.open_round()

    def stand(self, worker, twice):
        """A worker reports its state. The states of all workers are a snapshot."""
        self.standing.discard(worker)
        for _ in range(1 + twice):
            self.give(self.standing_as(worker, Kind.STATE, sequence=self.at[worker]))
        self.note_cut()

    def standing_as(self, worker, kind, **fields):
        speaks = self.joint and worker in self.speaks
        replica = [self.replicas[worker], -self.replicas[worker]] if speaks else EMPTY
        sent = {
            "parameters": replica,
            "metrics": b"m",
            "rows": ROWS,
            "epoch": self.coordinator.snapshot.epoch,
        }
        return self.say(worker, kind, **sent | fields)

    def report(self, worker, twice):
        """A worker ends its epoch, with the shared weights if asked."""
        self.reported.add(worker)
        for _ in range(1 + twice):
            reply = self.give(self.standing_as(worker, Kind.REPORT))
            if not reply.flags:
                reply = self.give(self.standing_as(worker, Kind.REPORT))
            self.spoken = self.spoken or worker in self.speaks
            assert Flag.AGAIN == reply.flags

    def end_epoch(self, epoch):
        if not self.there <= self.reported or self.mute:
            assert self.coordinator.wait_epoch(epoch, 0) is None
            return
        super().end_epoch(epoch)
        self.reported, self.spoken = set(), False
        self.note_cut()
        steps = self.coordinator.plans[0].steps
        assert self.coordinator.progress == pytest.approx(steps * (epoch + 1))

    @rule(worker=workers_)
    def repeat(self, worker):
        """An update repeated long after its answer changes nothing."""
        sent = self.sent[worker]
        if sent is None or self.waiting[worker] is not None:
            return
        before, speaks = state_of(self.coordinator), set(self.speaks)
        with suppress(RefusedError):  # its round closed long ago
            assert self.give(sent).flags & Flag.DUPLICATE
        self.speaks = speaks  # the worker does not read this answer
        assert before == state_of(self.coordinator)

    @rule()
    def note(self):
        """The driver requests a snapshot as soon as rounds allow."""
        self.coordinator.request_snapshot()

    @invariant()
    def what_was_dropped_is_known(self):
        """Dropped late updates are counted."""
        assert self.dropped == self.coordinator.aggregation.dropped.total()


class Gradients(InRounds):
    """Rounds of gradients: the mean goes to every worker's replica."""

    joint = True


class Quorum(InRounds):
    """Rounds with a quorum: two of three workers close one, or a single one when its time is up."""

    hybrid = Hybrid(2, 1.5)


class LateMerged(InRounds):
    """Rounds with a deadline, after which a late update is merged into the next round."""

    hybrid = Hybrid(WORKERS, 1.5, merge_late=True)


class GradientsOfSome(InRounds):
    """Gradient rounds in which late replicas apply the means that they missed."""

    joint, hybrid = True, Hybrid(1, 1.5)

    def __init__(self):
        super().__init__()
        self.few = mock.patch.multiple(limits, KEPT_BYTES=0, LEAST_KEPT=DEPTH)
        self.few.__enter__()

    def teardown(self):
        self.few.__exit__(None, None, None)
        super().teardown()


# -- runs that go on without workers --------------------------------------------------------------


class GoingOn:
    """Events in which workers are lost one by one and return."""

    goes_on_without = True

    @settled
    @rule(worker=workers_)
    def lose(self, worker):
        """A worker, active or waiting to return, is silent for too long, and the driver looks."""
        if len(self.there - {worker}) == 0 or worker in self.lost - self.waiting_room:
            return
        self.pass_time(STALL + 1)
        for other in (self.there | self.waiting_room) - {worker}:
            self.heard[other] = self.now
            self.coordinator.heartbeat(other, self.generation, self.attempts[other], 0, 0, 0, [])
        assert self.coordinator.wait_epoch(self.coordinator.shape.epochs, 0) is None
        self.gone(worker)
        assert self.lost == self.coordinator.lost

    @settled
    @precondition(lambda self: getattr(self, "standing", None))
    @rule(value=values_)
    def lose_one_that_is_ahead(self, value):
        """A worker reports for a snapshot, pushes, dies and returns before all others have reported."""
        worker = min(self.standing)
        for _ in range(2):
            self.step(worker, value, False)
        self.lose(worker)
        if worker in self.lost:
            assert self.join(worker)
            self.let_in(worker, self.ready(worker))

    @precondition(lambda self: self.lost - self.waiting_room)
    @rule(data=st.data())
    def push_of_the_lost(self, data):
        """Messages of a lost attempt change nothing."""
        worker = data.draw(st.sampled_from(sorted(self.lost - self.waiting_room)))
        self.refuse(self.update(worker, 60, self.coordinator.aggregation.next_sequence(worker)))

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def come_back(self, data):
        """Spark starts the task of a lost worker again, perhaps repeatedly."""
        worker = data.draw(st.sampled_from(sorted(self.lost)))
        if worker in self.waiting_room and self.now - self.heard[worker] < SILENCE:
            assert not self.join(worker)
            return
        assert self.join(worker)
        self.let_in(worker, self.ready(worker))


def going_on(machine):
    """Return a machine whose run continues without lost workers."""
    return type(f"{machine.__name__}GoesOn", (GoingOn, machine), {})


ALL_OR_NONE = [OneByOne, Hogwild, Bounded, InRounds, Gradients, Quorum, LateMerged, GradientsOfSome]
MACHINES = ALL_OR_NONE + [going_on(each) for each in ALL_OR_NONE if each not in (OneByOne, Quorum)]
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)


@each_machine
def test_the_laws_hold(machine):
    """The laws hold in 100 random runs of 40 steps."""
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=40))


@pytest.mark.whole
@each_machine
def test_the_laws_hold_for_long(machine):
    """The laws hold in 1000 random runs of 60 steps."""
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=60))


class CountsTwice(Coordinator):
    """A coordinator that counts a repeated update again."""

    def exchange(self, update, read):
        aggregation = self.aggregation
        taken = aggregation.last if isinstance(aggregation, Asynchronous) else aggregation.taken
        if taken.get(update.worker) == update.sequence and update.rows:
            taken[update.worker] -= 1
        return super().exchange(update, read)


class ForgetsTheLedger(Coordinator):
    """A coordinator that resumes from a checkpoint without its ledger."""

    def resume(self, snapshot, held):
        super().resume(replace(snapshot, ledger={}), held)


class ForgetsTheLosses(Coordinator):
    """A coordinator that resumes from a checkpoint without the losses of the epoch."""

    def resume(self, snapshot, held):
        super().resume(replace(snapshot, losses=[]), held)


class LosesTheRounds(Coordinator):
    """A coordinator that restarts from its snapshot with the version of the open round."""

    def restart(self):
        aggregation, version = self.aggregation, self.aggregation.version
        generation = super().restart()
        aggregation.version = version
        return generation


class TrustsTheOrder(RowAgreement):
    """An agreement that continues within an epoch although the order of its rows has changed."""

    def _compare(self, held):
        self.snapshots.committed = replace(self.snapshots.committed, before=None)
        super()._compare(held)


class NotesWhatIsToCome(UpdateSnapshots):
    """Faulty snapshots, to which later reports of workers are added."""

    def request(self, reports, *, ends=False):
        super().request(reports, ends=ends)
        self.newest = replace(self.newest, reports=reports)


class ForgetsWhatWasSaid(UpdateSnapshots):
    """Faulty snapshots, with each worker's state at an epoch's end."""

    def request(self, reports, *, ends=False):
        super().request(reports, ends=ends)
        self.newest = replace(self.newest, states=self.committed.states)


class BelievesWhatIsOld(Coordinator):
    """A coordinator that takes a repeated old state of a worker for its current one."""

    def _is_current(self, update):
        return True


class TakesBackTooEarly(WorkerLoss):
    """A part that readmits a worker whose update is already in the round after the snapshot."""

    def readmit_waiting(self):
        for worker in sorted(self.aggregation.lost):
            member = self.membership.members[worker]
            if not member.lost and member.held is not None:
                self.return_worker(worker)


class WaitsForNobodyToSpeak(RoundSnapshots):
    """Faulty snapshots, made without the shared weights of the replicas."""

    def lacks_weights(self, report):
        return False


PARTS = {
    RowAgreement: "rows",
    WorkerLoss: "losses",
    RoundSnapshots: "snapshots",
    UpdateSnapshots: "snapshots",
}


def with_part(kind):
    """Return a coordinator class with one part of this kind."""

    class Mistaken(Coordinator):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            getattr(self, PARTS[kind.__base__]).__class__ = kind

    return Mistaken


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("machine", "mistake"),
    [
        (OneByOne, CountsTwice),
        (Hogwild, CountsTwice),
        (Bounded, CountsTwice),
        (Quorum, CountsTwice),
        (OneByOne, ForgetsTheLedger),
        (Hogwild, ForgetsTheLedger),
        (Bounded, ForgetsTheLedger),
        (OneByOne, ForgetsTheLosses),
        (InRounds, ForgetsTheLosses),
        (Gradients, LosesTheRounds),
        (OneByOne, NotesWhatIsToCome),
        (OneByOne, ForgetsWhatWasSaid),
        (Hogwild, BelievesWhatIsOld),
        (InRounds, TrustsTheOrder),
        (Gradients, TrustsTheOrder),
        (going_on(InRounds), TakesBackTooEarly),
        (going_on(Gradients), WaitsForNobodyToSpeak),
    ],
)
def test_a_mistake_is_found(machine, mistake):
    """A coordinator with a known mistake breaks one of the laws."""
    kind = mistake if issubclass(mistake, Coordinator) else with_part(mistake)
    mistaken = type(mistake.__name__, (machine,), {"kind": kind})
    found = settings(
        max_examples=1000,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mistaken, settings=found)

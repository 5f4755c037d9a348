"""Coordination of a training run: merging, epochs, snapshots, and the return of lost workers.

``Coordinator`` answers the requests of workers (such as ``join``, ``ready`` and ``exchange``) from many
threads, and those of the driver (such as ``release``, ``wait_epoch`` and ``restart``) from one thread. It is
independent of HTTP and Keras: metric states and optimizer variables are bytes to it.

Fencing: an update carries (run, generation, worker, attempt, sequence). An update of another run or of an old
generation is refused. A newer attempt of a worker replaces the older one. An update that is sent again, with
the same sequence number, is not counted again. After the loss of a worker, the run is restored under the next
generation from the last *snapshot*: the center and every worker's state, at the end of an epoch or between
two rounds within an epoch. Without rounds, no merged update is rolled back, and a restarted worker continues
after its last counted sequence number.

If the run may continue without a lost worker, the run does not wait for it, and its attempt is refused. A new
attempt of the worker may rejoin and gets the state that it needs: in rounds at the next snapshot, otherwise
at once.

The parts share one lock and never call the coordinator:

* ``membership``: the attempts that take part;
* ``rows``: the agreement on the rows of all workers, and ``rebalance``: rows that workers give each other;
* ``schedule``: the epochs that may begin, the progress, the learning rate;
* ``screening``: NaN, Inf and divergence;
* ``snapshots`` and ``epochs``: the points from which the run is restored, and the reports of workers;
* ``losses``: lost workers and their return (not losses of the model);
* ``weights``: replies with weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite

from sparkdl.core import packing
from sparkdl.core.vectors import Vector, trim
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.fingerprint import NOTHING, Fingerprint
from sparkdl.errors import (
    DivergedError,
    RefusedError,
    RuleError,
)
from sparkdl.server import admission
from sparkdl.server.aggregation import (
    Aggregation,
    Read,
    limits,
)
from sparkdl.server.epochs import Epochs, WeightReplies
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.server.rebalance import Rebalance
from sparkdl.server.row_agreement import RowAgreement
from sparkdl.server.schedule import EpochSchedule
from sparkdl.server.screening import Screening
from sparkdl.server.snapshots import snapshots_of
from sparkdl.server.state import (
    CarriedState,
    EpochResult,
    RowsHeld,
    RunSpec,
    Snapshot,
)
from sparkdl.server.worker_loss import WorkerLoss
from sparkdl.transport.exchange import Begin, Notes
from sparkdl.transport.messages import Flag, Kind, Reply, Sections, Update

TIDY = 10.0  # minimum seconds between calls that return freed memory to the system


class Coordinator(GroupCoordinator):
    """Coordinator of a training run. It is independent of HTTP and Keras.

    Args:
        shape: settings of the run.
        aggregation: the center and its way of merging updates.
        carried: state that an earlier run leaves to this one.
    """

    shape: RunSpec

    def __init__(self, shape: RunSpec, aggregation: Aggregation, carried: CarriedState | None = None) -> None:
        super().__init__(shape, aggregation)
        aggregation.codec = shape.codec
        self.tidied = self.state.clock()  # time of the last return of memory
        self.schedule = EpochSchedule(shape)
        self.snapshots = snapshots_of(shape, aggregation, self.schedule, carried)
        self.epochs = Epochs(self.state, shape, self.schedule, self.snapshots, aggregation)
        self.rebalance = Rebalance(self.state, self.membership, self.schedule)
        self.rows = RowAgreement(self.state, self.membership, self.schedule, self.snapshots, aggregation)
        self.screening = Screening(self.state, shape, aggregation, self.membership)
        self.weights = WeightReplies(self.epochs)
        self.losses = WorkerLoss(self.membership, self.epochs, self.screening)

    def resume(self, snapshot: Snapshot, held: tuple[RowsHeld, ...]) -> None:
        """Continue from a snapshot of an earlier run with the same settings, before any worker has joined.

        Args:
            snapshot: the snapshot.
            held: row count and fingerprint of each worker in that run.
        """
        with self.changed:
            self.rows.expect(held, "the checkpoint")
            self.snapshots.resume(snapshot)
            self.epochs.resume(snapshot.reports)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot from which the run is restored."""
        return self.snapshots.committed

    @property
    def held(self) -> tuple[RowsHeld, ...]:
        """The row count and fingerprint of each worker, once all have reported them."""
        return self.rows.held

    @property
    def newest_snapshot(self) -> Snapshot:
        """The newest snapshot, which may not be committed."""
        return self.snapshots.newest

    @property
    def plans(self) -> list[BatchPlan]:
        """The plan of each worker, once all have reported their number of rows."""
        return self.schedule.plans

    @property
    def progress(self) -> float:
        """The number of counted steps, including those before the run."""
        return self.schedule.progress

    @property
    def released(self) -> int:
        """The first epoch that may not begin yet."""
        return self.schedule.released

    @property
    def stopping(self) -> bool:
        """True if replies tell the workers to end."""
        return self.schedule.stopping

    # Requests of workers.

    def ready(
        self,
        worker: int,
        generation: int,
        attempt: int,
        rows: int,
        validation_rows: int,
        notes: Notes,
        fingerprint: Fingerprint = NOTHING,
    ) -> Begin | None:
        """Record a worker's rows, and wait until it may begin; return its starting point.

        None: the wait timed out, and the worker should repeat the request.
        """
        with self.changed:
            member, held = self.membership.hear(worker, generation, attempt), RowsHeld(rows, fingerprint)
            begins = member.held is None
            self.rows.check(worker, member, held)
            member.held, member.validation_rows, member.notes = held, validation_rows, notes
            if not self.membership.agreed and self._all_ready():
                self.rows.agree()
            if begins and worker in self.lost:
                self.losses.readmit(worker)
            if begins and self.epochs.next_epoch(worker) < self.shape.epochs:
                self.losses.enter_training(worker)
            self.changed.notify_all()
            go = self.changed.wait_for(
                lambda: self.state.is_over(generation) or self._may_begin(worker), limits.PATIENCE
            )
            self.membership.hear(worker, generation, attempt)
            if not go:
                return None
            sequence, epoch = self.aggregation.next_sequence(worker), self.epochs.next_epoch(worker)
            members = [member for _, member in sorted(self.members.items())]
            shards = [member.notes["shard"] for member in members if "shard" in member.notes]
            begin: Begin = {
                "rows": self.plans[0].rows,
                "validation_rows": [member.validation_rows for member in members],
                "epoch": epoch,
                "sequence": sequence,
                "restore": bool(sequence or self.snapshot.states) or epoch > self.shape.plan.first_epoch,
                "learning_rate": rate if isfinite(rate := self.schedule.rate()) else None,
                "progress": self.progress,
                "stop": self.stopping,
            }
            if shards:
                begin |= {"shards": shards, "attempts": [member.attempt for member in members]}
            return begin

    def _check_header(self, update: Update, lengths: Sections) -> None:
        admission.check_run(update, self.shape.run)
        with self.changed:
            self.membership.hear(update.worker, update.generation, update.attempt)
        admission.check_model(update, lengths, self.shape, self.aggregation)
        if update.kind in admission.MERGED:
            if not self.membership.agreed:
                raise RefusedError(409, "The worker group is not ready and cannot merge updates yet.")
            admission.check_mergeable(update, lengths, self.shape, self.aggregation)

    def _answer(self, update: Update, read: Read) -> Reply:
        if update.kind in admission.MERGED:
            return self._push(update, read)
        answer: dict[Kind, Callable[[Update, Read], Reply]] = {
            Kind.REPORT: self._report,
            Kind.VALIDATION: self._validated,
            Kind.PULL: self._pull,
            Kind.RESTORE: self._restore,
            Kind.CENTER: self._center,
            Kind.RULE: self._rule,
            Kind.STATE: self._take_state,
            Kind.SHARE: self.rebalance.share,
            Kind.GIVE: self.rebalance.give,
            Kind.TAKE: self.rebalance.take,
        }
        if update.kind not in answer:
            raise RefusedError(400, f"A {update.kind.name} is not accepted in this run.")
        return answer[update.kind](update, read)

    def _is_stopping(self) -> bool:
        return self.stopping

    def _push(self, update: Update, read: Read) -> Reply:
        try:
            reply = self.aggregation.push(
                update, lambda: self.screening.screen(read()), lambda counts: self._count(update, counts)
            )
        except RuleError as error:
            self.fail(update.generation, error)
            raise
        with self.changed:
            if self.screening.has_refused(update):
                reply = replace(reply, flags=reply.flags | Flag.NOT_FINITE)
            if Flag.DUPLICATE in reply.flags and Flag.AWAIT not in update.flags:
                self.counters["duplicates"] += 1
            evaluate = self.epochs.to_evaluate(update.worker)
            if update.worker == self.snapshots.substitute():
                reply = replace(reply, flags=reply.flags | Flag.SPEAK)
            if self.snapshots.is_awaited(update) and Flag.AGAIN not in reply.flags:
                reply = replace(reply, flags=reply.flags | Flag.SEND_STATE)
        return reply if evaluate == reply.evaluate else replace(reply, evaluate=evaluate)

    def _count(self, update: Update, counts: bool) -> Reply:
        """Count an update, or the round that it closes, unless ``counts`` is False.

        Returns:
            A reply with the current stop flag, learning rate and progress.
        """
        schedule = self.schedule
        with self.changed:
            if not counts:
                return schedule.reply()
            if not self.aggregation.has_rounds:
                self.counters["exchanges"] += 1
                schedule.count_update(update)
                self.snapshots.end_update(self.epochs.reports)
                return schedule.reply()
            schedule.ending = schedule.short >= 0  # this round's replies tell all workers to end
            self.counters["exchanges"] += self.shape.num_workers - len(self.lost)
            schedule.count_round(update)
            return schedule.reply(self.snapshots.end_round())

    def _report(self, update: Update, read: Read) -> Reply:
        update = update if Flag.AWAIT in update.flags else read()
        self.snapshots.check_rule(update)
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            if self.epochs.is_new(update) and Flag.AWAIT not in update.flags:
                self.aggregation.leave(update.worker)
                if self.epochs.take_report(update):
                    self.losses.end_epochs()
                self.changed.notify_all()
            return self._wait_at_epoch_end(update)

    def _take_state(self, update: Update, read: Read) -> Reply:
        """Take the state of a worker within an epoch for a snapshot."""
        update = read()
        self.snapshots.check_rule(update)
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            if self.snapshots.take_state(update, current=self._is_current(update)):
                self.losses.readmit_waiting()
            return self.schedule.reply()  # also for a repetition after the snapshot was made

    def _is_current(self, update: Update) -> bool:
        """Return True if a worker has not continued since it sent this update."""
        sequence, epoch = self.aggregation.next_sequence(update.worker), self.epochs.next_epoch(update.worker)
        return (update.sequence, update.epoch) == (sequence, epoch)

    def _validated(self, update: Update, read: Read) -> Reply:
        update = update if Flag.AWAIT in update.flags else read()
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            if Flag.AWAIT not in update.flags:
                self.epochs.take_validation(update)
            return self._wait_at_epoch_end(update)

    def _wait_at_epoch_end(self, update: Update) -> Reply:
        """Hold a worker at an epoch's end until it may continue or has something to evaluate."""
        opened = self.epochs.wait_at_end(update)
        self.membership.check(update.worker, update.generation, update.attempt)
        reply = self.epochs.reply(update.worker)
        if not opened:
            return replace(reply, flags=reply.flags | Flag.AGAIN)
        if self.epochs.lacks_weights_of(update):
            return replace(reply, flags=reply.flags | Flag.SPEAK)
        evaluate, version = self.epochs.to_evaluate(update.worker), self.aggregation.version
        reply = replace(reply, evaluate=evaluate, version=version)
        ends = self.epochs.is_last(update.epoch) or Flag.STOP in reply.flags
        goes_on = reply.evaluate < 0 and not ends
        if goes_on and self.epochs.next_epoch(update.worker) == update.epoch + 1:  # else a repeated request
            self.losses.enter_training(update.worker)
        if goes_on and self.aggregation.has_rounds:
            return self.weights.with_center(reply, update)
        return reply

    def _pull(self, update: Update, read: Read) -> Reply:
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            return self.weights.to_evaluate(update)

    def _center(self, update: Update, read: Read) -> Reply:
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            return self.weights.center(update)

    def _rule(self, update: Update, read: Read) -> Reply:
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            reply, rule = self.weights.rule()
        return replace(reply, state=packing.pack(rule))

    def _restore(self, update: Update, read: Read) -> Reply:
        with self.changed:
            self.membership.check(update.worker, update.generation, update.attempt)
            return self.weights.to_begin(update.worker)

    # Requests of the driver.

    def release(self, epoch: int, learning_rate: float) -> None:
        """Let the workers train up to and including this epoch at this learning rate (nan: their own).

        This has no effect if a later epoch was released before.
        """
        with self.changed:
            if self.schedule.release(epoch, learning_rate):
                self.changed.notify_all()

    def wait_epoch(self, epoch: int, timeout: float) -> EpochResult | None:
        """Wait until every worker has reported an epoch, and evaluated it if required.

        Returns:
            The result of the epoch, or None if the epoch is not complete. The wait ends early if the run has
            failed or closed, if the evaluation waits for ``evaluate``, or if all workers have reported their
            rows and the epoch is not released yet. Also None if the run has diverged or a merge has failed.
        """
        with self.changed:
            self._note_silence()
            self.changed.wait_for(
                lambda: self.failure is not None or self.closed or self.epochs.concerns_driver(epoch), timeout
            )
            ended = self.epochs.is_complete(epoch)
            if not ended or isinstance(self.failure, DivergedError) or self.broken:
                return None
            return self.epochs.result(epoch)

    def awaiting_evaluation(self, epoch: int) -> EpochResult | None:
        """Return the reports of an epoch if its evaluation waits for the driver, else None."""
        with self.changed:
            return self.epochs.awaiting_evaluation(epoch)

    def evaluate(self, epoch: int, weights: tuple[Vector, Vector] | None) -> None:
        """Let workers evaluate an epoch with these weights, or with those of its snapshot if None."""
        with self.changed:
            self.epochs.evaluation_weights[epoch] = weights
            self.changed.notify_all()

    def _note_silence(self) -> None:
        """Treat workers that were silent for too long as lost, and warn of workers that make no progress."""
        for worker, reason in self.membership.silent_workers():
            if self.failure is None:
                self.lose(worker, reason)
        self.membership.warn_of_long_steps()

    def lose(self, worker: int, reason: str) -> None:
        """Continue without a worker; end the generation if the run may not continue or has no rows left."""
        self.losses.lose(worker, reason)

    def commit(self, snapshot: Snapshot) -> None:
        """Make a snapshot the restore point of the run, and forget the epochs before it."""
        with self.changed:
            self.snapshots.commit(snapshot)
            self.epochs.forget_before(snapshot.epoch)
            self.losses.readmit_waiting()
        self._tidy()

    def _tidy(self) -> None:
        """Return freed memory to the system. The C library keeps memory that many threads have freed."""
        if self.state.clock() - self.tidied > TIDY:
            self.tidied = self.state.clock()
            trim(inf)

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Replace the center with the weights that a callback set on the driver."""
        with self.changed:
            self.snapshots.replace(parameters, statistics)

    def request_snapshot(self, *, ends: bool = False) -> None:
        """Make a new ``newest_snapshot``: at once without rounds, otherwise between two rounds.

        Without rounds, the snapshot holds each worker's last reported state.

        Args:
            ends: True if an epoch ends, so that all workers have just reported their state. If False, without
                rounds, each worker reports its state again for the next snapshot.
        """
        with self.changed:
            self.snapshots.request(self.epochs.reports, ends=ends)

    def stop(self) -> None:
        """Tell every worker, in the reply to its next request, to end training."""
        with self.changed:
            self.schedule.stopping = True
            self.changed.notify_all()

    def end_early(self, epoch: int) -> None:
        """End an epoch early, and training with it, after each worker's current exchange.

        The epoch is reported and evaluated like an epoch with all of its batches.
        """
        with self.changed:
            if self.schedule.short == epoch:
                return
            self.schedule.short = epoch
            # In rounds, ``ending`` is set when the open round closes.
            self.schedule.ending = not self.aggregation.has_rounds
            self.changed.notify_all()

    def _restart(self) -> None:
        """In rounds, restore the last snapshot. An epoch that all workers reported is not trained again."""
        self.rebalance.clear()
        self.schedule.ending = self.schedule.short >= 0 and not self.aggregation.has_rounds
        self.screening.restart()
        if self.aggregation.has_rounds:
            self.epochs.roll_back()

    def stopped_snapshot(self) -> Snapshot:
        """Return the snapshot of a run that ends early: the committed one, with the current weights.

        If the run has diverged or a merge has failed so that the center cannot be used, return the committed
        snapshot unchanged.
        """
        with self.changed:
            useless = self.screening.useless or self.broken
            return self.snapshot if useless else self.epochs.stopped_snapshot()

    def carried(self) -> CarriedState:
        """Return the final state of the workers and the rule, from which the next run can continue."""
        return CarriedState(self.snapshot.states, self.snapshot.rule)

    @property
    def reported(self) -> bool:
        """True if a worker of a stopped run has reported the weights, or if workers have no replicas."""
        with self.changed:
            return not self.aggregation.has_replicas or self.epochs.stopped_with_weights() is not None

    def _all_ready(self) -> bool:
        return self.aggregation.all_of(self.membership.ready_workers())

    def _may_begin(self, worker: int) -> bool:
        """Return True if a worker may begin. A lost worker waits until it is readmitted or the run stops."""
        if worker in self.lost:
            return self.stopping
        may = self.schedule.may_train(self.snapshot.epoch) or self.epochs.to_evaluate(worker) >= 0
        return self.membership.agreed and self._all_ready() and may

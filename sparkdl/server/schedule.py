"""Schedule: the epochs that workers may train, their progress, and the learning rate."""

from __future__ import annotations

from dataclasses import replace
from math import nan

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.server.state import RunSpec
from sparkdl.transport.messages import Flag, Reply, Update


class EpochSchedule:
    """The driver's orders to the workers, and the workers' progress. The coordinator's lock guards both.

    Args:
        shape: settings of the run.

    Attributes:
        plans: plan of each worker, once all have reported their number of rows.
        progress: number of counted steps, including those before the run.
        released: first epoch that may not begin yet.
        learning_rate: rate of the released epochs; nan: the optimizer's own.
        stopping: True if replies tell the workers to end.
        short: epoch that is cut short, after which training ends; -1 if no epoch is.
        ending: True if replies tell the workers to end the epoch ``short``.
    """

    def __init__(self, shape: RunSpec) -> None:
        self.shape = shape
        self.plans: list[BatchPlan] = []
        self.progress = shape.first_step
        self.released = 0
        self.learning_rate = nan
        self.stopping = False
        self.short = -1
        self.ending = False

    def plan_for(self, rows: tuple[int, ...]) -> bool:
        """Make the plans for workers with these numbers of rows; return True if the plans changed."""
        if self.plans and self.plans[0].rows == rows:
            return False
        plan = replace(self.shape.plan, rows=rows)
        self.plans = [replace(plan, worker=k) for k in range(self.shape.num_workers)]
        return True

    def release(self, epoch: int, learning_rate: float) -> bool:
        """Let the workers train up to and including an epoch; return False if a later one was released."""
        if epoch + 1 < self.released:
            return False
        self.released, self.learning_rate = epoch + 1, learning_rate
        return True

    def may_train(self, epoch: int) -> bool:
        """Return True if the workers may train an epoch or should end."""
        return self.released > epoch or self.stopping

    def count_round(self, update: Update) -> None:
        """Count the steps of a round that closes with this update."""
        if self.shape.plan.joint:
            self.progress += 1.0
            return
        index = update.sequence % self.plans[0].windows
        self.progress += sum(len(plan.window_batches(index)) * plan.progress_per_step for plan in self.plans)

    def count_update(self, update: Update) -> None:
        """Count the steps of an update that is merged on its own."""
        self.progress += update.steps * self.plans[update.worker].progress_per_step

    def rate(self) -> float:
        """Return the learning rate of the next update, or of the mean gradient sent with the reply."""
        if self.shape.factor is None or not self.plans:
            return self.learning_rate
        plan = self.plans[0]
        done = max(0.0, self.progress - self.shape.first_step - plan.joint)
        return self.learning_rate * self.shape.factor(plan.first_epoch + done / plan.steps)

    def reply_at_once(self) -> Reply:
        """Return a reply that stops a worker only if training stops at once, not if an epoch is cut short."""
        reply = self.reply()
        return reply if self.stopping else replace(reply, flags=reply.flags & ~Flag.STOP)

    def reply(self, flag: Flag = Flag.NONE) -> Reply:
        """Return a reply with the current stop flag, learning rate and progress."""
        return Reply(
            flags=flag | Flag.STOP if self.stopping or self.ending else flag,
            learning_rate=self.rate(),
            progress=self.progress,
        )

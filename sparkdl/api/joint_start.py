"""``frequency="auto"``: a fit that begins joint, and goes on in windows of batches.

Windows cost accuracy mainly while the model is young. So the workers first exchange gradients after every
batch, which gives the same weights as plain Keras. At the end of an epoch they switch: from then on each
worker trains on windows of batches, and the rule DiLoCo merges the changes (post-local SGD: Lin et al., 2020;
DiLoCo: Douillard et al., 2023). Many workers take smaller batches there: the mean of their changes averages
out the noise of a small batch. Each part is a run of its own; callbacks and History see one fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sparkdl.config import AUTO, AUTO_WINDOW, Placement, TrainConfig
from sparkdl.driver.checkpoint_policy import newest_checkpoint, require_packable
from sparkdl.driver.fit import FitRun
from sparkdl.driver.request import Request, Switch
from sparkdl.process.reasons import reason_of
from sparkdl.rules import choose
from sparkdl.server.aggregation.counted_rounds import state_bytes
from sparkdl.transport.messages import ACTIVITIES

# The joint start takes 1 of every 12 epochs, or 1 of every 8 from MANY_WORKERS workers on.
EPOCHS_PER_JOINT, EPOCHS_PER_JOINT_OF_MANY = 12, 8
MANY_WORKERS = 8
# From MANY_WORKERS workers on, the batches of all workers have this many times the rows of one batch.
BATCHES_OF_MANY = 4
LEAST_SHARE = 4  # a worker's batch has at least this part of the rows of one batch
EXCHANGING = "exchange", "wait", "merge"  # the activities of a worker that windows save
CHEAP = 0.1  # part of the time below which they save little
logger = logging.getLogger(__name__)


def joint_epochs(epochs: int, num_workers: int) -> int:
    """Return the number of epochs of the joint start: all epochs if there is one worker."""
    if num_workers == 1:
        return epochs
    if num_workers >= MANY_WORKERS:
        return -(-epochs // EPOCHS_PER_JOINT_OF_MANY)
    return max(1, epochs // EPOCHS_PER_JOINT)


def window_batch_size(batch_size: int, num_workers: int) -> int:
    """Return the number of rows of a worker's batch in the windows that follow the joint start."""
    if num_workers < MANY_WORKERS:
        return batch_size
    return max(1, BATCHES_OF_MANY * batch_size // num_workers, batch_size // LEAST_SHARE)


def windows_of(request: Request) -> TrainConfig | None:
    """Return the settings for the epochs after the joint start; None if there are no such epochs."""
    config, epochs = request.config, request.fit.epochs
    has = config.frequency == AUTO and joint_epochs(epochs, request.num_workers) < epochs
    return config.last if has else None


def first_run(request: Request) -> FitRun:
    """Return the first run of a fit: the only one, unless a second run follows the joint start.

    Raises:
        ConfigError: an argument cannot be honoured. Arguments of the second run are checked here too.
    """
    config, fit = request.config, request.fit
    if config.frequency != AUTO:
        return FitRun(request)
    joint, newest = joint_epochs(fit.epochs, request.num_workers), newest_checkpoint(request)
    if newest is not None and newest.settings["frequency"] == AUTO:
        if not newest.settings["joint_start"]:
            return FitRun(_in_windows(request, newest.settings.get("window_batch_size")))
        # A joint epoch under way is completed, even if the resumed fit has a smaller number of epochs.
        joint = max(joint, newest.snapshot.epoch + (newest.snapshot.before is not None))
    switch = Switch(joint, config.last, window_batch_size(fit.batch_size, request.num_workers))
    start = replace(config, frequency="batch", merge=None)
    run = FitRun(replace(request, config=start, switch=switch, carried=None))
    if joint < fit.epochs:
        _require_rule(request, run)
    return run


def _require_rule(request: Request, run: FitRun) -> None:
    """Check, before the joint start trains, that the state of the windows' rule can be saved and sent.

    Raises:
        ConfigError: the state of the rule cannot be saved or sent.
    """
    config = request.config.last
    rule = choose(config.merge, mode=config.mode.value, window=config.window).rule
    state = rule.init(run.driver.parameters())
    if request.fit.checkpoint is not None:
        require_packable(rule, state)
    if config.placement is Placement.EXECUTORS:
        state_bytes(rule, state)


def continued(request: Request, first: FitRun, epoch: int) -> FitRun:
    """Execute the run that follows the joint start, and return it.

    The state that an earlier fit left, of its workers and merge rule, is used only if no epoch was joint.

    Args:
        request: the request of the fit.
        first: the joint start.
        epoch: the first epoch of the run.
    """
    began = "joint_start" in first.training
    fit = replace(request.fit, initial_epoch=epoch, seed=first.checkpoints.seed)
    size = window_batch_size(fit.batch_size, request.num_workers)
    if began:
        note_cheap_exchanges([worker["times"] for worker in first.record.workers()])
    following = _in_windows(
        replace(request, fit=fit, carried=None if began else request.carried, held=first.held), size
    )
    if began:  # The joint start has traced the batches.
        following.fit = replace(following.fit, profile=None)
    try:
        with request.flags.applied():
            run = FitRun(following, first)
        run.execute()
    except BaseException as error:
        first.record.finish("failed", reason_of(error))  # both runs have the same record
        request.history.run = first.record.values()
        raise
    return run


def note_cheap_exchanges(times: Sequence[Sequence[float]]) -> None:
    """Log that windows save little time, if exchanges took a small part of a joint start.

    Args:
        times: the seconds of each of ``messages.ACTIVITIES`` of each worker; empty if they are not known.
    """
    seconds = dict(zip(ACTIVITIES, map(sum, zip(*filter(None, times), strict=True)), strict=False))
    share = sum(seconds.get(activity, 0.0) for activity in EXCHANGING) / max(1e-9, sum(seconds.values()))
    if seconds and share < CHEAP:
        logger.info(
            'Exchanges took %.0f %% of the workers\' time in the joint start. With frequency="batch" the fit '
            "would take hardly longer, and would end with the weights of plain Keras.",
            100 * share,
        )


def _in_windows(request: Request, batch_size: int | None) -> Request:
    """Return the request of the run after a joint start.

    Intervals of snapshots and checkpoints count rounds. A round now has AUTO_WINDOW batches, so the intervals
    are divided by it, and rounded up.

    Args:
        request: the request of the fit.
        batch_size: rows of a worker's batch; None: the fit's batch size, as in checkpoints of older versions.
    """
    config, fit = request.config.last, request.fit
    if every := config.fault_tolerance.recovery_every:
        tolerance = replace(config.fault_tolerance, recovery_every=-(-every // AUTO_WINDOW))
        config = replace(config, fault_tolerance=tolerance)
    if fit.checkpoint is not None and fit.checkpoint.updates is not None:
        every = -(-fit.checkpoint.updates // AUTO_WINDOW)
        fit = replace(fit, checkpoint=replace(fit.checkpoint, every=every))
    return replace(
        request, config=config, fit=fit, continues=True, divides=False, local_batch_size=batch_size
    )

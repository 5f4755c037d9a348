"""``frequency="auto"``: a fit that begins joint, and goes on in windows of batches.

Windows cost accuracy mainly while the model is young. So the workers first exchange gradients after every
batch, which gives the same weights as plain Keras. At the end of an epoch they switch: from then on each
worker trains on windows of batches, and the rule DiLoCo merges the changes (post-local SGD: Lin et al., 2020;
DiLoCo: Douillard et al., 2023). Each part is a run of its own; callbacks and History see one fit.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.config import AUTO, AUTO_WINDOW, Placement, TrainConfig
from sparkdl.driver.checkpoint_policy import newest_checkpoint, require_packable
from sparkdl.driver.fit import FitRun
from sparkdl.driver.request import Request, Switch
from sparkdl.process.reasons import reason_of
from sparkdl.rules import choose
from sparkdl.server.aggregation.counted_rounds import state_bytes

# One of so many epochs is joint, with MANY_WORKERS or more one of so few; docs/how-to/which-mode.md says why.
EPOCHS_PER_JOINT, EPOCHS_PER_JOINT_OF_MANY = 12, 4
MANY_WORKERS = 8


def joint_epochs(epochs: int, num_workers: int) -> int:
    """Return the number of epochs of the joint start: all with one worker, which needs no windows."""
    if num_workers == 1:
        return epochs
    if num_workers >= MANY_WORKERS:
        return -(-epochs // EPOCHS_PER_JOINT_OF_MANY)
    return max(1, epochs // EPOCHS_PER_JOINT)


def windows_of(request: Request) -> TrainConfig | None:
    """Return the settings after the joint start of a fit that has epochs after it, else None."""
    config, epochs = request.config, request.fit.epochs
    has = config.frequency == AUTO and joint_epochs(epochs, request.num_workers) < epochs
    return config.last if has else None


def first_run(request: Request) -> FitRun:
    """Return the first run of a fit: the only one, unless the fit begins joint.

    Raises:
        ConfigError: an argument cannot be honoured, also if only the second run needs it.
    """
    config, fit = request.config, request.fit
    if config.frequency != AUTO:
        return FitRun(request)
    joint, newest = joint_epochs(fit.epochs, request.num_workers), newest_checkpoint(request)
    if newest is not None and newest.settings["frequency"] == AUTO:
        if not newest.settings["joint_start"]:
            return FitRun(_in_windows(request))
        # An epoch that began joint ends joint, also if the fit has fewer epochs now.
        joint = max(joint, newest.snapshot.epoch + (newest.snapshot.before is not None))
    switch = Switch(joint, config.last)
    start = replace(config, frequency="batch", merge=None)
    run = FitRun(replace(request, config=start, switch=switch, carried=None))
    if joint < fit.epochs:
        _require_rule(request, run)
    return run


def _require_rule(request: Request, run: FitRun) -> None:
    """Require a merge rule for the windows whose state can be kept, before the joint start trains.

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
    """Carry out the run that continues a fit after its joint start, with this epoch; return the run.

    The state of an earlier fit's windows goes on only if no epoch was joint.
    """
    began = "joint_start" in first.training
    fit = replace(request.fit, initial_epoch=epoch, seed=first.checkpoints.seed)
    following = _in_windows(
        replace(request, fit=fit, carried=None if began else request.carried, held=first.held)
    )
    if began:  # which traced its batches
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


def _in_windows(request: Request) -> Request:
    """Return the request of the run after a joint start.

    Snapshots and checkpoints are as many batches apart as before: their intervals count rounds.
    """
    config, fit = request.config.last, request.fit
    if every := config.fault_tolerance.recovery_every:
        tolerance = replace(config.fault_tolerance, recovery_every=-(-every // AUTO_WINDOW))
        config = replace(config, fault_tolerance=tolerance)
    if fit.checkpoint is not None and fit.checkpoint.updates is not None:
        every = -(-fit.checkpoint.updates // AUTO_WINDOW)
        fit = replace(fit, checkpoint=replace(fit.checkpoint, every=every))
    return replace(request, config=config, fit=fit, continues=True, divides=False)

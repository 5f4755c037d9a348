"""``frequency="auto"``: a fit that begins joint, and goes on in windows of batches.

Windows cost accuracy mainly while the model is young. So the workers first exchange gradients after every
batch, which gives the same weights as plain Keras. At the end of an epoch they switch: from then on each
worker trains on windows of batches, and the rule DiLoCo merges the changes (post-local SGD: Lin et al., 2020;
DiLoCo: Douillard et al., 2023). Each part is a run of its own; callbacks and History see one fit.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.config import AUTO
from sparkdl.driver.checkpoint_policy import frequency_of_newest
from sparkdl.driver.fit import FitRun
from sparkdl.driver.request import Request, Switch
from sparkdl.process.reasons import reason_of

# One of so many epochs is joint, with MANY_WORKERS or more one of so few; docs/how-to/which-mode.md says why.
EPOCHS_PER_JOINT, EPOCHS_PER_JOINT_OF_MANY = 12, 4
MANY_WORKERS = 8


def joint_epochs(epochs: int, num_workers: int) -> int:
    """Return the number of epochs of the joint start: all with one worker, which exchanges nothing."""
    if num_workers == 1:
        return epochs
    if num_workers >= MANY_WORKERS:
        return -(-epochs // EPOCHS_PER_JOINT_OF_MANY)
    return max(1, epochs // EPOCHS_PER_JOINT)


def first_run(request: Request) -> FitRun:
    """Return the first run of a fit: the only one, unless the fit begins joint."""
    config, fit = request.config, request.fit
    if config.frequency != AUTO:
        return FitRun(request)
    if frequency_of_newest(request) == config.last.frequency:  # it resumes after its joint start
        return FitRun(_in_windows(request))
    switch = Switch(joint_epochs(fit.epochs, request.num_workers), config.last)
    joint = replace(config, frequency="batch", merge=None)
    return FitRun(
        replace(request, config=joint, switch=switch if request.num_workers > 1 else None, carried=None)
    )


def continued(request: Request, first: FitRun, epoch: int) -> FitRun:
    """Carry out the run that continues a fit after its joint start, with this epoch; return the run.

    The state of an earlier fit's windows goes on only if no epoch was joint.
    """
    fit = replace(request.fit, initial_epoch=epoch, seed=first.checkpoints.seed, profile=None)
    carried = None if "joint_start" in first.training else request.carried
    following = replace(_in_windows(request), fit=fit, carried=carried)
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
    return replace(request, config=request.config.last, continues=True, divides=False)

"""``frequency="auto"``: a fit that begins joint, and goes on in windows of batches.

Windows cost accuracy mainly while the model is young. So the workers first exchange gradients after every
batch, which gives the same weights as plain Keras. At the end of an epoch they switch: from then on each
worker trains on windows of batches, and the rule DiLoCo merges the changes (post-local SGD: Lin et al., 2020;
DiLoCo: Douillard et al., 2023). Each part is a run of its own; callbacks and History see one fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sparkdl.config import AUTO, TrainConfig
from sparkdl.driver.checkpoint_policy import frequency_of_newest
from sparkdl.driver.fit import FitRun
from sparkdl.driver.request import Request, Switch

WINDOW = 16  # batches
MERGE = "diloco"
MANY = 8  # workers that need a longer start
PART, LARGE_PART = 12, 4  # one of so many epochs is joint; docs/how-to/which-mode.md has the experiments


class Parts(NamedTuple):
    """The settings of the two parts of a fit."""

    joint: TrainConfig
    windows: TrainConfig


def parts_of(config: TrainConfig) -> Parts:
    """Return the settings of the joint start and of the windows, for settings with ``frequency="auto"``."""
    merge = MERGE if config.merge is None else config.merge
    return Parts(
        replace(config, frequency="batch", merge=None), replace(config, frequency=WINDOW, merge=merge)
    )


def joint_epochs(epochs: int, num_workers: int) -> int:
    """Return the number of epochs of the joint start: all with one worker, which exchanges nothing."""
    if num_workers == 1:
        return epochs
    return -(-epochs // LARGE_PART) if num_workers >= MANY else max(1, epochs // PART)


def first_run(request: Request) -> FitRun:
    """Return the first run of a fit: the only one, unless the fit begins joint."""
    config, fit = request.config, request.fit
    if config.frequency != AUTO:
        return FitRun(request)
    parts = parts_of(config)
    if frequency_of_newest(request) == parts.windows.frequency:  # it resumes after its joint start
        return FitRun(_in_windows(request, parts))
    switch = Switch(joint_epochs(fit.epochs, request.num_workers), parts.windows)
    return FitRun(replace(request, config=parts.joint, switch=switch if request.num_workers > 1 else None))


def second_run(request: Request, first: FitRun, epoch: int) -> FitRun:
    """Return the run that continues a fit after its joint start, with this epoch."""
    fit = replace(request.fit, initial_epoch=epoch, seed=first.checkpoints.seed, profile=None)
    with request.flags.applied():
        return FitRun(replace(_in_windows(request, parts_of(request.config)), fit=fit), before=first)


def _in_windows(request: Request, parts: Parts) -> Request:
    return replace(request, config=parts.windows, continues=True, divides=False)

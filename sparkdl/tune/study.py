"""The Optuna study of a search: its sampler, its pruner, its storage and its direction."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from sparkdl.core.directions import is_better_larger
from sparkdl.core.validation import one_of
from sparkdl.errors import ConfigError
from sparkdl.process.reasons import reason_of
from sparkdl.tune.parameters import size_of

SAMPLERS: dict[str, Callable[[int | None], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True, multivariate=False),
    "random": lambda seed: RandomSampler(seed=seed),
    "grid": lambda seed: BruteForceSampler(seed=seed),
    "cmaes": lambda seed: CmaEsSampler(seed=seed),
    "gp": lambda seed: GPSampler(seed=seed),
}
NUM_TRIALS = 20  # by default; a grid is searched as a whole
NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}  # packages that Optuna imports for a sampler
# The epochs of a fit are Optuna's steps. Successive halving and Hyperband are asynchronous (ASHA).
PRUNERS: dict[str, Callable[[int], BasePruner]] = {
    "median": lambda epochs: MedianPruner(),
    "asha": lambda epochs: SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband": lambda epochs: HyperbandPruner(min_resource=1, max_resource=epochs, reduction_factor=3),
    "none": lambda epochs: NopPruner(),
}


def direction_of(
    metric: str, direction: str | None, storage: object = None
) -> Literal["minimize", "maximize"]:
    """Return "minimize" or "maximize".

    Args:
        metric: the name of a metric, as in the results of an epoch.
        direction: the direction that the user named, if any.
        storage: the storage of the search. If it is a study, its direction is the default.

    Raises:
        ConfigError: the direction is unknown, or does not follow from the metric's name.
    """
    if direction is not None:
        one_of("direction", direction, ("minimize", "maximize"))
        return "maximize" if direction == "maximize" else "minimize"
    if isinstance(storage, optuna.Study) and len(storage.directions) == 1:
        return "maximize" if storage.direction is StudyDirection.MAXIMIZE else "minimize"
    larger = is_better_larger(metric)
    if larger is None:
        raise ConfigError(
            f'Whether a smaller {metric} is better is not known. Set direction="minimize" or "maximize".'
        )
    return "maximize" if larger else "minimize"


def number_of_trials(
    wanted: int | None, sampler: BaseSampler, space: Mapping[str, BaseDistribution] | None
) -> int | None:
    """Return the number of trials of a search; None for a grid of unknown size, which ends by itself.

    Args:
        wanted: the number that the user asked for, if any.
        sampler: the sampler of the study.
        space: the distributions of the parameters; None if the trials ask for them.

    Raises:
        ConfigError: the sampler tries all combinations, and there are infinitely many.
    """
    if not isinstance(sampler, BruteForceSampler | GridSampler):
        return NUM_TRIALS if wanted is None else wanted
    if space is None or isinstance(sampler, GridSampler):
        return wanted
    size = size_of(space)
    return size if wanted is None else min(wanted, size)


def make_study(
    storage: str | BaseStorage | optuna.Study | None,
    name: str | None,
    direction: Literal["minimize", "maximize"],
    *,
    sampler: str | BaseSampler | None,
    pruner: str | BasePruner | None,
    seed: int | None,
    epochs: int,
) -> optuna.Study:
    """Return the study of a search: a new one, or the one of that name in the storage.

    Args:
        storage: None for memory; an SQLAlchemy URL or a storage of Optuna; or a study.
        name: the name of the study in the storage.
        direction: "minimize" or "maximize".
        sampler: a name in SAMPLERS, or a sampler of Optuna; None: that of a given study, or "tpe".
        pruner: a name in PRUNERS, or a pruner of Optuna; None: that of a given study, or "median".
        seed: the seed of the sampler. For a study that has trials, another one follows from it and their
            number. The sampler would otherwise repeat the choices with which the study began.
        epochs: the maximum number of epochs of a trial.

    Raises:
        ConfigError: a name is unknown, a package for the sampler is missing, the storage cannot be used, or
            its study has the other direction.
    """
    if isinstance(storage, optuna.Study):
        study = storage
        study.sampler = study.sampler if sampler is None else _sampler(sampler, _seed_for(study, seed))
        study.pruner = study.pruner if pruner is None else _pruner(pruner, epochs)
    else:
        if storage is not None and name is None:
            raise ConfigError("A storage needs study_name, so that the study can be found again.")
        made = _sampler(sampler or "tpe", seed), _pruner(pruner or "median", epochs)
        with quiet(), _explained(storage):
            study = optuna.create_study(
                storage=storage,
                sampler=made[0],
                pruner=made[1],
                study_name=name,
                direction=direction,
                load_if_exists=True,
            )
            if seed is not None and study.get_trials(deepcopy=False):
                study.sampler = _sampler(sampler or "tpe", _seed_for(study, seed))
    known = [each.name.lower() for each in study.directions]
    if known != [direction]:
        raise ConfigError(
            f'direction="{direction}" should be that of the study "{study.study_name}", which has '
            f"{' and '.join(known)}. Pass another study, or another direction or metric."
        )
    return study


def _seed_for(study: optuna.Study, seed: int | None) -> int | None:
    """Return the seed of the sampler: the given one for a study without trials, else one of their number."""
    count = len(study.get_trials(deepcopy=False))
    return (
        int(np.random.SeedSequence([seed, count]).generate_state(1)[0])
        if seed is not None and count
        else seed
    )


def _sampler(sampler: str | BaseSampler, seed: int | None) -> BaseSampler:
    """Return a sampler.

    Raises:
        ConfigError: the name is unknown, or a package for the sampler is missing.
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    missing = [name for name in NEEDS.get(sampler, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'sampler="{sampler}" needs {" and ".join(missing)} on the driver. Install: pip install '
            f"{' '.join(missing)}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # some samplers may change between releases
        return SAMPLERS[one_of("sampler", sampler, SAMPLERS)](seed)


def _pruner(pruner: str | BasePruner, epochs: int) -> BasePruner:
    """Return a pruner.

    Raises:
        ConfigError: the name is unknown.
    """
    return pruner if isinstance(pruner, BasePruner) else PRUNERS[one_of("pruner", pruner, PRUNERS)](epochs)


@contextmanager
def _explained(storage: object) -> Iterator[None]:
    """Turn the error of a storage that cannot be opened into a ConfigError."""
    try:
        yield
    except Exception as error:  # each kind of storage raises errors of its own
        raise ConfigError(
            f"The storage {storage!r} cannot be used: {reason_of(error)} Expected a storage of Optuna, or a "
            'URL such as "sqlite:///study.db".'
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Optuna's log records at INFO in a ``with`` block, unless the user set a level."""
    logger = logging.getLogger("optuna")
    level = logger.level
    if level == logging.INFO:  # Optuna's own default
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

"""The Optuna study of a search: its sampler, its pruner, its storage and its direction."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import BaseStorage

from sparkdl.core.validation import one_of
from sparkdl.errors import ConfigError
from sparkdl.process.reasons import reason_of

SAMPLERS: dict[str, Callable[[int | None], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True, multivariate=False),
    "random": lambda seed: RandomSampler(seed=seed),
    "grid": lambda seed: BruteForceSampler(seed=seed),
    "cmaes": lambda seed: CmaEsSampler(seed=seed),
    "gp": lambda seed: GPSampler(seed=seed),
}
NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}  # packages that Optuna imports for a sampler
# The epochs of a fit are Optuna's steps. Successive halving and Hyperband are asynchronous (ASHA).
PRUNERS: dict[str, Callable[[int], BasePruner]] = {
    "median": lambda epochs: MedianPruner(),
    "asha": lambda epochs: SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband": lambda epochs: HyperbandPruner(min_resource=1, max_resource=epochs, reduction_factor=3),
    "none": lambda epochs: NopPruner(),
}
# Words in the names of metrics of which a smaller or a larger value is better.
SMALLER = {"loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "divergence", "crossentropy"}
LARGER = {"acc", "accuracy", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "score", "similarity"}


def direction_of(metric: str, direction: str | None) -> Literal["minimize", "maximize"]:
    """Return "minimize" or "maximize".

    Args:
        metric: the name of a metric, as in the results of an epoch.
        direction: the direction that the user named, if any.

    Raises:
        ConfigError: the direction is unknown, or does not follow from the metric's name.
    """
    if direction is not None:
        one_of("direction", direction, ("minimize", "maximize"))
        return "maximize" if direction == "maximize" else "minimize"
    words = set(re.split(r"_|\d+$", metric)) | {metric.removeprefix("val_")}
    if words & SMALLER:
        return "minimize"
    if words & LARGER:
        return "maximize"
    raise ConfigError(
        f'Whether a smaller {metric} is better is not known. Set direction="minimize" or "maximize".'
    )


def make_study(
    storage: str | BaseStorage | optuna.Study | None,
    name: str | None,
    direction: Literal["minimize", "maximize"],
    *,
    sampler: str | BaseSampler,
    pruner: str | BasePruner,
    seed: int | None,
    epochs: int,
) -> optuna.Study:
    """Return the study of a search: a new one, or the one of that name in the storage.

    Args:
        storage: None for memory; an SQLAlchemy URL or a storage of Optuna; or a study.
        name: the name of the study in the storage.
        direction: "minimize" or "maximize".
        sampler: a name in SAMPLERS, or a sampler of Optuna.
        pruner: a name in PRUNERS, or a pruner of Optuna.
        seed: the seed of the sampler.
        epochs: the maximum number of epochs of a trial.

    Raises:
        ConfigError: a name is unknown, a package for the sampler is missing, the storage cannot be used, or
            its study has the other direction.
    """
    if not isinstance(sampler, BaseSampler):
        missing = [name for name in NEEDS.get(sampler, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f'sampler="{sampler}" needs {" and ".join(missing)} on the driver. Install: pip install '
                f"{' '.join(missing)}"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # some samplers may change between releases
            sampler = SAMPLERS[one_of("sampler", sampler, SAMPLERS)](seed)
    if not isinstance(pruner, BasePruner):
        pruner = PRUNERS[one_of("pruner", pruner, PRUNERS)](epochs)
    if isinstance(storage, optuna.Study):
        study = storage
        study.sampler, study.pruner = sampler, pruner
    else:
        if storage is not None and name is None:
            raise ConfigError("A storage needs study_name, so that the study can be found again.")
        with quiet(), _explained(storage):
            study = optuna.create_study(
                storage=storage,
                sampler=sampler,
                pruner=pruner,
                study_name=name,
                direction=direction,
                load_if_exists=True,
            )
    if study.direction.name.lower() != direction:
        raise ConfigError(
            f'direction should be "{study.direction.name.lower()}", as in the study '
            f'"{study.study_name}"; got "{direction}". Use another study_name.'
        )
    return study


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

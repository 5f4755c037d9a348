"""``search``: run the trials of an Optuna study on the slots of the Spark application."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from optuna import Study
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from sparkdl.api.spark_model import SparkModel
from sparkdl.api.tracking import logged_search
from sparkdl.config import Verbose
from sparkdl.core.validation import require_flag, text, whole_number
from sparkdl.data.arrays import is_array
from sparkdl.data.shared_rows import forget_in_task
from sparkdl.driver.display.progress import Display, LineDisplay
from sparkdl.driver.serving import shown
from sparkdl.errors import ConfigError, short
from sparkdl.process.interrupts import Cleanup
from sparkdl.settings import Network
from sparkdl.sources.resolve import SharedArrays
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.tune.best_models import BestModels, ranked
from sparkdl.tune.cross_validation import CrossValidated, require_build
from sparkdl.tune.parameters import space_of
from sparkdl.tune.result import SearchResult
from sparkdl.tune.side_by_side import kept_states, settings_of
from sparkdl.tune.study import NUM_TRIALS, direction_of, make_study, number_of_trials
from sparkdl.tune.study_run import StudyRun
from sparkdl.tune.trials import TrialRunner

logger = logging.getLogger(__name__)
# Arguments of a fit or of a SparkModel that ``search`` sets itself, or that trials cannot share.
OWN = {"self", "x", "y", "model", "verbose", "num_workers"}
OWN |= {"checkpoint", "resume", "initial_epoch", "profile"}
AT_ONCE = 16  # trials at a time under dynamic allocation without a limit
SEEDS = 2**32  # the seeds of samplers are those of NumPy, which have 32 bits


@short
def search(  # noqa: PLR0913 - the settings of a search, by keyword
    build: Any,
    data: Any = None,
    space: Mapping[str, Any] | None = None,
    *,
    metric: str = "val_loss",
    direction: str | None = None,
    num_trials: int | None = None,
    parallelism: int | None = None,
    workers_per_trial: int = 1,
    epochs: int = 1,
    batch_size: int | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    sampler: str | BaseSampler | None = None,
    pruner: str | BasePruner | None = None,
    storage: str | BaseStorage | Study | None = None,
    study_name: str | None = None,
    seed: int | None = None,
    keep: int = 1,
    directory: str | None = None,
    settings: Mapping[str, Any] | None = None,
    verbose: Verbose = "auto",
    dashboard: bool = True,
    **fit_arguments: Any,
) -> SearchResult:
    """Search for the hyper-parameters of a model: each trial is a fit on the cluster.

    Trials run side by side, as many as the slots allow. After each epoch that has ``metric``, a trial reports
    it, and the pruner may end the trial, except after its last epoch. The value of a trial is the result of
    its best epoch, and its model has the weights of that epoch.

    Args:
        build: a function that returns a compiled model, or a model and a dict of arguments of its fit, such
            as ``{"batch_size": 64}``. It is called on the driver, with a ``Parameters`` object, which
            has the methods of ``optuna.Trial`` and of ``keras_tuner.HyperParameters``; or, with ``space``,
            with the values as keyword arguments. A ``keras_tuner.HyperModel`` works too. A function that
            returns a number is an objective: that number is the value of the trial.
            ``cross_validated`` makes a function whose trials are cross-validated.
        data: training rows, as ``SparkModel.fit`` takes them: a tuple (x, y) or (x, y, sample_weight) of
            arrays, an RDD, a DataFrame, or a function. None for an objective that needs none.
        space: the range of each parameter by name: a tuple (low, high) or (low, high, "log"), which includes
            both ends, of whole numbers if both ends are whole and of floats otherwise; a list of values; or a
            distribution of Optuna. None: ``build`` asks for its parameters.
        metric: the name of the result to optimize.
        direction: "minimize" or "maximize"; by default it is that of a study given as ``storage``, or
            follows from the metric's name.
        num_trials: total number of trials, including those that the study has finished already. Trials that
            were interrupted, or lost with an executor and tried again, do not count. The default is 20, or
            all combinations of a grid.
        parallelism: the number of trials at a time; by default, as many as there are slots for. Under dynamic
            allocation these are the slots that the application may get; without a limit, those of 16 trials.
        workers_per_trial: the number of workers of each trial.
        epochs: maximum number of epochs of a trial.
        batch_size: as in ``SparkModel.fit``.
        validation_data: as in ``SparkModel.fit``.
        validation_split: as in ``SparkModel.fit``.
        sampler: how parameters are chosen: "tpe" (the default), "random", "grid" (each combination of a
            finite space once), "cmaes", "gp", or a sampler of Optuna.
        pruner: which trials are ended early: "median" (the default), "asha" (asynchronous successive
            halving), "hyperband", "none", or a pruner of Optuna. A step of Optuna is an epoch.
        storage: None keeps the study in memory; a URL such as "sqlite:///study.db", or a storage of Optuna,
            keeps it for ``optuna-dashboard`` and for a later search, which resumes it. Only one search at a
            time may use a study. An ``optuna.Study`` is used as it is; ``sampler`` and ``pruner`` replace its
            own if they are given.
        study_name: the name of the study in the storage.
        seed: the seed of the sampler, of the order of rows and, with the trial's number, of the initial
            weights, also of an objective if ``parallelism`` is 1. In a study that is resumed, the sampler
            goes on with other choices. With several trials at a time, these still depend on which trials end
            first.
        keep: the number of best models to keep.
        directory: a folder for the best models: a local path or a URI. The models of a study are in a
            subfolder named after the study. None keeps them in memory, and a later search of the study then
            lacks the models of earlier trials.
        settings: settings of each ``SparkModel``, such as ``{"mode": "asynchronous"}``. With one worker the
            default of ``frequency`` is "epoch", which gives the results of plain Keras.
        verbose: 0 is silent; otherwise each trial that ends prints a line.
        dashboard: whether the search has a live page, whose link it prints (docs/how-to/watch.md). With
            ``verbose=0`` there is none.
        fit_arguments: further arguments of ``SparkModel.fit``, such as ``features_col`` or ``class_weight``.
            Each trial gets copies of ``callbacks``.

    Returns:
        A SearchResult with the best model, its parameters, and the table of trials.

    Raises:
        ConfigError: an argument cannot be honoured, or the storage cannot be used.
        ClusterError: there are no slots, or Spark was stopped.
        SearchError: no trial succeeded.
        KeyboardInterrupt: the search was interrupted; finished trials are in the study.

    Example:
        >>> def build(units, rate):
        ...     model = keras.Sequential([keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.Adam(rate), "mse")
        ...     return model
        >>> space = {"units": (16, 256), "rate": (1e-4, 1e-1, "log")}
        >>> search(build, (x, y), space, validation_split=0.2, epochs=10).best_params  # doctest: +SKIP
        {'units': 203, 'rate': 0.0029}
    """
    require_build(build)
    chosen = None if space is None else space_of(space)
    better = direction_of(text("metric", metric), direction, storage)
    for name, number in (("num_trials", num_trials), ("epochs", epochs), ("keep", keep)):
        whole_number(name, NUM_TRIALS if number is None and name == "num_trials" else number)
    require_flag("dashboard", dashboard)
    of_fit = _known("fit_arguments", SparkModel.fit, fit_arguments) | {"epochs": epochs, "verbose": 0}
    of_fit |= {"batch_size": batch_size, "validation_data": validation_data}
    of_fit |= {"validation_split": validation_split, "seed": _order(seed)}
    if isinstance(build, CrossValidated):
        build.require(data, validation_data=validation_data, validation_split=validation_split)
    of_model = _settings(settings, workers_per_trial)
    study = make_study(storage, study_name, better, sampler=sampler, pruner=pruner, seed=seed, epochs=epochs)
    cluster = application_of(getattr(data, "sparkSession", None))
    trials = number_of_trials(num_trials, study.sampler, chosen)
    at_once = _parallelism(cluster, parallelism, workers_per_trial)
    threads = at_once if trials is None else min(trials, at_once)
    best = BestModels(keep, directory, study, of_model.get("custom_objects"))
    rows, weights = _rows(data)
    name, shared = _shared(rows)
    runner = TrialRunner(
        build=build,
        spread=chosen is not None,
        data=rows,
        shared=shared,
        fit_arguments={name: value for name, value in (of_fit | weights).items() if value is not None},
        settings=of_model,
        metric=metric,
        maximize=better == "maximize",
        seed=seed,
    )
    display = LineDisplay(epochs) if verbose != 0 else Display(epochs)
    run = StudyRun(study, runner, best, space=chosen, num_trials=trials, display=display)
    return _executed(run, cluster, threads, rows=name, page=dashboard and verbose != 0)


def _executed(
    run: StudyRun, cluster: SparkApplication, threads: int, *, rows: str, page: bool
) -> SearchResult:
    """Run the trials of a search, show and log it, and return its result.

    Args:
        run: the trials.
        cluster: the Spark application.
        threads: the number of trials at a time.
        rows: the name of the rows that executors keep during the search.
        page: whether there is a live page.
    """
    study, runner = run.study, run.runner
    about = {
        "metric": runner.metric,
        "direction": study.direction.name.lower(),
        "sampler": type(study.sampler).__name__,
        "pruner": type(study.pruner).__name__,
        "num_trials": "all" if run.num_trials is None else run.num_trials,
        "parallelism": threads,
        "workers_per_trial": runner.settings["num_workers"],
        "epochs": runner.fit_arguments["epochs"],
    }
    with Cleanup() as stack:
        stack.callback(_forget, cluster, rows)
        if runner.seed is not None and not runner.data:
            stack.enter_context(kept_states())  # objectives set the seeds
        if page:
            network = runner.settings.get("network") or Network()
            stack.enter_context(shown(run.record, cluster, network, run.display.note))
        runner.log = stack.enter_context(logged_search(about))
        run.execute(cluster, threads)
        result = SearchResult(study, runner.metric, run.best.get)
        if ranked(study):
            model = (lambda: result.best_model) if run.best.has(result.best_trial.number) else None
            runner.log.log_best(result.best_params, {runner.metric: result.best_value}, model)
    return result


def _rows(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments of each fit, and the sample weights as an argument by name.

    Raises:
        ConfigError: a tuple is neither (x, y) nor (x, y, sample_weight).
    """
    if not isinstance(data, tuple):
        return () if data is None else (data,), {}
    if len(data) not in (2, 3):
        raise ConfigError(f"data should be (x, y) or (x, y, sample_weight); got {len(data)} values.")
    return data[:2], {"sample_weight": data[2]} if len(data) == 3 else {}


def _shared(rows: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return a name for arrays that executors keep during the search, and the arrays with this name.

    Rows of other kinds are returned as they are, without a name.
    """
    if not rows or not (is_array(rows[0]) or isinstance(rows[0], list | tuple | dict)):
        return "", rows
    name = secrets.token_hex(8)
    return name, (SharedArrays(name, rows[0]), *rows[1:])


def _forget(cluster: SparkApplication, name: str) -> None:
    """Let the executors delete the arrays of a search; those that are not reached do so when they end."""
    if not name:
        return
    try:
        tasks = 2 * cluster.slots()
        cluster.context.parallelize(range(tasks), tasks).foreachPartition(partial(forget_in_task, name))
    except Exception as error:  # noqa: BLE001 - the executors delete the rows when they end
        logger.debug("The rows of the search %s were not deleted: %r", name, error)


def _order(seed: int | None) -> int:
    """Return the seed of the order of rows, which is the same in all trials.

    Raises:
        ConfigError: the seed is not a whole number of 32 bits.
    """
    if seed is None:
        return secrets.randbelow(2**31)
    if whole_number("seed", seed, least=0) >= SEEDS:
        raise ConfigError(f"seed should be a whole number from 0 to {SEEDS - 1}; got {seed}.")
    return seed


def _settings(given: Mapping[str, Any] | None, workers: int) -> dict[str, Any]:
    """Return the settings of each SparkModel.

    Args:
        given: the settings that the user gave.
        workers: the number of workers of a trial.

    Raises:
        ConfigError: a setting is unknown, or ``workers`` is not a whole number of at least 1.
    """
    whole_number("workers_per_trial", workers)
    return settings_of(_known("settings", SparkModel.__init__, given or {}) | {"num_workers": workers})


def _known(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a function.

    Raises:
        ConfigError: the function does not take one of them, or ``search`` sets it.
    """
    taken = set(inspect.signature(function).parameters) - OWN
    unknown = [each for each in given if each not in taken]
    if unknown:
        of_fit = name == "fit_arguments"
        refused = f"search takes no argument {unknown[0]!r}" if of_fit else f"settings take no {unknown[0]!r}"
        of = "further arguments are those of SparkModel.fit" if of_fit else "they are arguments of SparkModel"
        raise ConfigError(f"{refused}; {of}: {', '.join(sorted(taken - {'deprecated'}))}.")
    return dict(given)


def _parallelism(cluster: SparkApplication, wanted: int | None, workers: int) -> int:
    """Return the number of trials at a time.

    Raises:
        ConfigError: there are fewer slots than they need.
        ClusterError: there are no slots, or Spark was stopped.
    """
    if wanted is not None:
        whole_number("parallelism", wanted)
    with explained_if_stopped(cluster):
        slots, _ = cluster.num_workers(None, None, 60.0)
    if cluster.dynamic:  # executors that are idle have been released, and start again for the trials
        limit = cluster.most_slots()
        return wanted or max(limit // workers if limit else AT_ONCE, slots // workers, 1)
    trials = wanted or 1
    if trials * workers > slots:
        raise ConfigError(
            f"{trials} trial{'s' * (trials != 1)} at a time, with {workers} worker{'s' * (workers != 1)} "
            f"each, would use {trials * workers} slots; the application has {slots}. Use a smaller "
            f"{'parallelism or ' * (trials != 1)}workers_per_trial, or start more executors."
        )
    return wanted or slots // workers

"""``search``: run the trials of an Optuna study on the slots of the Spark application."""

from __future__ import annotations

import inspect
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from optuna import Study, Trial
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from sparkdl.api.spark_model import SparkModel
from sparkdl.config import Verbose
from sparkdl.core.validation import text, whole_number
from sparkdl.data.arrays import is_array
from sparkdl.data.shared_rows import forget_in_task
from sparkdl.driver.display.progress import Display, LineDisplay, value_text
from sparkdl.errors import ConfigError, SearchError, SparkDLError, short
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.sources.resolve import SharedArrays
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.tune.best_models import BestModels
from sparkdl.tune.parameters import size_of, space_of
from sparkdl.tune.result import REPEATS, SearchResult, repeated_trials
from sparkdl.tune.study import direction_of, make_study, quiet
from sparkdl.tune.trials import Outcome, TrialRunner

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
STOP_SECONDS = 60.0  # that the fits of a search that ends early may take to end
RECORDED = "results", "best_epoch", "reason", "traceback"  # of an outcome, as attributes of the trial
FAILURES = 3  # trials that may fail before the first one succeeds
SECOND = "second try"  # the attribute of a trial that repeats one whose executor was lost


@short
def search(  # noqa: PLR0913 - the settings of a search, by keyword
    build: Any,
    data: Any = None,
    space: Mapping[str, Any] | None = None,
    *,
    metric: str = "val_loss",
    direction: str | None = None,
    num_trials: int = 20,
    parallelism: int | None = None,
    workers_per_trial: int = 1,
    epochs: int = 1,
    batch_size: int | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    sampler: str | BaseSampler = "tpe",
    pruner: str | BasePruner = "median",
    storage: str | BaseStorage | Study | None = None,
    study_name: str | None = None,
    seed: int | None = None,
    keep: int = 1,
    directory: str | None = None,
    settings: Mapping[str, Any] | None = None,
    verbose: Verbose = "auto",
    **fit_arguments: Any,
) -> SearchResult:
    """Search for the hyper-parameters of a model: each trial is a fit on the cluster.

    Trials run side by side, as many as there are slots. After each epoch a trial reports ``metric``, and the
    pruner may end it. The value of a trial is its best epoch, and its model has the weights of that epoch.

    Args:
        build: a function that returns a compiled model, or a model and a dict of arguments of its fit, such
            as ``{"batch_size": 64}``. It is called on the driver, with a ``Parameters`` object, which
            has the methods of ``optuna.Trial`` and of ``keras_tuner.HyperParameters``; or, with ``space``,
            with the values as keyword arguments. A ``keras_tuner.HyperModel`` works too. A function that
            returns a number is an objective: that number is the value of the trial.
        data: training rows, as ``SparkModel.fit`` takes them: a tuple (x, y) or (x, y, sample_weight) of
            arrays, an RDD, a DataFrame, or a function. None for an objective that needs none.
        space: the range of each parameter by name: a tuple (low, high) or (low, high, "log"), both included,
            of whole numbers or of others; a list of values; or a distribution of Optuna. None: ``build``
            asks for its parameters.
        metric: the name of the result to optimize.
        direction: "minimize" or "maximize"; by default it follows from the metric's name.
        num_trials: number of trials, with those that the study has already. Trials that were interrupted, or
            lost with an executor and tried again, do not count.
        parallelism: the number of trials at a time; by default, as many as there are slots for.
        workers_per_trial: the number of workers of each trial.
        epochs: maximum number of epochs of a trial.
        batch_size: as in ``SparkModel.fit``.
        validation_data: as in ``SparkModel.fit``.
        validation_split: as in ``SparkModel.fit``.
        sampler: how parameters are chosen: "tpe", "random", "grid" (each combination of a finite space once),
            "cmaes", "gp", or a sampler of Optuna.
        pruner: which trials are ended early: "median", "asha" (asynchronous successive halving), "hyperband",
            "none", or a pruner of Optuna. A step of Optuna is an epoch.
        storage: None keeps the study in memory; a URL such as "sqlite:///study.db", or a storage of Optuna,
            keeps it for ``optuna-dashboard`` and for a later search, which resumes it. Only one search at a
            time may use a study. An ``optuna.Study`` is used as it is.
        study_name: the name of the study in the storage.
        seed: the seed of the sampler, of the order of rows, and (with the trial's number) of weights. With
            several trials at a time, what the sampler knows still depends on which trials end first.
        keep: the number of best models to keep.
        directory: a folder for the best models, which a resumed search needs: a local path or a URI.
        settings: settings of each ``SparkModel``, such as ``{"mode": "asynchronous"}``. With one worker the
            default of ``frequency`` is "epoch", which gives the results of plain Keras.
        verbose: 0 is silent; otherwise each trial that ends prints a line.
        fit_arguments: further arguments of ``SparkModel.fit``, such as ``features_col`` or ``class_weight``.

    Returns:
        A SearchResult with the best model, its parameters, and the table of trials.

    Raises:
        ConfigError: an argument cannot be honoured, or the storage cannot be used.
        ClusterError: there are no slots.
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
    if not callable(build) and not hasattr(build, "build"):
        raise ConfigError(f"build should be a function, or a HyperModel of KerasTuner; got {build!r:.100}.")
    chosen = None if space is None else space_of(space)
    better = direction_of(text("metric", metric), direction)
    for name, number in (("num_trials", num_trials), ("epochs", epochs), ("keep", keep)):
        whole_number(name, number)
    of_fit = _known("fit_arguments", SparkModel.fit, fit_arguments) | {"epochs": epochs, "verbose": 0}
    of_fit |= {"batch_size": batch_size, "validation_data": validation_data}
    of_fit |= {"validation_split": validation_split, "seed": _order(seed)}
    _require_validation(metric, of_fit)
    of_model = _settings(settings, workers_per_trial)
    study = make_study(storage, study_name, better, sampler=sampler, pruner=pruner, seed=seed, epochs=epochs)
    cluster = application_of(getattr(data, "sparkSession", None))
    if sampler == "grid" and chosen is not None:
        num_trials = min(num_trials, size_of(chosen))
    threads = min(num_trials, _parallelism(cluster, parallelism, workers_per_trial))
    best = BestModels(keep, directory, study, of_model.get("custom_objects"))
    rows = data if isinstance(data, tuple) else () if data is None else (data,)
    name, shared = _shared(rows)
    runner = TrialRunner(
        build=build,
        spread=chosen is not None,
        data=rows,
        shared=shared,
        fit_arguments={name: value for name, value in of_fit.items() if value is not None},
        settings=of_model,
        metric=metric,
        maximize=better == "maximize",
        seed=seed,
    )
    display = LineDisplay(epochs) if verbose != 0 else Display(epochs)
    run = _Search(study, runner, best, space=chosen, num_trials=num_trials, display=display)
    run.execute(cluster, threads)
    _forget(cluster, name)
    return SearchResult(study, metric, best.get)


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
    """Return the seed of the order of rows, which is the same in all trials."""
    return secrets.randbelow(2**31) if seed is None else whole_number("seed", seed, least=0)


def _settings(given: Mapping[str, Any] | None, workers: int) -> dict[str, Any]:
    """Return the settings of each SparkModel.

    Args:
        given: the settings that the user gave.
        workers: the number of workers of a trial.

    Raises:
        ConfigError: a setting is unknown, or ``workers`` is not a whole number of at least 1.
    """
    whole_number("workers_per_trial", workers)
    settings = {"dashboard": False, "frequency": "epoch" if workers == 1 else "batch"}
    return settings | _known("settings", SparkModel.__init__, given or {}) | {"num_workers": workers}


def _known(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a function.

    Raises:
        ConfigError: the function does not take one of them, or ``search`` sets it.
    """
    taken = set(inspect.signature(function).parameters) - {
        "self",
        "x",
        "y",
        "model",
        "verbose",
        "num_workers",
    }
    unknown = [each for each in given if each not in taken]
    if unknown:
        of = "SparkModel.fit" if name == "fit_arguments" else "SparkModel"
        raise ConfigError(
            f"search takes no argument {unknown[0]!r}; further arguments are those of {of}: "
            f"{', '.join(sorted(taken - {'deprecated'}))}."
        )
    return dict(given)


def _require_validation(metric: str, arguments: Mapping[str, Any]) -> None:
    """Require validation rows if the metric is a result of validation.

    Raises:
        ConfigError: there are none.
    """
    held = arguments.get("validation_split") or arguments.get("validation_indicator_col")
    if metric.startswith("val_") and not held and arguments["validation_data"] is None:
        raise ConfigError(
            f"metric={metric!r} needs validation rows. Pass validation_data or validation_split, or name "
            f"a result of training, such as {metric.removeprefix('val_')!r}."
        )


def _parallelism(cluster: SparkApplication, wanted: int | None, workers: int) -> int:
    """Return the number of trials at a time.

    Raises:
        ConfigError: there are fewer slots than they need.
        ClusterError: there are no slots.
    """
    if wanted is not None:
        whole_number("parallelism", wanted)
    slots, _ = cluster.num_workers(None, None, 60.0)
    if cluster.dynamic:
        return wanted or max(1, slots // workers)
    if (wanted or 1) * workers > slots:
        raise ConfigError(
            f"parallelism={wanted or 1} trials of {workers} worker{'s' * (workers != 1)} need "
            f"{(wanted or 1) * workers} slots; the application has {slots}. Use a smaller parallelism or "
            "workers_per_trial, or start more executors."
        )
    return wanted or slots // workers


class _Search:
    """The threads of a search, each of which runs one trial after the other.

    Args:
        study: the study.
        runner: runs a trial.
        best: keeps the best models.
        space: the distributions of the parameters; None: the trials ask for them.
        num_trials: number of trials, with the finished ones of the study.
        display: prints lines.
    """

    def __init__(
        self,
        study: Study,
        runner: TrialRunner,
        best: BestModels,
        *,
        space: Any,
        num_trials: int,
        display: Display,
    ) -> None:
        self.study, self.runner, self.best = study, runner, best
        self.space, self.num_trials, self.display = space, num_trials, display
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._exhausted = False
        self._failures: list[str] = []
        study.stop = self._exhaust  # type: ignore[method-assign]  # a sampler calls it when its grid is done
        self._resume()
        trials = study.get_trials(deepcopy=False)
        repeated = repeated_trials(trials)
        done = [trial for trial in trials if trial.state.is_finished() and trial.number not in repeated]
        self._ended, self._left = len(done), max(0, num_trials - len(done))
        self._succeeded = any(trial.state != TrialState.FAIL for trial in done)

    def execute(self, cluster: SparkApplication, threads: int) -> None:
        """Run the trials that are left.

        Args:
            cluster: the Spark application.
            threads: number of trials at a time.

        Raises:
            SearchError: no trial succeeded, or the storage failed.
            ConfigError: the metric is not a result of an epoch.
        """
        started = [cluster.thread(self._work, f"sparkdl-trials-{index}") for index in range(threads)]
        with Cleanup() as stack:
            stack.callback(self._stop, started)
            for thread in started:
                thread.start()
            while any(thread.is_alive() for thread in started):
                self.runner.builds.serve(POLL_SECONDS)
                interrupts.check()
        if self.error is not None:
            raise self.error
        if not self._succeeded:
            raise SearchError(
                f"No trial succeeded. The last one failed: {self._failures[-1]}"
                if self._failures
                else "No trial succeeded."
            )

    def _stop(self, threads: list[threading.Thread]) -> None:
        """End the fits that are under way, and wait for their threads."""
        self.runner.stopping.set()
        self.runner.builds.close()
        for thread in threads:
            while thread.is_alive():
                for model in tuple(self.runner.running.values()):
                    model.stop_training = True
                before = interrupts.limited(STOP_SECONDS)
                thread.join(min(POLL_SECONDS, before))
                if before <= 0:
                    return

    def _work(self) -> None:
        """Run one trial after the other, in a thread."""
        try:
            while (trial := self._next()) is not None:
                self._finish(trial, self.runner.run(trial))
        except SparkDLError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - of the storage, or of the sampler
            text = f"The study cannot go on: {type(error).__name__}: {error}"
            self._fail(SearchError(text))

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.runner.stopping.set()
        for model in tuple(self.runner.running.values()):
            model.stop_training = True

    def _next(self) -> Trial | None:
        with self._lock:
            if not self._left or self._exhausted or self.runner.stopping.is_set():
                return None
            self._left -= 1
            with quiet():
                return self.study.ask(self.space)

    def _finish(self, trial: Trial, outcome: Outcome) -> None:
        """Tell the study how a trial ended."""
        for name, value in vars(outcome).items():
            if name in RECORDED and value:
                trial.set_user_attr(name, value)
        if outcome.value is not None and outcome.model is not None:
            self.best.add(trial, outcome.value, outcome.model)
        with self._lock, quiet():
            if outcome.interrupted:
                self._try_again(trial)
            elif outcome.reason:
                self._record_failure(trial, outcome)
            else:
                self._ended, self._succeeded = self._ended + 1, True
                state = TrialState.PRUNED if outcome.pruned else None
                self.study.tell(trial, outcome.value, state=state)
                self.display.note(self._line(trial, outcome))

    def _record_failure(self, trial: Trial, outcome: Outcome) -> None:
        """Record a trial that failed; try it again if its executor was lost for the first time.

        Raises:
            SearchError: the first trials failed one after the other.
        """
        if outcome.again and SECOND not in trial.user_attrs:
            self._try_again(trial, {SECOND: True})
            self._left += 1
            return
        self._ended += 1
        self._failures.append(outcome.reason)
        self.study.tell(trial, state=TrialState.FAIL)
        self.display.note(self._line(trial, outcome))
        if not self._succeeded and len(self._failures) >= FAILURES:
            raise SearchError(
                f"The first {len(self._failures)} trials failed, the last one with {outcome.reason}"
            )

    def _try_again(self, trial: Trial | FrozenTrial, attributes: dict[str, Any] | None = None) -> None:
        """End a trial so that it does not count, and queue another one with its parameters."""
        self.study.tell(trial.number, state=TrialState.FAIL)
        repeats = {REPEATS: trial.number, **(attributes or {})}
        self.study.enqueue_trial(trial.params, user_attrs=repeats)

    def _resume(self) -> None:
        """Queue the trials again that were under way when the driver of an earlier search died."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._try_again(trial)

    def _exhaust(self) -> None:
        self._exhausted = True

    def _line(self, trial: Trial, outcome: Outcome) -> str:
        """Return the line of a trial that has ended."""
        epochs = max(map(len, outcome.results.values()), default=0)
        after = f" after {epochs} epoch{'s' * (epochs != 1)}" if epochs else ""
        metric = self.runner.metric
        if outcome.reason:
            text = f"failed: {outcome.reason}"
        elif outcome.pruned:
            text = f"pruned{after}, {metric}: {value_text(outcome.results[metric][-1])}"
        else:
            text = f"{metric}: {value_text(outcome.value or 0.0)}{after}"
        parameters = ", ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
        return f"Trial {trial.number} ({self._ended}/{self.num_trials}) - {text} - {parameters}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The result of a search."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from sparkdl.driver.training_record import lines_of, table_of
from sparkdl.errors import ConfigError
from sparkdl.spark.application import application_of
from sparkdl.tune.best_models import ranked

if TYPE_CHECKING:
    import keras
    import pandas as pd
    from pyspark.sql import DataFrame

REPEATS = "repeats"  # a trial attribute: the number of the interrupted or lost trial that it repeats
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
FIGURES = {
    "history": "plot_optimization_history",
    "curves": "plot_intermediate_values",
    "parallel": "plot_parallel_coordinate",
    "importances": "plot_param_importances",
}


class SearchResult:
    """The result of ``search``. Printed, it is a summary.

    Args:
        study: the study of Optuna.
        metric: the name of the result that was optimized.
        models: returns the best models, given how many; None for all that were kept.

    Attributes:
        study: the study of Optuna, with every trial.
        metric: the name of the result that was optimized.
    """

    def __init__(self, study: Study, metric: str, models: Callable[[int | None], list[keras.Model]]) -> None:
        self.study, self.metric, self._models = study, metric, models

    @property
    def best_trial(self) -> FrozenTrial:
        """The best trial of Optuna; of equal ones, the earliest.

        Raises:
            ConfigError: no trial completed.
        """
        best = ranked(self.study)[:1]
        if not best:
            raise ConfigError(f"No trial of the search completed: {self._summary()['trials']}.")
        return best[0]

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial, by name."""
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        """The value of the best trial: the best result of its epochs."""
        return float(self.best_trial.value or 0.0)

    @property
    def best_model(self) -> keras.Model:
        """The compiled model of the best trial, with the weights of its best epoch."""
        return self.best_models(1)[0]

    def best_models(self, count: int | None = None) -> list[keras.Model]:
        """Return the best ``count`` models, the best one first.

        Args:
            count: how many; None: all that were kept, which are ``keep``, or fewer if fewer trials were
                complete.

        Raises:
            ConfigError: ``keep`` or the number of complete trials was smaller, or the models of a resumed
                study were not kept in a directory.
        """
        return self._models(count)

    @property
    def trials(self) -> pd.DataFrame:
        """The table of trials, as a pandas DataFrame.

        The columns are ``number``, ``state`` ("complete", "pruned", "failed" or "repeated"), ``value``,
        ``epochs``, ``best_epoch``, ``seconds``, ``reason`` (of a failure), and one per parameter, as
        ``param_NAME``.
        """
        import pandas as pd

        return pd.DataFrame([_row(trial, state) for trial, state in self._states()])

    def to_spark(self) -> DataFrame:
        """Return the table of trials as a Spark DataFrame.

        A parameter whose values have several types is a column of strings.
        """
        frame: DataFrame = application_of(None).session.createDataFrame(self.trials.apply(_of_one_type))
        return frame

    def curves(self, name: str | None = None) -> pd.DataFrame:
        """Return a result of each epoch, as a pandas DataFrame; its ``plot()`` draws the curves.

        Args:
            name: the name of the result, such as "val_accuracy"; None: the metric of the search.

        Returns:
            A row for each epoch, counted from 1, and a column for each trial that has the result, named by
            its number. After the end of a trial its values are NaN.
        """
        import pandas as pd

        name = self.metric if name is None else name
        results = {trial.number: trial.user_attrs.get("results", {}) for trial in self.study.trials}
        columns = {number: pd.Series(each[name]) for number, each in results.items() if name in each}
        return pd.DataFrame(columns).rename(lambda epoch: epoch + 1).rename_axis("epoch")

    def plot(self, figure: str = "history") -> Any:
        """Return a figure of Plotly that Optuna draws.

        Args:
            figure: "history" (the value of each trial), "curves" (the metric after each epoch), "parallel"
                (parallel coordinates), or "importances" (of parameters).

        Raises:
            ConfigError: there is no such figure.
        """
        if figure not in FIGURES:
            raise ConfigError(f"figure should be one of {', '.join(map(repr, FIGURES))}; got {figure!r}.")
        import optuna.visualization

        return getattr(optuna.visualization, FIGURES[figure])(self.study)

    def _states(self) -> list[tuple[FrozenTrial, str]]:
        """Return each trial that has begun, with its state as a word."""
        states = states_of(self.study)
        trials = self.study.get_trials(deepcopy=False)
        return [(trial, states[trial.number]) for trial in trials if trial.number in states]

    def _summary(self) -> dict[str, str]:
        states = [state for _, state in self._states()]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        summary = {"trials": ", ".join(f"{count} {state}" for state, count in counts.items())}
        if counts.get("complete"):
            best = self.best_trial
            summary |= {
                f"best {self.metric}": f"{self.best_value:.4g} (trial {best.number})",
                "parameters": ", ".join(f"{name}={value}" for name, value in best.params.items()),
            }
        return summary

    def __repr__(self) -> str:
        return lines_of(self._summary())

    def _repr_html_(self) -> str:
        return table_of({escape(title): text for title, text in self._summary().items()})


def repeated_trials(trials: list[FrozenTrial]) -> set[int]:
    """Return the numbers of the trials that were interrupted or lost, and that another trial repeats."""
    return {trial.user_attrs[REPEATS] for trial in trials if REPEATS in trial.user_attrs}


def states_of(study: Study) -> dict[int, str]:
    """Return the state of each trial that has begun, as a word, by its number."""
    trials = study.get_trials(deepcopy=False)
    repeated = repeated_trials(trials)
    return {
        trial.number: "repeated" if trial.number in repeated else STATES.get(trial.state, "running")
        for trial in trials
        if trial.state != TrialState.WAITING
    }


def _of_one_type(column: pd.Series) -> pd.Series:
    """Return a column whose values have one type or are None."""
    if column.dtype != object:
        return column
    known = column[column.notna()]
    values = known if known.map(type).nunique() == 1 else known.map(str)
    return values.reindex(column.index).where(column.notna(), None)


def _row(trial: FrozenTrial, state: str) -> dict[str, Any]:
    """Return the row of a trial in the table."""
    results = trial.user_attrs.get("results", {})
    duration = trial.duration
    return {
        "number": trial.number,
        "state": state,
        "value": np.nan if trial.value is None else trial.value,
        "epochs": max(map(len, results.values()), default=0),
        "best_epoch": trial.user_attrs.get("best_epoch", 0),
        "seconds": np.nan if duration is None else duration.total_seconds(),
        "reason": trial.user_attrs.get("reason", ""),
        **{f"param_{name}": value for name, value in trial.params.items()},
    }

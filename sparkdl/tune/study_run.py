"""The run of a study: threads that ask for trials, train them, and tell the study how they ended."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

from optuna import Study, Trial
from optuna.trial import FrozenTrial, TrialState

from sparkdl.driver.display.progress import Display, value_text
from sparkdl.errors import ClusterError, SearchError, SparkDLError
from sparkdl.process.reasons import reason_of
from sparkdl.server.monitoring.live import State
from sparkdl.server.monitoring.overview import Overview
from sparkdl.spark.application import SparkApplication
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.tune.best_models import BestModels
from sparkdl.tune.result import REPEATS, repeated_trials, states_of
from sparkdl.tune.side_by_side import run_threads
from sparkdl.tune.trial_table import COMPLETE, REPEATED, TrialTable
from sparkdl.tune.trials import TrialOutcome, TrialRunner

RECORDED = "results", "best_epoch", "reason", "traceback"  # of an outcome, as attributes of the trial
FAILURES = 3  # trials that may fail before the first one succeeds
SECOND = "second try"  # the attribute of a trial that repeats one whose executor was lost


class StudyRun:
    """The threads of a search, each of which runs one trial of the study after the other.

    Args:
        study: the study.
        runner: runs a trial.
        best: keeps the best models.
        space: the distributions of the parameters; None: the trials ask for them.
        num_trials: number of trials, with the finished ones of the study; None: until the sampler has tried
            its whole grid.
        display: prints lines.

    Attributes:
        record: the record of the search for its live page.
    """

    def __init__(
        self,
        study: Study,
        runner: TrialRunner,
        best: BestModels,
        *,
        space: Any,
        num_trials: int | None,
        display: Display,
    ) -> None:
        self.study, self.runner, self.best = study, runner, best
        self.space, self.num_trials, self.display = space, num_trials, display
        self.table = TrialTable(runner.metric, maximize=runner.maximize, num_trials=num_trials)
        name = f"Search: {'maximize' if runner.maximize else 'minimize'} {runner.metric}"
        self.record = Overview(name, "trials", self.table.read, stops="after the trials that are running")
        self.table.changed = self.record.publish
        runner.reported = self.table.report
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._exhausted = False
        self._failures: list[str] = []  # the reasons of the trials that failed
        self._earlier = 0  # failures of earlier searches of the study
        self._ended, self._succeeded = 0, False
        self._left = math.inf if num_trials is None else num_trials

    def execute(self, cluster: SparkApplication, threads: int) -> None:
        """Run the trials that are left.

        Args:
            cluster: the Spark application.
            threads: number of trials at a time.

        Raises:
            SearchError: no trial succeeded, or the storage failed.
            ClusterError: Spark was stopped.
            ConfigError: the metric is not a result of an epoch.
        """
        # A sampler calls this method of the study when it has tried its whole grid.
        self.study.stop = self._exhaust  # type: ignore[method-assign]
        state: State = "stopped"  # after Ctrl-C
        try:
            self.table.load(self.study, states_of(self.study))
            self._resume()
            with explained_if_stopped(cluster):
                run_threads(
                    cluster,
                    partial(self._work, cluster),
                    threads,
                    name="sparkdl-trials",
                    stop=self._stop,
                    failed=lambda: self.error is not None,
                    idle=self._idle,
                )
            state = "failed" if self.error else "stopped" if self.record.stop_request else "finished"
        finally:
            del self.study.stop
            self.record.finish(state, "" if self.error is None else reason_of(self.error))
        if self.error is not None:
            raise self.error
        if not self._succeeded:
            last = f" The last one failed: {self._failures[-1]}" if self._failures else ""
            stopped = self.record.stop_request is not None
            none = "The search was stopped before a trial succeeded." if stopped else "No trial succeeded."
            raise SearchError(none + last)

    def _idle(self, seconds: float) -> None:
        """Make a call of a trial in the main thread, and follow the requests of the page's viewers."""
        self.runner.builds.serve(seconds)
        if self.record.stop_request == "now":
            self._stop()
        elif self.record.stop_request == "epoch":
            with self._lock:
                self._left = 0

    def _stop(self) -> None:
        """Begin no more trials, and end the fits that are under way."""
        self.runner.stopping.set()
        self.runner.builds.close()
        for model in tuple(self.runner.running.values()):
            model.stop_training = True

    def _work(self, cluster: SparkApplication) -> None:
        """Run one trial after the other, in a thread."""
        try:
            while (trial := self._next(cluster)) is not None:
                self._finish(trial, self.runner.run(trial))
        except Exception as error:  # noqa: BLE001 - of the storage, or of the sampler
            of_ours = isinstance(error, SparkDLError)
            self._fail(error if of_ours else SearchError(f"The study cannot go on: {reason_of(error)}"))
        except BaseException as error:  # noqa: BLE001 - such as SystemExit, which the main thread raises
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._stop()

    def _next(self, cluster: SparkApplication) -> Trial | None:
        """Return the next trial; None if there is none.

        Raises:
            ClusterError: Spark was stopped. A trial would start another application.
        """
        with self._lock:
            if not self._left or self.runner.stopping.is_set():
                return None
            if cluster.stopped:
                raise ClusterError(
                    "Spark was stopped during the search. Start a new session and search again. With the "
                    "same storage, the study continues."
                )
            if self._exhausted and not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                return None
            self._left -= 1
            trial = self.study.ask(self.space)
            self.table.begin(trial.number)
            return trial

    def _finish(self, trial: Trial, outcome: TrialOutcome) -> None:
        """Tell the study how a trial ended."""
        for name, value in vars(outcome).items():
            if name in RECORDED and value:
                trial.set_user_attr(name, value)
        if outcome.value is not None and outcome.model is not None:
            self._keep(trial, outcome.value, outcome.model)
        with self._lock:
            if outcome.interrupted:
                self._try_again(trial, {SECOND: True} if SECOND in trial.user_attrs else {})
            elif outcome.reason:
                self._record_failure(trial, outcome)
            else:
                self._ended, self._succeeded = self._ended + 1, True
                state = TrialState.PRUNED if outcome.pruned else None
                self.study.tell(trial, outcome.value, state=state)
                self._show(trial, outcome)
        self.best.trim()

    def _keep(self, trial: Trial, value: float, model: Any) -> None:
        """Keep a model; if its file cannot be written, end the search, but keep the trial."""
        try:
            self.best.add(trial, value, model)
        except Exception as error:  # noqa: BLE001 - each file system raises errors of its own
            text = f"The model of trial {trial.number} could not be written: {reason_of(error)}"
            self._fail(SearchError(text))

    def _record_failure(self, trial: Trial, outcome: TrialOutcome) -> None:
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
        self._show(trial, outcome)
        if not self._succeeded and len(self._failures) - self._earlier >= FAILURES:
            failed = len(self._failures) - self._earlier
            raise SearchError(f"The first {failed} trials failed, the last one with {outcome.reason}")

    def _try_again(self, trial: Trial | FrozenTrial, attributes: dict[str, Any]) -> None:
        """Queue another trial with the parameters of this one, which ends and does not count."""
        self.study.enqueue_trial(trial.params, user_attrs={REPEATS: trial.number, **attributes})
        self.study.tell(trial.number, state=TrialState.FAIL)
        self.table.end(trial.number, trial.params, REPEATED)

    def _resume(self) -> None:
        """Count the trials that have ended, and repeat those that were under way when a driver died."""
        trials = self.study.get_trials(deepcopy=False)
        repeated = repeated_trials(trials)
        for trial in trials:
            if trial.state == TrialState.RUNNING and trial.number in repeated:
                self.study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state == TrialState.RUNNING:
                self._try_again(trial, {SECOND: True} if SECOND in trial.user_attrs else {})
            elif trial.state.is_finished() and trial.number not in repeated:
                self._ended, self._left = self._ended + 1, max(0, self._left - 1)
                self._succeeded = self._succeeded or trial.state != TrialState.FAIL
                if trial.state == TrialState.FAIL:
                    self._failures.append(trial.user_attrs.get("reason", "an unknown reason"))
        self._earlier = len(self._failures)

    def _exhaust(self) -> None:
        self._exhausted = True

    def _show(self, trial: Trial, outcome: TrialOutcome) -> None:
        """Show the end of a trial."""
        line = self._line(trial, outcome)
        self.display.note(line)
        self.record.add_event(line, "error" if outcome.reason else "info")
        state = "failed" if outcome.reason else "pruned" if outcome.pruned else COMPLETE
        self.table.end(trial.number, trial.params, state, outcome.value, outcome.reason)

    def _line(self, trial: Trial, outcome: TrialOutcome) -> str:
        """Return the line of a trial that has ended."""
        epochs = max(map(len, outcome.results.values()), default=0)
        after = f" after {epochs} epoch{'s' * (epochs != 1)}" if epochs else ""
        metric = self.runner.metric
        if outcome.reason:
            text = f"failed: {outcome.reason}"
        elif outcome.pruned:
            last = outcome.results.get(metric, [])[-1:]
            text = f"pruned{after}" + "".join(f", {metric}: {value_text(value)}" for value in last)
        else:
            text = f"{metric}: {value_text(outcome.value or 0.0)}{after}"
        parameters = ", ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
        of = "" if self.num_trials is None else f"/{self.num_trials}"
        return f"Trial {trial.number} ({self._ended}{of}) - {text} - {parameters}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""MLflow's autologging of fits.

``mlflow.autolog()`` and ``mlflow.keras.autolog()`` replace ``keras.Model.fit``, which ``SparkModel.fit`` does
not call. If one of them or ``sparkdl.mlflow.autolog()`` is on, this module logs a fit as MLflow logs
``keras.Model.fit``, with the same settings. A search is a run whose trials are its child runs. An error of
MLflow is logged as a warning and never ends a fit.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sparkdl.api import joint_start
from sparkdl.config import AUTO
from sparkdl.driver.preparation import FitArguments
from sparkdl.driver.request import Request
from sparkdl.errors import ConfigError
from sparkdl.modeling.keras_types import Model
from sparkdl.process.reasons import reason_of
from sparkdl.rules import choose
from sparkdl.settings import flattened
from sparkdl.sources.resolve import SharedArrays

logger = logging.getLogger(__name__)
PARENT = "mlflow.parentRunId"  # the tag of a child run
PATH = {"artifact_path": "model"}  # the place of a model before MLflow 3
TAG = "mlflow.autologging"  # the tag of the runs that MLflow's autologging starts
# Arguments of ``fit`` that are not logged as parameters.
UNLOGGED = {"x", "y", "validation_data", "callbacks", "verbose", "decode"}
# Arguments of ``mlflow.keras.autolog`` that have no effect here. MLflow itself ignores the first one.
UNUSED = {"log_input_examples", "silent", "disable_for_unsupported_versions"}
_chosen: dict[str, Any] = {}  # the settings given to ``autolog``; empty: off


def autolog(*, disable: bool = False, **settings: Any) -> None:
    """Log every ``SparkModel.fit`` to MLflow.

    ``mlflow.autolog()`` and ``mlflow.keras.autolog()`` do so too. Unlike them, this function changes no other
    library, and is independent of their settings.

    Args:
        disable: whether to turn logging off.
        settings: arguments of ``mlflow.keras.autolog``, such as ``log_models=False``, except
            ``log_input_examples`` (which has no effect there either), ``silent`` and
            ``disable_for_unsupported_versions``.

    Raises:
        ConfigError: MLflow is not installed, or there is no such argument.

    Example:
        >>> sparkdl.mlflow.autolog(log_models=False)  # doctest: +SKIP
    """
    known = _default_settings()
    unknown = settings.keys() - known.keys()
    if unknown:
        raise ConfigError(
            f"autolog should get these arguments of mlflow.keras.autolog: {', '.join(known)}; got "
            f"{', '.join(sorted(unknown))}. Leave them out."
        )
    _chosen.clear()
    if not disable:
        _chosen.update(known | settings)


def _default_settings() -> dict[str, Any]:
    """Return the arguments of ``mlflow.keras.autolog`` with their defaults, without those in ``UNUSED``.

    Raises:
        ConfigError: MLflow is not installed.
    """
    try:
        from mlflow.keras import autolog as original
    except ImportError as error:
        raise ConfigError(
            f"sparkdl.mlflow needs MLflow, but importing it failed: {error}. Run pip install mlflow."
        ) from error
    parameters = inspect.signature(original).parameters.items()
    return {name: each.default for name, each in parameters if name not in UNUSED}


@contextmanager
def logged(request: Request, arguments: FitArguments) -> Iterator[None]:
    """Log the fit in a ``with`` block to MLflow, if its autologging is on.

    Args:
        request: the request of the fit, which gets MLflow's callback.
        arguments: the arguments of the fit.
    """
    settings = _attempt("say whether it logs the fit", lambda: _settings_for(request))
    if not settings:
        yield
        return
    fit, status = _LoggedFit(settings, request), "FAILED"
    try:
        fit.begin(arguments)
        yield
        fit.log_model()
        status = "FINISHED"
    finally:
        fit.end(status)


def _settings_for(request: Request) -> dict[str, Any]:
    """Return the settings of the autologging that logs a fit; empty if none does."""
    settings = _settings()
    excluded = settings and _is_excluded(request, exclusive=settings.get("exclusive", False))
    return {} if excluded else settings


def _settings() -> dict[str, Any]:
    """Return the settings of the autologging that is on; empty if it is off."""
    utils: Any = sys.modules.get(
        "mlflow.utils.autologging_utils"
    )  # do not import MLflow if the program has not
    if _chosen or utils is None or utils.autologging_is_disabled("keras"):
        return _chosen
    return dict(utils.AUTOLOGGING_INTEGRATIONS["keras"])


def _is_excluded(request: Request, *, exclusive: bool) -> bool:
    """Return True if a fit is not logged although autologging is on.

    Args:
        request: the request of the fit.
        exclusive: whether autologging leaves the user's own runs alone.
    """
    import mlflow

    from sparkdl.api import mlflow_internals

    if any(type(callback).__module__.startswith("mlflow.") for callback in request.callbacks):
        logger.warning("A callback of MLflow logs this fit, so MLflow's autologging does not log it again.")
        return True
    run = mlflow.active_run()
    if run is None:
        # A CrossValidator fits other estimators in threads without a run. MLflow leaves these out too.
        return mlflow_internals.is_estimator_logged()
    return exclusive and TAG not in run.data.tags


@dataclass(frozen=True)
class _Child:
    """The place of a fit that belongs to a search.

    Attributes:
        parent: the id of the search's run.
        experiment: the id of its experiment.
        name: the name of the child run.
        params: returns the parameters of the trial.
    """

    parent: str
    experiment: str
    name: str
    params: Callable[[], dict[str, Any]]


_child: ContextVar[_Child | None] = ContextVar("child", default=None)


class _LoggedRun:
    """A run of MLflow: the active one, or a new one.

    Args:
        settings: the settings of autologging, which are the arguments of ``mlflow.keras.autolog``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.run_id: str | None = None
        self.experiment = ""
        self.owns = False  # whether this object has started the run and ends it

    def _start(self) -> None:
        import mlflow

        run, child = mlflow.active_run(), _child.get()
        if run is None:
            tags = {**(self.settings.get("extra_tags") or {}), TAG: "keras"}
            if child is None:
                run = mlflow.start_run(tags=tags)
            else:
                tags |= {PARENT: child.parent}
                run = mlflow.start_run(experiment_id=child.experiment, run_name=child.name, tags=tags)
            self.owns = True
        self.run_id, self.experiment = run.info.run_id, run.info.experiment_id

    def _log_model(self, model: Model, named: dict[str, str]) -> None:
        """Log a model.

        Args:
            model: the trained model.
            named: the logged model of MLflow 3 that is completed with it.
        """
        import mlflow.keras
        from mlflow.keras.utils import get_model_signature

        settings = self.settings
        signed = settings["log_model_signatures"]
        place = {"name": "model", **named} if hasattr(mlflow, "initialize_logged_model") else PATH
        mlflow.keras.log_model(
            model,
            **place,
            save_exported_model=settings["save_exported_model"],
            signature=_attempt("find the signature", lambda: get_model_signature(model)) if signed else None,
            registered_model_name=settings["registered_model_name"],
            save_model_kwargs=settings["save_model_kwargs"],
        )

    def end(self, status: str) -> None:
        """End the run, if this object has started it."""
        if self.owns:
            import mlflow

            _attempt("end the run", lambda: mlflow.end_run(status))


class LoggedSearch(_LoggedRun):
    """A search that is logged to MLflow; it logs nothing if autologging is off."""

    def begin(self, values: Mapping[str, Any]) -> None:
        """Start a run, unless one is active, and log the settings of the search."""
        if self.settings:
            _attempt("start a run", self._start)
        if self.run_id is not None:
            import mlflow

            _attempt("log the parameters", lambda: mlflow.log_params(dict(values)))

    @contextmanager
    def trial(self, number: int, params: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Log the fits in a ``with`` block as child runs.

        Args:
            number: the number of the trial.
            params: returns the parameters of the trial.
        """
        if self.run_id is None:
            yield
            return
        token = _child.set(_Child(self.run_id, self.experiment, f"trial {number}", params))
        try:
            yield
        finally:
            _child.reset(token)

    def log_best(self, params: Mapping[str, Any], results: Mapping[str, float], model: Any) -> None:
        """Log the best trial.

        Args:
            params: its parameters.
            results: its value, by the name of the metric.
            model: returns its model; None if no model was kept.
        """
        if self.run_id is None:
            return
        import mlflow

        named = {f"best_{name}": value for name, value in params.items()}
        _attempt("log the best parameters", lambda: mlflow.log_params(named))
        _attempt("log the best value", lambda: mlflow.log_metrics(dict(results)))
        if self.settings.get("log_models") and model is not None:
            _attempt("log the model", lambda: self._log_model(model(), {}))


@contextmanager
def logged_search(values: Mapping[str, Any]) -> Iterator[LoggedSearch]:
    """Log the search in a ``with`` block to MLflow, if its autologging is on.

    Args:
        values: the settings of the search, by name.
    """
    search, status = LoggedSearch(_attempt("say whether it logs the search", _settings) or {}), "FAILED"
    try:
        search.begin(values)
        yield search
        status = "FINISHED"
    finally:
        search.end(status)


class _LoggedFit(_LoggedRun):
    """A fit that is logged to MLflow.

    Args:
        settings: the settings of autologging, which are the arguments of ``mlflow.keras.autolog``.
        request: the request of the fit.
    """

    def __init__(self, settings: dict[str, Any], request: Request) -> None:
        # The best model of a search is logged with the search.
        super().__init__(settings | ({"log_models": False} if _child.get() else {}))
        self.request = request
        self.named: dict[str, str] = {}  # the logged model of MLflow 3, which metrics refer to

    def begin(self, arguments: FitArguments) -> None:
        """Start a run, unless one is active; log parameters and arrays, and add MLflow's callback."""
        _attempt("start a run", self._start)
        if self.run_id is None:
            return
        _attempt("log the parameters", lambda: self._log_parameters(arguments))
        if self.settings.get("log_models"):
            _attempt("begin a model", self._name_model)
        if self.settings.get("log_datasets"):
            _attempt("log the data", lambda: _log_arrays(arguments))
        _attempt("follow the epochs", self._add_callback)

    def _log_parameters(self, arguments: FitArguments) -> None:
        """Log the parameters that the run does not have yet: MLflow refuses to change one."""
        import mlflow

        known = mlflow.MlflowClient().get_run(self.run_id).data.params
        values, child = _parameters(self.request, arguments), _child.get()
        values |= {} if child is None else child.params()
        mlflow.log_params({name: value for name, value in values.items() if name not in known})

    def _name_model(self) -> None:
        import mlflow

        if hasattr(mlflow, "initialize_logged_model"):  # from MLflow 3
            self.named = {"model_id": mlflow.initialize_logged_model("model").model_id}

    def _add_callback(self) -> None:
        from mlflow.keras import MlflowCallback

        often = {name: self.settings[name] for name in ("log_every_epoch", "log_every_n_steps")}
        self.request.callbacks = [*self.request.callbacks, MlflowCallback(**often, **self.named)]

    def log_model(self) -> None:
        """Log the trained model."""
        if self.run_id is not None and self.settings.get("log_models"):
            _attempt("log the model", lambda: self._log_model(self.request.model, self.named))


def _attempt(what: str, action: Callable[[], Any]) -> Any:
    """Return the result of a call of MLflow; after an error, warn and return None."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - MLflow's own errors, those of its store and of its network
        logger.warning("MLflow could not %s, and the fit goes on without it: %s", what, reason_of(error))
        return None


def _parameters(request: Request, arguments: FitArguments) -> dict[str, Any]:
    """Return the parameters of a fit by name: the arguments of ``fit``, and the settings of SparkModel."""
    given = {each.name: getattr(arguments, each.name) for each in fields(arguments)}
    config = request.config
    last = joint_start.windows_of(request) if config.frequency == AUTO else config
    return {
        **{name: value for name, value in given.items() if name not in UNLOGGED},
        "batch_size": request.fit.batch_size,
        "mode": config.mode.value,
        "frequency": config.frequency,
        "merge": None
        if last is None or last.joint
        else choose(last.merge, mode=last.mode.value, window=last.window).rule.name,
        "num_workers": request.num_workers,
        "batch_size_per_worker": config.batch_size_per_worker,
        "placement": config.placement.value,
        **flattened(config.stragglers),
    }


def _log_arrays(arguments: FitArguments) -> None:
    """Log the training and validation rows that are NumPy arrays."""
    import mlflow
    import mlflow.data

    x = arguments.x.x if isinstance(arguments.x, SharedArrays) else arguments.x
    for context, rows in ("train", (x, arguments.y)), ("eval", arguments.validation_data):
        first = rows[:2] if isinstance(rows, tuple) else ()
        if len(first) == 2 and all(isinstance(each, np.ndarray) for each in first):
            mlflow.log_input(mlflow.data.from_numpy(first[0], targets=first[1]), context=context)

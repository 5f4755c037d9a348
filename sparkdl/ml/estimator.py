"""A Spark ML Estimator that trains a Keras model, and the Model that its fit returns."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.sql import DataFrame

from sparkdl.api.spark_model import SparkModel
from sparkdl.core.tree import leaves
from sparkdl.errors import ConfigError, ModelError, short
from sparkdl.ml.params import FIT, SETTINGS, FitParams, TrainingParams, arguments, by_name
from sparkdl.ml.persistence import Stored
from sparkdl.ml.transformer import Predicts
from sparkdl.modeling import checks, losses, serialization, signature
from sparkdl.modeling.keras_types import Model as KerasModel
from sparkdl.settings import grouped
from sparkdl.spark import spark_internals
from sparkdl.ui.history import History

logger = logging.getLogger(__name__)


class TrainingSummary:
    """The results of a fit. Printed, it shows them as the History of ``SparkModel.fit`` does.

    Args:
        history: the content of Keras's History: a list of the results of epochs, by metric name.
        training: counts and timings of the run, as in the History of ``SparkModel.fit``.
        fit: the History of the fit; None for a model that was loaded from a file.

    Attributes:
        history: as the argument.
        training: as the argument; empty for a model that was loaded from a file.
    """

    def __init__(
        self, history: dict[str, list[float]], training: dict[str, Any], *, fit: History | None = None
    ) -> None:
        self.history, self.training, self._fit = history, training, fit

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the live page of the run, with its data, as one HTML file that needs no server.

        Args:
            path: a local path; an existing file is replaced.

        Raises:
            ConfigError: the model was loaded from a file, which has only the history.
            OSError: the file cannot be written.
        """
        if self._fit is None:
            raise ConfigError(
                "report needs the data of the run, which a saved model does not have; this summary was "
                "loaded and has only its history. Call report in the Python process that called fit, on the "
                "model that fit returned."
            )
        self._fit.report(path)

    def __repr__(self) -> str:
        return repr(self._shown()).replace("History", type(self).__name__, 1)

    def _repr_html_(self) -> str:
        return self._shown()._repr_html_()

    def _shown(self) -> History:
        """Return the History of the fit; for a loaded model, one with the results of the epochs."""
        if self._fit is not None:
            return self._fit
        shown = History()
        shown.history = self.history
        shown.epoch = list(range(max(map(len, self.history.values()), default=0)))
        return shown

    @property
    def objectiveHistory(self) -> list[float]:
        """The loss of each epoch."""
        return list(self.history.get("loss", []))

    @property
    def totalIterations(self) -> int:
        """The number of epochs."""
        return len(self.objectiveHistory)


class KerasEstimatorModel(Predicts, FitParams, Model):
    """A Keras model that an Estimator trained, with the Params of that training.

    The model is not a Param. CrossValidator passes the Params of its grid to ``transform``. If ``model`` were
    a Param, an untrained model in the grid would replace the trained model.

    Args:
        model: the trained keras.Model.
        params: its Params, by keyword.
    """

    unsaved = ("callbacks", "merge")  # not needed for predictions

    def __init__(self, model: KerasModel | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._model, self._builder = model, None
        self._summary: TrainingSummary | None = None

    def getModel(self) -> KerasModel:
        """Return the trained keras.Model."""
        return self._model

    def held(self) -> KerasModel | None:
        """Return the model; None if there is none."""
        return self._model

    def builder(self) -> Callable[[], KerasModel] | None:
        """Return the function that built the model; None if there is none."""
        return self._builder

    def hold(self, model: KerasModel) -> None:
        """Set the model."""
        self._model = model

    def unread(self) -> list[str]:
        """Return the columns of labels and sample weights, which the fit may have decoded."""
        outputs = signature.output_names(self._model)
        params = [name for name in ("labelCol", "weightCol") if self.isDefined(name)]
        return leaves([by_name(self.getOrDefault(name), outputs, "output") for name in params])

    @property
    def hasSummary(self) -> bool:
        """True if there is a training summary."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The results of the fit.

        Raises:
            ModelError: there is no training summary.
        """
        if self._summary is None:
            raise ModelError(f"{self.uid} has no training summary, because it was not created by fit.")
        return self._summary

    def extra(self) -> dict[str, object]:
        """Return the values to save along with the Params."""
        if self._summary is None:
            return {}
        # A metric with several values has an array for each epoch, which JSON does not have.
        history = self._summary.history.items()
        return {"history": {name: [np.asarray(each).tolist() for each in values] for name, values in history}}

    def adopt(self, extra: dict[str, Any]) -> None:
        """Restore the values that were saved along with the Params."""
        if "history" in extra:
            self._summary = TrainingSummary(extra["history"], {})


class KerasEstimator(TrainingParams, Stored, Estimator):  # type: ignore[type-arg]
    """An Estimator that trains a copy of a Keras model on the columns of a DataFrame.

    Args:
        params: its Params, by keyword; ``model`` is a compiled keras.Model, which a fit leaves unchanged, or
            a function that returns one.

    Example:
        >>> estimator = KerasEstimator(model=model, epochs=10, batchSize=64)  # doctest: +SKIP
        >>> Pipeline(stages=[assembler, estimator]).fit(frame).transform(frame)  # doctest: +SKIP
    """

    @short
    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Any:
        """Return an iterator over the index of each Param map and the model that is fitted with it.

        Raises:
            ConfigError: several fits would resume from one checkpoint folder.
        """
        stages = [self.copy(each) for each in paramMaps]
        folders = [
            stage.getOrDefault("checkpoint").uri
            for stage in stages
            if stage.isDefined("checkpoint") and stage.getOrDefault("resume")
        ]
        if len(set(folders)) < len(folders):
            raise ConfigError(
                "Each fit needs a checkpoint folder of its own to resume from; several Param maps have "
                f"checkpoint={max(folders, key=folders.count)!r} with resume=True. Leave checkpoint out, or "
                "set another folder in each Param map."
            )
        return super().fitMultiple(dataset, paramMaps)

    @short
    def _fit(self, dataset: DataFrame) -> KerasEstimatorModel:
        given = self.held()
        if given is None:
            raise ModelError(
                "KerasEstimator has no model. Set model to a compiled keras.Model, or to a "
                "function that returns one."
            )
        code = arguments(self, ("customObjects",))
        builder, original = None if checks.is_model(given) else given, None
        if builder is None:
            checks.require_compiled(given)
            original = given if given.built else None
            given = serialization.copy_of(given, **code)
        trained = SparkModel(given, **grouped(arguments(self, SETTINGS)))
        trained._original = original
        if self.isDefined("thresholds") and (shape := signature.known_output(trained.model)) is not None:
            losses.head_of(trained.model, self.getOrDefault("task"), shape, self.getOrDefault("thresholds"))
        fit = arguments(self, FIT)
        if fit.get("validation_indicator_col") == "":  # as in Spark, an empty name is none
            del fit["validation_indicator_col"]
        # Copies, because each fit needs callbacks of its own.
        fit["callbacks"] = [copy.copy(callback) for callback in fit.get("callbacks") or ()]
        inputs, outputs = signature.input_names(trained.model), signature.output_names(trained.model)
        fit["features_col"] = by_name(self.getOrDefault("featuresCol"), inputs, "input")
        fit["label_col"] = by_name(fit["label_col"], outputs, "output")
        if self.isDefined("weightCol") and self.getOrDefault("weightCol") != "":
            fit["sample_weight"] = by_name(self.getOrDefault("weightCol"), outputs, "output")
        history = trained.fit(dataset, **fit)
        result = KerasEstimatorModel(trained.model)
        result._builder = builder
        spark_internals.set_uid(result, self.uid)
        self._copyValues(result)
        result._summary = TrainingSummary(history.history, history.training, fit=history)
        if self.getOrDefault("task") == "auto":
            classifies = losses.head_of(trained.model, "auto", trained.output_shapes()).classifies
            what = (
                "class indices, probabilities and raw predictions" if classifies else "the unchanged output"
            )
            logger.info("%s predicts %s, as its loss implies.", self.uid, what)
        return result

"""The best models of a search, in memory or in a folder."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optuna import Study, Trial
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sparkdl.errors import ConfigError, ModelError
from sparkdl.modeling import serialization
from sparkdl.spark import files, spark_internals

MODEL = "model"  # the user attribute of a trial with the path of its model


class BestModels:
    """The best models of a search.

    Args:
        count: how many are kept.
        directory: the folder for their files, in which the study has a folder: a local path, or a URI of any
            file system that Spark can reach; None keeps the models in memory.
        study: the study. Of its earlier trials, the models in the folder are kept too.
        custom_objects: classes and functions that the models need, by name.
    """

    def __init__(
        self,
        count: int,
        directory: str | None,
        study: Study,
        custom_objects: dict[str, Any] | None = None,
    ) -> None:
        self._count, self._study, self._custom_objects = count, study, custom_objects
        self._lock = threading.Lock()
        self._context = spark_internals.active_context()
        self._folder = None if directory is None else _folder_of(directory, study)
        # By the number of a trial, its value, and its model or the path of its model.
        self._kept: dict[int, tuple[float, Any]] = {}
        self._written: set[int] = set()  # the trials whose files this search has written
        # The structure of these models, and the objects that they use.
        self._outlines: dict[int, tuple[serialization.ModelSpec, dict[str, Any]]] = {}
        for trial in ranked(study) if self._folder else []:
            path = trial.user_attrs.get(MODEL, "")
            if len(self._kept) < count and path.startswith(f"{self._folder}/") and self._is_there(path):
                self._kept[trial.number] = float(trial.value or 0.0), path

    def add(self, trial: Trial, value: float, model: Any) -> None:
        """Keep the model of a trial that is about to end, if it is among the best.

        Args:
            trial: the trial, which gets the path of the file as an attribute.
            value: the value of the trial.
            model: the keras.Model.
        """
        with self._lock:
            if len(self._kept) >= self._count and self._order(trial.number, value) > max(
                self._order(number, kept) for number, (kept, _) in self._kept.items()
            ):
                return
            if self._folder is not None:
                path = self._write(trial.number, model)
                self._written.add(trial.number)
                with suppress(ModelError):  # a model that cannot be sent, which Keras may load all the same
                    self._outlines[trial.number] = serialization.outline(model, self._custom_objects)
                trial.set_user_attr(MODEL, path)
                model = path
            self._kept[trial.number] = value, model

    def trim(self) -> None:
        """Drop the models that are no longer among the best, once their successors are in the study."""
        with self._lock:
            order = sorted(self._kept, key=lambda number: self._order(number, self._kept[number][0]))
            for number in order[self._count :]:
                _, model = self._kept.pop(number)
                self._outlines.pop(number, None)
                if self._folder is not None:
                    files.discard(model, context=self._context)

    def has(self, number: int) -> bool:
        """Return True if the model of a trial was kept."""
        return number in self._kept

    def get(self, count: int | None) -> list[Any]:
        """Return the models of the best ``count`` trials of the study, or all that were kept, best first.

        Raises:
            ConfigError: one of them was not kept, or fewer trials completed.
        """
        best = ranked(self._study)
        if count is None:
            kept = itertools.takewhile(lambda trial: trial.number in self._kept, best)
            count = max(1, len(list(kept)))
        missing = [trial.number for trial in best[:count] if trial.number not in self._kept]
        wanted = f"The search should have kept {count} model{'s' * (count != 1)}"
        if missing:
            raise ConfigError(
                f"{wanted}; that of trial {missing[0]} was not kept. Search with keep={count}, and with a "
                "directory, in which a later search finds the models of an earlier one. An objective keeps "
                "no model."
            )
        if len(best) < count:
            raise ConfigError(
                f"{wanted}; {len(best)} trial{'s' * (len(best) != 1)} completed. Search with more trials, or "
                "with a pruner that ends fewer."
            )
        return [self._model(trial.number) for trial in best[:count]]

    def _order(self, number: int, value: float) -> tuple[float, int]:
        return _order(self._study, value, number)

    def _model(self, number: int) -> Any:
        """Return the model of a trial."""
        _, model = self._kept[number]
        if self._folder is None:
            return model
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "model.keras")
            files.get(model, local, context=self._context)
            if number in self._outlines:
                return serialization.filled(local, *self._outlines[number])
            own = number in self._written
            try:
                return serialization.load(local, model, self._custom_objects, safe_mode=not own)
            except ModelError as error:
                raise ModelError(
                    f'{error} The model may need code. Search with settings={{"custom_objects": ...}}, or '
                    "load the file with sparkdl.load_spark_model(path, custom_objects, safe_mode=False)."
                ) from error

    def _is_there(self, path: str) -> bool:
        return files.exists(path, context=self._context)

    def _write(self, number: int, model: Any) -> str:
        path = f"{self._folder}/trial-{number:05}.keras"
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "model.keras")
            serialization.save(model, local)
            files.put(local, path, overwrite=True, context=self._context)
        return path


def ranked(study: Study) -> list[FrozenTrial]:
    """Return the completed trials of a study, the best one first; of equal ones, the earlier first."""
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(completed, key=lambda trial: _order(study, float(trial.value or 0.0), trial.number))


def _order(study: Study, value: float, number: int) -> tuple[float, int]:
    return (-value if study.direction is StudyDirection.MAXIMIZE else value), number


def _folder_of(directory: str, study: Study) -> str:
    """Return the folder of a study's models."""
    base = str(directory).rstrip("/")
    return f"{base if '://' in base else os.path.abspath(base)}/{quote(study.study_name, safe='')}"

"""The best models of a search, in memory or in a folder."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna import Study, Trial
from optuna.study import StudyDirection
from optuna.trial import TrialState

from sparkdl.errors import ConfigError
from sparkdl.modeling import serialization
from sparkdl.spark import files, spark_internals

MODEL = "model"  # the user attribute of a trial with the path of its model


@dataclass(frozen=True)
class _Kept:
    """A model that is kept: in memory, or as a file.

    Attributes:
        value: the value of its trial.
        number: the number of its trial.
        model: the model; None if it is in a file.
        path: the path of the file; empty if the model is in memory.
    """

    value: float
    number: int
    model: Any = None
    path: str = ""


class BestModels:
    """The best models of a search.

    Args:
        count: how many are kept.
        folder: the folder for their files: a local path, or a URI of any file system that Spark can reach;
            None keeps them in memory.
        study: the study, whose earlier trials may have files.
        custom_objects: classes and functions that the models need, by name.
    """

    def __init__(
        self,
        count: int,
        folder: str | None,
        study: Study,
        custom_objects: dict[str, Any] | None = None,
    ) -> None:
        self._count, self._folder, self._custom_objects = count, folder, custom_objects
        self._maximize = study.direction is StudyDirection.MAXIMIZE
        self._lock = threading.Lock()
        self._context = spark_internals.active_context()
        self._kept = [
            _Kept(trial.value, trial.number, path=trial.user_attrs[MODEL])
            for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if trial.value is not None and trial.user_attrs.get(MODEL)
        ]
        self._sort()

    def add(self, trial: Trial, value: float, model: Any) -> None:
        """Keep the model of a trial if it is among the best; drop the one that no longer is.

        Args:
            trial: the trial, which gets the path of the file as an attribute.
            value: the value of the trial.
            model: the keras.Model.
        """
        with self._lock:
            if len(self._kept) >= self._count and not self._is_better(value, self._kept[-1].value):
                return
            kept = _Kept(value, trial.number, model)
            if self._folder is not None:
                kept = _Kept(value, trial.number, path=self._write(trial.number, model))
                trial.set_user_attr(MODEL, kept.path)
            self._kept.append(kept)
            self._sort()
            for dropped in self._kept[self._count :]:
                if dropped.path:
                    files.discard(dropped.path, context=self._context)
            del self._kept[self._count :]

    def get(self, count: int) -> list[Any]:
        """Return the best ``count`` models, the best one first.

        Raises:
            ConfigError: fewer were kept.
        """
        if count > len(self._kept):
            raise ConfigError(
                f"{count} model{'s' * (count != 1)} should be among those kept; the search kept "
                f"{len(self._kept)}. Search with keep={count}; a study that is resumed also needs a "
                "directory, which keeps its models."
            )
        return [
            each.model if each.model is not None else self._read(each.path) for each in self._kept[:count]
        ]

    def numbers(self) -> list[int]:
        """Return the numbers of the trials whose models are kept, the best one first."""
        return [each.number for each in self._kept]

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self._maximize else value < other

    def _sort(self) -> None:
        self._kept.sort(key=lambda each: (-each.value if self._maximize else each.value, each.number))

    def _write(self, number: int, model: Any) -> str:
        path = f"{str(self._folder).rstrip('/')}/trial-{number:05}.keras"
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "model.keras")
            serialization.save(model, local)
            files.put(local, path, overwrite=True, context=self._context)
        return path

    def _read(self, path: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "model.keras")
            files.get(path, local, context=self._context)
            return serialization.load(local, path, self._custom_objects, safe_mode=True)

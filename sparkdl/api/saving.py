"""Saving and loading of a SparkModel: a plain Keras file, and a JSON file with the settings."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkdl.config import OF_PLACE, TrainConfig, without_place
from sparkdl.errors import ConfigError
from sparkdl.modeling import serialization
from sparkdl.rules.settings import from_settings, to_settings
from sparkdl.settings import grouped
from sparkdl.spark import files, spark_internals

Model = Any  # a keras.Model; this module only passes it on


def save(model: Model, config: TrainConfig, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Write a model and its settings.

    Args:
        model: the model.
        config: the settings.
        path: a local path, or a URI of any file system that Spark can reach; ends with ".keras".
        overwrite: whether an existing model file may be replaced. The ".json" file beside it is
            always replaced.

    Raises:
        ConfigError: the path does not end with ".keras", or ``merge`` is the user's own rule or has an
            optimizer of Keras.
        FileExistsError: the model file exists, and ``overwrite`` is False.
    """
    path = _keras_file(path)
    values = config.to_dict() | {"merge": to_settings(config.merge)}
    context = spark_internals.active_context()
    if files.exists(path, context=context) and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it.")
    with tempfile.TemporaryDirectory() as folder:
        local, settings = Path(folder, "model.keras"), Path(folder, "model.json")
        serialization.save(model, local)
        settings.write_text(json.dumps(values, indent=2))
        files.put(local, path, overwrite=overwrite, context=context)
        try:
            files.put(settings, _settings_path(path), overwrite=True, context=context)
        except BaseException:
            # Settings of an older model may not fit this one. A model can be loaded without settings.
            with suppress(OSError):
                files.discard(_settings_path(path), context=context)
            raise


def load(
    path: str | os.PathLike[str], custom_objects: dict[str, Any] | None, *, safe_mode: bool
) -> tuple[Model, dict[str, Any]]:
    """Return a model that ``save`` wrote, and its settings as arguments of SparkModel.

    Args:
        path: the path or URI of the ".keras" file.
        custom_objects: classes and functions that the model needs, by name.
        safe_mode: whether to refuse models that contain code, such as Lambda layers.

    Raises:
        ConfigError: the path does not end with ".keras", or a setting is invalid.
        FileNotFoundError: there is no such file.
        ModelError: Keras cannot restore a model from the file.
    """
    path = _keras_file(path)
    context = spark_internals.active_context()
    with tempfile.TemporaryDirectory() as folder:
        local, settings = Path(folder, "model.keras"), Path(folder, "model.json")
        files.get(path, local, context=context)
        model = serialization.load(local, path, custom_objects, safe_mode=safe_mode)
        values: dict[str, Any] = {}
        if files.exists(_settings_path(path), context=context):
            files.get(_settings_path(path), settings, context=context)
            values = without_place(json.loads(settings.read_text()), OF_PLACE, _settings_path(path))
            values["merge"] = from_settings(values.get("merge"))
    return model, grouped(values)


def _keras_file(path: str | os.PathLike[str]) -> str:
    """Return a path as a string.

    Raises:
        ConfigError: it does not end with ".keras".
    """
    if not str(path).endswith(".keras"):
        raise ConfigError(f'path should end with ".keras", the format of Keras; got {path!r}.')
    return os.fspath(path)


def _settings_path(path: str) -> str:
    return path[: -len(".keras")] + ".json"

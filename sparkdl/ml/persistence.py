"""Saving and loading of pipeline stages: Spark's own metadata, and a plain Keras file next to it.

``metadata`` has the Params and other values as JSON, ``model.keras`` the model. Both are on the file system
to which Spark resolves the path.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from sparkdl.config import without_place
from sparkdl.errors import ConfigError, ModelError
from sparkdl.ml.params import OBJECTS, OF_PLACE, KerasParams
from sparkdl.modeling import serialization
from sparkdl.modeling.keras_types import Model
from sparkdl.rules.settings import from_settings, to_settings
from sparkdl.spark import spark_internals
from sparkdl.spark.application import application_of

logger = logging.getLogger(__name__)
FILE = "model.keras"
CUSTOM = (
    " Custom objects that loading the model needs must be registered with Keras before that, or be in a "
    "keras.saving.custom_object_scope."
)


class KerasWriter(MLWriter):
    """Writer of a stage.

    Args:
        stage: the stage; its ``extra()`` goes into the metadata, and the model from ``held()`` into a file.
    """

    def __init__(self, stage: Stored) -> None:
        super().__init__()
        self.stage = stage

    # A private hook of PySpark 3.5 to 4.3.
    def _handleOverwrite(self, path: str) -> None:
        if not application_of(self.sparkSession).remote:
            super()._handleOverwrite(path)
            return
        from pyspark.ml.connect.readwrite import RemoteMLWriter

        RemoteMLWriter.handleOverwrite(path, True)

    def saveImpl(self, path: str) -> None:
        """Write the stage to a new path.

        Raises:
            ModelError: the stage's model is a function, which cannot be saved.
            ConfigError: the merge rule or its optimizer is not one of sparkdl's, so it cannot be saved. Or
                Spark Connect cannot write to the path.
        """
        stage, cluster = self.stage, application_of(self.sparkSession)
        if cluster.remote and not path.startswith("/"):
            raise ConfigError(
                "Over Spark Connect, path should be an absolute path on Spark's default file system; got "
                f"{path!r}. Leave out the file system, or save from a classic SparkSession, without remote()."
            )
        set_here = {
            param.name: value
            for param in filter(stage.isSet, stage.params)
            if (value := stage.getOrDefault(param)) is not None and param.name not in OF_PLACE
        }
        left = [name for name in set_here if name in OBJECTS and name not in ("model", *stage.unsaved)]
        if "merge" in set_here:
            try:
                set_here["merge"] = to_settings(set_here["merge"])
            except ConfigError:
                if "merge" not in stage.unsaved:
                    raise
                del set_here["merge"]
        if left:
            logger.warning(
                "These Params of %s contain code and were not saved: %s. Set them again on the loaded "
                "stage.%s",
                stage.uid,
                ", ".join(left),
                CUSTOM if "customObjects" in left else "",
            )
        kept = {name: value for name, value in set_here.items() if name not in OBJECTS}
        model = stage.held()
        if model is not None:
            require_file(model)
        DefaultParamsWriter.saveMetadata(stage, path, cluster.handle, {"sparkdl": stage.extra()}, kept)
        if model is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, FILE)
            serialization.save(model, local)
            cluster.put(local, f"{path}/{FILE}")


def require_file(model: object) -> None:
    """Require a model that can be saved to a file.

    Raises:
        ModelError: the model is a function.
    """
    if not hasattr(model, "save"):
        raise ModelError(
            f"A stage whose model is a function cannot be saved; got {model!r}. Set model to a compiled "
            "keras.Model."
        )


class KerasReader(MLReader["Stored"]):
    """Reader of stages that ``KerasWriter`` wrote.

    Args:
        kind: the class of the stage.
    """

    def __init__(self, kind: type[Stored]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Stored:
        """Return the stage at a path.

        Custom objects of the model must be registered with Keras, or be in a
        ``keras.saving.custom_object_scope``.

        Raises:
            ModelError: the stage is of another class, or the model cannot be restored, for example
                because a custom object is missing.
        """
        cluster = application_of(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(path, cluster.handle)
        if not metadata["class"].endswith(f".{self.kind.__name__}"):
            raise ModelError(f"{path} holds a {metadata['class']}, not a {self.kind.__name__}.")
        stage = self.kind()
        spark_internals.set_uid(stage, metadata["uid"])
        metadata["paramMap"] = without_place(metadata["paramMap"], OF_PLACE, path)
        metadata["defaultParamMap"] = without_place(metadata["defaultParamMap"], OF_PLACE, path)
        if "merge" in metadata["paramMap"]:
            metadata["paramMap"]["merge"] = from_settings(metadata["paramMap"]["merge"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, FILE)
            if cluster.get(f"{path}/{FILE}", local):
                stage.hold(serialization.load(local, path))
        stage.adopt(metadata["sparkdl"])
        return stage


class Stored(KerasParams, MLWritable, MLReadable[Any]):
    """A stage that is saved and loaded with its model.

    Attributes:
        unsaved: Params that are left out without a warning if they cannot be saved.
    """

    unsaved: tuple[str, ...] = ()

    def held(self) -> Model | None:
        """Return the model; None if it is not set."""
        raise NotImplementedError

    def hold(self, model: Model) -> None:
        """Set the model."""
        raise NotImplementedError

    def write(self) -> KerasWriter:
        """Return a writer of this stage."""
        return KerasWriter(self)

    @classmethod
    def read(cls) -> KerasReader:
        """Return a reader of stages of this class."""
        return KerasReader(cls)

    def extra(self) -> dict[str, object]:
        """Return the values to save along with the Params."""
        return {}

    def adopt(self, extra: dict[str, Any]) -> None:
        """Restore the values that were saved along with the Params."""

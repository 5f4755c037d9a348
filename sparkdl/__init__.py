"""Train Keras 3 models on a Spark cluster in one line.

Example:
    >>> history = SparkModel(model).fit(data, epochs=10, batch_size=64)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sparkdl._version import __version__
from sparkdl.core.lazy import loader

# Packages of the distribution "sparkdl" (0.2.2) and of Databricks Runtime ML, which use the same folder.
_FOREIGN = "estimators", "graph", "horovod", "image", "param", "transformers", "udf", "utils"

_HOMES = {
    "CheckpointConfig": "sparkdl.config",
    "Ensemble": "sparkdl.tune.ensemble",
    "FaultTolerance": "sparkdl.settings",
    "History": "sparkdl.ui.history",
    "Network": "sparkdl.settings",
    "SparkModel": "sparkdl.api.spark_model",
    "load_spark_model": "sparkdl.api.spark_model",
    "plan": "sparkdl.api.planning",
    "plot": "sparkdl.ui.plot",
    "predict_udf": "sparkdl.driver.predictions",
    "run": "sparkdl.api.run",
    "to_simple_rdd": "sparkdl.api.spark_model",
    "SparkDLError": "sparkdl.errors",
    "Stragglers": "sparkdl.settings",
    "WorkerContext": "sparkdl.worker.collective",
}
__all__ = [
    "CheckpointConfig",
    "Ensemble",
    "FaultTolerance",
    "History",
    "Network",
    "SparkDLError",
    "SparkModel",
    "Stragglers",
    "WorkerContext",
    "__version__",
    "load_spark_model",
    "plan",
    "plot",
    "predict_udf",
    "run",
    "to_simple_rdd",
]

if TYPE_CHECKING:
    from sparkdl.api.planning import plan
    from sparkdl.api.run import run
    from sparkdl.api.spark_model import SparkModel, load_spark_model, to_simple_rdd
    from sparkdl.config import CheckpointConfig
    from sparkdl.driver.predictions import predict_udf
    from sparkdl.errors import SparkDLError
    from sparkdl.settings import FaultTolerance, Network, Stragglers
    from sparkdl.tune.ensemble import Ensemble
    from sparkdl.ui.history import History
    from sparkdl.ui.plot import plot
    from sparkdl.worker.collective import WorkerContext


def _require_alone(folder: str) -> None:
    """Require that the folder of this package has no files of a different project named sparkdl.

    Raises:
        ImportError: the folder has packages of that project.
    """
    found = [name for name in _FOREIGN if os.path.exists(os.path.join(folder, name, "__init__.py"))]
    if found:
        raise ImportError(
            f"{folder} should contain only the files of sparkdl-keras; it also has {', '.join(found)} of a "
            'different project named "sparkdl". Run "pip uninstall -y sparkdl sparkdl-keras", then install '
            "sparkdl-keras again.",
            name=__name__,
        )


_require_alone(os.path.dirname(__file__))


__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__

"""MLflow: log every fit of a SparkModel."""

from sparkdl.api.tracking import autolog

__all__ = ["autolog"]

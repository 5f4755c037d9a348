"""Private parts of MLflow, as checked with MLflow 3.17."""

from __future__ import annotations

from mlflow.utils import autologging_utils


def is_estimator_logged() -> bool:
    """Return True if MLflow logs the fit of an estimator that is under way, in any thread.

    MLflow 2.16 does not record this; the result is then False.
    """
    return bool(getattr(autologging_utils, "_has_active_training_session", bool)())

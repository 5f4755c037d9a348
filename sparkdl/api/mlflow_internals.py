"""Private parts of MLflow, as checked with MLflow 3.17."""

from __future__ import annotations

from mlflow.utils import autologging_utils


def is_estimator_logged() -> bool:
    """Return True if MLflow is logging the fit of an estimator, in any thread.

    With MLflow 2.16, which does not record this, the result is False.
    """
    return bool(getattr(autologging_utils, "_has_active_training_session", bool)())

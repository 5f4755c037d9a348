"""Several fits of one Spark application: priorities, fair shares, pauses at epoch ends, back-fill."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Job": "sparkdl.scheduling.job",
    "Schedule": "sparkdl.scheduling.schedule",
    "Scheduler": "sparkdl.scheduling.scheduler",
}
__all__ = ["Job", "Schedule", "Scheduler"]

if TYPE_CHECKING:
    from sparkdl.scheduling.job import Job
    from sparkdl.scheduling.schedule import Schedule
    from sparkdl.scheduling.scheduler import Scheduler


def __getattr__(name: str) -> Any:
    """Load a public name on first use: the policy and its simulation need neither Keras nor Spark."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkdl.scheduling' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__

"""Run several fits in one Spark application: priorities, fair shares, pauses at epoch ends, back-fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.core.lazy import loader

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


__getattr__ = loader(__name__, _HOMES)  # the policy needs neither Keras nor Spark


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__

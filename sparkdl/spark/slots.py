"""Slots of a Spark application (places for one task each), and the choice of the number of workers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparkdl.errors import ClusterError
from sparkdl.process import interrupts

logger = logging.getLogger(__name__)
NOTICE_SECONDS = 10.0  # minimum time between two messages about the same wait
LOCAL_CLUSTER = r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,"
SETTLE_SECONDS = 2.0  # the longest gap expected between two executors that register


class Application(Protocol):
    """The properties of a Spark application that determine its slots."""

    @property
    def local(self) -> bool:
        """True if tasks run in the driver's own JVM."""

    @property
    def dynamic(self) -> bool:
        """True if executors are allocated dynamically."""

    @property
    def separate_gpus(self) -> int:
        """The number of GPUs per executor if each task gets its own; 0: the application's settings apply."""

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting of the application."""

    def slots(self) -> int:
        """Return the number of tasks that can run at the same time on the present executors."""

    def age(self) -> float:
        """Return the seconds since the application started."""


class Wait(NamedTuple):
    """The reason why workers have not begun.

    Attributes:
        reason: the reason, as a clause.
        for_slots: whether the workers wait for slots.
    """

    reason: str = "other jobs may occupy the slots"
    for_slots: bool = True


def wait_of(stages: Sequence[tuple[bool, int]], others: Sequence[int], running: int) -> Wait:
    """Return the reason why workers have not begun.

    Args:
        stages: for each stage of the workers' job, whether it was submitted, and its number of tasks. The
            workers are the tasks of the last stage.
        others: the IDs of the other active jobs.
        running: the number of tasks that run, of all jobs.
    """
    if not any(submitted for submitted, _ in stages):
        return Wait("Spark is planning their job", False)
    submitted, wanted = stages[-1]
    if not submitted:
        return Wait("Spark is computing and distributing the rows", False)
    if others:
        return Wait(f"other jobs may occupy the slots (job {', '.join(map(str, others))})")
    if running < wanted:
        return Wait("executors are starting, or have no free slots")
    return Wait("they are importing Keras", False)


class Slots:
    """The slots of a Spark application.

    Args:
        application: the application.
    """

    def __init__(self, application: Application) -> None:
        self._application, self._setting = application, application.setting

    def num_workers(self, wanted: int | None, most: int | None, timeout: float) -> tuple[int, str]:
        """Return the number of workers to use, and the reason.

        Args:
            wanted: the number that the user requested, if any.
            most: the largest number of workers that can each have a row in every batch; None: no
                limit.
            timeout: seconds to wait for executors to register.

        Raises:
            ClusterError: there are fewer slots than workers.
        """
        # Under dynamic allocation executors start only when there is work for them.
        dynamic = self._application.dynamic
        slots = self._application.slots() if dynamic and wanted else self.settled(wanted, timeout)
        if dynamic:
            most_slots = self.most()
            if wanted is not None and most_slots and wanted > most_slots:
                raise self._too_few(wanted, most_slots)
            slots = wanted or max(slots, 1)
        if wanted is not None:
            if wanted > slots:
                raise self._too_few(wanted, slots)
            return wanted, "as requested"
        if slots < 1:
            raise self._too_few(1, slots)
        if most is not None and most < slots:
            return most, "one per row of a batch"
        return slots, "one per slot"

    def settled(self, wanted: int | None, timeout: float) -> int:
        """Return the number of slots, once executors that are still starting have registered.

        Without dynamic allocation, wait up to ``timeout`` for the next slot while there are none, or fewer
        than ``wanted`` although the application requested that many. Otherwise wait for it no longer than
        Spark itself would.

        Args:
            wanted: the number of slots that are enough; None: those of all executors that are starting.
            timeout: seconds to wait for the next slot.
        """
        if self._application.local:
            return self._application.slots()
        registering = float(self._seconds("spark.scheduler.maxRegisteredResourcesWaitingTime", 30.0))
        young = self._application.age() < registering
        current = self.requested()
        slots, since, noticed = self._application.slots(), time.monotonic(), time.monotonic()
        patience = max(SETTLE_SECONDS, registering if young or not slots else 0.0)
        while True:
            now = time.monotonic()
            if slots >= (wanted or 1) and (wanted or not young or now - since > SETTLE_SECONDS):
                return slots
            coming = not self._application.dynamic and (not slots or slots < (wanted or 0) <= current)
            if now - since > (timeout if coming else min(timeout, patience)):
                return slots
            if now - noticed > NOTICE_SECONDS:
                noticed = now
                logger.warning("Waiting for executors; the application has %d slots so far.", slots)
            time.sleep(0.1)
            interrupts.check()
            if (found := self._application.slots()) != slots:
                slots, since = found, now

    def most(self) -> int:
        """Return the number of slots at the limit of dynamic allocation; 0 without a known limit."""
        most = self._setting("spark.dynamicAllocation.maxExecutors", "0")
        return int(most) * self.per_executor() if most.isdecimal() else 0

    def requested(self) -> int:
        """Return the number of slots that the application requested; 0 if it requested none."""
        master, cores = self._setting("spark.master"), self.executor_cores()
        if cluster := re.match(LOCAL_CLUSTER, master):
            instances = cluster[1]
        elif master.startswith("spark://"):
            instances = int(self._setting("spark.cores.max", "0")) // max(1, cores)
        else:
            instances = self._setting("spark.executor.instances", "0")
        return int(instances) * self.per_executor()

    def executor_cores(self) -> int:
        """Return the cores of an executor.

        The default is 1. On a standalone master it is ``spark.cores.max``, or 0 if that is not set.
        """
        master, cores = self._setting("spark.master"), self._setting("spark.executor.cores")
        if cluster := re.match(LOCAL_CLUSTER, master):
            return int(cluster[2])
        return int(cores or (self._setting("spark.cores.max", "0") if master.startswith("spark://") else 1))

    def per_executor(self) -> int:
        """Return the number of tasks that an executor runs at the same time."""
        tasks = self.executor_cores() // int(self._setting("spark.task.cpus", "1"))
        return min(tasks, self._application.separate_gpus or tasks)

    def _seconds(self, name: str, default: float) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|min)?", self._setting(name))
        if not match:
            return default
        return float(match[1]) * {"ms": 0.001, "m": 60.0, "min": 60.0}.get(match[2] or "s", 1.0)

    def _too_few(self, wanted: int, slots: int) -> ClusterError:
        each = "executors x spark.executor.cores / spark.task.cpus"
        if self._application.separate_gpus:
            each = "executors x GPUs per executor, since workers do not share a GPU without share_gpus=True"
        advice = f"Use num_workers={slots} or less, or start more executors" if slots else "Start executors"
        return ClusterError(
            f"num_workers={wanted} needs {wanted} slot{'s' * (wanted != 1)}; the application has {slots} "
            f"({each}). {advice}; with a local master, use local[{wanted}]."
        )

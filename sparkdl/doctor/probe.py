"""The task that examines an executor. Executors import this file, so it imports little."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from sparkdl.data.spill import local_directory
from sparkdl.worker import devices
from sparkdl.worker.tasks import Task, TaskCall


@dataclass(frozen=True)
class ProbeTask(Task[object]):
    """Describe the task's process and machine.

    Attributes:
        arrow: whether to yield Arrow batches of a column "data", for a DataFrame; otherwise bytes.
    """

    arrow: bool

    spread = True

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[object]:
        """Yield the description, as JSON."""
        for _ in given:
            pass
        gpus = devices.held() or tuple(devices.visible_gpus()[:1])
        described = json.dumps(
            {
                "host": socket.gethostname(),
                "python": f"{platform.python_version()} ({sys.executable})",
                "folder": local_directory(),
                "free": shutil.disk_usage(local_directory()).free,
                "gpus": gpus,
            }
        ).encode()
        if not self.arrow:
            yield described
            return
        from sparkdl.data import arrow

        yield from arrow.rows_of(described)

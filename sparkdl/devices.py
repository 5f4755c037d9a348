"""What a task may use of its machine: threads, and which of the machine's devices.

These settings have to be in the environment before the backend is imported, so nothing here imports it.
"""

from __future__ import annotations

import os


def prepare(backend: str, threads: int) -> None:
    """Set up the process of a task for a backend with so many threads, before keras is imported.

    Two workers that each take every core fight: on two cores they are slower than one.
    """
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, str(threads))

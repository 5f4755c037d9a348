"""What a test may not leave behind."""

import threading
import time


def leaked_threads(before, seconds=5.0):
    """Return the names of threads that are alive and were not before, once they had time to end."""
    deadline = time.monotonic() + seconds
    while new := [thread for thread in threading.enumerate() if thread not in before]:
        if time.monotonic() > deadline:
            break
        new[0].join(0.1)
    return [thread.name for thread in new]
